"""What is measured of one request: how it ended, when, and what its client is told of it."""

import re
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from serve_app.config import GatewaySection
from serve_app.errors import EngineDied, InvalidRequest, ModelNotFound, NotReady, Overloaded, RequestError
from serve_app.gateway import recording as module
from serve_app.gateway.inbound import from_chat
from serve_app.gateway.recording import Recording
from serve_app.gateway.respond import with_timings
from serve_app.gateway.schema import ChatBody, MessageBody
from serve_app.messages import ChoiceMetrics, GenerateSummary, Stage
from serve_app.telemetry import names, stages
from serve_app.telemetry.stages import stage

ARRIVED_S = 1_000_000.0

Clock = Callable[[float], None]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets the clock to so many seconds after the request's arrival; it begins there."""
    now = SimpleNamespace(s=ARRIVED_S)
    clock = SimpleNamespace(time=lambda: now.s)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(stages, "time", clock)

    def set_to(seconds: float) -> None:
        now.s = ARRIVED_S + seconds

    return set_to


def recording(stream: bool = False) -> Recording:
    made = Recording("the-id", "chat", "m", ARRIVED_S)
    body = ChatBody(model="m", messages=[MessageBody(role="user", content="my words")], stream=stream)
    made.inbound = from_chat(body, GatewaySection())
    return made


def summary(begin_s: float = 2.0, end_s: float = 4.0) -> GenerateSummary:
    choice = ChoiceMetrics(3, ARRIVED_S + begin_s, ARRIVED_S + end_s, 0.5, "stop")
    return GenerateSummary((stage(names.DECODE, ARRIVED_S + begin_s, ARRIVED_S + end_s),), (choice,), 7, 3, 2)


def answered(at: Clock, stream: bool = True) -> Recording:
    """A whole answer: 1 s of tokenizing, 2 s of decoding, written in two pieces until 4.5 s."""
    made = recording(stream)
    at(1)
    made.hop_answered((stage(names.ENCODE, ARRIVED_S, ARRIVED_S + 1),), ARRIVED_S)
    made.status = 200
    made.wrote(ARRIVED_S + 2, ARRIVED_S + 2.25)
    at(4)
    made.summarise(summary(), ARRIVED_S + 1)
    made.wrote(ARRIVED_S + 4, ARRIVED_S + 4.5)
    made.whole = True
    return made


# How it ended.


def test_a_whole_answer_ended_with_its_last_byte_whatever_came_later(at: Clock) -> None:
    made = answered(at)
    at(60)
    made.leave()
    made.fail(EngineDied("after the fact"))
    metrics = made.metrics("t" * 32, sampled=True)
    assert (metrics.status, metrics.outcome, metrics.error) == (200, "ok", None)
    assert (metrics.ended_s, metrics.first_write_s) == (ARRIVED_S + 4.5, ARRIVED_S + 2.25)
    assert (metrics.prompt_tokens, metrics.completion_tokens, metrics.cached_tokens) == (7, 3, 2)
    assert (metrics.trace_id, metrics.sampled, metrics.stream) == ("t" * 32, True, True)
    assert [one.name for one in metrics.stages] == [names.ENCODE, names.DECODE, names.WRITE]


def test_what_was_never_answered_has_no_client_any_more(at: Clock) -> None:
    at(3)
    metrics = recording().metrics()
    assert (metrics.status, metrics.outcome, metrics.error) == (499, "disconnected", names.DISCONNECTED)
    assert metrics.ended_s == ARRIVED_S + 3
    assert (metrics.prompt_tokens, metrics.completion_tokens, metrics.cached_tokens) == (None, None, None)
    assert (metrics.choices, metrics.first_write_s, metrics.stages) == ((), None, ())


def test_who_leaves_amid_the_answer_was_not_answered(at: Clock) -> None:
    made = recording()
    made.status = 200
    made.leave()
    made.leave()
    assert (made.metrics().status, made.metrics().error) == (499, names.DISCONNECTED)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InvalidRequest("n", "n"), "invalid"),
        (Overloaded("full"), "refused"),
        (NotReady("cold"), "refused"),
        (EngineDied("dead"), "error"),
    ],
)
def test_the_first_error_is_the_requests_with_its_own_status(at: Clock, error: RequestError, outcome: str) -> None:
    made = recording()
    made.status = 200  # of a stream that had begun
    made.fail(error)
    made.fail(EngineDied("second"))
    made.leave()
    metrics = made.metrics()
    assert (metrics.status, metrics.error, metrics.outcome) == (error.status, error.code, outcome)


def test_what_fails_because_the_client_has_left_is_no_error(at: Clock) -> None:
    made = recording()
    made.status = 200
    made.leave()
    made.fail(EngineDied("its call was cancelled"))
    assert made.metrics().outcome == "disconnected"


def test_a_model_that_is_not_served_is_nowhere_named(at: Clock) -> None:
    made = recording()
    assert made.metrics().model == "m"
    made.fail(ModelNotFound("model: 'my words' is not served here"))
    assert made.metrics().model == ""
    assert "words" not in repr(made.metrics())


def test_an_error_bodys_bytes_are_no_first_token(at: Clock) -> None:
    made = recording()
    made.status = 400
    made.wrote(ARRIVED_S + 1, ARRIVED_S + 2)
    assert made.metrics().first_write_s is None
    assert [one.name for one in made.metrics().stages] == [names.WRITE]


