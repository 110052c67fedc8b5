"""What a token costs each hop, by the number of streams, over the token channel and over a stream per request.

The simulated engine, at a rate that no engine on these CPUs reaches: each stream gets a token per step. Run by
`make bench-channel`; prints tables, and with `--json` writes all rounds and a plot.
"""

import argparse
import functools
from typing import Any

from bench import report, summary, systems, tables
from bench.measure import Plan
from bench.report import Report
from bench.session import Application, Session, end_in_order_on_sigterm, options, run

from serve_app.local.servefile import DEFAULT_CONFIG, merge

CONFIG = DEFAULT_CONFIG.with_name("simulated.yaml")
# What each mode changes in the application.
MODES: dict[str, dict[str, Any]] = {
    "channel": {"channel": {"enabled": True}},
    "streams": {"channel": {"enabled": False}},
}
BASELINE = "streams"
TOKENS = 256


def main() -> None:
    """Runs all rounds and prints what they gave."""
    arguments = _arguments()
    end_in_order_on_sigterm()
    applications = {name: _application(name, arguments) for name in arguments.modes}
    run(applications, arguments.streams, arguments, lambda session: _tell(session, arguments))


def _arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--step-ms", type=float, default=33.0, help="of the simulated engine: a token for each stream")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    return parser.parse_args()


def _application(mode: str, arguments: argparse.Namespace) -> Application:
    overrides = merge(engine_of(max(arguments.streams), arguments.step_ms), MODES[mode])
    # One after the other within the time of an answer, so that at any time as many begin as end.
    ramp_s = TOKENS * arguments.step_ms / 1000
    plan = Plan(arguments.seconds, ramp_s=ramp_s, tokens=TOKENS)
    return Application(functools.partial(systems.tokenline, config=CONFIG, overrides=overrides), {mode: plan})


def engine_of(streams: int, step_ms: float) -> dict[str, Any]:
    """An engine that steps all streams together, and hops that take them all."""
    room = {"max_ongoing_requests": 2 * streams}
    tokens = TOKENS + 256  # prompt and template included
    sim = {"step_ms": step_ms, "step_ms_per_sequence": 0.0, "max_sequences": 2 * streams}
    blocks = {"kv_blocks": 2 * streams * tokens // 16, "block_tokens": 16}
    return {
        **dict.fromkeys(("gateway", "tokenizer", "postprocess"), room),
        "engine": room | {"sim": sim | blocks},
    }


def _tell(session: Session, arguments: argparse.Namespace) -> None:
    measurements = session.measurements
    whole = Report(
        benchmark="channel",
        machine=report.machine(),
        versions=report.versions(),
        settings={name: getattr(arguments, name) for name in ("rounds", "seconds", "streams", "step_ms", "modes")}
        | {"tokens": TOKENS},
        summary=summary.summary(measurements),
        ratios={BASELINE: summary.ratios(measurements, BASELINE), "fewest": summary.growth(measurements)},
        idle=summary.idle(session.rests),
        failures=session.failures,
        rounds=measurements,
        rests=session.rests,
    )
    print(markdown(whole))  # noqa: T201 - the result
    if arguments.json:
        report.write(whole, arguments.json)


def markdown(whole: Report) -> str:
    """Tables of cost by hop, how it grows with the streams, and how the modes compare; medians of rounds."""
    groups = {"all": [summary.CPU]} | tables.cost_columns(whole.summary)
    parts = ["### CPU-seconds per 1,000 tokens", tables.table(whole.summary, groups, "streams")]
    parts += ["### Divided by that with the fewest streams", tables.table(whole.ratios["fewest"], groups, "streams")]
    parts += [f"### Divided by {BASELINE}", tables.table(whole.ratios[BASELINE], groups, "streams")]
    parts += ["### Speed", tables.table(whole.summary, tables.SPEED, "streams")]
    parts += ["### At rest, thousandths of a core", tables.idle_table(whole.idle)]
    parts += ["### Failures", tables.failures(whole.rounds, whole.failures)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
