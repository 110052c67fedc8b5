"""The configuration: its defaults, its bounds, and refusals that name the key."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from serve_app import config
from serve_app.config import AppConfig, DelaysSection, Hop, Section, load
from serve_app.errors import ConfigError

MODEL = {"name": "m", "source": "./model"}
HOPS = ["gateway", "tokenizer", "engine", "postprocess"]
SECTIONS = [one for one in vars(config).values() if isinstance(one, type) and issubclass(one, Section)]
every_section = pytest.mark.parametrize(
    "section", [one for one in SECTIONS if one not in (Section, AppConfig)], ids=lambda one: one.__name__
)


def refusal(args: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        load(args)
    sentence = str(refused.value)
    assert "\n" not in sentence
    return sentence


def nested(path: str, value: Any) -> dict[str, Any]:
    """A configuration that is right but for the value at a dotted path."""
    args: dict[str, Any] = {"model": dict(MODEL)}
    *folders, key = path.split(".")
    place = args
    for folder in folders:
        place = place.setdefault(folder, {})
    place[key] = value
    return args


def test_a_model_is_all_that_must_be_said() -> None:
    loaded = load({"model": MODEL})
    assert (loaded.model.name, loaded.model.source, loaded.model.context_tokens) == ("m", "./model", None)
    assert loaded == AppConfig(model=loaded.model)
    assert loaded.engine.kind == "vllm"
    assert not loaded.model.trust_remote_code
    assert all(getattr(loaded, hop).replicas == 1 for hop in HOPS)
    assert (loaded.channel.enabled, loaded.channel.max_backlog_items) == (True, 8192)
    assert loaded.postprocess.stream_coalesce_tokens == 1


def test_what_is_said_is_what_is_loaded() -> None:
    loaded = load(
        {
            "model": MODEL | {"context_tokens": 512, "chat_template_path": "t.jinja", "trust_remote_code": True},
            "gateway": {"replicas": 2, "max_replicas": 4, "num_cpus": 0.5, "max_body_bytes": 2048},
            "tokenizer": {"threads": 8, "item_timeout_s": 1},
            "engine": {"kind": "sim", "device": "cpu", "sim": {"source": "echo", "fail_after_tokens": 0}},
            "postprocess": {"max_ongoing_requests": 7, "stream_coalesce_tokens": 8},
            "channel": {"enabled": False, "max_backlog_items": 100},
        }
    )
    assert (loaded.model.context_tokens, loaded.model.chat_template_path) == (512, "t.jinja")
    assert loaded.model.trust_remote_code
    assert (loaded.gateway.replicas, loaded.gateway.max_replicas, loaded.gateway.num_cpus) == (2, 4, 0.5)
    assert (loaded.gateway.max_body_bytes, loaded.postprocess.max_ongoing_requests) == (2048, 7)
    assert loaded.postprocess.stream_coalesce_tokens == 8
    assert (loaded.channel.enabled, loaded.channel.max_backlog_items) == (False, 100)
    assert (loaded.tokenizer.threads, loaded.tokenizer.item_timeout_s) == (8, 1.0)
    assert (loaded.engine.sim.source, loaded.engine.sim.fail_after_tokens) == ("echo", 0)


@pytest.mark.parametrize(
    "path", sorted(Path(config.__file__).parent.glob("configs/*.yaml")), ids=lambda path: path.name
)
def test_every_serve_config_file_of_this_project_loads(path: Path) -> None:
    applications = yaml.safe_load(path.read_text("utf-8"))["applications"]
    assert [load(application["args"]).model.name for application in applications]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("engin", "engin: unknown key; did you mean engine?"),
        ("engine.replica", "engine.replica: unknown key; did you mean replicas?"),
        ("engine.sim.kv_block", "engine.sim.kv_block: unknown key; did you mean kv_blocks?"),
        ("model.sauce", "model.sauce: unknown key; did you mean source?"),
        ("gateway.request_timeout", "gateway.request_timeout: unknown key; did you mean request_timeout_s?"),
        ("channels", "channels: unknown key; did you mean channel?"),
        ("channel.max_backlog", "channel.max_backlog: unknown key; did you mean max_backlog_items?"),
        ("channel.enable", "channel.enable: unknown key; did you mean enabled?"),
        (
            "postprocess.coalesce_tokens",
            "postprocess.coalesce_tokens: unknown key; did you mean stream_coalesce_tokens?",
        ),
        ("channel.replicas", "channel.replicas: unknown key; known here: enabled, max_backlog_items"),
    ],
)
def test_an_unknown_key_is_named_with_its_path_and_the_nearest_known_one(path: str, sentence: str) -> None:
    assert refusal(nested(path, 1)) == sentence


def test_an_unknown_key_like_no_other_gets_the_list_of_the_known_ones() -> None:
    known = "model, gateway, tokenizer, engine, postprocess, channel, insight, tracing, delays"
    assert refusal(nested("zzz", 1)) == f"zzz: unknown key; known here: {known}"
    assert refusal(nested("model.zzz", 1)).startswith("model.zzz: unknown key; known here: name, source, ")


@pytest.mark.parametrize(
    ("args", "start"),
    [
        ({}, "model: required, and missing"),
        ({"model": {"name": "m"}}, "model.source: required, and missing"),
        ({"model": None}, "model: expected object, got null"),
        ([], "args: expected object, got array"),
        (None, "args: expected object, got null"),
    ],
)
def test_a_missing_key_is_named_with_its_path(args: Any, start: str) -> None:
    assert refusal(args) == start


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("engine.replicas", 0),
        ("engine.replicas", 100_001),
        ("engine.replicas", "2"),
        ("engine.replicas", True),
        ("engine.replicas", 1.5),
        ("engine.kind", "tgi"),
        ("engine.device", "tpu"),
        ("engine.gpu_memory_utilization", 0),
        ("engine.gpu_memory_utilization", 1.01),
        ("engine.environment", {"A": 1}),
        ("engine.environment", ["A"]),
        ("engine.vllm_args", "--enforce-eager"),
        ("engine.sim.step_ms", -1),
        ("engine.sim.step_ms", float("nan")),
        ("engine.sim.step_ms", float("inf")),
        ("engine.sim.prefill_tokens_per_s", 0),
        ("engine.sim.prefill_tokens_per_s", float("nan")),
        ("engine.sim.source", "random"),
        ("engine.sim", None),
        ("gateway.num_cpus", -0.1),
        ("gateway.num_cpus", float("nan")),
        ("gateway.max_body_bytes", 1023),
        ("gateway.request_timeout_s", 0),
        ("gateway.request_timeout_s", 86_401),
        ("gateway.max_choices", 0),
        ("tokenizer.threads", 65),
        ("tokenizer.item_timeout_s", -1),
        ("model.name", ""),
        ("model.name", "m" * 257),
        ("model.source", ""),
        ("model.context_tokens", 1),
        ("model.trust_remote_code", "yes"),
        *[("postprocess.stream_coalesce_tokens", value) for value in (0, -1, 1025, 2.5, "2", True, None)],
        *[("channel.max_backlog_items", value) for value in (0, 15, 10_000_001, 100.5, "100", True, None)],
        *[("channel.enabled", value) for value in (0, 1, "yes", None)],
        ("channel", None),
        ("channel", True),
    ],
)
def test_a_value_of_the_wrong_type_or_out_of_bounds_is_refused_by_its_path(path: str, value: Any) -> None:
    assert refusal(nested(path, value)).startswith(path)


def test_a_refusal_says_what_was_expected() -> None:
    assert refusal(nested("engine.replicas", 0)) == "engine.replicas: must be >= 1"
    assert "'tgi'" in refusal(nested("engine.kind", "tgi"))


@pytest.mark.parametrize("hop", HOPS)
def test_fewer_replicas_at_most_than_at_least_are_refused(hop: str) -> None:
    args = {"model": MODEL, hop: {"replicas": 3, "max_replicas": 2}}
    assert refusal(args) == f"{hop}.max_replicas: 2 is less than {hop}.replicas, 3"
    assert getattr(load({"model": MODEL, hop: {"replicas": 3, "max_replicas": 3}}), hop).max_replicas == 3


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("model", "model.source"),
        ("tokenizer", "model.source"),
        ("served_model_name", "model.name"),
        ("max_model_len", "model.context_tokens"),
        ("trust_remote_code", "model.trust_remote_code"),
        ("dtype", "engine.dtype"),
        ("quantization", "engine.quantization"),
        ("tensor_parallel_size", "engine.tensor_parallel_size"),
        ("pipeline_parallel_size", "engine.pipeline_parallel_size"),
        ("distributed_executor_backend", "engine.executor"),
        ("gpu_memory_utilization", "engine.gpu_memory_utilization"),
        ("kv_cache_memory_bytes", "engine.kv_cache_gib"),
        ("max_num_seqs", "engine.max_sequences"),
    ],
)
def test_a_vllm_argument_that_has_a_field_of_its_own_is_refused_with_that_field(name: str, instead: str) -> None:
    args = nested("engine.vllm_args", {name: 1})
    args["engine"]["device"] = "cpu"
    assert refusal(args) == f"engine.vllm_args.{name}: set {instead} instead"
    section, field = instead.split(".")
    assert hasattr(getattr(load({"model": MODEL}), section), field)


def test_other_vllm_arguments_pass_whatever_they_hold() -> None:
    given_args = {"enforce_eager": True, "compilation_config": {"level": 0, "sizes": [1, 2]}}
    assert load(nested("engine.vllm_args", given_args)).engine.vllm_args == given_args


def test_two_configurations_do_not_share_their_dictionaries() -> None:
    first, second = load({"model": MODEL}), load({"model": MODEL})
    first.engine.vllm_args["enforce_eager"] = True
    first.engine.environment["A"] = "1"
    assert second.engine.vllm_args == {}
    assert second.engine.environment == {}


def test_a_loaded_configuration_cannot_be_changed() -> None:
    loaded = load({"model": MODEL})
    with pytest.raises(AttributeError):
        loaded.engine.replicas = 2  # type: ignore[misc]


@every_section
def test_every_field_is_described_in_the_docstring_of_its_section(section: type[Section]) -> None:
    documented = section.__doc__ or ""
    inherited = {field.name for field in msgspec.structs.fields(Hop)} if section is not Hop else set()
    for field in msgspec.structs.fields(section):
        if field.name not in inherited and not _is_section(field.type):
            assert re.search(rf"(?m)^\s*(\w+, )*{field.name}(, \w+)*: ", documented), field.name


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


@every_section
def test_every_number_has_a_lower_bound(section: type[Section]) -> None:
    for field in msgspec.inspect.type_info(section).fields:  # type: ignore[attr-defined]
        options = getattr(field.type, "types", (field.type,))
        for kind in options:
            if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
                assert kind.ge is not None or kind.gt is not None, field.name


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["model", "name", "engine", "sim", "replicas", "x"]) | st.text(), inner)
    ),
    max_leaves=8,
)


@given(args=_json)
def test_whatever_the_arguments_are_they_load_or_are_refused_as_a_config_error(args: Any) -> None:
    try:
        loaded = load(args)
    except ConfigError:
        return
    assert isinstance(loaded, AppConfig)


# What is observed, and how slow it is made.

DELAYS = ["template_ms", "encode_ms", "engine_queue_ms", "prefill_ms", "detokenize_ms", "write_ms"]


def test_what_is_observed_has_its_defaults() -> None:
    loaded = load({"model": MODEL})
    assert (loaded.insight.num_cpus, loaded.insight.max_requests, loaded.insight.window_s) == (0.1, 10_000, 900.0)
    tracing = loaded.tracing
    assert (tracing.endpoint, tracing.protocol, tracing.sample_ratio) == (None, None, None)
    assert not tracing.capture_content  # prompts are the users'
    assert tracing.max_queued_spans == 4096
    assert all(getattr(loaded.delays, name) == 0 for name in DELAYS)
    assert loaded.gateway.admin_key_file is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tracing.sample_ratio", 1.5),
        ("tracing.sample_ratio", -0.1),
        ("tracing.sample_ratio", float("nan")),
        ("tracing.endpoint", "jaeger:4317"),
        ("tracing.endpoint", ""),
        ("tracing.endpoint", "ftp://jaeger"),
        ("tracing.protocol", "http/json"),
        ("tracing.protocol", "GRPC"),
        ("tracing.capture_content", "yes"),
        ("tracing.capture_content", 1),
        ("tracing.capture_content", None),
        ("tracing.max_queued_spans", 1),
        ("tracing.max_queued_spans", 511),
        ("tracing.max_queued_spans", 1_000_001),
        ("insight.max_requests", 0),
        ("insight.max_requests", 100_001),
        ("insight.window_s", 1),
        ("insight.window_s", 86_401),
        ("insight.window_s", float("nan")),
        ("insight.num_cpus", -0.1),
        ("insight.replicas", 2),
        ("insight.max_request", 2),
        ("tracing.endpoints", "http://a"),
        ("delays.write_s", 1),
        *[(f"delays.{name}", value) for name in DELAYS for value in (-1, 60_001, float("nan"), "5", None)],
    ],
)
def test_what_is_observed_has_its_bounds(key: str, value: Any) -> None:
    assert refusal(nested(key, value)).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tracing.sample_ratio", 0),
        ("tracing.sample_ratio", 1),
        ("tracing.endpoint", "https://collector:4318/v1"),
        ("tracing.protocol", "http/protobuf"),
        ("tracing.max_queued_spans", 512),
        ("tracing.max_queued_spans", 1_000_000),
        ("insight.max_requests", 1),
        ("insight.max_requests", 100_000),
        ("insight.window_s", 10),
        ("insight.window_s", 86_400),
        ("insight.num_cpus", 0),
        ("postprocess.stream_coalesce_tokens", 1),
        ("postprocess.stream_coalesce_tokens", 1024),
        ("channel.max_backlog_items", 16),
        ("channel.max_backlog_items", 10_000_000),
        ("channel.enabled", False),
    ],
)
def test_a_bound_itself_is_within(key: str, value: Any) -> None:
    section, field = key.split(".")
    assert getattr(getattr(load(nested(key, value)), section), field) == value


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("insight.max_request", "max_requests"),
        ("tracing.end_point", "endpoint"),
        ("tracing.capture_contents", "capture_content"),
        ("delays.templates_ms", "template_ms"),
        ("gateway.admin_keyfile", "admin_key_file"),
    ],
)
def test_an_unknown_key_of_what_is_observed_is_refused_with_the_nearest_one(key: str, meant: str) -> None:
    assert refusal(nested(key, 1)) == f"{key}: unknown key; did you mean {meant}?"


@pytest.mark.parametrize("delay", DELAYS)
def test_delays_are_for_the_simulated_engine_only(delay: str) -> None:
    for engine in ({}, {"kind": "vllm"}, {"kind": "vllm", "device": "cpu"}):
        args = nested(f"delays.{delay}", 0.5) | {"engine": engine}
        assert refusal(args) == "delays: only with engine.kind sim"
    loaded = load(nested(f"delays.{delay}", 60_000) | {"engine": {"kind": "sim"}})
    assert getattr(loaded.delays, delay) == 60_000


def test_a_delay_of_nothing_is_none_for_any_engine() -> None:
    for delay in DELAYS:
        assert load(nested(f"delays.{delay}", 0)).delays == DelaysSection()
