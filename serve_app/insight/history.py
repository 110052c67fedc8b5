"""What the insight remembers: latest requests, each replica's latest report, bins of 10 s of load and rates, totals.

Pure: no asyncio, no Ray, no clock. Bounded by the config's `max_requests`, by the stages so many have, and `window_s`;
the totals outlive them.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serve_app.config import InsightSection
from serve_app.messages import HopReport, LoadReport, RequestMetrics
from serve_app.telemetry.account import Account, account
from serve_app.telemetry.names import GATEWAY, STAGES
from serve_app.telemetry.outbox import STAGES_PER_REQUEST

BIN_S = 10.0
# A replica that has not reported for this long is gone. Each reports every second that it has news, else every ten.
SILENT_S = 30.0

Replica = tuple[str, str]  # hop and replica


@dataclass(frozen=True, slots=True)
class Entry:
    """A request with its account, made once. `at_s` is when it ended, by this process's clock at the latest."""

    at_s: float
    request: RequestMetrics
    account: Account

    @property
    def served(self) -> bool:
        """Whether any work was done for it. What one that was turned away waited says nothing of the stages."""
        return self.request.outcome not in ("invalid", "refused")


@dataclass(slots=True)
class Counts:
    """What ended in one bin."""

    requests: int = 0
    completion_tokens: int = 0
    errors: int = 0


@dataclass(slots=True)
class LoadPeak:
    """The highest of each number that one engine reported in one bin. `kv_usage` is a share, 0 to 1."""

    running: int
    waiting: int
    kv_usage: float

    def raise_to(self, load: LoadReport) -> None:
        """Takes one more report of the bin in."""
        self.running = max(self.running, load.running)
        self.waiting = max(self.waiting, load.waiting)
        self.kv_usage = max(self.kv_usage, load.kv_usage)


