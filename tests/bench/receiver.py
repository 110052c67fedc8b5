"""A receiver of spans in a process of its own that takes them without reading them: its cost is not tracing's."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc


@dataclass(frozen=True)
class Receiver:
    """stop: ends it and returns the bytes that it got; once."""

    endpoint: str
    stop: Callable[[], int]


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver for the length of the block."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_take, args=(theirs,), daemon=True)
    process.start()
    theirs.close()

    def stop() -> int:
        ours.send(None)
        received: int = ours.recv()
        return received

    try:
        yield Receiver(f"http://127.0.0.1:{ours.recv()}", stop)
    finally:
        process.terminate()
        process.join()


def _take(pipe: Connection) -> None:
    received = 0

    class Takes(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            def take(request: bytes, context: Any) -> bytes:
                nonlocal received
                received += len(request)
                return b""

            return grpc.unary_unary_rpc_method_handler(take)

    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[Takes()])
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        pipe.recv()
        pipe.send(received)
    server.stop(None)
