"""Ray Serve's options from our configuration."""

from typing import Any

import pytest

from deployments.options import engine_options, hop_options, insight_options
from serve_app.config import EngineSection, GatewaySection, Hop, InsightSection


def test_a_hop_has_fixed_replicas_and_the_limits_of_its_section() -> None:
    section = Hop(replicas=3, num_cpus=0.5, max_ongoing_requests=7, max_queued_requests=9)
    assert hop_options("gateway", section) == {
        "name": "gateway",
        "num_replicas": 3,
        "max_ongoing_requests": 7,
        "max_queued_requests": 9,
        "ray_actor_options": {"num_cpus": 0.5},
    }


def test_a_section_with_fields_of_its_own_gives_the_same_options_as_its_hop() -> None:
    assert hop_options("gateway", GatewaySection(max_choices=3)) == hop_options("gateway", Hop())


def test_a_hop_whose_replicas_may_grow_scales_by_itself_between_its_bounds() -> None:
    options = hop_options("tokenizer", Hop(replicas=2, max_replicas=6, target_ongoing_requests=7.5))
    assert "num_replicas" not in options
    assert options["autoscaling_config"] == {
        "min_replicas": 2,
        "initial_replicas": 2,
        "max_replicas": 6,
        "target_ongoing_requests": 7.5,
    }


def test_a_hop_that_may_not_grow_does_not_scale() -> None:
    options = hop_options("tokenizer", Hop(replicas=2, max_replicas=2))
    assert options["num_replicas"] == 2
    assert "autoscaling_config" not in options


def gpus(**engine: Any) -> Any:
    return engine_options(EngineSection(**engine))["ray_actor_options"].get("num_gpus")


def test_with_mp_all_gpus_of_a_replica_belong_to_its_actor() -> None:
    assert gpus() == 1
    assert gpus(tensor_parallel_size=4, pipeline_parallel_size=2) == 8
    assert "placement_group_bundles" not in engine_options(EngineSection(tensor_parallel_size=4))


@pytest.mark.parametrize("executor", ["mp", "ray"])
@pytest.mark.parametrize("kind_and_device", [("sim", "gpu"), ("sim", "cpu"), ("vllm", "cpu")])
def test_an_engine_without_gpus_takes_none_whatever_its_sizes(executor: str, kind_and_device: tuple[str, str]) -> None:
    kind, device = kind_and_device
    options = engine_options(
        EngineSection(kind=kind, device=device, executor=executor, tensor_parallel_size=4, num_cpus=2)
    )
    assert options["ray_actor_options"] == {"num_cpus": 2}
    assert "placement_group_bundles" not in options


def test_with_ray_every_worker_has_a_bundle_and_the_first_has_the_actors_cpus_too() -> None:
    section = EngineSection(executor="ray", tensor_parallel_size=2, pipeline_parallel_size=2, num_cpus=3)
    options = engine_options(section)
    assert options["placement_group_bundles"] == [{"CPU": 3, "GPU": 1}, {"GPU": 1}, {"GPU": 1}, {"GPU": 1}]
    assert options["placement_group_strategy"] == "PACK"
    assert options["ray_actor_options"] == {"num_cpus": 3}


def test_with_ray_a_lone_worker_has_the_one_bundle() -> None:
    options = engine_options(EngineSection(executor="ray", num_cpus=1))
    assert options["placement_group_bundles"] == [{"CPU": 1, "GPU": 1}]


def test_the_engine_scales_like_any_hop() -> None:
    options = engine_options(EngineSection(replicas=1, max_replicas=3))
    assert options["name"] == "engine"
    assert options["health_check_period_s"] < 10  # Ray Serve's own, in which requests would go to a dead engine
    assert options["autoscaling_config"]["max_replicas"] == 3


def test_the_options_of_two_replicas_are_not_one_object() -> None:
    first, second = engine_options(EngineSection()), engine_options(EngineSection())
    first["ray_actor_options"]["num_gpus"] = 0
    assert second["ray_actor_options"]["num_gpus"] == 1


def test_the_insight_has_one_replica_whatever_its_size() -> None:
    options = insight_options(InsightSection(num_cpus=0.5))
    assert (options["name"], options["num_replicas"]) == ("insight", 1)
    assert options["ray_actor_options"] == {"num_cpus": 0.5}


def test_the_insight_of_the_default_configuration_fits_on_a_small_machine_and_never_scales() -> None:
    options = insight_options(InsightSection())
    assert options["ray_actor_options"] == {"num_cpus": 0.1}
    assert "autoscaling_config" not in options
    # Every replica reports once a second, and pages ask meanwhile: none of them may be queued behind the others.
    assert options["max_ongoing_requests"] >= 100


def test_how_much_the_insight_remembers_is_not_rays_concern() -> None:
    assert insight_options(InsightSection(max_requests=1, window_s=10)) == insight_options(InsightSection())


def test_the_insights_options_are_new_each_time() -> None:
    insight_options(InsightSection())["ray_actor_options"]["num_cpus"] = 5
    assert insight_options(InsightSection())["ray_actor_options"] == {"num_cpus": 0.1}
