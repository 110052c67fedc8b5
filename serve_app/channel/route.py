"""Where a request's items go: travels with the request, from the reader to the writer."""

import msgspec


class Route(msgspec.Struct, frozen=True, array_like=True):
    """`host`, `port` and `key` are the reader's, the same for all of its requests; `number` is the request's there."""

    host: str
    port: int
    key: bytes
    number: int

    def __repr__(self) -> str:
        """Without the key, which must not get into a log."""
        return f"Route({self.host!r}, {self.port}, number={self.number})"

    @property
    def reader(self) -> tuple[str, int, bytes]:
        """Which reader it is."""
        return self.host, self.port, self.key
