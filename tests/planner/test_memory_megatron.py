"""The ledger's weights, gradients and optimizer equal Megatron's allocations to the byte."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from megarl.config.algorithm import SftConfig
from megarl.config.lora import LoraConfig
from megarl.config.roles import ActorConfig, CriticConfig, OptimizerConfig
from megarl.families.shape import ModelShape
from megarl.planner.memory import bare_weights, stage_memory
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.megatron import MegatronParallel
from tests.planner.jobs import buffers, reference_elements
from tests.tiny_models import write_tiny_model
from tests.train.cluster import Cluster
from tests.train.jobs import Setup
from tests.train.splits import actor_of

SPLITS = [
    MegatronParallel(data=3),
    MegatronParallel(tensor=2, data=2),
    MegatronParallel(tensor=2, pipeline=2),
    MegatronParallel(pipeline=2, virtual_pipeline=2, data=2),
    MegatronParallel(tensor=4),
    MegatronParallel(tensor=2, context=2),
]
MIXTURE_SPLITS = [
    MegatronParallel(tensor=2),
    MegatronParallel(data=4, expert=2),
    MegatronParallel(tensor=2, data=2, expert=2),
    MegatronParallel(tensor=2, data=2, expert=4, expert_tensor=1),
    MegatronParallel(pipeline=2, data=2, expert=2, last_stage_layers=1),
]
LORA = LoraConfig(rank=4, modules=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))


def setup_of(parallel: MegatronParallel, folder: Path, shape: ModelShape, lora: LoraConfig | None = None) -> Setup:
    """Return the setup of an actor, or of a critic where the shape has a value head."""
    actor: ActorConfig | CriticConfig = actor_of(parallel)
    if shape.has_value_head:
        actor = CriticConfig(**{**actor.model_dump(), "is_sequence_parallel": False})
    algorithm = SftConfig(kind="sft")
    return Setup(actor=actor, folder=folder, shape=shape, optimizer=OptimizerConfig(), algorithm=algorithm, lora=lora)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapter"])
@pytest.mark.parametrize("is_critic", [False, True], ids=["actor", "critic"])
@pytest.mark.parametrize(
    ("family", "is_tied"),
    [("qwen2", False), ("qwen2", True), ("qwen3_moe", False), ("qwen2_moe", False)],
    ids=["untied", "tied", "mixture", "shared expert"],
)
def test_the_ledger_is_what_megatron_allocates(
    family: str, is_tied: bool, is_critic: bool, lora: LoraConfig | None, cluster: Cluster, tmp_path: Path
) -> None:
    if family != "qwen2" and (is_critic or (lora and family != "qwen3_moe")):
        pytest.skip("as that of a dense model")
    if lora and family == "qwen3_moe":
        lora = LoraConfig(rank=4, modules=("q_proj", "v_proj", "o_proj", "experts"))
    shape = write_tiny_model(tmp_path / "model", family, tied=is_tied)
    shape = shape.as_critic() if is_critic else shape
    for parallel in MIXTURE_SPLITS if shape.experts else SPLITS:
        setup = setup_of(parallel, tmp_path / "model", shape, lora)
        found = cluster.run(parallel.world_size, buffers, setup)
        stages = stage_memory(shape, parallel, dtype="float32", lora=lora)
        for rank, allocated in enumerate(found):
            stage = stages[rank // (parallel.tensor * parallel.replicas)]
            # The base of an adapter has no gradients.
            held = 4 * (allocated.weights + allocated.frozen)
            assert (held, 4 * allocated.gradients) == (stage.weight_bytes, stage.gradient_bytes)
            assert 8 * allocated.master <= stage.optimizer_bytes
        if parallel == MegatronParallel(data=3) and not is_critic and lora is None:
            padding = 64 * 64 - 99 * 64 % (64 * 64)
            num_tensors = 1 if is_tied else 2
            parameters = sum(prod(spec.shape) for spec in canonical_tensors(shape).values())
            assert sum(item.master for item in found) == parameters + num_tensors * padding


@pytest.mark.slow
def test_a_reference_holds_its_weights_alone(cluster: Cluster, tmp_path: Path) -> None:
    shape = write_tiny_model(tmp_path / "model", "qwen2", tied=True)
    parallel = MegatronParallel(tensor=2, pipeline=2)
    found = cluster.run(4, reference_elements, setup_of(parallel, tmp_path / "model", shape))
    stages = bare_weights(shape, parallel, dtype="float32")
    assert [4 * number for number in found] == [stages[rank // 2].num_bytes for rank in range(4)]
