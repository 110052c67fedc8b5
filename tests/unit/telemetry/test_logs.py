"""One JSON object a line, with the ids of the request that the running task works on and of no other."""

import asyncio
import contextvars
import io
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from serve_app.telemetry import logs
from serve_app.telemetry.logs import bind, set_up

Lines = Callable[[], list[dict[str, Any]]]

log = logging.getLogger("serve_app.a_test")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """What our loggers have written since the last call, parsed; they are left as they were."""
    ours = [logging.getLogger(name) for name in logs._OURS]
    before = [(list(one.handlers), one.level, one.propagate) for one in ours]
    written = io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", written)
        set_up("tokenizer", "tokenizer-0")

    def read() -> list[dict[str, Any]]:
        text = written.getvalue()
        written.seek(0)
        written.truncate()
        assert text == "" or text.endswith("\n")
        return [json.loads(line) for line in text.split("\n")[:-1]]

    yield read
    for one, (one.handlers, level, one.propagate) in zip(ours, before, strict=True):
        one.setLevel(level)


def alone(work: Callable[[], None]) -> None:
    """In a context of its own: nothing that other tests bound is seen, and nothing stays bound."""
    contextvars.Context().run(work)


def test_a_line_is_one_object_that_says_where_it_comes_from(lines: Lines) -> None:
    alone(lambda: log.info("%d of\n%s", 2, "three"))
    (line,) = lines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "INFO",
        "hop": "tokenizer",
        "replica": "tokenizer-0",
        "logger": "serve_app.a_test",
        "message": "2 of\nthree",
    }


@pytest.fixture
def far_from_greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "XYZ-9")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("far_from_greenwich")
def test_the_time_is_that_of_the_record_in_utc(lines: Lines) -> None:
    record = logging.LogRecord("serve_app.a_test", logging.INFO, __file__, 1, "x", None, None)
    record.created, record.msecs = 1_700_000_000.25, 250.0
    alone(lambda: log.handle(record))
    assert lines()[0]["time"] == "2023-11-14T22:13:20.250Z"


def test_what_is_below_info_is_not_written_and_what_is_not_ours_neither(lines: Lines) -> None:
    alone(lambda: log.debug("x"))
    alone(lambda: logging.getLogger("somebody.elses").info("x"))
    assert lines() == []


@pytest.mark.parametrize("name", ["serve_app.x.y", "deployments.x"])
def test_every_logger_of_ours_writes(lines: Lines, name: str) -> None:
    alone(lambda: logging.getLogger(name).warning("x"))
    assert [line["logger"] for line in lines()] == [name]


def test_a_line_is_written_once_and_to_nobody_else(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray and vLLM have handlers at the root."""
    elsewhere = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(elsewhere)])
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", again := io.StringIO())
        set_up("tokenizer", "tokenizer-0")
    alone(lambda: log.warning("x"))
    assert lines() == []  # the later set-up has taken the earlier one's place
    assert again.getvalue().count("\n") == 1
    assert elsewhere.getvalue() == ""


def test_fields_stand_beside_the_message(lines: Lines) -> None:
    alone(lambda: log.info("done", extra={"fields": {"e2e_s": 0.5, "stages": {"decode": 0.25}, "error": None}}))
    (line,) = lines()
    assert (line["e2e_s"], line["stages"], line["error"]) == (0.5, {"decode": 0.25}, None)


def test_an_exceptions_text_and_place_are_in_its_line(lines: Lines) -> None:
    def work() -> None:
        try:
            raise ValueError("what went wrong")
        except ValueError:
            log.exception("failed")

    alone(work)
    (line,) = lines()
    assert (line["level"], line["message"]) == ("ERROR", "failed")
    assert line["error"].startswith("Traceback")
    assert line["error"].endswith("ValueError: what went wrong")
    assert "test_logs.py" in line["error"]


def test_a_line_has_the_ids_of_its_request(lines: Lines) -> None:
    def work() -> None:
        bind("r-1", "t" * 32)
        log.info("x")
        bind("r-2", None)
        log.info("x")

    alone(work)
    assert [(one["request_id"], one.get("trace_id")) for one in lines()] == [("r-1", "t" * 32), ("r-2", None)]
    alone(lambda: log.info("x"))
    assert not {"request_id", "trace_id"} & set(lines()[0])


def test_a_task_has_its_own_ids_and_not_its_neighbours(lines: Lines) -> None:
    async def request(name: str, barrier: asyncio.Barrier) -> None:
        bind(name, f"trace of {name}")
        for _ in range(3):
            await barrier.wait()  # every other task has run in between
            log.info("%s", name)

    async def neighbours() -> None:
        barrier = asyncio.Barrier(4)
        await asyncio.gather(*(request(f"r-{at}", barrier) for at in range(4)))
        log.info("nobody")

    alone(lambda: asyncio.run(neighbours()))
    *those, nobody = lines()
    assert len(those) == 12
    for line in those:
        assert (line["request_id"], line["trace_id"]) == (line["message"], f"trace of {line['message']}")
    assert "request_id" not in nobody


def test_work_in_a_thread_for_a_request_has_the_requests_ids(lines: Lines) -> None:
    async def request() -> None:
        bind("r-1", None)
        await asyncio.to_thread(log.info, "x")

    alone(lambda: asyncio.run(request()))
    assert lines()[0]["request_id"] == "r-1"


def test_a_thread_that_works_for_no_request_has_no_ids(lines: Lines) -> None:
    def work() -> None:
        bind("r-1", "t" * 32)
        thread = threading.Thread(target=log.info, args=("x",))
        thread.start()
        thread.join()

    alone(work)
    assert not {"request_id", "trace_id"} & set(lines()[0])


def test_lines_of_many_threads_do_not_mix(lines: Lines) -> None:
    start = threading.Barrier(8)

    def work(name: str) -> None:
        bind(name, None)
        start.wait()
        for _ in range(50):
            log.info("%s", name * 20)

    threads = [threading.Thread(target=work, args=(f"r-{at}",)) for at in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    written = lines()
    assert len(written) == 400
    assert all(one["message"] == one["request_id"] * 20 for one in written)


def test_what_has_no_json_still_makes_a_line(lines: Lines) -> None:
    alone(lambda: log.info("half a pair: %s", "\ud83d", extra={"fields": {"odd": object}}))
    (line,) = lines()
    assert line["message"] == "half a pair: \ud83d"
    assert line["odd"] == str(object)
