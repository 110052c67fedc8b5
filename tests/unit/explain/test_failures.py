from collections.abc import Callable
from typing import Any

import pytest

from serve_app.explain.explain import explain
from serve_app.explain.symptom import Symptom
from serve_app.messages import RequestMetrics
from serve_app.telemetry import names

Make = Callable[..., RequestMetrics]


def failures(requests: list[RequestMetrics]) -> list[Symptom]:
    return [one for one in explain(requests).symptoms if one.name.startswith("errors")]


def ended(code: str, outcome: str, status: int) -> dict[str, Any]:
    return {"error": code, "outcome": outcome, "status": status}


@pytest.mark.parametrize(
    ("code", "outcome", "status", "name"),
    [
        ("deadline_exceeded", "timeout", 504, "errors: timeouts"),
        ("body_timeout", "timeout", 408, "errors: timeouts of the body"),
        ("engine_died", "error", 503, "errors: engine died"),
        ("out_of_memory", "error", 500, "errors: out of memory"),
        ("backlog_full", "error", 503, "errors: not read"),
        ("internal_error", "error", 500, "errors: internal errors"),
        ("client_disconnected", "disconnected", 499, "errors: clients left"),
        ("of_the_future", "error", 500, "errors: of_the_future"),
    ],
)
def test_a_failed_request_is_named_with_the_layer_it_failed_in(
    code: str, outcome: str, status: int, name: str, make: Make
) -> None:
    requests = [make() for _ in range(9)] + [make(engine__queue=30.0, fields=ended(code, outcome, status))]
    (found,) = failures(requests)
    assert (found.name, found.layer, found.over_bound) == (name, names.ENGINE_QUEUE, True)
    assert found.evidence.startswith(f"1 of 10 requests (10%) ended with {code}")


@pytest.mark.parametrize(
    ("reached", "queue"),
    [
        ([names.READ], names.TOKENIZER_QUEUE),
        ([names.READ, names.TEMPLATE, names.ENCODE], names.POSTPROCESS_QUEUE),
        ([names.READ, names.ENCODE, names.POSTPROCESS_QUEUE], names.ENGINE_QUEUE),
    ],
)
def test_a_refused_request_names_the_queue_it_did_not_get_past(
    reached: list[str], queue: str, make: Make, refused: Make
) -> None:
    (found,) = failures([make(), refused(*reached)])
    assert (found.name, found.layer) == ("errors: refused", queue)
    assert any(lever.key.endswith("max_queued_requests") for lever in found.levers)


def test_kinds_are_told_apart_and_the_most_frequent_comes_first(make: Make, refused: Make) -> None:
    requests = [make(fields=ended("engine_died", "error", 503)), refused(), refused()]
    assert [one.name for one in failures(requests)] == ["errors: refused", "errors: engine died"]


def test_an_error_that_took_no_time_has_an_unknown_layer(make: Make) -> None:
    nothing = {"stages": (), "ended_s": make().arrived_s, "choices": (), "first_write_s": None}
    (found,) = failures([make(fields=ended("internal_error", "error", 500) | nothing)])
    assert found.layer is None
    assert "unknown" in found.evidence


def test_the_clients_own_mistakes_are_no_symptom(make: Make, refused: Make) -> None:
    assert failures([make(), refused(code="invalid_value", outcome="invalid", status=400)]) == []


def test_good_requests_have_no_errors(make: Make) -> None:
    assert failures([make() for _ in range(10)]) == []
