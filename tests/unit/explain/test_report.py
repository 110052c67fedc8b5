from collections.abc import Callable

import pytest

from serve_app.explain.explain import explain
from serve_app.explain.report import COLUMNS, report
from serve_app.messages import RequestMetrics, Stage
from serve_app.telemetry import names

Make = Callable[..., RequestMetrics]


def line_of(text: str, beginning: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(beginning))


def test_a_set_has_its_latencies_parts_symptoms_and_levers(make: Make, refused: Make) -> None:
    text = report(explain([*(make(engine__queue=2.5) for _ in range(9)), refused()]))
    assert "10 requests, 2023-11-14 22:13:20 to 2023-11-14 22:13:22 UTC: 9 ok, 1 refused" in text
    assert "errors: 1 overloaded" in text
    assert "the largest part of the wait is engine.queue, 98%" in text
    assert line_of(text, "all ").split() == ["all", "10", *["2,521"] * 3, *["2.00"] * 3, *["2,564"] * 3]
    assert line_of(text, "engine.queue").split()[:6] == ["engine.queue", "9", "2,500", "2,500", "2,500", "98%"]
    assert "! slow first token: engine.queue" in text
    assert "engine.max_sequences" in text


def test_lengths_have_tables_of_their_own_where_there_are_several(make: Make) -> None:
    one = report(explain([make()]))
    two = report(explain([make(), make(prompt_tokens=5000)]))
    assert one.count("have it") == 1
    assert two.count("have it") == 3
    assert "\nlong: 1 " in two


def test_a_request_is_a_waterfall_that_adds_up(make: Make) -> None:
    text = report(explain([make(prefill=0.3, fields={"trace_id": "ab12", "cached_tokens": 64})], one_by_one=True))
    assert text.startswith("request r1, trace ab12\nchat of m, streamed, 2023-11-14 22:13:20 UTC: ok (200)\n")
    assert "tokens: 100 prompt, 64 of them cached, 21 completion" in text
    assert "TTFT 307 ms, TPOT 2.0 ms, E2E 350 ms" in text
    prefill = line_of(text, "prefill ").split()
    assert prefill[:4] == ["prefill", "6.50", "300.0", "86%"]
    assert len(prefill[4]) == pytest.approx(47 * 0.86, abs=1)
    assert "the largest part of the wait is prefill" in text
    assert "engine.vllm_args.enable_prefix_caching" in text


def test_work_in_pieces_is_dotted_between_them(make: Make) -> None:
    text = report(explain([make(gateway__write=0.02)], one_by_one=True))
    bar = line_of(text, "gateway.write ").split()[-1]
    assert "·" in bar
    assert bar.endswith("█")


def test_time_that_no_stage_covers_is_drawn_where_it_lies(make: Make) -> None:
    text = report(explain([make(gap=0.5)], one_by_one=True))
    unaccounted = line_of(text, "unaccounted").split()
    assert unaccounted[1:4] == ["21.5", "500.0", "89%"]


def test_several_requests_of_one_id_are_all_shown(make: Make) -> None:
    text = report(explain([make(at_s=60.0), make()], one_by_one=True))
    assert text.count("request r1,") == 2
    assert text.index("22:13:20 UTC") < text.index("22:14:20 UTC")


def test_what_is_unknown_is_called_so(make: Make) -> None:
    bare = {"stages": (), "choices": (), "first_write_s": None, "prompt_tokens": None, "completion_tokens": None}
    requests = [make(fields=bare)]
    text = report(explain(requests, one_by_one=True))
    assert "trace unknown" in text
    assert "tokens: unknown prompt, unknown of them cached, unknown completion" in text
    assert "TTFT unknown, TPOT unknown, E2E 65.0 ms" in text
    assert line_of(report(explain(requests)), "unknown ").split() == ["unknown", "1", *["unknown"] * 6, *["65.0"] * 3]


def test_a_request_that_took_no_time_has_unknown_shares(make: Make) -> None:
    nothing = {"stages": (Stage(names.AUTH, 1_700_000_000.0, 1_700_000_000.0, 0.0),), "ended_s": 1_700_000_000.0}
    text = report(explain([make(fields=nothing | {"choices": ()})], one_by_one=True))
    assert line_of(text, "gateway.auth").split() == ["gateway.auth", "0.00", "0.00", "unknown"]
    assert "the largest part of the wait is unknown" in text


def test_nothing_remembered_is_a_sentence() -> None:
    assert report(explain([])) == "no request has ended within what the service remembers (insight.window_s)"


@pytest.mark.parametrize("one_by_one", [True, False])
def test_no_line_is_wider_than_the_terminal_nor_obeyed_by_it(one_by_one: bool, make: Make) -> None:
    long = {"request_id": "x" * 300 + "\x1b[2J", "error": "e\x07" * 80, "outcome": "error", "status": 500}
    requests = [make(engine__queue=3.0, fields=long), make(prompt_tokens=5000, decode=900.0), make(prompt_tokens=None)]
    lines = report(explain(requests, one_by_one)).split("\n")
    assert max(map(len, lines)) <= COLUMNS
    assert all(line.isprintable() for line in lines)
