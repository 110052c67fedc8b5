"""The running application's metrics as a real Prometheus has them: all that a machine without GPU can have."""

import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from browser import chromium
from playwright.sync_api import expect
from prometheus import Prometheus, prometheus

from deployments.meter import exported_name
from serve_app.launch import Service
from serve_app.telemetry import names
from serve_app.telemetry.metric_table import METRICS

pytestmark = pytest.mark.timeout(600)

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
# A report of Ray's (10 s), a scrape, and Prometheus' own start.
LIMIT_S = 60.0
STRANGER = "no-such-model-4711"
# No prefix cache is simulated, and a counter of requests begins with the first that has something to count.
NOT_SIMULATED = "tokenline_cached_prompt_tokens"
HERE = [name for name in METRICS if not name.startswith("tokenline_gpu_") and name != NOT_SIMULATED]
CHAT = 'gen_ai_operation_name="chat"'
OK = f'{CHAT},outcome="ok"'


@dataclass
class Sent:
    """What the client sent and got."""

    streams: int = 0
    wholes: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    @property
    def answered(self) -> int:
        return self.streams + self.wholes

    def add(self, usage: openai.types.CompletionUsage) -> None:
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens


@pytest.fixture(scope="module")
def sent(sim_service: Service) -> Sent:
    """Chats short and long, streamed and whole, and one for a model that is not served."""
    sent = Sent()
    begun_s = time.monotonic()
    with openai.OpenAI(base_url=f"{sim_service.url}/v1", api_key="none", max_retries=0) as client:
        for text in ("hello", "hello again", "word " * 300, "word " * 1500):
            body = {
                "model": sim_service.model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 8,
                "extra_body": {"ignore_eos": True},
            }
            for chunk in client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}):
                if chunk.usage is not None:
                    sent.add(chunk.usage)
            sent.streams += 1
            sent.add(client.chat.completions.create(**body).usage)
            sent.wholes += 1
        sent.seconds = time.monotonic() - begun_s
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model=STRANGER, messages=[{"role": "user", "content": "hello"}])
    return sent


@pytest.fixture(scope="module")
def metrics(sim_service: Service, sent: Sent) -> Iterator[Prometheus]:
    """Prometheus, once it has all of `sent`."""
    with prometheus(sim_service.metrics_url) as server:
        everything = sent.answered + 1
        server.wait(
            f"sum(ray_tokenline_requests_total{{{CHAT}}})",
            lambda answer: bool(answer) and answer[0].value == everything,
            LIMIT_S,
        )
        server.wait("count(ray_tokenline_in_flight)", lambda answer: bool(answer) and answer[0].value == 4, LIMIT_S)
        yield server


@pytest.mark.parametrize("name", HERE)
def test_each_metric_is_there_with_its_kind_and_its_labels(metrics: Prometheus, name: str) -> None:
    metric = METRICS[name]
    series = exported_name(metric) + ("_count" if metric.kind == "histogram" else "")
    assert metrics.kind(exported_name(metric)) == metric.kind
    # Empty without an error, which Prometheus reads as absent.
    always = set(metric.labels) - {"error_type"}
    assert metrics.labels(series) >= always | {"deployment", "replica", "application"}


def test_what_did_not_happen_and_gpus_that_are_not_there_have_no_series(metrics: Prometheus) -> None:
    there = metrics.names()
    for name, metric in METRICS.items():
        if name not in HERE:
            assert exported_name(metric) not in there


def test_requests_and_tokens_are_counted_exactly(metrics: Prometheus, sent: Sent) -> None:
    def total(metric: str, labels: str) -> float | None:
        return metrics.value(f"sum({metric}{{{labels}}})")

    assert total("ray_tokenline_requests_total", OK) == sent.answered
    assert total("ray_tokenline_requests_total", f'{OK},kind="stream"') == sent.streams
    assert total("ray_tokenline_requests_total", f'{OK},kind="whole"') == sent.wholes
    assert total("ray_tokenline_prompt_tokens_total", CHAT) == sent.prompt_tokens
    assert total("ray_tokenline_completion_tokens_total", CHAT) == sent.completion_tokens
    assert total("ray_gen_ai_server_request_duration_seconds_count", CHAT) == sent.answered + 1
    assert total("ray_gen_ai_server_time_to_first_token_seconds_count", OK) == sent.answered
    assert total("ray_gen_ai_server_time_per_output_token_seconds_count", OK) == sent.answered


def test_requests_are_told_apart_by_the_length_of_their_prompt(metrics: Prometheus) -> None:
    found = metrics.query(f"sum by (length) (ray_tokenline_requests_total{{{OK}}})")
    assert {one.labels["length"]: one.value for one in found} == {"short": 4, "medium": 2, "long": 2}


