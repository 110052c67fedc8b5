"""Owns one run of the service on this machine: starts the process that holds Ray, waits for an answer, ends everything.

This is the supervisor. It imports no Ray, so it outlives whatever happens there, and a run's last process is swept up
by its tag (`local/processes.py`). Knows nothing of flags (`cli.py`) or of background runs (`local/detached.py`).
"""

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from serve_app.errors import TokenlineError
from serve_app.local import engine_cpus, environment, events, ports, preflight, servefile
from serve_app.local.events import Event, Order
from serve_app.local.probe import is_ready
from serve_app.local.processes import sweep
from serve_app.local.progress import Reporter
from serve_app.local.servefile import ServeFile

_CHILD = [sys.executable, "-m", "deployments.local"]
_POLL_S = 0.2
_READY_POLL_S = 0.5
# The child bounds its own shutdown (`deployments/local.py`); this is a little longer.
_CHILD_STOP_S = 8.5
_SWEEP_GRACE_S = 0.5
_DOING = {"engine": "loading the model", "prefill": "loading the model", "decode": "loading the model"}
_FAILED = {"DEPLOY_FAILED", "UNHEALTHY"}
_MESSAGE_LINES = 12


class LaunchFailed(TokenlineError):
    """The service did not start, or ended by itself; the message says which part and ends with its last lines."""


@dataclass(frozen=True)
class Service:
    """A service that is ready.

    metrics_url: what Prometheus scrapes.
    log: what Ray and the replicas wrote; unless it was put elsewhere it goes when the run ends well.
    wait: never returns; raises LaunchFailed once the service has ended by itself. A deployment that turns unhealthy is
    only reported: Ray Serve replaces its replicas.
    """

    url: str
    model: str
    run_id: str
    pid: int
    metrics_url: str
    log: Path
    wait: Callable[[], None] = field(repr=False)


@contextlib.contextmanager
def serving(
    config: Path,
    *,
    host: str | None = None,
    port: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    reporter: Reporter | None = None,
    run_id: str | None = None,
    log: Path | None = None,
    timeout_s: float = 600.0,
) -> Iterator[Service]:
    """Serve `config` (a Serve config file) inside the `with` block; after it no process of the run is left.

    port: 0 takes a free one, None the file's. overrides: merged into the application's args. log: where Ray and the
    replicas write; None puts it in the run's own folder. timeout_s: from start to ready.
    Raises ConfigError before anything is started, and LaunchFailed.
    """
    if port == 0:
        (port,) = ports.free_ports(1)
    file = servefile.read(config, host=host, port=port, overrides=overrides)
    preflight.check(file)
    run = Run(file, reporter or Reporter(None), run_id or uuid.uuid4().hex, log)
    try:
        service = run.start(timeout_s)
        yield service
    except LaunchFailed:
        run.keep_folder = True
        raise
    finally:
        run.stop()


