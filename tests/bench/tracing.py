"""What tracing costs: tokens/s and CPU-seconds per 1,000 tokens with every request traced, one in a hundred, and none.

One running application, the simulated engine, rounds interleaved; whether a request is traced is decided by its
client's `traceparent`, so that nothing else differs. Run by `make bench-tracing`; prints medians and their ratios.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from bench import summary, systems, tables
from bench.measure import Measurement, Plan, measure, rotated
from bench.receiver import receiving
from bench.session import end_in_order_on_sigterm

from serve_app.local.servefile import DEFAULT_CONFIG

MODES = {"off": 0, "1 %": 100, "100 %": 1}  # one request in so many is traced
BASELINE = "off"
COLUMNS = {"tokens/s": [summary.TOKENS_PER_S], "CPU-s per 1,000 tokens": [summary.CPU]}
CONFIG = DEFAULT_CONFIG.with_name("simulated.yaml")


def main() -> None:
    """Runs all rounds and prints what they gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="the window of each measurement")
    parser.add_argument("--clients", type=int, default=16)
    arguments = parser.parse_args()
    end_in_order_on_sigterm()
    log = Path(tempfile.mkdtemp(prefix="tokenline-bench-")) / "serve.log"
    with receiving() as receiver:
        overrides: dict[str, Any] = {
            "tracing": {"endpoint": receiver.endpoint},
            "engine": {"sim": {"step_ms": 4.0, "step_ms_per_sequence": 0.05}},
        }
        with systems.tokenline(log, CONFIG, overrides) as system:
            measure(system, BASELINE, 0, arguments.clients, Plan(seconds=2.0, ramp_s=1.0))
            rounds = [
                measure(system, mode, number, arguments.clients, _plan(mode, number, arguments.seconds))
                for number in range(arguments.rounds)
                for mode in rotated(list(MODES), number)
            ]
        received_bytes = receiver.stop()
    print(markdown(rounds))  # noqa: T201 - the result
    print(f"\n{received_bytes / 1e6:.1f} MB of spans")  # noqa: T201


def _plan(mode: str, number: int, seconds: float) -> Plan:
    seed = 1 + number * len(MODES) + list(MODES).index(mode)
    return Plan(seconds, ramp_s=1.0, traced_every=MODES[mode], seed=seed)


def markdown(rounds: list[Measurement]) -> str:
    """Medians with their spread, and the same divided by the round without tracing."""
    parts = [tables.table(summary.summary(rounds), COLUMNS)]
    parts += [f"Divided by {BASELINE}:", tables.table(summary.ratios(rounds, BASELINE), COLUMNS)]
    parts += [tables.failures(rounds, [])]
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
