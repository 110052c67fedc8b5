"""Reads a request body within its limits of size and time."""

import asyncio

from starlette.requests import Request

from serve_app.errors import BodyTimeout, BodyTooLarge

# What is read and thrown away of a body that is too large, as a multiple of the limit: a server that answers and closes
# while the client still sends makes many clients report a broken connection in place of the answer.
_DRAIN_FACTOR = 8


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises BodyTooLarge, BodyTimeout, and Starlette's ClientDisconnect when the client left."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise BodyTimeout(f"body: not received within {timeout_s:g} s.", "body") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        elif size > max_bytes * _DRAIN_FACTOR:
            break
    if size > max_bytes:
        raise BodyTooLarge(f"body: larger than the {max_bytes} bytes this server takes.", "body")
    return b"".join(chunks)
