"""The recipe's fields reach Megatron's gradient buffers and optimizer; the learning rate follows its schedule."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import pytest

from megarl.config.algorithm import SftConfig
from megarl.config.native import owned
from megarl.config.roles import ActorConfig, OptimizerConfig
from megarl.data.packing import Packing
from megarl.train import optimizer as optimizer_module
from megarl.train.optimizer import buffer_config, learning_rate, optimizer_config
from tests.filled_shares import pack
from tests.train import jobs
from tests.train.cluster import Cluster, Shares
from tests.train.conftest import Models
from tests.train.reference import Model
from tests.train.samples import make_samples
from tests.train.test_build import config_with

DECAYING = OptimizerConfig(learning_rate=1e-2, weight_decay=0.5)
OVERLAPPING: dict[str, object] = {"overlap_grad_reduce": True, "bucket_size": 5000}


def batch_of(model: Model, *, data_parallel: int, micro_batch_multiple: int = 1) -> Shares:
    packing = Packing(
        data_parallel=data_parallel,
        tokens_per_micro_batch=32,
        samples_per_update=None,
        pad_multiple=1,
        micro_batch_multiple=micro_batch_multiple,
    )
    return Shares.of(
        pack(make_samples(6, vocab=model.shape.vocab, seed=3), packing, temperature=1.0), ranks_per_share=1
    )


def setup_of(model: Model, actor: ActorConfig) -> jobs.Setup:
    return jobs.Setup(
        actor=actor, folder=model.folder, shape=model.shape, optimizer=DECAYING, algorithm=SftConfig(kind="sft")
    )


@pytest.mark.parametrize(
    ("world", "actor", "bucketed"),
    [
        (2, ActorConfig(pool="train"), [0, 1]),
        # Megatron cuts only the first chunk of the first stage into buckets.
        (4, ActorConfig(pool="train", pipeline=2, virtual_pipeline=2), [0, 1]),
    ],
    ids=["DP2", "PP2-VPP2-DP2"],
)
def test_gradients_that_travel_in_buckets_during_the_backward_pass_are_the_same(
    world: int, actor: ActorConfig, bucketed: list[int], cluster: Cluster, models: Models
) -> None:
    model = models.get("qwen2", tied=False)
    multiple = actor.pipeline if actor.virtual_pipeline > 1 else 1
    batch = batch_of(model, data_parallel=world // actor.model_parallel, micro_batch_multiple=multiple)
    assert len(batch[0].mini_batches[0].micro_batches) > 1
    overlapping = actor.model_copy(update={"megatron_ddp": OVERLAPPING})
    plain, found = (
        cluster.run(world, jobs.update_buckets, setup_of(model, each), batch) for each in (actor, overlapping)
    )
    for rank in range(world):
        assert plain[rank].num_buckets == actor.virtual_pipeline
        assert (found[rank].num_buckets > 3) == (rank in bucketed)
        for name, tensor in plain[rank].tensors.items():
            np.testing.assert_allclose(found[rank].tensors[name], tensor, rtol=0, atol=1e-6, err_msg=name)


def test_adam_with_decay_in_the_gradient_is_another_optimizer(cluster: Cluster, models: Models) -> None:
    model = models.get("qwen2", tied=False)
    batch = batch_of(model, data_parallel=1)
    coupled = ActorConfig(pool="train", megatron_optimizer={"decoupled_weight_decay": False})
    (usual,), (found,) = (
        cluster.run(1, jobs.update_buckets, setup_of(model, actor), batch)
        for actor in (ActorConfig(pool="train"), coupled)
    )
    assert (usual.adam, found.adam) == ("AdamW", "Adam")
    assert any(np.abs(found.tensors[name] - usual.tensors[name]).max() > 1e-4 for name in usual.tensors)


def test_no_field_is_set_by_both_megarl_and_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    model_config = config_with()
    for name in ("MegatronOptimizerConfig", "DistributedDataParallelConfig"):
        monkeypatch.setattr(optimizer_module, name, lambda **fields: fields)
    of_optimizer = cast("dict[str, object]", optimizer_config(OptimizerConfig(), model_config, {}))
    of_buffers = cast("dict[str, object]", buffer_config({}))
    assert [name for name in of_optimizer if owned("megatron_optimizer", name, device="cpu") is None] == []
    assert [name for name in of_buffers if owned("megatron_ddp", name, device="cpu") is None] == []


def rates(total_steps: int, **options: object) -> list[float]:
    config = OptimizerConfig.model_validate({"learning_rate": 1.0, **options})
    return [learning_rate(step, config, total_steps) for step in range(total_steps)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.0, 1.0, 1.0]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        # It heads for the floor, which it would reach after the last step.
        ({"decay": "linear", "min_learning_rate": 0.5, "warmup_steps": 1}, [1.0, 1.0, 0.875, 0.75, 0.625]),
        ({"decay": "linear", "warmup_steps": 10}, [0.1, 0.2, 0.3]),
    ],
    ids=["constant", "warm-up", "linear", "warm-up longer than the run"],
)
def test_the_rate_follows_its_schedule(options: dict[str, object], expected: list[float]) -> None:
    assert rates(len(expected), **options) == pytest.approx(expected)


def test_a_share_of_the_steps_warms_up_like_their_number() -> None:
    assert rates(6, warmup_share=0.7, decay="linear") == rates(6, warmup_steps=4, decay="linear")


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    curve = rates(8, decay="cosine", min_learning_rate=0.2)
    assert curve[0] == 1.0
    assert curve[4] == pytest.approx(0.6)
    assert curve[2] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert curve == sorted(curve, reverse=True)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_steps_beyond_the_end_keep_the_floor(decay: str) -> None:
    config = OptimizerConfig.model_validate({"learning_rate": 1.0, "decay": decay, "min_learning_rate": 0.1})
    assert learning_rate(50, config, 10) == pytest.approx(0.1)