def test_an_error_is_counted_under_its_code_and_no_text_of_a_client_is_a_label(
    metrics: Prometheus, sim_service: Service
) -> None:
    (error,) = metrics.query("sum by (error_type, outcome, model) (ray_tokenline_errors_total)")
    assert error.labels == {"error_type": "model_not_found", "outcome": "invalid", "model": "unknown"}
    assert error.value == 1
    durations = metrics.query('ray_gen_ai_server_request_duration_seconds_count{error_type!=""}')
    assert [(one.labels["error_type"], one.value) for one in durations] == [("model_not_found", 1)]
    assert STRANGER not in httpx.get(sim_service.metrics_url, timeout=10).text


def test_the_stages_are_those_of_a_chat_and_their_time_is_within_the_clients(metrics: Prometheus, sent: Sent) -> None:
    seconds = {
        one.labels["hop"]: one.value
        for one in metrics.query(f"sum by (hop) (ray_tokenline_stage_seconds_total{{{OK}}})")
    }
    assert set(seconds) <= {*names.STAGES, names.UNACCOUNTED}
    assert set(seconds) >= {names.TEMPLATE, names.ENCODE, names.PREFILL, names.DECODE, names.DETOKENIZE, names.WRITE}
    assert 0 < sum(seconds.values()) <= sent.seconds


def test_each_hop_reports_its_load(metrics: Prometheus) -> None:
    hops = {"gateway", "tokenizer", "postprocess", "engine"}
    for name in ("ray_tokenline_in_flight", "ray_tokenline_queued"):
        assert {one.labels["hop"]: one.labels["deployment"] for one in metrics.query(name)} == {
            hop: hop for hop in hops
        }
    assert metrics.value("ray_tokenline_engine_kv_blocks") == 8192
    assert metrics.value("ray_tokenline_engine_kv_usage") == 0


def test_a_percentile_can_be_asked_for_by_length(metrics: Prometheus) -> None:
    buckets = f"sum by (le, length) (ray_gen_ai_server_time_to_first_token_seconds_bucket{{{OK}}})"
    found = metrics.query(f"histogram_quantile(0.95, {buckets})")
    assert {one.labels["length"] for one in found} == {"short", "medium", "long"}
    assert all(0 < one.value < 10 for one in found)


def test_prometheus_takes_every_query_of_the_docs(metrics: Prometheus) -> None:
    queries = re.findall(r"```promql\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert len(queries) >= 6
    for query in queries:
        metrics.query(query)


# The last one: its load changes every count.
def test_the_page_shows_under_load_what_prometheus_counts(
    metrics: Prometheus, sim_service: Service, sent: Sent, tmp_path: Path
) -> None:
    everything = sent.answered + 1
    folder = Path(os.environ.get("TOKENLINE_SCREENSHOTS", tmp_path))
    with chromium() as browser:
        for name, width, height in (("desktop", 1440, 900), ("phone", 390, 844)):
            page = browser.new_page(viewport={"width": width, "height": height})
            with load(sim_service) as streams:
                page.goto(f"{sim_service.url}/insight")
                running = page.locator("[data-metric=running]")
                expect(running).to_have_attribute("data-value", re.compile(r"[1-9]"), timeout=30_000)
                picture = folder / f"insight-under-load-{name}.png"
                page.screenshot(path=picture, full_page=True)
            assert picture.stat().st_size > 20_000
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            everything += len(streams)
            metrics.wait(IN_ALL["total-requests"], lambda answer, all_of=everything: answer[0].value == all_of, LIMIT_S)
            for metric, expression in IN_ALL.items():
                (counted,) = metrics.query(expression)
                shown = page.locator(f"[data-metric={metric}]").first
                expect(shown).to_have_attribute("data-value", str(int(counted.value)), timeout=30_000)
            share = page.locator("[data-metric=share][data-bucket=all]")
            shares = [float(one.get_attribute("data-value") or 0) for one in share.all()]
            assert sum(shares) == pytest.approx(1, abs=0.01)
            page.close()


IN_ALL = {
    "total-requests": "sum(ray_tokenline_requests_total)",
    "total-prompt-tokens": "sum(ray_tokenline_prompt_tokens_total)",
    "total-completion-tokens": "sum(ray_tokenline_completion_tokens_total)",
    "total-errors": "sum(ray_tokenline_errors_total)",
}


@contextmanager
def load(service: Service) -> Iterator[list[int]]:
    """Four clients that stream inside the block, and end what they began after it; the list grows by each stream."""
    over = threading.Event()
    streams: list[int] = []

    def talk() -> None:
        with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
            while not over.is_set():
                for _ in client.completions.create(model=service.model, prompt="go on", max_tokens=40, stream=True):
                    pass
                streams.append(1)

    with ThreadPoolExecutor(4) as clients:
        talks = [clients.submit(talk) for _ in range(4)]
        try:
            yield streams
        finally:
            over.set()
        for one in talks:
            one.result()
