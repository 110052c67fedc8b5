"""A system that does not start is noted, and the others are tried all the same."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.measure import Plan, rotated
from bench.session import Application, Session
from bench.systems import NotReady, System


@contextlib.contextmanager
def broken(log: Path) -> Iterator[System]:
    raise NotReady(f"it ended with status 1; its log is {log.name}")
    yield


def test_systems_that_do_not_start_are_noted_each_round(tmp_path: Path) -> None:
    applications = {
        "one": Application(broken, {"one": Plan(1.0), "one-traced": Plan(1.0)}),
        "other": Application(broken, {"other": Plan(1.0)}),
    }
    session = Session(applications, [1], 0.0, tmp_path)
    session.run(2)
    assert [(one.system, one.round, one.error) for one in session.failures] == [
        ("one", 0, "NotReady: it ended with status 1; its log is one-1.log"),
        ("one-traced", 0, "NotReady: it ended with status 1; its log is one-1.log"),
        ("other", 0, "NotReady: it ended with status 1; its log is other-1.log"),
        ("other", 1, "NotReady: it ended with status 1; its log is other-2.log"),
        ("one", 1, "NotReady: it ended with status 1; its log is one-2.log"),
        ("one-traced", 1, "NotReady: it ended with status 1; its log is one-2.log"),
    ]
    assert session.measurements == []


@contextlib.contextmanager
def interrupted(log: Path) -> Iterator[System]:
    raise KeyboardInterrupt
    yield


def test_a_run_that_is_interrupted_says_so_and_ends(tmp_path: Path) -> None:
    plans = {"one": Plan(1.0)}
    session = Session({"one": Application(interrupted, plans)}, [1], 0.0, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        session.run(2)
    assert [(one.system, one.round, one.error) for one in session.failures] == [
        ("one", 0, "interrupted; nothing after it was run")
    ]


def test_each_comes_first_in_turn() -> None:
    assert [rotated(["a", "b", "c"], by) for by in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
