"""What crosses between the supervisor (`serve_app/launch.py`) and the process that holds Ray (`deployments/local.py`).

The supervisor passes an Order; events come back, one JSON object a line. The child stops when its standard input ends.
"""

from typing import Any, Literal

import msgspec


class Order(msgspec.Struct, frozen=True):
    """What to serve.

    content: a Serve config file's content.
    num_cpus: logical CPUs that Ray is told it has.
    temp_dir: Ray's folder for sockets and logs; its path must be short.
    run_id: the tag that every process carries.
    metrics_port: where Ray serves this machine's metrics to Prometheus.
    """

    content: dict[str, Any]
    num_cpus: int
    temp_dir: str
    run_id: str
    metrics_port: int


class Event(msgspec.Struct, frozen=True):
    """One change.

    kind: `ray` and `serve` once they run, `deployment` and `application` at a change of status, `error` before the end.
    name: the deployment's or application's.
    status: Ray Serve's word, such as HEALTHY or DEPLOY_FAILED.
    message: Ray Serve's explanation; may have many lines.
    """

    kind: Literal["ray", "serve", "deployment", "application", "error"]
    name: str = ""
    status: str = ""
    message: str = ""


def encode(event: Event) -> bytes:
    """One line."""
    return msgspec.json.encode(event) + b"\n"


def decode(line: bytes) -> Event | None:
    """The event of a line, or None for a line that is not one."""
    try:
        return msgspec.json.decode(line, type=Event)
    except msgspec.DecodeError:
        return None
