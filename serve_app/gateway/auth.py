"""Who may ask for what. There are no API keys yet: whoever reaches the port may generate; `/insight` can have a key.

The key comes from a file or the environment, is compared in constant time, and is never logged.
"""

import base64
import binascii
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from starlette.datastructures import Headers

from serve_app.config import GatewaySection
from serve_app.errors import ConfigError, Unauthorized

ADMIN_KEY_VARIABLE = "TOKENLINE_ADMIN_KEY"


class Authenticator:
    """Reads its key once. Raises ConfigError for a file that cannot be read or is empty."""

    def __init__(self, config: GatewaySection, environ: Mapping[str, str]) -> None:
        # An environment may hold bytes that are no UTF-8.
        self._admin_key = (
            _read(config.admin_key_file) or os.fsencode(environ.get(ADMIN_KEY_VARIABLE, "")).strip() or None
        )

    def tenant(self, headers: Headers) -> str:
        """On whose account a request runs."""
        del headers
        return "default"

    def require_admin(self, headers: Headers) -> None:
        """The key as a bearer token, or as the password of HTTP's basic scheme, which browsers can ask for.

        Raises Unauthorized, unless no key is configured.
        """
        if self._admin_key is not None and not hmac.compare_digest(_presented(headers), self._admin_key):
            raise Unauthorized(
                "This needs the admin key, as a bearer token or as the password of basic authentication."
            )


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"gateway.admin_key_file: cannot read {path}: {error.strerror}") from error
    if not key:
        raise ConfigError(f"gateway.admin_key_file: {path} is empty")
    return key


def _presented(headers: Headers) -> bytes:
    # Starlette reads headers as Latin-1, whatever their bytes are; in it some halves of letters are spaces.
    scheme, _, value = headers.get("authorization", "").strip(" \t").partition(" ")
    raw = value.encode("latin-1").strip(b" \t")
    if scheme.lower() == "bearer":
        return raw
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(raw, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""
