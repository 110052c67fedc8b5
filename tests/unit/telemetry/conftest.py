"""A receiver per test, and tracers that send to it soon: no test waits for the SDK's five seconds."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from receiver import Receiver

from serve_app.config import TracingSection
from serve_app.telemetry.tracing import Tracing, start

Trace = Callable[..., Tracing]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's own configuration, and short delays. The exporters read their time limit in seconds."""
    for name in ("ENDPOINT", "PROTOCOL", "HEADERS", "TRACES_ENDPOINT", "TRACES_PROTOCOL", "TRACES_HEADERS"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    for name in (
        "OTEL_SDK_DISABLED",
        "OTEL_TRACES_EXPORTER",
        "OTEL_TRACES_SAMPLER",
        "OTEL_RESOURCE_ATTRIBUTES",
        "OTEL_SERVICE_NAME",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def tracer(receiver: Receiver) -> Iterator[Trace]:
    """Starts a tracer of a hop, with the configuration given; sends to `receiver` by gRPC if nothing else is said."""
    started = []

    def make(hop: str = "gateway", **config: Any) -> Tracing:
        section = TracingSection(**{"endpoint": receiver.grpc_url} | config)
        started.append(start(section, hop, f"{hop}-0", "a-model"))
        return started[-1]

    yield make
    for one in started:
        one.shutdown(0.1)
