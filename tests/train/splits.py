"""Splits of a model over ranks, batches packed for them, and comparisons of what their ranks return."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.config.algorithm import AlgorithmConfig, GrpoConfig
from megarl.config.roles import ActorConfig, CriticConfig, OptimizerConfig
from megarl.data.packing import Packing
from megarl.data.shares import UNUSED_IN_FORWARD
from megarl.types import TrainSample
from megarl.weights.algebra.slices import Layout
from megarl.weights.executors.tensors import box_of
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from tests.filled_shares import pack
from tests.train import jobs
from tests.train.cluster import Shares
from tests.train.reference import Model

Held = jobs.Outcome | jobs.CriticOutcome

TOLERANCE = 1e-5
TEMPERATURE = 0.8

# With a vast epsilon Adam is gradient descent: learning rate and epsilon cancel, and the change of a weight is its
# gradient. With the usual one it is the gradient's sign, and noise around zero would hide behind the tolerance.
DESCENT = OptimizerConfig(learning_rate=100.0, eps=100.0, weight_decay=1e-3, clip_grad_norm=0.5)
GRPO = GrpoConfig(kind="grpo", entropy_coef=0.1)

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}

SPLITS = {
    "TP1": (1, ActorConfig(pool="train")),
    "TP2": (2, ActorConfig(pool="train", tensor=2)),
    "PP2": (2, ActorConfig(pool="train", pipeline=2)),
    "PP2-VPP2": (2, ActorConfig(pool="train", pipeline=2, virtual_pipeline=2)),
    "TP2-SP": (2, ActorConfig(pool="train", tensor=2, is_sequence_parallel=True)),
    "TP2-PP2": (4, ActorConfig(pool="train", tensor=2, pipeline=2)),
    "DP2": (2, ActorConfig(pool="train")),
    "CP2": (2, ActorConfig(pool="train", context=2)),
}
CONTEXT_SPLITS = {
    "CP4": (4, ActorConfig(pool="train", context=4)),
    "CP2-DP2": (4, ActorConfig(pool="train", context=2)),
    "CP2-TP2": (4, ActorConfig(pool="train", context=2, tensor=2)),
    "CP2-TP2-SP": (4, ActorConfig(pool="train", context=2, tensor=2, is_sequence_parallel=True)),
    "CP2-PP2": (4, ActorConfig(pool="train", context=2, pipeline=2)),
    "CP2-PP2-VPP2": (4, ActorConfig(pool="train", context=2, pipeline=2, virtual_pipeline=2)),
}

MIXTURE_SPLITS = {
    "TP1": SPLITS["TP1"],
    "TP2-SP": SPLITS["TP2-SP"],
    "PP2-VPP2": SPLITS["PP2-VPP2"],
    "EP2": (2, ActorConfig(pool="train", expert=2)),
    "EP2-DP2": (4, ActorConfig(pool="train", expert=2)),
    "TP2-EP2": (4, ActorConfig(pool="train", tensor=2, is_sequence_parallel=True, expert=2)),
    "TP2-EP2-ETP1": (2, ActorConfig(pool="train", tensor=2, is_sequence_parallel=True, expert=2, expert_tensor=1)),
    "TP2-EP4-ETP1": (4, ActorConfig(pool="train", tensor=2, is_sequence_parallel=True, expert=4, expert_tensor=1)),
    "CP2-EP2": (2, ActorConfig(pool="train", context=2, expert=2)),
    "CP2-TP2-EP4-ETP1": (
        4,
        ActorConfig(pool="train", context=2, tensor=2, is_sequence_parallel=True, expert=4, expert_tensor=1),
    ),
    "EP2-PP2": (4, ActorConfig(pool="train", pipeline=2, expert=2, first_stage_layers=1)),
}


def packed(
    samples: Sequence[TrainSample],
    *,
    world: int,
    actor: ActorConfig,
    budget: int = 48,
    per_update: int | None = None,
    has_versions: bool = False,
    is_forward: bool = False,
    has_routes: bool = False,
    shares_prefixes: bool = False,
) -> Shares:
    packing = Packing(
        data_parallel=world // actor.model_parallel,
        tokens_per_micro_batch=budget,
        samples_per_update=per_update,
        pad_multiple=actor.tensor * actor.sequence_multiple,
        sequence_multiple=actor.sequence_multiple,
        micro_batch_multiple=actor.pipeline if actor.virtual_pipeline > 1 else 1,
    )
    without = UNUSED_IN_FORWARD if is_forward else ()
    shares = pack(
        samples,
        packing,
        temperature=TEMPERATURE,
        has_versions=has_versions,
        has_routes=has_routes,
        shares_prefixes=shares_prefixes,
        without=without,
    )
    return Shares.of(shares, ranks_per_share=actor.tensor * actor.context)


def actor_of(parallel: MegatronParallel) -> ActorConfig:
    """Return the section of a recipe with this split."""
    return ActorConfig(
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


def setup_of(model: Model, actor: ActorConfig, algorithm: AlgorithmConfig = GRPO) -> jobs.Setup:
    return jobs.Setup(actor=actor, folder=model.folder, shape=model.shape, optimizer=DESCENT, algorithm=algorithm)


def whole_weights(outcomes: Sequence[Held], model: Model, actor: ActorConfig | CriticConfig) -> dict[str, Tensor]:
    """Assemble canonical tensors from every rank's parameters."""
    shape = model.shape.as_critic() if isinstance(actor, CriticConfig) else model.shape
    return assembled_tensors(outcomes, megatron_layout(shape, parallel_of(outcomes, actor), dtype="float32"))


def parallel_of(outcomes: Sequence[Held], actor: ActorConfig | CriticConfig) -> MegatronParallel:
    return MegatronParallel.of(actor, data=len(outcomes) // actor.model_parallel)


def assembled_tensors(outcomes: Sequence[Held], layout: Layout) -> dict[str, Tensor]:
    """Assemble the canonical tensors of a layout; replicas must be bit-equal."""
    weights = {name: torch.full(spec.shape, torch.nan) for name, spec in layout.canonical.items()}
    for rank, outcome in enumerate(outcomes):
        for piece in layout.by_rank[rank].pieces:
            target = box_of(weights[piece.slice.name], piece.slice.offsets, piece.slice.shape)
            local = torch.from_numpy(outcome.tensors[piece.local_name])
            source = box_of(local, piece.local_offsets, piece.slice.shape)
            if not target.isnan().any():
                assert torch.equal(target, source), f"{piece.slice} differs between replicas"
            target.copy_(source)
    return weights


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float = TOLERANCE) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        difference = (found[name] - tensor).abs().max().item()
        assert difference < tolerance, f"{name} is off by {difference:.2e}"


def assert_same_logprobs(found: Sequence[np.ndarray], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for index, (array, tensor) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(array, tensor.numpy(), rtol=0, atol=TOLERANCE, err_msg=f"sample {index}")


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint's safetensors files, by folder and canonical name."""
    return {
        f"{path.parent.relative_to(folder)}/{name}": tensor
        for path in folder.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
