"""What tracing costs: tokens/s and CPU-seconds per 1,000 tokens with every request traced, one in a hundred, and none.

One running application, the simulated engine, rounds interleaved; whether a request is traced is decided by its
client's `traceparent`, so that nothing else differs. Run by `make bench-tracing`; prints medians and their ratios.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
import uuid
from concurrent import futures
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc
import psutil

from serve_app.launch import serving
from serve_app.local.processes import tagged
from serve_app.local.servefile import DEFAULT_CONFIG

MODES = {"off": 0, "1 %": 100, "100 %": 1}  # one request in so many is traced
TOKENS = 64
PROMPT = "Tell me something about the sea. "


@dataclass(frozen=True)
class Round:
    """One mode for some seconds."""

    mode: str
    tokens_per_s: float
    cpu_s_per_1000_tokens: float


def main() -> None:
    """Runs all rounds and prints what they gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    collector = multiprocessing.get_context("spawn").Process(target=collect, args=(theirs,), daemon=True)
    collector.start()
    port = ours.recv()
    overrides: dict[str, Any] = {
        "tracing": {"endpoint": f"http://127.0.0.1:{port}"},
        "engine": {"sim": {"step_ms": 4.0, "step_ms_per_sequence": 0.05}},
    }
    with serving(DEFAULT_CONFIG.with_name("simulated.yaml"), port=0, overrides=overrides) as service:
        asyncio.run(load(service.url, "off", arguments.clients, 3.0))
        rounds = [
            measure(service.url, service.run_id, mode, arguments.clients, arguments.seconds)
            for number in range(arguments.rounds)
            for mode in rotated(list(MODES), number)
        ]
    ours.send(None)
    print(report(rounds, ours.recv()))  # noqa: T201 - the result


def rotated(modes: list[str], by: int) -> list[str]:
    """So that no mode always follows the same one."""
    by %= len(modes)
    return modes[by:] + modes[:by]


def measure(url: str, run_id: str, mode: str, clients: int, seconds: float) -> Round:
    """One round: what was streamed, and the CPU time of every process of the run meanwhile."""
    before, begin = cpu_s(run_id), time.monotonic()
    tokens = asyncio.run(load(url, mode, clients, seconds))
    elapsed = time.monotonic() - begin
    time.sleep(1.5)  # what the batches still owe is part of the cost
    return Round(mode, tokens / elapsed, (cpu_s(run_id) - before) / tokens * 1000)


def cpu_s(run_id: str) -> float:
    """User and system time of all processes of the run."""
    total = 0.0
    for process in tagged(run_id):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


async def load(url: str, mode: str, clients: int, seconds: float) -> int:
    """So many clients, each one stream after the other; returns the tokens they got."""
    end = time.monotonic() + seconds
    counts = await asyncio.gather(*(client(url, mode, number, end) for number in range(clients)))
    return sum(counts)


async def client(url: str, mode: str, number: int, end: float) -> int:
    """A plain socket: a real client library would cost more than what is measured."""
    host, port = url.removeprefix("http://").split(":")
    every = MODES[mode]
    tokens, asked = 0, number
    while time.monotonic() < end:
        asked += 1
        flags = "01" if every and asked % every == 0 else "00"
        body = json.dumps({"model": "simulated", "prompt": PROMPT, "max_tokens": TOKENS, "stream": True})
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
            f"traceparent: 00-{uuid.uuid4().hex}-{uuid.uuid4().hex[:16]}-{flags}\r\n\r\n"
        )
        writer.write(head.encode() + body.encode())
        answer = await reader.read(-1)
        writer.close()
        assert b" 200 OK" in answer[:64], answer[:500]
        assert b"[DONE]" in answer, answer[-500:]
        tokens += TOKENS
    return tokens


def report(rounds: list[Round], received_bytes: int) -> str:
    """Medians and spreads of the rounds, and the median of each round's ratio to the `off` of the same turn."""
    turns = len(rounds) // len(MODES)
    lines = [f"{os.cpu_count()} cores, {turns} rounds a mode; {received_bytes / 1e6:.1f} MB of spans"]
    by_mode = {mode: [one for one in rounds if one.mode == mode] for mode in MODES}
    for mode, some in by_mode.items():
        pairs = list(zip(some, by_mode["off"], strict=True))
        rates = [one.tokens_per_s for one in some]
        costs = [one.cpu_s_per_1000_tokens for one in some]
        rate_ratio = statistics.median(one.tokens_per_s / off.tokens_per_s for one, off in pairs)
        cost_ratio = statistics.median(one.cpu_s_per_1000_tokens / off.cpu_s_per_1000_tokens for one, off in pairs)
        rate = f"{statistics.median(rates):5.0f} tokens/s ({min(rates):.0f} to {max(rates):.0f}; {rate_ratio:.3f})"
        cost = (
            f"{statistics.median(costs):.3f} CPU-s per 1,000 ({min(costs):.3f} to {max(costs):.3f}; {cost_ratio:.3f})"
        )
        lines.append(f"{mode:>6}: {rate}   {cost}")
    return "\n".join(lines)


def collect(pipe: Connection) -> None:
    """A receiver in a process of its own that takes spans without reading them: its cost is not tracing's."""
    received = 0

    class Takes(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            def take(request: bytes, context: Any) -> bytes:
                nonlocal received
                received += len(request)
                return b""

            return grpc.unary_unary_rpc_method_handler(take)

    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[Takes()])
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    pipe.recv()
    pipe.send(received)
    server.stop(None)


if __name__ == "__main__":
    main()
