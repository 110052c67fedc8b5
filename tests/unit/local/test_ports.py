"""Ports for servers that are started a moment later."""

import socket

import pytest

from serve_app.local import ports


def test_free_ports_are_not_given_twice_and_lie_below_those_of_outgoing_connections_and_of_kubernetes() -> None:
    given = [*ports.free_ports(20), *ports.free_ports(1), *ports.free_ports(20)]
    assert len(set(given)) == 41
    assert max(given) < 30_000
    assert all(ports.is_free("0.0.0.0", port) for port in given)


def test_taken_ports_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (free,) = ports.free_ports(1)
        monkeypatch.setattr(ports, "_rounds", iter([port, free]))
        assert ports.free_ports(1) == [free]


def test_too_few_free_ports_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_rounds", iter([]))
    with pytest.raises(OSError, match="fewer than 2 free ports from 28000 to 29999"):
        ports.free_ports(2)
