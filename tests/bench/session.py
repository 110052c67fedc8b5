"""Rounds: each system is started, warmed up, measured under each load and ended before the next one starts."""

import argparse
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.measure import Failure, Idle, Measurement, Plan, measure, rest, rotated
from bench.systems import Start

_WARM_UP = Plan(seconds=3.0, ramp_s=1.0, seed=1)
_WARM_UP_CLIENTS = 8


@dataclass(frozen=True)
class Application:
    """What is started as one, and the plans it is measured under, by the name of the system each stands for."""

    start: Start
    plans: Mapping[str, Plan]


@dataclass
class Session:
    """All that was measured so far. logs: the folder of the systems' logs."""

    applications: Mapping[str, Application]
    clients: Sequence[int]
    idle_s: float
    logs: Path
    measurements: list[Measurement] = field(default_factory=list)
    rests: list[Idle] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def run(self, rounds: int) -> None:
        """All rounds; a system that fails is noted, and the next one is started."""
        for number in range(rounds):
            for name in rotated(list(self.applications), number):
                self._round(name, number)

    def _round(self, name: str, number: int) -> None:
        application = self.applications[name]
        say(f"round {number + 1}: {name} starts")
        try:
            with application.start(self.logs / f"{name}-{number + 1}.log") as system:
                say("up; warming up")
                measure(system, name, number, _WARM_UP_CLIENTS, _WARM_UP)
                if self.idle_s > 0:
                    self.rests.append(rest(system, name, number, self.idle_s))
                for clients in self.clients:
                    for variant in rotated(list(application.plans), number):
                        one = measure(system, variant, number, clients, application.plans[variant])
                        self.measurements.append(one)
                        say(_line(one))
        except (KeyboardInterrupt, SystemExit):
            self.failures += [
                Failure(plan, number, "interrupted; nothing after it was run") for plan in application.plans
            ]
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the other systems are measured and this is reported
            traceback.print_exc()
            self.failures += [Failure(plan, number, f"{type(error).__name__}: {error}") for plan in application.plans]


def _line(one: Measurement) -> str:
    seen = one.figures
    failed = f", {sum(seen.failures.values())} FAILED" if seen.failures else ""
    return f"{one.system}, {one.clients} clients: {seen.tokens_per_s:.0f} tokens/s, TTFT {seen.ttft_ms}{failed}"


def options(description: str | None) -> argparse.ArgumentParser:
    """What every benchmark of rounds can be told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="the window of each measurement")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds for which each system is looked at at rest")
    parser.add_argument("--json", type=Path, help="where to write all rounds; the plot goes beside it")
    parser.add_argument("--logs", type=Path, help="the folder for the systems' logs")
    return parser


def run(
    applications: Mapping[str, Application],
    clients: Sequence[int],
    arguments: argparse.Namespace,
    tell: Callable[[Session], None],
) -> None:
    """All rounds; what was measured is told however they end."""
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="tokenline-bench-"))
    session = Session(applications, clients, arguments.idle, logs)
    try:
        session.run(arguments.rounds)
    finally:
        tell(session)


def end_in_order_on_sigterm() -> None:
    """So that what was started is ended then too, as on Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def say(text: str) -> None:
    """Progress, on standard error: the result alone is on standard output."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)  # noqa: T201
