"""One load on one running system, measured: what the clients saw, and the CPU time of every process meanwhile."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from bench.client import Load, Seen
from bench.figures import Figures, figures
from bench.processes import Usages, members, spent, usages
from bench.systems import System

# For the client's process to start.
_CLIENT_S = 1.0
# What was asked at the end of the window is let finish.
_FINISH_S = 120.0
# vLLM's processes look for work without sleep for about a second after the last.
_SETTLE_S = 3.0


class Measurement(msgspec.Struct, frozen=True):
    """One system under one load in one round.

    cpu_s: CPU seconds by process group within the window of `window_s` seconds. client_cores: what the load itself
    took. client_late_ms: how late it came to look at what had arrived, at worst. elsewhere_cores: what ran on the
    machine beside both; near 0 unless somebody else used it.
    """

    system: str
    round: int
    clients: int
    window_s: float
    figures: Figures
    cpu_s: dict[str, float]
    client_cores: float
    client_late_ms: float
    elsewhere_cores: float


class Idle(msgspec.Struct, frozen=True):
    """A system that nobody asks anything: CPU seconds by process group within `window_s` seconds."""

    system: str
    round: int
    window_s: float
    cpu_s: dict[str, float]


class Failure(msgspec.Struct, frozen=True):
    """A system that could not be measured in a round, wholly or from some load on."""

    system: str
    round: int
    error: str


class Plan(msgspec.Struct, frozen=True):
    """The load but for its clients: `ramp_s` until all clients ask, then a window of `seconds` that counts."""

    seconds: float
    ramp_s: float = 4.0
    tokens: int = 64
    traced_every: int = 0
    seed: int = 0


def measure(system: System, name: str, number: int, clients: int, plan: Plan) -> Measurement:
    """Raises RuntimeError when the client itself fails."""
    known = members(system.run_id, system.root)
    begin_s = time.monotonic() + _CLIENT_S
    full_s = begin_s + plan.ramp_s
    load = Load(
        system.url,
        system.model,
        clients,
        begin_s,
        full_s,
        full_s + plan.seconds,
        tokens=plan.tokens,
        traced_every=plan.traced_every,
        # No prompt comes twice in a run of the same system.
        seed=plan.seed * 1000 + clients,
    )
    command = [sys.executable, "-m", "bench.client", msgspec.json.encode(load).decode()]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as client:
        try:
            time.sleep(max(0.0, load.full_s - time.monotonic()))
            before = _look(known, client.pid)
            time.sleep(max(0.0, load.end_s - time.monotonic()))
            after = _look(known, client.pid)
            output, _ = client.communicate(timeout=_FINISH_S)
        finally:
            client.kill()
    if client.returncode != 0:
        raise RuntimeError(f"the client ended with status {client.returncode}")
    outcome = msgspec.json.decode(output, type=Seen)
    # The clients begin nothing new after `end_s`, so the window must not reach past it.
    seen = figures(outcome.answers, before.at_s, load.end_s)
    # A process that started since `known` counts as elsewhere.
    window_s, cpu_s = after.at_s - before.at_s, spent(before.usages, after.usages)
    client_s = after.client_s - before.client_s
    elsewhere_s = after.machine_s - before.machine_s - client_s - sum(cpu_s.values())
    return Measurement(
        system=name,
        round=number,
        clients=clients,
        window_s=window_s,
        figures=seen,
        cpu_s=cpu_s,
        client_cores=client_s / window_s,
        client_late_ms=outcome.late_ms,
        elsewhere_cores=elsewhere_s / window_s,
    )


@dataclass(frozen=True)
class _Look:
    """CPU seconds so far, of all there is to tell apart, and when they were read."""

    usages: Usages
    client_s: float
    machine_s: float
    at_s: float


def _look(processes: Iterable[psutil.Process], client: int) -> _Look:
    found = usages(processes)
    own, machine = psutil.Process(client).cpu_times(), psutil.cpu_times()
    busy_s = machine.user + machine.nice + machine.system + machine.irq + machine.softirq
    return _Look(found, own.user + own.system, busy_s, time.monotonic())


def rest(system: System, name: str, number: int, seconds: float) -> Idle:
    """What it costs to be there, once it has settled."""
    time.sleep(_SETTLE_S)
    processes = members(system.run_id, system.root)
    before, from_s = usages(processes), time.monotonic()
    time.sleep(seconds)
    after, to_s = usages(processes), time.monotonic()
    return Idle(name, number, to_s - from_s, spent(before, after))


def rotated(names: list[str], by: int) -> list[str]:
    """So that none always follows the same one."""
    by %= len(names)
    return names[by:] + names[:by]
