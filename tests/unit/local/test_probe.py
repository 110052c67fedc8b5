"""The questions put to a service that has just started."""

import http.server
import json
import shlex
import threading
from collections.abc import Iterator

import pytest

from serve_app.local import probe
from serve_app.local.ports import free_ports


class Scripted(http.server.BaseHTTPRequestHandler):
    status = 200
    body: object = None
    seen: bytes = b""

    def do_GET(self) -> None:
        self.send_response(Scripted.status)
        self.end_headers()

    def do_POST(self) -> None:
        Scripted.seen = self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()
        self.wfile.write(json.dumps(Scripted.body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Scripted) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(("status", "ready"), [(200, True), (503, False), (404, False)])
def test_only_200_is_ready(status: int, ready: bool, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "status", status)
    assert probe.is_ready(url) is ready


def test_nothing_listening_is_not_ready() -> None:
    assert not probe.is_ready(f"http://127.0.0.1:{free_ports(1)[0]}")


def test_the_sample_chat_names_the_model_and_returns_its_words(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "body", {"choices": [{"message": {"content": " Paris. "}}]})
    assert probe.sample_chat(url, "m") == "Paris."
    assert json.loads(Scripted.seen) == probe.sample_body("m")


def test_an_error_in_place_of_an_answer_is_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "status", 404)
    monkeypatch.setattr(Scripted, "body", {"error": {"code": "model_not_found"}})
    with pytest.raises(probe.ProbeFailed, match="status 404.*model_not_found"):
        probe.sample_chat(url, "m")


def test_the_curl_line_survives_a_shell() -> None:
    words = shlex.split(probe.curl_line("http://h:1", "it's"))
    assert words[:2] == ["curl", "http://h:1/v1/chat/completions"]
    assert json.loads(words[-1]) == probe.sample_body("it's")