@dataclass(slots=True)
class Totals:
    """Since this process started, whatever has been forgotten since. Tokens that are unknown count as none."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, request: RequestMetrics) -> None:
        """One more request that has ended."""
        self.requests += 1
        self.prompt_tokens += request.prompt_tokens or 0
        self.completion_tokens += request.completion_tokens or 0
        if request.error is not None:
            self.errors[request.error] += 1


class History:
    """`now_s` is this process's clock, in seconds of the wall; reports come from machines whose clocks may differ."""

    def __init__(self, config: InsightSection) -> None:
        self.window_s = config.window_s
        self._max_requests = config.max_requests
        self._max_stages = config.max_requests * STAGES_PER_REQUEST
        self._stages = 0
        self._entries: deque[Entry] = deque()
        self._replicas: dict[Replica, tuple[float, HopReport]] = {}
        self._counts: dict[float, Counts] = {}
        self._loads: dict[Replica, dict[float, LoadPeak]] = {}
        self._dropped: dict[Replica, int] = {}
        self._complete_from_s = 0.0  # requests that ended before it may have made room for later ones
        self.totals = Totals()
        self.since_s: float | None = None  # the first report's time

    @property
    def dropped(self) -> int:
        """Requests that gateways could not deliver, since this process started."""
        return sum(self._dropped.values())

    def add(self, report: HopReport, now_s: float) -> None:
        """What one replica says of itself, with the requests that have ended there since it last did."""
        self.since_s = now_s if self.since_s is None else self.since_s
        replica = (report.hop, report.replica)
        self._carry(replica, now_s)
        self._replicas[replica] = (now_s, msgspec.structs.replace(report, requests=()))
        self._carry(replica, now_s)
        if report.dropped_requests:
            self._dropped[replica] = report.dropped_requests
        for request in report.requests:
            self._add_request(request, now_s)
        self._forget(now_s)

    def requests(self, last: int | None = None, request_id: str | None = None) -> tuple[RequestMetrics, ...]:
        """The `last` ones, newest last; only those of an id, if one is given: the request's own or its trace's.

        Clients choose ids, so several requests may have the same.
        """
        found = [
            one.request for one in self._entries if request_id in (None, one.request.request_id, one.request.trace_id)
        ]
        found.sort(key=lambda request: request.ended_s)
        return tuple(found if last is None else found[max(0, len(found) - last) :])

    def entries(self, now_s: float) -> list[Entry]:
        """The requests of the window that are still remembered, newest last."""
        found = [one for one in self._entries if one.at_s >= now_s - self.window_s]
        return sorted(found, key=lambda one: one.at_s)

    def replicas(self, now_s: float) -> list[HopReport]:
        """The latest report of each replica that is not silent, without its requests, in a stable order."""
        alive = [report for heard_s, report in self._replicas.values() if now_s - heard_s <= SILENT_S]
        return sorted(alive, key=lambda report: (report.hop, report.replica))

    def counts(self, now_s: float) -> dict[float, Counts]:
        """By the begin of the bin. A bin that is missing is unknown: no gateway was there to report."""
        self._carry_all(now_s)
        return self._counts

    def loads(self, now_s: float) -> dict[Replica, dict[float, LoadPeak]]:
        """Of each engine replica of the window, gone ones too: peaks by the begin of the bin."""
        self._carry_all(now_s)
        return self._loads

    def complete_from_s(self, now_s: float) -> float:
        """Since when no request was forgotten; `now_s` while nothing was ever reported."""
        if self.since_s is None:
            return now_s
        return min(now_s, max(self.since_s, now_s - self.window_s, self._complete_from_s))

    def _add_request(self, request: RequestMetrics, now_s: float) -> None:
        if any(one.name not in STAGES for one in request.stages):  # as another version's gateway may send
            known = tuple(one for one in request.stages if one.name in STAGES)
            request = msgspec.structs.replace(request, stages=known)
        at_s = min(request.ended_s, now_s)
        self._entries.append(Entry(at_s, request, account(request)))
        self._stages += len(request.stages)
        self.totals.add(request)
        counts = self._counts.setdefault(bin_of(at_s), Counts())
        counts.requests += 1
        counts.completion_tokens += request.completion_tokens or 0
        counts.errors += request.error is not None

    def _carry_all(self, now_s: float) -> None:
        for replica in self._replicas:
            self._carry(replica, now_s)

    def _carry(self, replica: Replica, to_s: float) -> None:
        """What a replica last said holds in every bin from then on, since it is only silent without news."""
        heard_s, report = self._replicas.get(replica, (to_s, None))
        if report is None or to_s - heard_s > SILENT_S:
            return
        begin_s = bin_of(heard_s)
        while begin_s <= to_s:
            if report.hop == GATEWAY:
                self._counts.setdefault(begin_s, Counts())
            if (load := report.load) is not None:
                peak = LoadPeak(load.running, load.waiting, load.kv_usage)
                self._loads.setdefault(replica, {}).setdefault(begin_s, peak).raise_to(load)
            begin_s += BIN_S

    def _forget(self, now_s: float) -> None:
        from_s = now_s - self.window_s
        while self._entries and self._entries[0].at_s < from_s:
            self._forget_oldest()
        while len(self._entries) > self._max_requests or (self._stages > self._max_stages and len(self._entries) > 1):
            self._complete_from_s = max(self._complete_from_s, self._forget_oldest())
        for replica in [one for one, (heard_s, _) in self._replicas.items() if now_s - heard_s > SILENT_S]:
            del self._replicas[replica]
        _forget_bins(self._counts, from_s)
        for replica, bins in list(self._loads.items()):
            _forget_bins(bins, from_s)
            if not bins:
                del self._loads[replica]

    def _forget_oldest(self) -> float:
        """When it ended."""
        oldest = self._entries.popleft()
        self._stages -= len(oldest.request.stages)
        return oldest.at_s


def _forget_bins(bins: dict[float, Any], from_s: float) -> None:
    for begin_s in [one for one in bins if one + BIN_S <= from_s]:
        del bins[begin_s]


def bin_of(moment_s: float) -> float:
    """The begin of the bin that the moment lies in."""
    return moment_s // BIN_S * BIN_S
