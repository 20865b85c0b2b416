"""What a recipe passes on to Megatron's gradient buffers and optimizer arrives, and changes what it should."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from megarl.config.algorithm import SftConfig
from megarl.config.native.owned import owned
from megarl.config.roles import ActorConfig, OptimizerConfig
from megarl.data.packing import pack
from megarl.train import optimizer as optimizer_module
from megarl.train.optimizer import buffer_config, optimizer_config
from megarl.types import TrainBatch
from tests.train import optimizer_jobs as jobs
from tests.train.cluster import Cluster
from tests.train.conftest import Models
from tests.train.jobs import Setup
from tests.train.reference import Model
from tests.train.samples import make_samples
from tests.train.test_model import config_with

DECAYING = OptimizerConfig(learning_rate=1e-2, weight_decay=0.5)
OVERLAPPING: dict[str, object] = {"overlap_grad_reduce": True, "bucket_size": 5000}


def batch_of(model: Model, *, data_parallel: int, micro_batch_multiple: int = 1) -> TrainBatch:
    return pack(
        make_samples(6, vocab=model.shape.vocab, seed=3),
        data_parallel=data_parallel,
        tokens_per_micro_batch=32,
        samples_per_update=None,
        pad_multiple=1,
        micro_batch_multiple=micro_batch_multiple,
        temperature=1.0,
    )


def setup_of(model: Model, actor: ActorConfig) -> Setup:
    return Setup(
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
    assert len(batch.mini_batches[0].shares[0]) > 1
    overlapping = actor.model_copy(update={"megatron_ddp": OVERLAPPING})
    plain, found = (cluster.run(world, jobs.update, setup_of(model, each), batch) for each in (actor, overlapping))
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
        cluster.run(1, jobs.update, setup_of(model, actor), batch) for actor in (ActorConfig(pool="train"), coupled)
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
