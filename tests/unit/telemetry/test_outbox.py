"""What waits to be reported: in order, bounded, and what does not fit is counted."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serve_app.messages import RequestMetrics, Stage
from serve_app.telemetry.outbox import Outbox


def request(number: int) -> RequestMetrics:
    return RequestMetrics(str(number), "chat", "m", False, 0.0, 1.0, 200, "ok")


def ids(requests: tuple[RequestMetrics, ...]) -> list[int]:
    return [int(one.request_id) for one in requests]


def test_what_was_added_is_taken_once_and_in_order() -> None:
    outbox = Outbox()
    for number in range(3):
        outbox.add(request(number))
    assert ids(outbox.take()) == [0, 1, 2]
    assert outbox.take() == ()
    assert outbox.dropped == 0


def test_what_comes_back_goes_ahead_of_what_has_come_since() -> None:
    outbox = Outbox()
    outbox.add(request(0))
    outbox.add(request(1))
    taken = outbox.take()
    outbox.add(request(2))
    outbox.put_back(taken)
    assert ids(outbox.take()) == [0, 1, 2]


@given(st.integers(1, 20), st.integers(0, 60))
def test_the_oldest_make_room_and_are_counted(room: int, count: int) -> None:
    outbox = Outbox(room)
    for number in range(count):
        outbox.add(request(number))
    assert outbox.dropped == max(0, count - room)
    assert ids(outbox.take()) == list(range(count))[-room:]


def test_what_comes_back_to_a_full_outbox_is_what_is_dropped() -> None:
    outbox = Outbox(3)
    for number in range(3):
        outbox.add(request(number))
    taken = outbox.take()
    outbox.add(request(3))
    outbox.add(request(4))
    outbox.put_back(taken)
    assert outbox.dropped == 2
    assert ids(outbox.take()) == [2, 3, 4]


class AnyUse(RuleBasedStateMachine):
    """Every request that was ever added waits, is with whoever took it, was delivered, or is counted as dropped."""

    @initialize(room=st.integers(1, 5))
    def begin(self, room: int) -> None:
        self.room = room
        self.outbox = Outbox(room)
        self.added = self.delivered = 0
        self.taken: tuple[RequestMetrics, ...] = ()

    @rule()
    def add(self) -> None:
        self.outbox.add(request(self.added))
        self.added += 1

    @rule()
    def deliver(self) -> None:
        self.delivered += len(self.taken)
        self.taken = self.outbox.take()
        assert ids(self.taken) == sorted(ids(self.taken))

    @rule()
    def fail(self) -> None:
        self.outbox.put_back(self.taken)
        self.taken = ()

    @invariant()
    def nothing_is_lost_uncounted(self) -> None:
        waiting = len(self.outbox._waiting)
        assert waiting <= self.room
        assert self.added == waiting + len(self.taken) + self.delivered + self.outbox.dropped


TestAnyUse = AnyUse.TestCase


def test_requests_of_very_many_choices_are_bounded_by_their_stages() -> None:
    outbox = Outbox(10)
    large = tuple(Stage("decode", 0.0, 1.0, 1.0) for _ in range(100))
    for number in range(5):
        outbox.add(msgspec.structs.replace(request(number), stages=large))
    assert ids(outbox.take()) == [4]  # 160 stages is room for one of them
    assert outbox.dropped == 4
    outbox.add(msgspec.structs.replace(request(5), stages=large * 10))
    assert ids(outbox.take()) == [5]  # the latest is kept, whatever its size
