"""What vLLM says of itself after each step becomes the engine's load. vLLM itself is tested end to end."""

from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.engine.vllm_engine import _LastStats
from serve_app.messages import LoadReport


def scheduler(running: int = 0, queries: int = 0, hits: int = 0, reset: bool = False) -> Any:
    """vLLM's `SchedulerStats` of one step."""
    cache = SimpleNamespace(reset=reset, requests=1, queries=queries, hits=hits)
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=2,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.5,
        prefix_cache_stats=cache,
    )


def iteration(preempted: int) -> Any:
    """vLLM's `IterationStats` of one step."""
    return SimpleNamespace(num_preempted_reqs=preempted)


@pytest.fixture
def stats() -> _LastStats:
    stats = _LastStats()
    stats._vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=64))
    return stats


def test_before_the_first_step_there_is_no_load(stats: _LastStats) -> None:
    assert stats.report() == LoadReport(running=0, waiting=0, kv_usage=0.0, kv_blocks=64)


def test_the_load_is_that_of_the_last_step_and_the_counts_are_of_all(stats: _LastStats) -> None:
    stats.take(scheduler(running=3, queries=100), iteration(preempted=2))
    stats.take(scheduler(running=1, queries=50, hits=32), iteration(preempted=1))
    assert stats.report() == LoadReport(
        running=1,
        waiting=3,
        kv_usage=0.5,
        kv_blocks=64,
        preemptions=3,
        prefix_queries_tokens=150,
        prefix_hits_tokens=32,
    )


def test_a_step_that_says_nothing_changes_nothing(stats: _LastStats) -> None:
    stats.take(scheduler(running=3, queries=100), iteration(preempted=2))
    before = stats.report()
    stats.take(None, None)
    assert stats.report() == before


def test_emptying_the_prefix_cache_leaves_the_counts(stats: _LastStats) -> None:
    stats.take(scheduler(queries=100, hits=16), None)
    stats.take(scheduler(queries=10, reset=True), None)
    assert (stats.report().prefix_queries_tokens, stats.report().prefix_hits_tokens) == (110, 16)
