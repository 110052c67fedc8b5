"""How long a connection to a machine that has vanished can look alive."""

import asyncio
import socket


def keep_alive(transport: asyncio.Transport) -> None:
    """Has the system find out within half a minute that the other machine is gone; a dead process it tells at once."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000)):
        if hasattr(socket, name):  # Linux has all four
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
