"""What a person sees, on a terminal and in a log."""

import io

from serve_app.local.progress import Reporter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_in_a_log_each_step_gets_a_line_at_start_and_one_at_the_end() -> None:
    out, clock = io.StringIO(), Clock()
    report = Reporter(out, live=False, clock=clock)
    report.start("engine", "loading the model")
    clock.now += 34.2
    report.done("engine")
    assert out.getvalue() == "engine: loading the model …\nengine: ready after 34.2 s\n"


def test_in_a_log_a_long_step_is_heard_of_every_fifteen_seconds() -> None:
    out, clock = io.StringIO(), Clock()
    report = Reporter(out, live=False, clock=clock)
    report.start("engine", "loading the model")
    for _ in range(40):
        clock.now += 1
        report.tick()
    assert out.getvalue().splitlines()[1:] == ["engine: loading the model … 15 s", "engine: loading the model … 30 s"]


def test_on_a_terminal_the_steps_under_way_share_one_line_that_ticks() -> None:
    out, clock = io.StringIO(), Clock()
    report = Reporter(out, live=True, clock=clock)
    report.start("engine", "loading")
    clock.now += 2
    report.start("gateway", "starting")
    report.done("gateway")
    report.tick()
    lines = out.getvalue().split("\r\x1b[2K")
    assert lines[-3:] == [
        "engine: loading … 2 s, gateway: starting … 0 s",
        "gateway: ready after 0.0 s\n",
        "engine: loading … 2 s",
    ]
    report.clear()
    assert out.getvalue().endswith("\r\x1b[2K")


def test_a_terminal_that_has_gone_does_not_stop_the_shutdown() -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    report = Reporter(Gone(), live=False)
    report.say("one")
    report.say("two")


def test_without_an_output_nothing_happens() -> None:
    report = Reporter(None)
    report.start("a", "b")
    report.tick()
    report.done("a")
    report.clear()
