"""The ledger's weights, gradients and optimizer equal Megatron's allocations to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest

from megarl.config.algorithm import GaeConfig, SftConfig
from megarl.config.lora import LoraConfig
from megarl.config.roles import ActorConfig, CriticConfig, OptimizerConfig
from megarl.planner.memory import bare_weights, stage_memory
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.megatron import MegatronParallel
from tests.planner.jobs import buffers, critic_buffers, reference_elements
from tests.tiny_models import write_tiny_model
from tests.train.cluster import Cluster
from tests.train.jobs import CriticSetup, Setup

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


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "is_tied"),
    [("qwen2", False), ("qwen2", True), ("qwen3_moe", False), ("qwen2_moe", False)],
    ids=["untied", "tied", "mixture", "shared expert"],
)
def test_the_ledger_is_what_megatron_allocates(family: str, is_tied: bool, cluster: Cluster, tmp_path: Path) -> None:
    shape = write_tiny_model(tmp_path / "model", family, tied=is_tied)
    for parallel in MIXTURE_SPLITS if shape.experts else SPLITS:
        actor = ActorConfig(
            pool="train",
            tensor=parallel.tensor,
            context=parallel.context,
            pipeline=parallel.pipeline,
            virtual_pipeline=parallel.virtual_pipeline,
            is_sequence_parallel=parallel.tensor > 1,
            expert=parallel.expert,
            expert_tensor=parallel.expert_tensor,
            first_stage_layers=parallel.first_stage_layers,
            last_stage_layers=parallel.last_stage_layers,
        )
        setup = Setup(
            actor=actor,
            folder=tmp_path / "model",
            shape=shape,
            optimizer=OptimizerConfig(),
            algorithm=SftConfig(kind="sft"),
        )
        found = cluster.run(parallel.world_size, buffers, setup)
        stages = stage_memory(shape, parallel, dtype="float32")
        for rank, allocated in enumerate(found):
            stage = stages[rank // (parallel.tensor * parallel.replicas)]
            assert (4 * allocated.weights, 4 * allocated.gradients) == (stage.weight_bytes, stage.gradient_bytes)
            assert 8 * allocated.master <= stage.optimizer_bytes
        if parallel == MegatronParallel(data=3):
            padding = 64 * 64 - 99 * 64 % (64 * 64)
            num_tensors = 1 if is_tied else 2
            parameters = sum(prod(spec.shape) for spec in canonical_tensors(shape).values())
            assert sum(item.master for item in found) == parameters + num_tensors * padding


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_the_ledger_of_a_critic_has_its_value_head(is_tied: bool, cluster: Cluster, tmp_path: Path) -> None:
    shape = write_tiny_model(tmp_path / "model", "qwen2", tied=is_tied)
    for parallel in SPLITS:
        critic = CriticConfig(
            pool="train",
            tensor=parallel.tensor,
            context=parallel.context,
            pipeline=parallel.pipeline,
            virtual_pipeline=parallel.virtual_pipeline,
        )
        setup = CriticSetup(critic=critic, folder=tmp_path / "model", shape=shape, algorithm=GaeConfig(kind="gae"))
        found = cluster.run(parallel.world_size, critic_buffers, setup)
        stages = stage_memory(shape.as_critic(), parallel, dtype="float32")
        for rank, allocated in enumerate(found):
            stage = stages[rank // (parallel.tensor * parallel.replicas)]
            assert (4 * allocated.weights, 4 * allocated.gradients) == (stage.weight_bytes, stage.gradient_bytes)
            assert 8 * allocated.master <= stage.optimizer_bytes


@pytest.mark.slow
@pytest.mark.parametrize("is_critic", [False, True], ids=["actor", "critic"])
def test_the_ledger_of_an_adapter_has_no_gradients_of_its_base(
    is_critic: bool, cluster: Cluster, tmp_path: Path
) -> None:
    shape = write_tiny_model(tmp_path / "model", "qwen2", tied=False)
    lora = LoraConfig(rank=4, modules=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
    for parallel in SPLITS:
        sizes = {name: getattr(parallel, name) for name in ("tensor", "context", "pipeline", "virtual_pipeline")}
        if is_critic:
            critic = CriticConfig(pool="train", **sizes)
            critic_setup = CriticSetup(
                critic=critic, folder=tmp_path / "model", shape=shape, algorithm=GaeConfig(kind="gae"), lora=lora
            )
            found = cluster.run(parallel.world_size, critic_buffers, critic_setup)
        else:
            setup = Setup(
                actor=ActorConfig(pool="train", is_sequence_parallel=parallel.tensor > 1, **sizes),
                folder=tmp_path / "model",
                shape=shape,
                optimizer=OptimizerConfig(),
                algorithm=SftConfig(kind="sft"),
                lora=lora,
            )
            found = cluster.run(parallel.world_size, buffers, setup)
        stages = stage_memory(shape.as_critic() if is_critic else shape, parallel, dtype="float32", lora=lora)
        for rank, allocated in enumerate(found):
            stage = stages[rank // (parallel.tensor * parallel.replicas)]
            held = 4 * (allocated.weights + allocated.frozen)
            assert (held, 4 * allocated.gradients) == (stage.weight_bytes, stage.gradient_bytes)
            assert 8 * allocated.master <= stage.optimizer_bytes


@pytest.mark.slow
def test_a_reference_holds_its_weights_alone(cluster: Cluster, tmp_path: Path) -> None:
    shape = write_tiny_model(tmp_path / "model", "qwen2", tied=True)
    parallel = MegatronParallel(tensor=2, pipeline=2)
    setup = Setup(
        actor=ActorConfig(pool="train", tensor=2, pipeline=2),
        folder=tmp_path / "model",
        shape=shape,
        optimizer=OptimizerConfig(),
        algorithm=SftConfig(kind="sft"),
    )
    found = cluster.run(4, reference_elements, setup)
    stages = bare_weights(shape, parallel, dtype="float32")
    assert [4 * number for number in found] == [stages[rank // 2].num_bytes for rank in range(4)]
