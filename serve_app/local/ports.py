"""Owns the question which TCP ports are free on this machine. Knows nothing of who will use them."""

import errno
import itertools
import random
import socket

_ANY = "0.0.0.0"  # HAProxy's statistics and metrics listen on all interfaces (Ray Serve 2.60, haproxy_templates.py)
# Below Linux's ephemeral ports (32768 and up): no outgoing connection takes one between our look and Ray's bind.
# Above those of Ray's workers, which count from 10002, and below Kubernetes' node ports (30000 and up).
_FIRST_BLOCK, _LAST_BLOCK = 20_000, 28_000
BLOCK_PORTS = 100
_SINGLE_PORTS = range(28_000, 30_000)
# Each process goes round these in an order of its own, and gives none twice until it has given all.
_rounds = itertools.cycle(random.sample(_SINGLE_PORTS, len(_SINGLE_PORTS)))


def is_free(host: str, port: int) -> bool:
    """Whether this process could listen there now; a port that HAProxy shares by SO_REUSEPORT counts as taken.

    Raises OSError for a host that is none of this machine's, and for a port that this user may not have.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def free_ports(count: int) -> list[int]:
    """Different ports, free on every interface; the next call gives others. Raises OSError if there are too few."""
    found: list[int] = []
    for port in itertools.islice(_rounds, len(_SINGLE_PORTS)):
        if len(found) == count:
            break
        if is_free(_ANY, port):
            found.append(port)
    if len(found) < count:
        raise OSError(errno.EADDRINUSE, f"fewer than {count} free ports from {_SINGLE_PORTS[0]} to {_SINGLE_PORTS[-1]}")
    return found


def free_block() -> int:
    """The first of `BLOCK_PORTS` neighbouring ports whose first ten are free; chosen at random among such blocks."""
    starts = list(range(_FIRST_BLOCK, _LAST_BLOCK, BLOCK_PORTS))
    random.shuffle(starts)
    for start in starts:
        if all(is_free(_ANY, start + offset) for offset in range(10)):
            return start
    return _FIRST_BLOCK  # a replica that finds its port taken tries the next one by itself
