"""Requests for a bare socket: of clients that leave, or do not read, as no HTTP library does on purpose."""


def post(path: str, body: bytes, request_id: str = "") -> bytes:
    """A whole HTTP/1.1 request."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    if request_id:
        lines.append(f"x-request-id: {request_id}")
    return "\r\n".join([*lines, "", ""]).encode() + body
