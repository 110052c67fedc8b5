import socket
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from serve_app.errors import ConfigError
from serve_app.explain import fetch
from serve_app.explain.fetch import FetchFailed, admin_key, latest, with_id
from serve_app.messages import RequestMetrics

Make = Callable[..., RequestMetrics]


class Service:
    """Answers every request with the same bytes, and keeps what it was asked."""

    def __init__(self) -> None:
        self.status, self.body, self.location = 200, b"[]", ""
        self.asked: list[tuple[str, str | None]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                service.asked.append((self.path, self.headers["Authorization"]))
                self.send_response(service.status)
                if service.location:
                    self.send_header("Location", service.location)
                self.send_header("Content-Length", str(len(service.body)))
                self.end_headers()
                self.wfile.write(service.body)

            def log_message(self, *_: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def service() -> Iterator[Service]:
    one = Service()
    thread = Thread(target=one.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield one
    one.server.shutdown()
    thread.join()
    one.server.server_close()


def test_the_latest_requests_come_as_they_were_measured(service: Service, make: Make) -> None:
    requests = (make(), make(at_s=1.0, prompt_tokens=None))
    service.body = msgspec.json.encode(requests)
    assert latest(service.url + "/", None, 50) == requests
    assert service.asked == [("/insight/requests?last=50", None)]


def test_one_request_is_asked_for_with_the_key(service: Service, make: Make) -> None:
    service.body = msgspec.json.encode([make()])
    assert with_id(service.url, "secret", "a b&c") == (make(),)
    assert service.asked == [("/insight/requests?id=a+b%26c", "Bearer secret")]


def test_no_requests_yet_are_no_error(service: Service) -> None:
    assert latest(service.url, None, 200) == ()


def test_an_id_that_is_not_remembered_is_said_so(service: Service) -> None:
    with pytest.raises(FetchFailed, match="no request with the id 'r9' is remembered"):
        with_id(service.url, None, "r9")


@pytest.mark.parametrize(("key", "words"), [(None, "wants a key"), ("wrong", "wants another key")])
def test_a_missing_or_wrong_key_says_how_to_give_it(key: str | None, words: str, service: Service) -> None:
    service.status = 401
    with pytest.raises(FetchFailed, match=f"{words}.*--key-file.*TOKENLINE_ADMIN_KEY"):
        latest(service.url, key, 200)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b"<html>", "status 404: is it Tokenline?"),
        (400, b'{"error": {"message": "last: too many", "code": "x"}}', "status 400: last: too many"),
        (200, b"<html>", "something else than requests"),
        (200, b'[{"a": 1}]', "something else than requests"),
        (200, b"[\xff]", "something else than requests"),
    ],
)
def test_any_other_answer_is_one_sentence(status: int, body: bytes, words: str, service: Service) -> None:
    service.status, service.body = status, body
    with pytest.raises(FetchFailed) as caught:
        latest(service.url, None, 200)
    assert words in str(caught.value)


def test_a_redirect_does_not_get_the_key(service: Service) -> None:
    service.status, service.location = 302, service.url + "/elsewhere"
    with pytest.raises(FetchFailed, match="status 302"):
        latest(service.url, "secret", 200)
    assert len(service.asked) == 1


def test_nothing_that_serves_is_said_with_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(FetchFailed, match=f"nothing serves at http://127.0.0.1:{port}"):
        latest(f"http://127.0.0.1:{port}", None, 200)


def test_a_service_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_TIMEOUT_S", 0.05)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(FetchFailed, match="does not answer within"),
    ):
        latest(f"http://127.0.0.1:{silent.getsockname()[1]}", None, 200)


def test_something_that_speaks_no_http_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 ready\r\n")

        thread = Thread(target=answer)
        thread.start()
        with pytest.raises(FetchFailed, match="nothing serves at"):
            latest(f"http://127.0.0.1:{server.getsockname()[1]}", None, 200)
        thread.join()


@pytest.mark.parametrize("url", ["file:///etc/passwd", "127.0.0.1:8000", "http://", "http://h:99999", "http://a b", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        latest(url, None, 200)


def test_a_proxy_of_the_environment_is_not_asked(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert latest(service.url, None, 200) == ()


def test_the_key_is_the_files_else_the_environments_else_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENLINE_ADMIN_KEY", raising=False)
    assert admin_key(None) is None
    monkeypatch.setenv("TOKENLINE_ADMIN_KEY", " from-env ")
    assert admin_key(None) == "from-env"
    (tmp_path / "key").write_text("from-file\n")
    assert admin_key(tmp_path / "key") == "from-file"


@pytest.mark.parametrize("content", ["", "\n", "a\nb", "schlüssel"])
def test_what_is_no_key_is_refused_with_the_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(content)
    with pytest.raises(ConfigError, match="not a key"):
        admin_key(tmp_path / "key")


def test_a_missing_key_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="none"):
        admin_key(tmp_path / "none")
