"""Many streams through the running application on the simulated engine: no error, no cross-talk, nothing left behind.

`TOKENLINE_STREAM_SECONDS` makes the load longer than the few seconds of `make test`.
"""

import asyncio
import os
import time
from typing import Any

import httpx
import openai
import psutil
import pytest

from serve_app.launch import Service
from serve_app.local.processes import tagged

CLIENTS = 64
pytestmark = pytest.mark.timeout(600)

SECONDS = float(os.environ.get("TOKENLINE_STREAM_SECONDS", "10"))


tokens_of: dict[int, set[str]] = {}


async def _talk(client: openai.AsyncOpenAI, marker: int, until_s: float) -> int:
    """Streams completions of a prompt that is the marker's id and nothing else, until the time is over; how many."""
    streams = 0
    while time.monotonic() < until_s:
        stream = await client.completions.create(
            model="simulated", prompt=[marker] * 4, max_tokens=20, stream=True, logprobs=0
        )
        tokens: list[str] = []
        async for chunk in stream:
            tokens += chunk.choices[0].logprobs.tokens
        assert len(tokens) == 20, f"marker {marker}: {len(tokens)} tokens"
        assert len(set(tokens)) == 1, f"marker {marker}: cross-talk, {set(tokens)}"
        tokens_of.setdefault(marker, set()).update(tokens)
        streams += 1
    return streams


async def test_64_streams_at_once_stay_apart_and_leave_nothing_behind(sim_service: Service) -> None:
    tokens_of.clear()
    async with openai.AsyncOpenAI(base_url=f"{sim_service.url}/v1", api_key="none", max_retries=0) as client:
        # One round first, so that connections and caches exist before anything is counted.
        await asyncio.gather(*(_talk(client, 1000 + number, time.monotonic() + 0.1) for number in range(CLIENTS)))
        before, tasks_before = _open_things(sim_service), (await _ready(sim_service))["tasks"]
        end = time.monotonic() + SECONDS
        counts = await asyncio.gather(*(_talk(client, 1000 + number, end) for number in range(CLIENTS)))
        after = _open_things(sim_service)
    assert all(count >= 1 for count in counts)
    assert len(set.union(*tokens_of.values())) == CLIENTS, "two markers gave the same token"
    report = await _ready(sim_service)
    assert report["engine"]["running"] == report["engine"]["waiting"] == 0
    assert report["engine"]["kv_usage"] == 0
    for hop, tasks in report["tasks"].items():
        # Ray's own tasks come and go; one left behind by each of hundreds of streams would be far more.
        assert tasks <= tasks_before[hop] + 8, f"{hop}: {tasks_before[hop]} asyncio tasks became {tasks}"
    print(f"{sum(counts)} streams of 20 tokens in {SECONDS:g} s; tasks {tasks_before} -> {report['tasks']}")  # noqa: T201 - pytest -s
    for name, (files, threads) in after.items():
        files_before, threads_before = before.get(name, (files, threads))
        # HAProxy keeps up to one idle connection per client; a descriptor left by each stream would be many more.
        assert files <= files_before + CLIENTS, f"{name}: {files_before} open files became {files}"
        assert threads <= threads_before + 8, f"{name}: {threads_before} threads became {threads}"


async def _ready(service: Service) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=30) as http:
        report: dict[str, Any] = (await http.get(f"{service.url}/ready")).json()
        return report


def _open_things(service: Service) -> dict[str, tuple[int, int]]:
    """Per replica process: open file descriptors and threads."""
    found = {}
    for process in tagged(service.run_id):
        try:
            name = f"{process.name()} {process.pid}"
            if "ServeReplica" in " ".join(process.cmdline()):
                found[name] = (process.num_fds(), process.num_threads())
        except psutil.NoSuchProcess:
            continue
    return found
