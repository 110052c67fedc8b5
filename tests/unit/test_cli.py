"""The command's exit codes and sentences; what it starts is tested elsewhere."""

import json
import socket
from pathlib import Path

import pytest
import yaml

from serve_app import cli
from serve_app.explain import fetch
from serve_app.local import detached, servefile
from serve_app.messages import RequestMetrics, Stage


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config file that would start if anything let it: a foreign application, so no model is needed."""
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump({"applications": [{"name": "a", "import_path": "no_such_module:app"}]}))
    return path


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.err.startswith("tokenline: ")
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1
    return captured.err


def test_check_says_ok_for_the_default_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(servefile.DEFAULT_CONFIG)]) == 0
    assert capsys.readouterr().out == "ok\n"


def test_check_names_the_unknown_key_of_the_args(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = yaml.safe_load(servefile.DEFAULT_CONFIG.read_text())
    content["applications"][0]["args"]["engine"]["replica"] = 2
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(content))
    assert cli.main(["check", str(path)]) == 2
    assert "engine.replica" in complaint(capsys)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: [1", "not valid YAML"),
        ("- 1", "no `applications`"),
        ("applications: []", "exactly one"),
        ("applications: [{name: a}]", "import_path"),
        ("applications: [{import_path: 'a:b', args: 3}]", "args"),
        ("http_options: {port: 70000}\napplications: [{import_path: 'a:b'}]", "http_options.port"),
    ],
)
def test_check_says_what_is_wrong_with_a_file(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    assert cli.main(["check", str(path)]) == 2
    assert words in complaint(capsys)


def test_check_of_a_missing_file_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in complaint(capsys)


def test_run_without_the_model_says_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--port", "0"]) == 2
    assert "make model" in complaint(capsys)


@pytest.mark.parametrize("flags", [[], ["--detach"]])
def test_run_on_a_taken_port_names_it_and_the_way_out(
    flags: list[str], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["run", str(config), "--port", str(port), *flags]) == 2
    said = complaint(capsys)
    assert f"port {port}" in said
    assert "make run PORT=" in said


def test_run_on_a_foreign_address_names_the_key(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(config), "--host", "192.0.2.77", "--port", "0"]) == 2
    assert "http_options.host" in complaint(capsys)


def test_stop_when_nothing_runs_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stop"]) == 0
    assert "nothing runs" in capsys.readouterr().out


def test_model_prints_the_folder_of_the_prepared_model(
    monkeypatch: pytest.MonkeyPatch, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "convert", lambda _, folder: (folder / "config.json").write_text("{}"))
    assert cli.main(["model"]) == 0
    assert "once" in capsys.readouterr().out
    assert cli.main(["model"]) == 0
    said = capsys.readouterr().out
    assert str(cache) in said
    assert "once" not in said


def test_a_cache_that_cannot_be_written_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOKENLINE_CACHE", str(tmp_path / "file" / "cache"))
    assert cli.main(["model"]) == 2
    assert "Not a directory" in complaint(capsys)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("tokenline ")


def request_metrics(request_id: str = "r1") -> RequestMetrics:
    stages = (Stage("prefill", 1.0, 1.3, 0.3),)
    return RequestMetrics(request_id, "chat", "m", False, 1.0, 1.4, 200, "ok", stages=stages, prompt_tokens=3)


def test_explain_shows_the_latest_requests(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[object] = []

    def latest(*arguments: object) -> tuple[RequestMetrics, ...]:
        asked.append(arguments)
        return (request_metrics(),)

    monkeypatch.setattr(fetch, "latest", latest)
    monkeypatch.setenv("TOKENLINE_ADMIN_KEY", "secret")
    assert cli.main(["explain", "--last", "7", "--url", "http://h:1"]) == 0
    assert asked == [("http://h:1", "secret", 7)]
    assert "the largest part of the wait is prefill, 75%" in capsys.readouterr().out


def test_explain_of_an_id_shows_each_request_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def with_id(*arguments: object) -> tuple[RequestMetrics, ...]:
        asked.append(arguments)
        return (request_metrics(), request_metrics())

    monkeypatch.setattr(fetch, "with_id", with_id)
    (tmp_path / "key").write_text("from-file\n")
    assert cli.main(["explain", "r1", "--key-file", str(tmp_path / "key")]) == 0
    assert asked == [(fetch.DEFAULT_URL, "from-file", "r1")]
    assert capsys.readouterr().out.count("request r1,") == 2


def test_explain_asks_the_background_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def latest(url: str, _: str | None, __: int) -> tuple[RequestMetrics, ...]:
        asked.append(url)
        return ()

    monkeypatch.setattr(fetch, "latest", latest)
    monkeypatch.setattr(detached, "current", lambda: detached.State("x", 1, "http://127.0.0.1:8123", ready=True))
    assert cli.main(["explain"]) == 0
    monkeypatch.setattr(detached, "current", lambda: detached.State("x", 1))
    assert cli.main(["explain"]) == 0
    assert asked == ["http://127.0.0.1:8123", fetch.DEFAULT_URL]


def test_explain_as_json_is_the_explanation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch, "latest", lambda *_: (request_metrics(),))
    assert cli.main(["explain", "--json", "--url", "http://h:1"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["dominant"] == "prefill"
    assert said["buckets"][0]["ttft_s"] is None


def test_explain_where_nothing_serves_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert cli.main(["explain", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "nothing serves at" in complaint(capsys)


@pytest.mark.parametrize("flags", [["--url", "file:///etc/passwd"], ["--key-file", "/no/such/key"]])
def test_explain_with_a_wrong_flag_is_one_sentence(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *flags]) == 2
    complaint(capsys)


@pytest.mark.parametrize("count", ["0", "-1", "many"])
def test_explain_takes_whole_numbers_only(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["explain", "--last", count])
    assert "--last" in capsys.readouterr().err
