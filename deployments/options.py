"""From a hop's config section to Ray Serve's deployment options. Pure: dictionaries in Ray Serve's words."""

from typing import Any

from serve_app.config import EngineSection, Hop, InsightSection

# Seconds between the checks that find a dead engine; Ray Serve's own 10 s is long to send requests to one.
_ENGINE_HEALTH_CHECK_PERIOD_S = 2.0


def hop_options(name: str, hop: Hop) -> dict[str, Any]:
    """Options of one deployment, named like its hop. Fixed replicas, or autoscaling when `max_replicas` is set."""
    options: dict[str, Any] = {
        "name": name,
        "max_ongoing_requests": hop.max_ongoing_requests,
        "max_queued_requests": hop.max_queued_requests,
        "ray_actor_options": {"num_cpus": hop.num_cpus},
    }
    if hop.max_replicas is None or hop.max_replicas == hop.replicas:
        return options | {"num_replicas": hop.replicas}
    return options | {
        "autoscaling_config": {
            "min_replicas": hop.replicas,
            "initial_replicas": hop.replicas,
            "max_replicas": hop.max_replicas,
            "target_ongoing_requests": min(hop.target_ongoing_requests, hop.max_ongoing_requests),
        }
    }


def insight_options(insight: InsightSection) -> dict[str, Any]:
    """One replica, since a second would know only half of the requests."""
    return {
        "name": "insight",
        "num_replicas": 1,
        "max_ongoing_requests": 256,
        "ray_actor_options": {"num_cpus": insight.num_cpus},
    }


def engine_options(engine: EngineSection) -> dict[str, Any]:
    """As `hop_options`, with the GPUs of one replica.

    With `mp` all GPUs of a replica belong to its actor, on one node. With `ray` the actor holds none: vLLM puts one
    worker in each bundle of the replica's placement group, and the first bundle also has the actor's CPUs (vLLM 0.32,
    `ray_executor_v2.py`).
    """
    options = hop_options("engine", engine)
    options["health_check_period_s"] = _ENGINE_HEALTH_CHECK_PERIOD_S
    gpus = engine.tensor_parallel_size * engine.pipeline_parallel_size
    if engine.kind == "sim" or engine.device == "cpu":
        return options
    if engine.executor == "mp":
        options["ray_actor_options"]["num_gpus"] = gpus
        return options
    options["placement_group_bundles"] = [{"CPU": engine.num_cpus, "GPU": 1}, *({"GPU": 1},) * (gpus - 1)]
    options["placement_group_strategy"] = "PACK"
    return options
