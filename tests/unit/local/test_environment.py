"""What surrounds a private Ray Serve."""

from pathlib import Path

from serve_app.config import load
from serve_app.local import environment
from serve_app.local.processes import TAG


def test_the_tag_is_in_the_environment_and_other_clusters_are_not() -> None:
    base = {"RAY_ADDRESS": "10.0.0.1:6379", "HOME": "/h", TAG: "outer"}
    made = environment.child_environment(base, "run", Path("/tmp/x"))
    assert made[TAG] == "run"
    assert made["HOME"] == "/h"
    assert "RAY_ADDRESS" not in made


def test_the_callers_settings_win_over_defaults_but_not_over_what_keeps_runs_apart() -> None:
    base = {"RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "9", "RAY_SERVE_HAPROXY_STATS_PORT": "8404"}
    made = environment.child_environment(base, "run", Path("/tmp/x"))
    assert made["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == "9"
    assert made["RAY_SERVE_HAPROXY_STATS_PORT"] != "8404"
    assert made["RAY_SERVE_ENABLE_HA_PROXY"] == made["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"


def test_a_runs_ports_differ_from_each_other_and_from_rays_defaults() -> None:
    made = environment.child_environment({}, "run", Path("/tmp/x"))
    names = (
        "HAPROXY_STATS_PORT",
        "HAPROXY_METRICS_PORT",
        "DIRECT_INGRESS_MIN_HTTP_PORT",
        "DIRECT_INGRESS_MAX_HTTP_PORT",
    )
    ports = {int(made[f"RAY_SERVE_{name}"]) for name in names}
    assert len(ports) == 4
    assert not ports & {8404, 9101, 30_000}


def test_the_folders_path_leaves_room_for_haproxys_sockets() -> None:
    folder = environment.new_folder()
    try:
        assert folder.stat().st_mode & 0o777 == 0o700
        node_id = "0" * 56
        assert len(str(folder / node_id / "metrics.sock")) <= 97
    finally:
        folder.rmdir()


def test_ray_is_told_of_enough_cpus_for_every_replica() -> None:
    args = {"model": {"name": "m", "source": "s"}, "engine": {"num_cpus": 100, "replicas": 2, "max_replicas": 3}}
    hops_of_one_cpu, a_little_for_the_insight = 3, 1
    assert environment.logical_cpus(load(args)) == 300 + hops_of_one_cpu + a_little_for_the_insight
    assert environment.logical_cpus(None) >= 1
