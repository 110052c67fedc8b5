"""Owns a private Ray on this machine and one application on it, from start to end, for `tokenline run`.

Run as `python -m deployments.local ORDER.json` by the supervisor (`serve_app/launch.py`), which reads events from its
standard output and ends it by closing its standard input. Knows nothing of terminals, of models, or of the application.
"""

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import ray
from ray import serve

# What `serve run CONFIG` calls (ray/serve/scripts.py of Ray 2.60); the public `serve.start` gives no client back.
from ray.serve._private.api import serve_start
from ray.serve.schema import ServeDeploySchema

from serve_app.local.events import Event, Order, encode
from serve_app.local.processes import sweep

_POLL_STARTING_S = 0.3
# One look costs 90 ms of CPU (Ray 2.60): every 2 s it was a sixth of what an idle service takes.
_POLL_RUNNING_S = 10.0
# Together they leave the supervisor time for its own sweep within 10 s of Ctrl-C.
_SERVE_SHUTDOWN_S = 5.0
_SERVE_ABANDON_S = 1.0
_RAY_SHUTDOWN_S = 2.5
_SWEEP_GRACE_S = 0.5
# Serve passes no large objects here; Ray's default is 30 % of the machine's memory.
_OBJECT_STORE_BYTES = 256 << 20


def main() -> None:
    """Serve until standard input ends or SIGTERM comes; exit status 1 if the application could not be started."""
    supervisor = os.getppid()
    order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Order)
    events = _take_stdout()
    stop = threading.Event()
    threading.Thread(target=_wait_for_end_of_input, args=(stop,), daemon=True).start()
    status, ran = 0, False
    try:
        _start(order, events, stop)
        ran = _watch(events, stop)
    except Exception as error:  # noqa: BLE001  whatever Ray raises is told to the person who started us
        _emit(events, Event("error", message=f"{type(error).__name__}: {error}"))
        status = 1
    # With no request to finish, a replica that is still loading a model would only be waited for.
    _within(_SERVE_SHUTDOWN_S if ran else _SERVE_ABANDON_S, serve.shutdown)
    _within(_RAY_SHUTDOWN_S, ray.shutdown)
    # The supervisor does this too, and keeps the folder of a failed run; but it may be gone.
    sweep(order.run_id, _SWEEP_GRACE_S)
    if os.getppid() != supervisor:
        shutil.rmtree(order.temp_dir, ignore_errors=True)
    os._exit(status)  # a thread that hangs in Ray must not keep the process


def _start(order: Order, events: BinaryIO, stop: threading.Event) -> None:
    config = ServeDeploySchema.model_validate(order.content)
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=order.num_cpus,
        object_store_memory=_OBJECT_STORE_BYTES,
        namespace="serve",
        _temp_dir=order.temp_dir,
        _metrics_export_port=order.metrics_port,
    )
    # `ray.init` has put its own handler in place, which would skip the shutdown below.
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    _emit(events, Event("ray"))
    client = serve_start(
        http_options=config.http_options.model_dump(),
        proxy_location=config.proxy_location,
    )
    _emit(events, Event("serve"))
    client.deploy_apps(config, _blocking=False)


def _watch(events: BinaryIO, stop: threading.Event) -> bool:
    """Tell every change of status until `stop`. Returns whether the application was running at last."""
    seen: dict[tuple[str, str], Event] = {}
    running = False
    while not stop.wait(_POLL_RUNNING_S if running else _POLL_STARTING_S):
        for event in _statuses():
            if seen.get((event.kind, event.name)) != event:
                seen[event.kind, event.name] = event
                _emit(events, event)
            if event.kind == "application":
                running = event.status == "RUNNING"
    return running


def _statuses() -> list[Event]:
    found: list[Event] = []
    for name, application in serve.status().applications.items():
        hops: dict[str, Any] = application.deployments
        found += [Event("deployment", hop, state.status.value, state.message) for hop, state in hops.items()]
        found.append(Event("application", name, application.status.value, application.message))
    return found


def _take_stdout() -> BinaryIO:
    """The supervisor's pipe for events only; what Ray prints joins standard error, the log."""
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return events


def _emit(events: BinaryIO, event: Event) -> None:
    try:
        events.write(encode(event))
    except BrokenPipeError:
        return  # the supervisor has gone; the end of standard input says so too


def _wait_for_end_of_input(stop: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stop.set()


def _within(limit_s: float, action: Callable[[], object]) -> None:
    """Do it, but give up waiting after `limit_s`: `serve.shutdown` under HAProxy can take 30 s (Ray 2.60)."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(limit_s)


if __name__ == "__main__":
    main()
