"""An `Explanation` as plain text for a terminal of 100 columns. Pure."""

import textwrap
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from serve_app.explain.explain import Bucket, Explanation, StagePart
from serve_app.explain.levers import Layer, Lever
from serve_app.explain.symptom import UNACCOUNTED_AIM, Symptom, ms, percent
from serve_app.explain.waterfall import Row, Waterfall
from serve_app.telemetry.percentiles import Percentiles

COLUMNS = 100
UNKNOWN = "unknown"
_SHARE_BAR = 27
_TIME_BAR = 47


def report(explanation: Explanation) -> str:
    """Buckets, the parts of the wait, symptoms and levers; or the waterfalls, if the explanation has any."""
    if not explanation.buckets:
        return "no request has ended within what the service remembers (insight.window_s)"
    if explanation.waterfalls:
        lines = _waterfalls(explanation)
    else:
        lines = [*_head(explanation), "", *_latencies(explanation.buckets)]
        lines += [line for bucket in _worth_showing(explanation.buckets) for line in ("", *_stages(bucket))]
        lines += _symptoms(explanation.symptoms) + _levers(explanation.layers)
    # Names and ids come from outside, and a terminal obeys some characters.
    return "\n".join("".join(sign if sign.isprintable() else "?" for sign in line).rstrip() for line in lines)


def _head(explanation: Explanation) -> list[str]:
    everything = explanation.buckets[0]
    span = f"{_moment(explanation.begin_s)} to {_moment(explanation.end_s)} UTC"
    lines = _wrapped(f"{_counted(everything.requests)}, {span}: {_counts(everything.outcomes)}")
    if everything.errors:
        lines += _wrapped(f"errors: {_counts(everything.errors)}")
    if explanation.dominant is not None and explanation.unaccounted is not None:
        share = next(part.share for part in everything.stages if part.name == explanation.dominant)
        lines += _wrapped(
            f"the largest part of the wait is {explanation.dominant}, {percent(share or 0.0)}; no stage covers "
            f"{percent(explanation.unaccounted)} of a request at the median (aim: under {UNACCOUNTED_AIM:.0%})"
        )
    return lines


def _latencies(buckets: Iterable[Bucket]) -> list[str]:
    values = ("TTFT", "TPOT", "E2E")
    lines = [
        f"{'prompt':<8}{'requests':>9}" + "".join(f"{f'{name} ms':>27}" for name in values),
        " " * 17 + f"{'p50':>9}{'p95':>9}{'p99':>9}" * len(values),
    ]
    for bucket in buckets:
        cells = "".join(map(_cells, (bucket.ttft_s, bucket.tpot_s, bucket.e2e_s)))
        lines.append(f"{bucket.name:<8}{bucket.requests:>9}{cells}")
    return lines


def _worth_showing(buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    """With one length of prompt, it and `all` are the same."""
    shown = buckets if len(buckets) > 2 else buckets[:1]
    return tuple(bucket for bucket in shown if bucket.stages)


def _stages(bucket: Bucket) -> list[str]:
    title = f"{bucket.name}: {bucket.served}"
    head = f"{title:<24}{'have it':>8}{'p50 ms':>10}{'p95 ms':>10}{'p99 ms':>10}{'share':>9}"
    return [head, *map(_stage, bucket.stages)]


def _stage(part: StagePart) -> str:
    share = UNKNOWN if part.share is None else percent(part.share)
    bar = "█" * round((part.share or 0.0) * _SHARE_BAR)
    return f"{part.name:<24}{part.requests:>8}{_cells(part.seconds, 10)}{share:>9}  {bar}"


def _symptoms(symptoms: Iterable[Symptom]) -> list[str]:
    lines = ["", "Symptoms (! over a bound, - where to look first)"]
    for one in symptoms:
        lines += _wrapped(f"{'!' if one.over_bound else '-'} {one.name}: {one.layer or UNKNOWN}")
        lines += _wrapped(one.evidence, "    ") + _keys(one.levers)
    return lines if len(lines) > 2 else []


def _levers(layers: Iterable[Layer]) -> list[str]:
    lines = ["", "Levers (keys of the config file)"]
    for layer in layers:
        lines += _wrapped(f"{layer.name}: {layer.meaning}") + _keys(layer.levers)
    return lines if len(lines) > 2 else []


def _keys(levers: Iterable[Lever]) -> list[str]:
    return [line for one in levers for line in _wrapped(f"    {one.key:<47} {one.advice}", "", " " * 52)]


def _waterfalls(explanation: Explanation) -> list[str]:
    head = f"{'stage':<22}{'begins ms':>10}{'took ms':>11}{'share':>8}"
    lines: list[str] = []
    for one in explanation.waterfalls:
        lines += [*_request(one), "", head, *(_row(row, one.e2e_s) for row in one.rows)]
        lines += [f"the largest part of the wait is {one.dominant or UNKNOWN}", ""]
    dominant = {one.dominant for one in explanation.waterfalls}
    return lines[:-1] + _levers(layer for layer in explanation.layers if layer.name in dominant)


def _request(one: Waterfall) -> list[str]:
    how = "streamed" if one.stream else "not streamed"
    ending = f"{one.outcome} ({one.status}{'' if one.error is None else f', {one.error}'})"
    tokens = f"{_number(one.prompt_tokens)} prompt, {_number(one.cached_tokens)} of them cached"
    return [
        *_wrapped(f"request {one.request_id}, trace {one.trace_id or UNKNOWN}"),
        *_wrapped(f"{one.operation} of {one.model}, {how}, {_moment(one.arrived_s)} UTC: {ending}"),
        f"tokens: {tokens}, {_number(one.completion_tokens)} completion",
        f"TTFT {ms(one.ttft_s)}, TPOT {ms(one.tpot_s)}, E2E {ms(one.e2e_s)}",
    ]


def _row(row: Row, wall_s: float) -> str:
    begins = UNKNOWN if row.begins_s is None else _cell(row.begins_s)
    share = UNKNOWN if row.share is None else percent(row.share)
    return f"{row.stage:<22}{begins:>10}{_cell(row.took_s):>11}{share:>8}  {_bar(row, wall_s)}"


def _bar(row: Row, wall_s: float) -> str:
    """The stage's place in the request's time: full where it was at work, dotted where it only lay between pieces."""
    signs = [" "] * _TIME_BAR
    for sign, spans in (("·", row.spans), ("█", row.busy)):
        for begin_s, end_s in spans if wall_s > 0 else ():
            first = min(int(begin_s / wall_s * _TIME_BAR), _TIME_BAR - 1)
            for at in range(first, max(first + 1, round(end_s / wall_s * _TIME_BAR))):
                signs[at] = sign
    return "".join(signs)


def _cells(found: Percentiles | None, width: int = 9) -> str:
    values = (None,) * 3 if found is None else (found.p50, found.p95, found.p99)
    return "".join(f"{UNKNOWN if value is None else _cell(value):>{width}}" for value in values)


def _cell(seconds: float) -> str:
    """Milliseconds without their unit."""
    decimals = 2 if seconds < 0.01 else 1 if seconds < 1 else 0
    return f"{seconds * 1000:,.{decimals}f}"


def _number(count: int | None) -> str:
    return UNKNOWN if count is None else f"{count:,}"


def _counted(requests: int) -> str:
    return "1 request" if requests == 1 else f"{requests:,} requests"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _moment(seconds: float | None) -> str:
    try:
        return UNKNOWN if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def _wrapped(text: str, indent: str = "", further: str | None = None) -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent=indent, subsequent_indent=indent if further is None else further)
