"""A busy quarter of an hour for the insight: requests as the hops measure them, loads, errors, all from one seed."""

import random
from collections.abc import Iterator

from serve_app.insight.history import History
from serve_app.messages import ChoiceMetrics, GpuReport, HopReport, LoadReport, RequestMetrics, Stage
from serve_app.telemetry import names
from serve_app.telemetry.stages import Work, stage

HOSTILE_ID = "<img src=x onerror=alert(1)>"
ENGINES = ("engine-7f3a", "engine-b21c")
_FAILURES = {
    "overloaded": ("refused", 429),
    "deadline_exceeded": ("timeout", 504),
    "engine_died": ("error", 503),
    "client_disconnected": ("disconnected", 499),
    "invalid_request": ("invalid", 400),
}


def sample_request(rng: random.Random, arrived_s: float, prompt: int, tokens: int, **fields: object) -> RequestMetrics:
    """A streamed chat that ended well: every stage, with the work for each token in pieces."""
    now_s, stages = arrived_s, []

    def lasting(name: str, seconds: float) -> None:
        nonlocal now_s
        stages.append(stage(name, now_s, now_s + seconds))
        now_s += seconds + rng.uniform(0.0001, 0.001)

    lasting(names.AUTH, rng.uniform(0.0001, 0.0004))
    lasting(names.READ, rng.uniform(0.0003, 0.002))
    lasting(names.TOKENIZER_QUEUE, rng.expovariate(250))
    lasting(names.TEMPLATE, rng.uniform(0.001, 0.004) + prompt * 2e-6)
    lasting(names.ENCODE, rng.uniform(0.001, 0.002) + prompt * 1e-5)
    lasting(names.POSTPROCESS_QUEUE, rng.expovariate(500))
    lasting(names.ENGINE_QUEUE, rng.expovariate(12))
    lasting(names.PREFILL, 0.02 + prompt * rng.uniform(0.8e-4, 1.2e-4))
    step_s = rng.uniform(0.008, 0.014)
    works = [Work(name) for name in (names.DETOKENIZE, names.RENDER, names.WRITE)]
    first_s = now_s
    for at in range(tokens):
        begin_s = first_s + at * step_s
        for work in works:
            end_s = begin_s + rng.uniform(0.0001, 0.0006)
            work.add(begin_s, end_s)
            begin_s = end_s
    last_s = first_s + (tokens - 1) * step_s
    stages.append(stage(names.DECODE, first_s, last_s))
    stages += [one for work in works for one in work.stages()]
    whole = {
        "request_id": f"chatcmpl-{rng.getrandbits(64):016x}",
        "operation": "chat",
        "model": "smollm2-135m-instruct",
        "stream": True,
        "arrived_s": arrived_s,
        "ended_s": max(one.end_s for one in stages) + 0.0005,
        "status": 200,
        "outcome": "ok",
        "trace_id": f"{rng.getrandbits(128):032x}",
        "sampled": True,
        "first_write_s": first_s + 0.0012,
        "stages": tuple(stages),
        "choices": (ChoiceMetrics(tokens, first_s, last_s, step_s * 1.7, "stop"),),
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "cached_tokens": prompt // 3,
    }
    return RequestMetrics(**(whole | fields))


def failed_request(rng: random.Random, arrived_s: float, error: str) -> RequestMetrics:
    """One that ended before its first token."""
    outcome, status = _FAILURES[error]
    seconds = 12.0 if outcome == "timeout" else rng.uniform(0.002, 0.02)
    reached = (Stage(names.READ, arrived_s, arrived_s + 0.001, 0.001, 1, 0.001),)
    waited = (stage(names.ENGINE_QUEUE, arrived_s + 0.004, arrived_s + seconds),) if outcome == "timeout" else ()
    return sample_request(
        rng,
        arrived_s,
        180,
        2,
        ended_s=arrived_s + seconds,
        status=status,
        outcome=outcome,
        error=error,
        first_write_s=None,
        stages=reached + waited,
        choices=(),
        prompt_tokens=180 if outcome == "timeout" else None,
        completion_tokens=None,
        cached_tokens=None,
    )


def fill(history: History, now_s: float, seconds: int = 600, gpus: bool = False) -> None:
    """Reports of every second up to `now_s`, oldest first, as the replicas would have sent them."""
    rng = random.Random(7)
    for moment in range(seconds, -1, -1):
        at_s = now_s - moment
        for report in _reports(rng, at_s, busy=0.4 + 0.6 * abs((moment % 240) / 120 - 1), gpus=gpus):
            history.add(report, at_s)


def _reports(rng: random.Random, at_s: float, busy: float, gpus: bool) -> Iterator[HopReport]:
    requests = tuple(_ended(rng, at_s, busy))
    yield HopReport("gateway", "gateway-0", at_s, int(9 * busy), 0, exported_spans=5000, requests=requests)
    yield HopReport("gateway", "gateway-1", at_s, int(7 * busy), 0, exported_spans=4000, dropped_spans=3)
    yield HopReport("tokenizer", "tokenizer-0", at_s, int(3 * busy), rng.randrange(2))
    yield HopReport("postprocess", "postprocess-0", at_s, int(14 * busy), 0)
    for order, replica in enumerate(ENGINES):
        running = int((12 - 5 * order) * busy)
        waiting = max(0, int(8 * busy) - 4) if order == 0 else 0
        load = LoadReport(running, waiting, min(1.0, (0.86 - 0.4 * order) * busy), 2048, 2 - order, 90_000, 31_400)
        cards = (GpuReport(order, "NVIDIA H200", 0.71, 0.43, 96 << 30, 141 << 30, 101 << 30, 95e9),) if gpus else ()
        yield HopReport("engine", replica, at_s, running, waiting, load=load, gpus=cards)


def _ended(rng: random.Random, at_s: float, busy: float) -> Iterator[RequestMetrics]:
    for _ in range(rng.randint(0, max(1, int(6 * busy)))):
        prompt, tokens, ended_s = (
            rng.choice((24, 90, 150, 420, 800, 1800, 3900)),
            rng.randint(8, 160),
            at_s - rng.random(),
        )
        state = rng.getstate()
        lasted_s = sample_request(rng, 0.0, prompt, tokens).ended_s
        rng.setstate(state)
        yield sample_request(rng, ended_s - lasted_s, prompt, tokens)
    if rng.random() < 0.04:
        yield failed_request(rng, at_s - 0.5, rng.choice(tuple(_FAILURES)))
