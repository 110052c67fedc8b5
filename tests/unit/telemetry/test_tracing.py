"""The spans that reach a real receiver: the tree, what stands on them, and which trace they belong to."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from receiver import ReceivedSpan, Receiver

from serve_app.config import TracingSection
from serve_app.messages import Stage
from serve_app.telemetry import traceparent
from serve_app.telemetry.tracing import HopSpan, Tracing, start

Trace = Callable[..., Tracing]

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENT = f"00-{TRACE}-{SPAN}-01"
BEGIN_S = 1_800_000_000.0
NEVER_RECORDED = [None, f"00-{TRACE}-{SPAN}-00", "", "garbage", f"00-{'0' * 32}-{SPAN}-01", "1"]


def one_span(receiver: Receiver, work: Callable[[], None]) -> ReceivedSpan:
    work()
    receiver.wait_for(1)
    (span,) = receiver.spans()
    return span


def lies(span: ReceivedSpan) -> tuple[float, float]:
    """Its begin and end in seconds after BEGIN_S. A float of today's seconds is exact to 240 ns."""
    return round(span.start_s - BEGIN_S, 6), round(span.end_s - BEGIN_S, 6)


def test_a_request_through_three_hops_is_one_tree(tracer: Trace, receiver: Receiver) -> None:
    gateway, tokenizer, engine = tracer("gateway"), tracer("tokenizer"), tracer("engine")
    root = gateway.begin("gateway", traceparent=None, begin_s=BEGIN_S, root=True)
    hop = tokenizer.begin("tokenizer", traceparent=root.traceparent, begin_s=BEGIN_S + 1)
    hop.stages([Stage("tokenizer.encode", BEGIN_S + 1, BEGIN_S + 2, 1.0)])
    hop.end(BEGIN_S + 2)
    engine.stage(hop.traceparent, Stage("prefill", BEGIN_S + 3, BEGIN_S + 4, 1.0), {"tokenline.engine_request_id": "r"})
    root.stages([Stage("gateway.read", BEGIN_S, BEGIN_S + 0.5, 0.5)])
    root.end(BEGIN_S + 5)
    receiver.wait_for(5)
    names = {one.span_id: one.name for one in receiver.spans()}
    tree = {(one.name, names.get(one.parent_id or ""), one.kind, one.service) for one in receiver.spans()}
    assert tree == {
        ("gateway", None, "server", "gateway"),
        ("gateway.read", "gateway", "internal", "gateway"),
        ("tokenizer", "gateway", "server", "tokenizer"),
        ("tokenizer.encode", "tokenizer", "internal", "tokenizer"),
        ("prefill", "tokenizer", "internal", "engine"),
    }
    assert {one.trace_id for one in receiver.spans()} == {root.trace_id}
    assert {one.status for one in receiver.spans()} == {"unset"}


def test_a_span_has_the_times_that_were_measured(tracer: Trace, receiver: Receiver) -> None:
    span = one_span(receiver, lambda: tracer().begin("x", traceparent=CLIENT, begin_s=BEGIN_S).end(BEGIN_S + 0.25))
    assert lies(span) == (0.0, 0.25)