def test_a_stage_that_fails_is_measured(at: Clock) -> None:
    made = recording()

    def fail() -> None:
        with made.measure(names.READ):
            at(2)
            raise InvalidRequest("n", "n")

    with pytest.raises(InvalidRequest):
        fail()
    assert made.metrics().stages == (stage(names.READ, ARRIVED_S, ARRIVED_S + 2),)


def test_another_machines_stages_lie_within_the_call(at: Clock) -> None:
    made = recording()
    at(3)
    made.hop_answered((stage(names.ENCODE, ARRIVED_S + 100, ARRIVED_S + 101),), ARRIVED_S + 1)
    assert made.metrics().stages == (stage(names.ENCODE, ARRIVED_S + 2, ARRIVED_S + 3),)


# What the client is told.


def test_timings_add_up_and_say_where_each_stage_lies(at: Clock) -> None:
    made = recording(stream=True)
    at(1)
    made.hop_answered((stage(names.ENCODE, ARRIVED_S + 0.25, ARRIVED_S + 1),), ARRIVED_S)
    made.status = 200
    made.wrote(ARRIVED_S + 2, ARRIVED_S + 2.5)
    at(5)
    made.summarise(summary(), ARRIVED_S + 1)
    timings = made.timings("t" * 32)
    assert timings["parts_ms"] == {
        names.ENCODE: 750.0,
        names.DECODE: 1500.0,
        names.WRITE: 500.0,
        names.UNACCOUNTED: 2250.0,
    }
    assert timings["e2e_ms"] == sum(timings["parts_ms"].values()) == 5000.0
    assert (timings["ttft_ms"], timings["tpot_ms"], timings["longest_gap_ms"]) == (2500.0, 1000.0, 500.0)
    assert timings["stages"][0] == {
        "name": names.ENCODE,
        "begin_ms": 250.0,
        "busy_ms": 750.0,
        "longest_ms": 750.0,
        "count": 1,
    }
    counts = [timings[f"{kind}_tokens"] for kind in ("prompt", "completion", "cached")]
    assert (counts, timings["trace_id"]) == ([7, 3, 2], "t" * 32)
    assert "words" not in repr(timings)


def test_what_is_unknown_is_null_and_not_zero(at: Clock) -> None:
    timings = recording().timings(None)
    for name in ("ttft_ms", "tpot_ms", "longest_gap_ms", "prompt_tokens", "completion_tokens", "cached_tokens"):
        assert timings[name] is None
    assert (timings["e2e_ms"], timings["parts_ms"], timings["trace_id"]) == (0.0, {names.UNACCOUNTED: 0.0}, None)


def test_the_timings_do_not_end_the_request(at: Clock) -> None:
    made = recording()
    made.status = 200
    made.timings(None)
    made.server_timing()
    made.whole = True
    assert made.metrics().outcome == "ok"


# RFC 9110's token, and the header's parameter as a decimal number.
_ENTRY = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+;dur=\d+\.\d{3}"


def test_the_header_has_each_part_and_the_total_in_its_own_syntax(at: Clock) -> None:
    made = answered(at)
    header = made.server_timing()
    assert re.fullmatch(rf"{_ENTRY}(, {_ENTRY})*", header)
    assert header.endswith(", total;dur=4500.000")
    durations = [float(entry.split("=")[1]) for entry in header.split(", ")]
    assert sum(durations[:-1]) == pytest.approx(durations[-1])


def test_every_stage_has_a_name_that_the_header_takes(at: Clock) -> None:
    made = recording()
    at(len(names.STAGES))
    every = tuple(stage(name, ARRIVED_S + at_s, ARRIVED_S + at_s + 1) for at_s, name in enumerate(names.STAGES))
    made.hop_answered(every, ARRIVED_S)
    assert re.fullmatch(rf"{_ENTRY}(, {_ENTRY})*", made.server_timing())


def test_a_stage_of_a_newer_hop_is_neither_lost_nor_counted(at: Clock) -> None:
    made = recording()
    at(1)
    made.hop_answered((Stage("hologram", ARRIVED_S, ARRIVED_S + 1, 1.0),), ARRIVED_S)
    assert [one["name"] for one in made.timings(None)["stages"]] == ["hologram"]
    assert made.timings(None)["parts_ms"] == {names.UNACCOUNTED: 1000.0}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"a":"}"}', b'{"a":"}","timings":{"x":1}}'),
        (b'{"a":{"b":"{}}}"}}', b'{"a":{"b":"{}}}"},"timings":{"x":1}}'),
        (
            b'data: {"text":"}"}\n\ndata: {"choices":[]}\n\ndata: [DONE]\n\n',
            b'data: {"text":"}"}\n\ndata: {"choices":[],"timings":{"x":1}}\n\ndata: [DONE]\n\n',
        ),
    ],
)
def test_timings_are_the_last_objects_last_field_whatever_its_texts_hold(data: bytes, expected: bytes) -> None:
    assert with_timings(data, {"x": 1}) == expected


def test_a_request_that_arrives_now_is_measured_with_the_walls_clock() -> None:
    made = Recording("id", "tokenize", "m", time.time())
    metrics = made.metrics()
    assert made.arrived_s <= metrics.ended_s <= time.time()
    assert not metrics.stream
