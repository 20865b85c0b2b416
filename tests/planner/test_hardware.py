from __future__ import annotations

import pytest

from megarl.config.recipe import ClusterConfig
from megarl.errors import ConfigError
from megarl.planner.hardware import DEFAULT_GPU, GPUS, gpu_named, gpu_of, other_gpu, parse_gpu


def test_a_known_gpu_is_found_by_its_name() -> None:
    assert parse_gpu("h200") is GPUS["h200"]


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA H20", "h20"), ("NVIDIA GB200", "gb200"), ("NVIDIA A100-SXM4-80GB", "a100")],
)
def test_a_gpu_is_found_by_the_name_of_its_driver(driver_name: str, name: str) -> None:
    assert gpu_named(driver_name) is GPUS[name]
    assert gpu_named("Tesla V100") is None


def test_figures_can_be_changed() -> None:
    gpu = parse_gpu("h100,memory_gib=94,network_gb_per_s=25")
    assert (gpu.name, gpu.memory_gib, gpu.network_gb_per_s, gpu.tflops) == ("custom", 94, 25, 989)


@pytest.mark.parametrize("text", ["tpu", "h100,memory=3", "h100,tflops=much", "h100,tflops=-1", "h100,tflops=inf"])
def test_a_wrong_gpu_is_explained(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpu: 1 problem"):
        parse_gpu(text)


def test_the_recipes_gpu_counts_before_what_ray_reports() -> None:
    assert gpu_of(ClusterConfig(gpu="h200"), ["A100-80G"]) is GPUS["h200"]
    assert gpu_of(ClusterConfig(), ["H200", "A100-80G", "TPU-V4"]) is GPUS["a100"]
    assert gpu_of(ClusterConfig(), ["TPU-V4"]) is GPUS[DEFAULT_GPU]


def test_a_smaller_gpu_than_the_recipe_names_is_a_warning() -> None:
    assert "Ray reports h100" in (other_gpu(ClusterConfig(gpu="h200"), ["H200", "H100"]) or "")
    for named, reported in ((None, ["H100"]), ("h100", ["H200"]), ("h200", []), ("h200", ["TPU-V4"])):
        assert other_gpu(ClusterConfig.model_validate({"gpu": named}), reported) is None