class Run:
    """The processes of one run and what is known of them."""

    def __init__(self, file: ServeFile, reporter: Reporter, run_id: str, log: Path | None) -> None:
        self.keep_folder = False
        self._file = file
        self._report = reporter
        self._run_id = run_id
        self._folder = environment.new_folder()
        (self._metrics_port,) = ports.free_ports(1)
        self._log = log or self._folder / "serve.log"
        self._events: queue.Queue[Event] = queue.Queue()
        self._child: subprocess.Popen[bytes] | None = None
        self._pump: threading.Thread | None = None
        self._steps: dict[str, str] = {}
        self._was_running = False

    def start(self, timeout_s: float) -> Service:
        """From nothing to a path that has answered its warm-up. Raises LaunchFailed."""
        deadline = time.monotonic() + timeout_s
        self._report.start("ray", "starting")
        self._child = self._spawn()
        self._wait_until_running(deadline)
        url = f"http://{self._file.host}:{self._file.port}"
        self._report.start("warm-up", "waiting until the whole path has answered")
        while not is_ready(url):
            self._step(deadline, _READY_POLL_S)
        self._report.done("warm-up")
        engine_cpus.make_room(self._child.pid)
        # On every interface of the machine (Ray 2.60), this one among them.
        metrics_url = f"http://127.0.0.1:{self._metrics_port}/metrics"
        model = self._file.model_name
        return Service(url, model, self._run_id, self._child.pid, metrics_url, self._log, self._watch)

    def stop(self) -> None:
        """End every process of the run within about 10 s; a second Ctrl-C cuts the wait short."""
        self._report.clear()
        if self._child is not None and self._child.stdin is not None:
            with contextlib.suppress(OSError):
                self._child.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self._child.wait(_CHILD_STOP_S)
        self._sweep()
        if not self.keep_folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _sweep(self) -> None:
        while True:
            with contextlib.suppress(KeyboardInterrupt):  # however often it comes, no process is left behind
                sweep(self._run_id, _SWEEP_GRACE_S)
                if self._child is not None:
                    self._child.wait()
                if self._pump is not None:
                    self._pump.join(1.0)  # nobody holds the other end any more
                return

    def _spawn(self) -> "subprocess.Popen[bytes]":
        order = self._folder / "order.json"
        cpus = environment.logical_cpus(self._file.config)
        content = Order(self._file.content, cpus, str(self._folder), self._run_id, self._metrics_port)
        order.write_bytes(msgspec.json.encode(content))
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            child = subprocess.Popen(
                [*_CHILD, str(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment.child_environment(os.environ, self._run_id, self._folder),
                start_new_session=True,  # Ctrl-C is for us alone; we end the others in order
            )
        assert child.stdout is not None
        self._pump = threading.Thread(target=_pump, args=(child.stdout, self._events), daemon=True)
        self._pump.start()
        return child

    def _wait_until_running(self, deadline: float) -> None:
        while self._steps.get("application") != "RUNNING":
            self._step(deadline, _POLL_S)
        self._was_running = True

    def _watch(self) -> None:
        while True:
            self._step(None, _POLL_S)

    def _step(self, deadline: float | None, wait_s: float) -> None:
        """Take in what has happened, wait a little, and raise LaunchFailed if the run is lost."""
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout=wait_s)
            while True:
                self._take(event)
                event = self._events.get_nowait()
        self._report.tick()
        assert self._child is not None
        if (status := self._child.poll()) is not None:
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            raise LaunchFailed(f"the process that holds Ray ended {how}; its log is {self._log}")
        if deadline is not None and time.monotonic() > deadline:
            raise LaunchFailed(f"the service was not ready in time; its log is {self._log}")

    def _take(self, event: Event) -> None:
        match event:
            case Event(kind="ray"):
                self._report.done("ray", "started")
                self._report.start("serve", "starting the controller and HAProxy")
            case Event(kind="serve"):
                self._report.done("serve", "started")
            case Event(kind="deployment"):
                self._take_deployment(event)
            case Event(kind="application"):
                self._steps["application"] = event.status
                self._refuse_failure(event)
            case Event(kind="error"):
                raise LaunchFailed(f"{last_lines(event.message)}\nThe log is {self._log}")

    def _take_deployment(self, event: Event) -> None:
        self._refuse_failure(event)
        before = self._steps.get(event.name)
        self._steps[event.name] = event.status
        if event.status == "HEALTHY" and before != "HEALTHY":
            self._report.done(event.name)
            if self._was_running and self._child is not None:  # with replicas that were not there before
                engine_cpus.make_room(self._child.pid)
        elif before is None:
            self._report.start(event.name, _DOING.get(event.name, "starting"))

    def _refuse_failure(self, event: Event) -> None:
        if event.status not in _FAILED:
            return
        if not self._was_running:
            raise LaunchFailed(f"{event.name} failed:\n{last_lines(event.message)}\nThe log is {self._log}")
        if event.kind == "deployment":
            self._report.say(f"{event.name}: unhealthy: {last_lines(event.message)}")
            self._report.start(event.name, "Ray Serve replaces it")


def last_lines(message: str) -> str:
    """The end of a long message, without terminal colours: where Python puts the reason."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", message).rstrip()
    return "\n".join(plain.splitlines()[-_MESSAGE_LINES:])


def _pump(stream: IO[bytes], into: "queue.Queue[Event]") -> None:
    with stream:
        for line in stream:
            if (event := events.decode(line)) is not None:
                into.put(event)
