"""The admin key: where it comes from, how it is presented, and who gets in."""

import base64
import contextlib
import hmac
import os
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from serve_app.config import GatewaySection
from serve_app.errors import ConfigError, Unauthorized
from serve_app.gateway import auth
from serve_app.gateway.auth import ADMIN_KEY_VARIABLE, Authenticator


def presented(value: str | None) -> Headers:
    return Headers({} if value is None else {"authorization": value})


def basic(credentials: str) -> str:
    return f"Basic {base64.b64encode(credentials.encode()).decode()}"


@pytest.fixture
def guarded(tmp_path: Path) -> Authenticator:
    file = tmp_path / "key"
    file.write_text(" schlüssel à \n")
    return Authenticator(GatewaySection(admin_key_file=str(file)), {ADMIN_KEY_VARIABLE: "another"})


@pytest.mark.parametrize("value", [basic("me:schlüssel à"), basic(":schlüssel à"), "bearer schlüssel à"])
def test_the_files_key_opens(guarded: Authenticator, value: str) -> None:
    # Headers are bytes of Latin-1 to Starlette, and UTF-8 to whoever typed the key.
    guarded.require_admin(Headers(raw=[(b"authorization", value.encode())]))


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        "Bearer another",
        "schlüssel à",
        basic("schlüssel à"),
        basic("me:wrong"),
        "Basic %%%",
        "Digest schlüssel à",
    ],
)
def test_nothing_else_does(guarded: Authenticator, value: str | None) -> None:
    headers = presented(None) if value is None else Headers(raw=[(b"authorization", value.encode())])
    with pytest.raises(Unauthorized) as refused:
        guarded.require_admin(headers)
    assert "schlüssel" not in refused.value.message


def test_without_a_file_the_environments_key_counts() -> None:
    authenticator = Authenticator(GatewaySection(), {ADMIN_KEY_VARIABLE: "k"})
    authenticator.require_admin(presented("Bearer k"))
    with pytest.raises(Unauthorized):
        authenticator.require_admin(presented(None))


@pytest.mark.parametrize("environ", [{}, {ADMIN_KEY_VARIABLE: ""}, {ADMIN_KEY_VARIABLE: "  "}])
def test_without_a_key_everybody_gets_in(environ: dict[str, str]) -> None:
    Authenticator(GatewaySection(), environ).require_admin(presented(None))


def test_a_file_that_is_missing_or_empty_is_the_operators_mistake(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    for path in (empty, tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match=r"gateway\.admin_key_file"):
            Authenticator(GatewaySection(admin_key_file=str(path)), {})


def test_an_unreadable_file_says_why_and_an_empty_one_too(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for path, reason in ((empty, "is empty"), (tmp_path / "missing", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError) as refused:
            Authenticator(GatewaySection(admin_key_file=str(path)), {ADMIN_KEY_VARIABLE: "k"})
        sentence = str(refused.value)
        assert sentence.startswith("gateway.admin_key_file: ")
        assert str(path) in sentence
        assert reason in sentence


def test_a_key_in_the_environment_may_be_no_utf_8() -> None:
    key = b"schl\xfcssel"
    authenticator = Authenticator(GatewaySection(), {ADMIN_KEY_VARIABLE: os.fsdecode(key)})
    authenticator.require_admin(Headers(raw=[(b"authorization", b"Bearer " + key)]))
    with pytest.raises(Unauthorized):
        authenticator.require_admin(presented("Bearer schl"))


@pytest.mark.parametrize("value", [None, "Bearer k", "Bearer wrong", "Basic %%%", "k"])
def test_whatever_is_presented_is_compared_in_constant_time(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    class Hmac:
        @staticmethod
        def compare_digest(presented: bytes, key: bytes) -> bool:
            compared.append(key)
            return hmac.compare_digest(presented, key)

    monkeypatch.setattr(auth, "hmac", Hmac)
    authenticator = Authenticator(GatewaySection(), {ADMIN_KEY_VARIABLE: "k"})
    with contextlib.suppress(Unauthorized):
        authenticator.require_admin(presented(value))
    assert compared == [b"k"]


def test_whoever_generates_needs_no_key(guarded: Authenticator) -> None:
    assert guarded.tenant(presented(None)) == guarded.tenant(presented("Bearer wrong")) == "default"
