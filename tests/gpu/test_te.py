"""Layers of Transformer Engine against Megatron's own, on one GPU: the same weights, gradients, files and learning."""

from __future__ import annotations

import gc
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.checkpoint.resume import TrainerState
from megarl.config.algorithm import SftConfig
from megarl.config.kernels import is_te_installed
from megarl.config.lora import ALL_MODULES, ATTENTION_MODULES, LoraConfig
from megarl.config.roles import ActorConfig, OptimizerConfig
from megarl.data.packing import Packing
from megarl.families.shape import ModelShape
from megarl.train.actor import ActorRank
from megarl.train.lora import adapters_off
from megarl.train.rank_spec import RankSpec
from megarl.types import TrainBatch
from tests.filled_shares import pack
from tests.gpu.test_trainer import sample_of
from tests.tiny_models import write_random_adapter, write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_te_installed(), reason="Transformer Engine is not installed"),
]

logger = logging.getLogger(__name__)
Keys = dict[str, object]
LOCAL: Keys = {"kernels": "local"}
TE: Keys = {"kernels": "te"}
SCALINGS = ("tensorwise", "blockwise", "delayed")
NUM_STEPS = 50
NUM_SEEDS = 3


def fp8(scaling: str, **keys: object) -> Keys:
    return {"precision": "fp8", "fp8_scaling": scaling, **keys}


@contextmanager
def one_rank(
    shape: ModelShape,
    folder: Path | None,
    keys: Keys,
    *,
    learning_rate: float = 1e-3,
    lora: LoraConfig | None = None,
) -> Iterator[ActorRank]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    spec = RankSpec(
        rank=0,
        world=1,
        master_address="127.0.0.1",
        master_port=port,
        device="cuda",
        split=ActorConfig.model_validate({"pool": "gpu", **keys}),
        shape=shape,
        seed=1,
        timeout_s=60,
        lora=lora,
    )
    optimizer = OptimizerConfig(learning_rate=learning_rate, weight_decay=0.0)
    trainer = ActorRank(spec, algorithm=SftConfig(kind="sft"), optimizer=optimizer, total_steps=NUM_STEPS)
    try:
        if folder is not None:
            trainer.load(folder)
        yield trainer
    finally:
        trainer.close()
        gc.collect()


def batch_of(seed: int, *, num_samples: int = 24) -> TrainBatch:
    random = np.random.default_rng(seed)
    samples = [sample_of(random, int(random.integers(3, 40)), int(random.integers(5, 90))) for _ in range(num_samples)]
    packing = Packing(
        data_parallel=1,
        tokens_per_micro_batch=512,
        samples_per_update=None,
        pad_multiple=128,
        micro_batch_multiple=1,
    )
    (batch,) = pack(samples, packing, temperature=1.0)
    return batch


def logprobs_of(trainer: ActorRank, batch: TrainBatch) -> np.ndarray:
    numbers = trainer.logprobs(batch)
    assert numbers is not None
    return numbers.numbers


