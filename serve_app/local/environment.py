"""Owns what a private Ray Serve needs around it: environment variables, ports of its own, and a short-lived folder.

Knows nothing of the processes' lives or of the configuration's meaning.
"""

import math
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from serve_app.config import AppConfig
from serve_app.local.ports import BLOCK_PORTS, free_block, free_ports
from serve_app.local.processes import TAG

# Taken unless the caller's environment says otherwise. Names and effects: ray/serve/_private/constants.py of Ray 2.60.
_DEFAULTS = {
    # Streams pass HAProxy, no Python.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Throughput mode would otherwise hold back 1,000 log lines and hide stderr.
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
    "RAY_SERVE_LOG_TO_STDERR": "1",
    # The gateway would otherwise wait 30 s at its end for load balancers that are not there.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    # When gateways come or go a new HAProxy takes over, and the old one cuts its streams after this time: as long as a
    # request may last (`gateway.request_timeout_s`).
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "600",
    # Serve's 5 s and 10 s kill a proxy that is merely slow, which on two busy cores it is (seen).
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30",
    # Serve's 0.1 s keeps its controller at 7 % of a core, and Ray's GCS at 2 %, while nothing happens.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    # Serve's 0.1 s has every replica and handle set its gauges ten times a second; Ray exports them every 10 s.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    # What failed once at start fails again: say so after the first attempt.
    "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}
# Each of these would send the private Ray to another cluster, or another job's settings into it.
_FOREIGN = (
    "RAY_ADDRESS",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_NAMESPACE",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_RUNTIME_ENV_HOOK",
)

# HAProxy refuses socket paths over 97 bytes, and Ray puts the node's id (56 digits) and `metrics.sock` behind this.
_MAX_FOLDER_BYTES = 97 - len("/metrics.sock") - 57


def new_folder() -> Path:
    """A fresh folder for one run's sockets and Ray's logs, readable by this user only."""
    prefix = "tokenline-"
    parent = tempfile.gettempdir()
    if len(parent) + len(f"/{prefix}") + 8 > _MAX_FOLDER_BYTES:
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def child_environment(base: Mapping[str, str], run_id: str, folder: Path) -> dict[str, str]:
    """The environment of the process that starts Ray, and so of every process of the run."""
    stats_port, metrics_port = free_ports(2)
    ingress_port = free_block()
    own = {
        TAG: run_id,
        # A token for this run alone. Without one Ray 2.60 makes ~/.ray/auth_token, which turns authentication on in
        # every cluster that this user starts later, while `serve deploy` does not send it (seen).
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), base.get("PYTHONPATH", "")])),
        # Fixed numbers by default: a second Ray Serve on the machine would fail on them, or worse, share them.
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ingress_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ingress_port + BLOCK_PORTS - 1),
        # By default under a folder in /tmp that belongs to whichever user came first.
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }
    inherited = {name: value for name, value in base.items() if name not in _FOREIGN}
    return _DEFAULTS | inherited | own


def logical_cpus(config: AppConfig | None) -> int:
    """How many CPUs to tell Ray it has: those of the machine, or more where the configured deployments reserve more.

    A reservation is bookkeeping, and with too few of them Ray Serve waits for ever for a replica that cannot be placed.
    """
    present = os.cpu_count() or 1
    if config is None:
        return present
    hops = (config.gateway, config.tokenizer, config.postprocess, config.engine)
    reserved = sum(hop.num_cpus * (hop.max_replicas or hop.replicas) for hop in hops) + config.insight.num_cpus
    return max(present, math.ceil(reserved))