def test_the_resource_names_hop_replica_version_and_model(
    tracer: Trace, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.name=another")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "another")
    span = one_span(receiver, lambda: tracer("postprocess").begin("postprocess", traceparent=CLIENT).end())
    assert span.service == "postprocess"
    assert span.resource["service.namespace"] == "tokenline"
    assert span.resource["service.instance.id"] == "postprocess-0"
    assert span.resource["service.version"] == "0.1.0"
    assert span.resource["tokenline.model"] == "a-model"
    assert span.resource["deployment.environment.name"] == "test"


def test_attributes_arrive_with_their_types_and_none_is_left_out(tracer: Trace, receiver: Receiver) -> None:
    def work() -> None:
        span = tracer().begin("x", traceparent=CLIENT)
        span.set({"a": "é\ud800", "b": True, "c": 1, "d": 0.5, "e": ["x", "y"], "f": None, "g": 1 << 80})
        span.end()

    assert one_span(receiver, work).attributes == {
        "a": "é?",
        "b": True,
        "c": 1,
        "d": 0.5,
        "e": ["x", "y"],
        "g": str(1 << 80),
    }


@pytest.mark.parametrize(
    ("ending", "status", "message", "attributes"),
    [
        ({}, "unset", "", {}),
        ({"error": "invalid"}, "unset", "", {"error.type": "invalid"}),
        ({"error": "died", "failed": True}, "error", "", {"error.type": "died"}),
        ({"error": "died", "failed": True, "description": "it \ud800"}, "error", "it ?", {"error.type": "died"}),
    ],
)
def test_an_error_is_named_and_only_a_failure_is_the_status(
    tracer: Trace, receiver: Receiver, ending: Any, status: str, message: str, attributes: dict[str, str]
) -> None:
    span = one_span(receiver, lambda: tracer().begin("x", traceparent=CLIENT).end(**ending))
    assert (span.status, span.status_message, span.attributes) == (status, message, attributes)


def test_a_stage_can_be_the_one_that_failed(tracer: Trace, receiver: Receiver) -> None:
    one = Stage("decode", BEGIN_S, BEGIN_S + 1, 1.0)
    span = one_span(receiver, lambda: tracer("engine").stage(CLIENT, one, error="engine_died", failed=True))
    assert (span.parent_id, span.kind, span.status) == (SPAN, "internal", "error")
    assert span.attributes == {"error.type": "engine_died"}


def test_summed_work_is_as_long_as_the_work_and_says_so(tracer: Trace, receiver: Receiver) -> None:
    summed = Stage("postprocess.detokenize", BEGIN_S, BEGIN_S + 4, 0.5, 40, 0.125, ((BEGIN_S, BEGIN_S + 0.125),))

    def work() -> None:
        tracer().begin("postprocess", traceparent=CLIENT).stages([summed], {"tokenline.more": 1})

    span = one_span(receiver, work)
    assert lies(span) == (0.0, 0.5)
    assert span.attributes == {
        "tokenline.more": 1,
        "tokenline.count": 40,
        "tokenline.longest_s": 0.125,
        "tokenline.extent_s": 4.0,
    }


@pytest.mark.parametrize(("busy_s", "length_s"), [(9.0, 2.0), (-1.0, 0.0), (math.nan, None)])
def test_a_stage_never_sticks_out_and_never_ends_before_it_begins(
    tracer: Trace, receiver: Receiver, busy_s: float, length_s: float | None
) -> None:
    one = Stage("x", BEGIN_S, BEGIN_S + 2, busy_s)
    span = one_span(receiver, lambda: tracer().stage(CLIENT, one))
    begin_s, end_s = lies(span)
    assert end_s >= begin_s == 0.0
    assert length_s is None or end_s == length_s


def test_a_span_ends_once_and_takes_nothing_afterwards(tracer: Trace, receiver: Receiver) -> None:
    tracing = tracer()

    def work() -> None:
        span = tracing.begin("x", traceparent=CLIENT, begin_s=BEGIN_S)
        span.end(BEGIN_S + 1)
        span.end(BEGIN_S + 9, error="late", failed=True)
        span.set({"late": True})

    span = one_span(receiver, work)
    tracing.shutdown()
    assert (lies(span), span.status, span.attributes) == ((0.0, 1.0), "unset", {})
    assert tracing.exported_spans == 1


def test_an_end_before_the_begin_is_no_negative_span(tracer: Trace, receiver: Receiver) -> None:
    span = one_span(receiver, lambda: tracer().begin("x", traceparent=CLIENT, begin_s=BEGIN_S).end(BEGIN_S - 1))
    assert lies(span) == (0.0, 0.0)


def test_the_gateway_goes_on_with_the_clients_trace(tracer: Trace, receiver: Receiver) -> None:
    span = one_span(receiver, lambda: tracer().begin("gateway", traceparent=CLIENT, root=True).end())
    assert (span.trace_id, span.parent_id) == (TRACE, SPAN)


@pytest.mark.parametrize("header", [None, "garbage", f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE.upper()}-{SPAN}-01"])
def test_the_gateway_starts_a_trace_where_the_client_gave_no_valid_one(
    tracer: Trace, receiver: Receiver, header: str | None
) -> None:
    opened: list[HopSpan] = []

    def work() -> None:
        opened.append(tracer().begin("gateway", traceparent=header, root=True))
        opened[0].end()

    span = one_span(receiver, work)
    assert span.parent_id is None
    assert span.trace_id != TRACE
    assert opened[0].traceparent == f"00-{span.trace_id}-{span.span_id}-01"
    assert opened[0].trace_id == span.trace_id


def test_the_gateways_span_of_an_unsampled_trace_is_named_and_not_recorded(tracer: Trace, receiver: Receiver) -> None:
    tracing = tracer()
    span = tracing.begin("gateway", traceparent=f"00-{TRACE}-{SPAN}-00", root=True)
    assert not span.sampled
    assert span.traceparent is not None
    assert span.traceparent.startswith(f"00-{TRACE}-")
    assert span.traceparent.endswith("-00")
    assert SPAN not in span.traceparent
    use(span)
    assert sent_before_the_end(tracing, receiver) == 0


@pytest.mark.parametrize("header", NEVER_RECORDED)
def test_a_hop_without_a_recorded_parent_makes_nothing_and_passes_it_on(
    tracer: Trace, receiver: Receiver, header: str | None
) -> None:
    tracing = tracer("tokenizer")
    span = tracing.begin("tokenizer", traceparent=header)
    assert (span.traceparent, span.sampled) == (header, False)
    use(span)
    tracing.stage(header, Stage("prefill", BEGIN_S, BEGIN_S + 1, 1.0))
    assert sent_before_the_end(tracing, receiver) == 0


def use(span: HopSpan) -> None:
    span.set({"a": 1})
    span.stages([Stage("x", BEGIN_S, BEGIN_S + 1, 1.0)])
    span.end(error="e", failed=True)


def sent_before_the_end(tracing: Tracing, receiver: Receiver) -> int:
    tracing.shutdown()
    assert tracing.exported_spans + tracing.dropped_spans == len(receiver.spans())
    return len(receiver.spans())


@pytest.mark.parametrize(("ratio", "recorded"), [(0.0, 0), (0.01, 1), (0.5, 2), (1.0, 4)])
def test_the_ratio_decides_by_the_trace_id(
    tracer: Trace, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, ratio: float, recorded: int
) -> None:
    parts = iter([0.001, 0.3, 0.7, 0.999])  # how far up in the range of ids each trace lies
    monkeypatch.setattr(traceparent.Ids, "generate_trace_id", lambda self: 1 << 64 | int(next(parts) * (1 << 64)))
    tracing = tracer(sample_ratio=ratio)
    spans = [tracing.begin("gateway", traceparent=None, root=True) for _ in range(4)]
    assert [one.traceparent and one.traceparent[-2:] for one in spans] == ["01"] * recorded + ["00"] * (4 - recorded)
    for one in spans:
        one.end()
    assert sent_before_the_end(tracing, receiver) == recorded


def test_the_ratio_does_not_decide_for_a_client_that_has_decided(tracer: Trace) -> None:
    assert tracer(sample_ratio=0.0).begin("gateway", traceparent=CLIENT, root=True).sampled


def test_without_a_ratio_the_environment_decides(tracer: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracing = tracer()
    assert not tracing.begin("gateway", traceparent=None, root=True).sampled
    assert tracing.begin("gateway", traceparent=CLIENT, root=True).sampled


@pytest.mark.parametrize("header", [None, CLIENT])
def test_without_an_endpoint_a_request_still_has_an_id(header: str | None) -> None:
    tracing = start(TracingSection(), "gateway", "g", "m")
    span = tracing.begin("gateway", traceparent=header, root=True)
    assert span.traceparent is not None
    assert (span.traceparent[-3:], span.sampled) == ("-00", False)
    assert (span.trace_id == TRACE) == (header is not None)
    assert not tracing.records(CLIENT)
    use(span)
    tracing.shutdown()
    assert (tracing.exported_spans, tracing.dropped_spans) == (0, 0)


def test_a_wrong_configuration_stops_no_replica(caplog: pytest.LogCaptureFixture) -> None:
    tracing = start(TracingSection(endpoint="https://[bad"), "gateway", "g", "m")
    assert not tracing.begin("gateway", traceparent=CLIENT, root=True).sampled
    assert "tracing is off" in caplog.text