def gradients_of(trainer: ActorRank, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Return the gradients of a second step, in which delayed scaling has past values; the weights hardly change."""
    for _ in range(2):
        trainer.update(batch)
    return {name: each.main_grad.clone() for name, each in trainer._optimizer.parameters().items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_weights_are_the_same_bits_in_both_kinds_of_layers(family: str, tmp_path: Path) -> None:
    shape = write_tiny_model(tmp_path / "model", family, tied=family == "qwen2")
    found: list[dict[str, torch.Tensor]] = []
    files: list[dict[str, bytes]] = []
    for index, keys in enumerate((LOCAL, TE)):
        with one_rank(shape, tmp_path / "model", keys) as trainer:
            found.append({name: tensor.clone() for name, tensor in trainer.tensors().items()})
            folder = tmp_path / f"export{index}"
            folder.mkdir()
            trainer.export(folder, tmp_path / "model")
            files.append({path.name: path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert files[0]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("family", "keys", "tolerance"),
    [
        ("qwen2", TE, 0.02),
        ("qwen3", TE, 0.02),
        ("qwen2_moe", TE, 0.04),
        ("qwen3_moe", TE, 0.04),
        *[("qwen2", fp8(scaling), 0.15) for scaling in SCALINGS],
        ("qwen2_moe", fp8("tensorwise"), 0.25),
        ("qwen3_moe", fp8("tensorwise"), 0.25),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_local_layers(family: str, keys: Keys, tolerance: float, tmp_path: Path) -> None:
    shape = write_tiny_model(tmp_path / "model", family, ffn=256)
    batch = batch_of(0)
    with one_rank(shape, tmp_path / "model", LOCAL, learning_rate=1e-12) as trainer:
        expected, right = gradients_of(trainer, batch), logprobs_of(trainer, batch)
    with one_rank(shape, tmp_path / "model", keys, learning_rate=1e-12) as trainer:
        found, mine = gradients_of(trainer, batch), logprobs_of(trainer, batch)
    assert_near(found, expected, tolerance)
    differences = np.abs(mine - right)
    logger.info("%s %s: logprobs off by %.4f, at most %.4f", family, keys, differences.mean(), differences.max())
    assert differences.mean() < tolerance


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    worst = {
        name: float((found[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-9)) for name in expected
    }
    logger.info("worst %s", sorted(worst.items(), key=lambda item: -item[1])[:4])
    assert max(worst.values()) < 4 * tolerance, worst
    assert float(np.median(list(worst.values()))) < tolerance


@pytest.mark.parametrize(
    ("family", "keys", "tolerance"),
    [
        ("qwen2", TE, 0.02),
        *[("qwen2", fp8(scaling), 0.15) for scaling in SCALINGS],
        ("qwen3_moe", TE, 0.04),
        ("qwen3_moe", fp8("tensorwise"), 0.25),
    ],
    ids=str,
)
def test_an_adapter_beside_a_base_in_fp8_has_the_gradients_of_one_beside_local_layers(
    family: str, keys: Keys, tolerance: float, tmp_path: Path
) -> None:
    shape = write_tiny_model(tmp_path / "model", family, ffn=256)
    modules = ALL_MODULES if family == "qwen2" else ATTENTION_MODULES
    write_random_adapter(tmp_path / "adapter", tmp_path / "model", modules, rank=16)
    lora = LoraConfig(rank=16, alpha=6, modules=modules, path=tmp_path / "adapter")
    batch = batch_of(0)
    with one_rank(shape, tmp_path / "model", LOCAL, learning_rate=1e-12, lora=lora) as trainer:
        expected, right = gradients_of(trainer, batch), logprobs_of(trainer, batch)
    with one_rank(shape, tmp_path / "model", keys, learning_rate=1e-12, lora=lora) as trainer:
        found, mine = gradients_of(trainer, batch), logprobs_of(trainer, batch)
        with adapters_off(trainer._models):
            base = logprobs_of(trainer, batch)
    with one_rank(shape, tmp_path / "model", LOCAL) as trainer:
        plain = logprobs_of(trainer, batch)
    assert all(name.endswith(("lora_a", "lora_b")) for name in found)
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    assert_near(found, expected, tolerance)
    for ours, theirs in ((mine, right), (base, plain)):
        logger.info("logprobs off by %.4f", np.abs(ours - theirs).mean())
        assert np.abs(ours - theirs).mean() < tolerance
    assert np.abs(mine - base).mean() > 0.01, "the adapter makes no difference"


def test_a_checkpoint_of_one_kind_continues_with_the_other(tmp_path: Path) -> None:
    shape = write_tiny_model(tmp_path / "model", "qwen2")
    batch = batch_of(0)

    def states_of(trainer: ActorRank) -> dict[str, torch.Tensor]:
        shards = trainer._optimizer.shards()
        return {
            **{name: tensor.cpu().clone() for name, tensor in trainer.tensors().items()},
            **{f"{name} master": shard.master.cpu().clone() for name, shard in shards.items()},
            **{f"{name} moment": shard.moment("exp_avg_sq").cpu().clone() for name, shard in shards.items()},
        }

    def saved(trainer: ActorRank, folder: Path) -> TrainerState:
        state = trainer.snapshot("everything")
        folder.mkdir()
        trainer.write(folder, tmp_path / "model")
        return state

    with one_rank(shape, tmp_path / "model", fp8("tensorwise")) as trainer:
        for _ in range(3):
            trainer.update(batch)
        before, state = states_of(trainer), saved(trainer, tmp_path / "fp8")
        after = trainer.update(batch).stats
    for keys in (LOCAL, TE, fp8("tensorwise")):
        with one_rank(shape, None, keys) as trainer:
            trainer.resume(tmp_path / "fp8", state)
            found = states_of(trainer)
            assert found.keys() == before.keys()
            assert [name for name in before if not torch.equal(found[name], before[name])] == []
            again = trainer.update(batch).stats
            assert again is not None
            assert after is not None
            logger.info("%s: %s, uninterrupted %s", keys, (again.loss, again.grad_norm), (after.loss, after.grad_norm))
            if keys.get("precision") == "fp8":
                assert (again.loss, again.grad_norm) == (after.loss, after.grad_norm), "not bit for bit"


def test_updated_weights_are_quantised_anew(tmp_path: Path) -> None:
    """Copies of weights in FP8 are kept between micro-batches, and must not outlive the weights that they are of."""
    shape = write_tiny_model(tmp_path / "model", "qwen2")
    batch = batch_of(0)
    with one_rank(shape, tmp_path / "model", fp8("tensorwise"), learning_rate=1e-2) as trainer:
        trainer.update(batch)
        kept = logprobs_of(trainer, batch)
        trainer.trim()
        assert np.array_equal(kept, logprobs_of(trainer, batch))


@pytest.mark.parametrize(
    ("recomputed", "offload"),
    [
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, "everything"),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, "nothing"),
    ],
    ids=["full", "mlp"],
)
def test_recomputation_and_offload_work_with_fp8(recomputed: Keys, offload: str, tmp_path: Path) -> None:
    shape = write_tiny_model(tmp_path / "model", "qwen2")
    batch = batch_of(0)
    losses: list[list[float]] = []
    for keys in (fp8("tensorwise"), fp8("tensorwise", megatron=recomputed, offload=offload)):
        with one_rank(shape, tmp_path / "model", keys) as trainer:
            found = []
            for _ in range(3):
                trainer.release()
                trainer.reload()
                stats = trainer.update(batch).stats
                assert stats is not None
                found.append(stats.loss)
            losses.append(found)
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-3)


def test_fifty_steps_of_fp8_learn_like_bf16_over_seeds(tmp_path: Path) -> None:
    """The bound is the spread of bfloat16 itself over seeds, measured in the same test."""
    variants = {"bf16": LOCAL, **{scaling: fp8(scaling) for scaling in SCALINGS}}
    ends: dict[str, list[float]] = {name: [] for name in variants}
    norms: dict[str, list[float]] = {name: [] for name in variants}
    for seed in range(NUM_SEEDS):
        shape = write_tiny_model(tmp_path / f"model{seed}", "qwen2", layers=6, ffn=256, seed=seed)
        batches = [batch_of(100 * seed + index, num_samples=12) for index in range(5)]
        for name, keys in variants.items():
            with one_rank(shape, tmp_path / f"model{seed}", keys) as trainer:
                curve = [trainer.update(batches[step % 5]).stats for step in range(NUM_STEPS)]
            found = [(stats.loss, stats.grad_norm) for stats in curve if stats is not None]
            assert len(found) == NUM_STEPS
            ends[name].append(float(np.mean([loss for loss, _ in found[-10:]])))
            norms[name] += [norm for _, norm in found]
            logger.info("%s seed %d: steps 1, 10, 25, 50 %s", name, seed, [found[step] for step in (0, 9, 24, 49)])
    noise = float(np.std(ends["bf16"]))
    logger.info("ends %s, noise %.4f", ends, noise)
    for scaling in SCALINGS:
        off = np.abs(np.divide(norms[scaling], norms["bf16"]) - 1)
        logger.info("%s: norms off by %.4f in the median, at most %.4f", scaling, np.median(off), off.max())
        differences = np.abs(np.subtract(ends[scaling], ends["bf16"]))
        assert differences.mean() < max(2 * noise, 0.05 * float(np.mean(ends["bf16"])))
        assert np.median(off) < 0.1
