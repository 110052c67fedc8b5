"""Tokenline beside its peers: vLLM's own API server and Ray Serve LLM, on one model, one machine, in turns.

Run by `make bench`; prints tables, and with `--json` writes all rounds and a plot.
"""

import argparse
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from bench import report, summary, systems, tables
from bench.measure import Plan
from bench.one_layer import one_layer
from bench.receiver import receiving
from bench.report import Report
from bench.session import Application, Session, end_in_order_on_sigterm, options, run
from bench.systems import PEERS_PYTHON

BASELINES = ("ray-llm-direct", "vllm")
DEFAULT = ("vllm", "ray-llm", "ray-llm-direct", "tokenline")
TRACED_EVERY = 100


def main() -> None:
    """Runs all rounds and prints what they gave."""
    arguments = _arguments()
    end_in_order_on_sigterm()
    if any(name.startswith("ray-llm") for name in arguments.systems) and not PEERS_PYTHON.exists():
        raise SystemExit("bench: the peers' environment is not installed; run `make peers`")
    with _applications(arguments.seconds) as known:
        applications = {name: known[name] for name in arguments.systems}
        run(applications, arguments.clients, arguments, lambda session: _tell(session, arguments))


def _arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--systems", nargs="+", choices=DEFAULT, default=list(DEFAULT))
    return parser.parse_args()


@contextlib.contextmanager
def _applications(seconds: float) -> Iterator[dict[str, Application]]:
    """By name. Tokenline traced and not traced are one application: the client's `traceparent` decides."""
    model = one_layer()
    plan = Plan(seconds)
    traced = Plan(seconds, traced_every=TRACED_EVERY, seed=2)
    with receiving() as receiver:
        ours = systems.one_layer_tokenline(model, {"tracing": {"endpoint": receiver.endpoint}})
        yield {
            "vllm": Application(functools.partial(systems.vllm, model=model), {"vllm": plan}),
            "ray-llm": Application(
                functools.partial(systems.ray_llm, model=model, direct_streaming=False), {"ray-llm": plan}
            ),
            "ray-llm-direct": Application(
                functools.partial(systems.ray_llm, model=model, direct_streaming=True), {"ray-llm-direct": plan}
            ),
            "tokenline": Application(ours, {"tokenline": plan, "tokenline-traced": traced}),
        }


def _tell(session: Session, arguments: argparse.Namespace) -> None:
    measurements = session.measurements
    whole = Report(
        benchmark="peers",
        machine=report.machine(),
        versions=report.versions(),
        settings=_settings(arguments),
        summary=summary.summary(measurements),
        ratios={baseline: summary.ratios(measurements, baseline) for baseline in BASELINES},
        idle=summary.idle(session.rests),
        failures=session.failures,
        rounds=measurements,
        rests=session.rests,
    )
    print(markdown(whole))  # noqa: T201 - the result
    if arguments.json:
        report.write(whole, arguments.json)


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        **{name: getattr(arguments, name) for name in ("rounds", "seconds", "clients", "systems")},
        "tokens": Plan(seconds=0).tokens,
        "traced_every": TRACED_EVERY,
        "context_tokens": systems.CONTEXT_TOKENS,
        "max_sequences": systems.MAX_SEQUENCES,
        "max_batched_tokens": systems.MAX_BATCHED_TOKENS,
        "kv_cache_bytes": systems.KV_CACHE_BYTES,
    }


def markdown(whole: Report) -> str:
    """Tables of what was seen, what it cost, and how that compares; medians of rounds with the least and greatest."""
    costs = tables.COST | tables.cost_columns(whole.summary)
    parts = ["### Speed", tables.table(whole.summary, tables.SPEED)]
    parts += ["### CPU-seconds per 1,000 tokens", tables.table(whole.summary, costs)]
    for baseline, ratios in whole.ratios.items():
        if ratios:
            parts += [f"### Divided by {baseline}", tables.table(ratios, tables.RATIOS)]
    parts += ["### At rest, thousandths of a core", tables.idle_table(whole.idle)]
    parts += ["### Failures", tables.failures(whole.rounds, whole.failures)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
