"""Resuming: a checkpoint of one layout continues in another."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.checkpoint.manifest import FORMAT, Manifest, read_header, write_manifest
from megarl.checkpoint.resume import TrainerState
from megarl.config.roles import ActorConfig, OptimizerConfig
from megarl.families.shape import ModelShape
from megarl.train import checkpoint
from megarl.train.checkpoint import RankCheckpoints, has_own_master
from megarl.train.optimizer import ModelOptimizer
from megarl.train.optimizer_states import Shard
from megarl.train.rank_spec import RankSpec
from megarl.weights.algebra.slices import Holding
from megarl.weights.executors.hf import load_hf
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from tests.schedule import slow
from tests.train import jobs, save_jobs
from tests.train.cluster import Cluster, Shares
from tests.train.conftest import Models
from tests.train.reference import Model
from tests.train.samples import make_samples
from tests.train.splits import MIXTURE_SPLITS, packed, saved_tensors, setup_of
from tests.train.splits import SPLITS as DENSE_SPLITS
from tests.weights.reference import make_shape

SPLITS = {**DENSE_SPLITS, **MIXTURE_SPLITS}

ADAM = OptimizerConfig(learning_rate=1e-3, eps=1e-4, warmup_steps=2, decay="cosine")
NUM_STEPS = 4
SAVED_AFTER = 2


def batches_of(model: Model, world: int, actor: ActorConfig) -> list[Shares]:
    return [
        packed(make_samples(6, vocab=model.shape.vocab, seed=seed), world=world, actor=actor)
        for seed in range(NUM_STEPS)
    ]


def assert_saved_the_same(first: Path, second: Path, *, tolerance: float = 0.0) -> dict[str, Tensor]:
    """Compare all tensors of two checkpoints; return those of the second."""
    expected, found = saved_tensors(first), saved_tensors(second)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        difference = (tensor.float() - found[name].float()).abs().max().item()
        assert difference <= tolerance, f"{name} is off by {difference:.2e}"
    return found


class Checkpoints:
    """Trainers that were saved in the middle and at the end of their steps, one for each model and split."""

    def __init__(self, cluster: Cluster, models: Models, folder: Path) -> None:
        self._cluster, self._models, self._folder = cluster, models, folder
        self._states: dict[tuple[str, str], tuple[TrainerState, TrainerState]] = {}

    def train(self, family: str, split: str) -> tuple[Path, TrainerState, TrainerState]:
        """Return the folder with `half` and `at_once`, and the states of both."""
        folder = self._folder / f"{family}-{split}"
        if (family, split) not in self._states:
            setup, batches = self._setup(family, split)
            before, after = batches[:SAVED_AFTER], batches[SAVED_AFTER:]
            folders = (folder / "half", folder / "at_once")
            world = SPLITS[split][0]
            self._states[family, split] = self._cluster.run(
                world, jobs.train_and_save_twice, setup, before, after, folders
            )[0]
        return folder, *self._states[family, split]

    def go_on(self, family: str, first: str, second: str, folder: Path) -> TrainerState:
        """Resume what the first split saved in the middle in the second split, and save it at the end in `folder`."""
        saved, state, _ = self.train(family, first)
        setup, batches = self._setup(family, second)
        after = batches[SAVED_AFTER:]
        return self._cluster.run(SPLITS[second][0], jobs.resume_and_train, setup, saved / "half", state, after, folder)[
            0
        ][0]

    def _setup(self, family: str, split: str) -> tuple[jobs.Setup, list[Shares]]:
        model = self._models.get(family, tied=family in ("qwen3", "gemma3_text"))
        world, actor = SPLITS[split]
        return replace(setup_of(model, actor), optimizer=ADAM), batches_of(model, world, actor)


@pytest.fixture(scope="module")
def checkpoints(cluster: Cluster, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(cluster, models, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(
    ("family", "split"),
    [
        *[("qwen3", split) for split in ("TP2-SP", "PP2-VPP2")],
        ("qwen3_moe", "TP2-EP2"),
        *slow(("qwen3", "DP2"), ("qwen3", "TP2-PP2"), ("qwen3_moe", "EP2-DP2")),
    ],
)
def test_training_in_two_parts_gives_the_same_bits(
    family: str, split: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder, _, expected_state = checkpoints.train(family, split)
    assert checkpoints.go_on(family, split, split, tmp_path) == expected_state
    found = assert_saved_the_same(folder / "at_once", tmp_path)
    assert {key.rpartition("/")[0] for key in found} == {"model", "optimizer/exp_avg", "optimizer/exp_avg_sq"}


def test_ranks_verify_a_checkpoint_together(cluster: Cluster, models: Models, tmp_path: Path) -> None:
    """Saved by one rank; whichever tensor is damaged, one rank of any layout finds it."""
    model = models.get("qwen3", tied=True)
    folder = tmp_path / "saved"
    (saved,) = cluster.run(
        1, jobs.train_and_save, replace(setup_of(model, SPLITS["TP1"][1]), optimizer=ADAM), [], folder
    )
    manifest = Manifest(
        format=FORMAT, megarl_version="", step=1, contents="everything", recipe={}, recipe_digest="", files=saved[1]
    )
    write_manifest(folder, manifest)
    world, actor = SPLITS["TP2-PP2"]
    setup = setup_of(model, actor)
    assert cluster.run(world, jobs.fail_to_verify, setup, folder) == [""] * world
    path = folder / "optimizer" / "exp_avg_sq" / "model-00001-of-00001.safetensors"
    whole = path.read_bytes()
    entries = read_header(path).entries
    for entry in (entries[0], entries[-1]):
        path.write_bytes(whole[: entry.start] + bytes([whole[entry.start] ^ 1]) + whole[entry.start + 1 :])
        messages = cluster.run(world, jobs.fail_to_verify, setup, folder)
        (found,) = (message for message in messages if message)
        assert f"tensor {entry.name} does not have the digest" in found


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("qwen3", "TP2-SP", "PP2"),
        ("qwen3", "PP2-VPP2", "CP2"),
        ("qwen3_moe", "TP2-EP2", "TP2-SP"),
        *slow(("qwen3", "DP2", "TP2-PP2"), ("qwen3", "TP2-PP2", "TP1"), ("qwen3", "CP2", "TP2")),
        *slow(("qwen2_moe", "TP2-EP4-ETP1", "EP2-PP2")),
        # Buffers, dense layers in front, alternating rows in stacks of experts, norms behind blocks.
        *slow(("glm4_moe", "EP2-PP2", "TP2-SP"), ("deepseek_v3", "EP2-PP2", "TP2-EP2-ETP1")),
        *slow(("gpt_oss", "EP2-PP2", "TP2-EP2-ETP1"), ("gemma3_text", "TP2-SP", "PP2-VPP2")),
    ],
)
def test_another_layout_goes_on_where_the_first_stood(
    family: str, first: str, second: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder, _, _ = checkpoints.train(family, first)
    checkpoints.go_on(family, first, second, tmp_path)
    assert_saved_the_same(folder / "at_once", tmp_path, tolerance=1e-6)


def test_what_a_layout_loads_and_saves_again_is_the_same_to_the_last_bit(
    cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    model = models.get("llama", tied=False)
    world, actor = SPLITS["DP2"]
    setup = replace(setup_of(model, actor), optimizer=ADAM)
    batches = batches_of(model, world, actor)[:SAVED_AFTER]
    state = cluster.run(world, jobs.train_and_save, setup, batches, tmp_path / "first")[0][0]
    world, actor = SPLITS["TP2-PP2"]
    again = replace(setup_of(model, actor), optimizer=ADAM)
    cluster.run(world, jobs.resume_and_train, again, tmp_path / "first", state, [], tmp_path / "second")
    found = assert_saved_the_same(tmp_path / "first", tmp_path / "second")
    assert any(tensor.abs().max() > 0 for name, tensor in found.items() if name.startswith("optimizer/exp_avg_sq"))


def test_weights_that_the_model_folder_rounds_are_kept_as_master_weights(
    cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    model = models.get("qwen2", tied=False)
    shape: ModelShape = replace(model.shape, dtype="bfloat16")
    world, actor = SPLITS["DP2"]
    setup = replace(setup_of(model, actor), optimizer=ADAM, shape=shape)
    batches = batches_of(model, world, actor)[:SAVED_AFTER]
    outcomes = cluster.run(world, jobs.train_and_save, setup, batches, tmp_path / "first")
    cluster.run(world, jobs.resume_and_train, setup, tmp_path / "first", outcomes[0][0], [], tmp_path / "second")
    found = assert_saved_the_same(tmp_path / "first", tmp_path / "second")
    name = "model.norm.weight"
    assert found[f"model/{name}"].dtype == torch.bfloat16
    assert torch.equal(found[f"optimizer/master/{name}"].bfloat16(), found[f"model/{name}"])


class HalfAdam:
    """The optimizer of one of two replicas, which has half of every parameter."""

    def __init__(self, holding: Holding, rank: int) -> None:
        sizes = {name: prod(spec.shape) for name, spec in holding.tensors.items()}
        self.ranges = {name: (size * rank // 2, size * (rank + 1) // 2) for name, size in sizes.items()}
        self.masters = {name: torch.zeros(end - start) for name, (start, end) in self.ranges.items()}
        self.adam = torch.optim.Adam(self.masters.values())
        self.num_gathered = 0

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.masters)

    def shards(self) -> dict[str, Shard]:
        return {
            name: Shard(range=self.ranges[name], master=master, optimizer=self.adam, key=master, group_index=0)
            for name, master in self.masters.items()
        }

    def adopt_masters(self) -> None:
        self.num_gathered += 1


@pytest.mark.parametrize("first", ["model", "optimizer/master"])
def test_replicas_that_resume_read_each_byte_once(first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Master weights are read, or `model/` where they are the same, and moments; weights are gathered."""
    layout = megatron_layout(make_shape(), MegatronParallel(data=2), dtype="float32")
    kinds = (first, "optimizer/exp_avg", "optimizer/exp_avg_sq")
    for kind in kinds:
        (tmp_path / kind).mkdir(parents=True)
        tensors = {name: torch.rand(spec.shape) for name, spec in layout.canonical.items()}
        save_file(tensors, tmp_path / kind / "model.safetensors")
    num_read: Counter[str] = Counter()

    def counted(folder: Path, holding: Holding, *arguments: Any) -> None:
        num_read[str(folder.relative_to(tmp_path))] += sum(piece.slice.num_elements for piece in holding.pieces)
        load_hf(folder, holding, *arguments)

    monkeypatch.setattr(checkpoint, "load_hf", counted)
    replicas = [HalfAdam(layout.by_rank[rank], rank) for rank in range(2)]
    for rank, optimizer in enumerate(replicas):
        checkpoints = RankCheckpoints.__new__(RankCheckpoints)
        checkpoints.spec = cast("RankSpec", SimpleNamespace(rank=rank))
        checkpoints.layout, checkpoints.optimizer = layout, cast("ModelOptimizer", optimizer)
        checkpoints.restore(tmp_path, num_updates=3)
    num_elements = sum(prod(spec.shape) for spec in layout.canonical.values())
    assert num_read == dict.fromkeys(kinds, num_elements)
    assert [optimizer.num_gathered for optimizer in replicas] == [1, 1]
    whole = {name: torch.empty(spec.shape) for name, spec in layout.by_rank[0].tensors.items()}
    load_hf(tmp_path / first, layout.by_rank[0], layout.canonical, whole)
    for name, expected in whole.items():
        halves = [optimizer.masters[name] for optimizer in replicas]
        assert torch.equal(torch.cat(halves), expected.view(-1)), name
    assert all(shard.num_updates == 3 for optimizer in replicas for shard in optimizer.shards().values())


def test_a_tensor_that_is_not_trained_is_restored_from_the_model_folder(tmp_path: Path) -> None:
    """The bias of a router is a buffer: it has neither master weights nor moments."""
    layout = megatron_layout(make_shape(), MegatronParallel(), dtype="float32")
    frozen, holding = "chunk0.decoder.final_layernorm.weight", layout.by_rank[0]
    trained = {name: spec for name, spec in holding.tensors.items() if name != frozen}
    optimizer = HalfAdam(replace(holding, tensors=trained), rank=0)
    expected = {name: torch.rand(spec.shape) for name, spec in layout.canonical.items()}
    for kind in ("model", "optimizer/master", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
        (tmp_path / kind).mkdir(parents=True)
        saved = {name: tensor for name, tensor in expected.items() if kind == "model" or name != "model.norm.weight"}
        save_file(saved, tmp_path / kind / "model.safetensors")
    checkpoints = RankCheckpoints.__new__(RankCheckpoints)
    checkpoints.spec = cast("RankSpec", SimpleNamespace(rank=0))
    checkpoints.layout, checkpoints.optimizer = layout, cast("ModelOptimizer", optimizer)
    tensors = {name: torch.zeros(spec.shape) for name, spec in holding.tensors.items()}
    checkpoints.tensors = lambda: tensors
    checkpoints.restore(tmp_path, num_updates=1)
    assert torch.equal(tensors[frozen], expected["model.norm.weight"])
    assert not any(tensor.any() for name, tensor in tensors.items() if name != frozen)
    name = "chunk0.embedding.word_embeddings.weight"
    embedding = expected["model.embed_tokens.weight"].view(-1)
    half = optimizer.masters[name][: len(embedding) // 2]
    assert torch.equal(half, embedding[: len(half)])


def test_every_file_is_digested_by_the_rank_that_wrote_it(cluster: Cluster, models: Models, tmp_path: Path) -> None:
    model = models.get("qwen2", tied=True)
    world, actor = SPLITS["TP2-PP2"]
    batches = batches_of(model, world, actor)[:1]
    outcomes = cluster.run(world, jobs.train_and_save, setup_of(model, actor), batches, tmp_path / "saved")
    digests = {name: digest for _, files, _ in outcomes for name, digest in files.items()}
    written = {str(path.relative_to(tmp_path / "saved")) for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    assert written == set(digests)
    assert sum(len(files) for _, files, _ in outcomes) == len(digests)
    sizes = np.array([(tmp_path / "saved" / name).stat().st_size for name in digests])
    assert (sizes == [digest.num_bytes for digest in digests.values()]).all()


def test_a_save_that_fails_fails_on_every_rank_and_training_goes_on(
    cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    model = models.get("qwen2", tied=True)
    world, actor = SPLITS["TP2"]
    (tmp_path / "file").touch()
    batch = batches_of(model, world, actor)[0]
    outcomes = cluster.run(world, jobs.fail_to_save_and_go_on, setup_of(model, actor), batch, tmp_path / "file")
    assert all("was not saved" in message for message, _ in outcomes)
    assert [result.version for _, result in outcomes] == [1, 1]


def test_what_is_saved_beside_training_is_the_snapshot_and_training_does_not_notice(
    cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    model = models.get("qwen2", tied=True)
    world, actor = SPLITS["DP2"]
    setup = replace(setup_of(model, actor), optimizer=ADAM)
    batches = batches_of(model, world, actor)
    before, after = batches[:SAVED_AFTER], batches[SAVED_AFTER:]
    cluster.run(world, jobs.train_and_save, setup, before, tmp_path / "still")
    undisturbed = cluster.run(world, save_jobs.train_while_writing, setup, before, after, None)
    beside = cluster.run(world, save_jobs.train_while_writing, setup, before, after, tmp_path / "beside")
    assert all(all(is_writing) for is_writing, _ in beside)
    assert_saved_the_same(tmp_path / "still", tmp_path / "beside")
    for (_, expected_weights), (_, weights) in zip(undisturbed, beside, strict=True):
        assert all(np.array_equal(weights[name], tensor) for name, tensor in expected_weights.items())


def test_a_trainer_that_has_not_updated_yet_is_saved_as_it_starts(
    cluster: Cluster, models: Models, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    model = models.get("qwen3", tied=True)
    folder, _, _ = checkpoints.train("qwen3", "DP2")
    world, actor = SPLITS["DP2"]
    setup = replace(setup_of(model, actor), optimizer=ADAM)
    state = cluster.run(world, jobs.train_and_save, setup, [], tmp_path / "new")[0][0]
    batches = batches_of(model, world, actor)
    cluster.run(world, jobs.resume_and_train, setup, tmp_path / "new", state, batches, tmp_path / "whole")
    assert_saved_the_same(folder / "at_once", tmp_path / "whole")


def test_no_rank_saves_weights_that_are_not_finite(cluster: Cluster, models: Models, tmp_path: Path) -> None:
    model = models.get("qwen2", tied=True)
    world, actor = SPLITS["TP2"]
    messages = cluster.run(world, save_jobs.break_a_weight_and_save, setup_of(model, actor), tmp_path / "saved")
    assert all("NaN or infinite" in message for message in messages)


def test_ranks_stay_connected_from_save_to_save_until_one_fails(
    cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    world, actor = SPLITS["DP2"]
    setup = setup_of(models.get("qwen2", tied=True), actor)
    for messages, num_joined in cluster.run(world, save_jobs.save_again_and_again, setup, tmp_path):
        assert [message == "no error" for message in messages] == [True, True, True, False, True, True], messages
        # Once at first, once after the group was left, once after the save that failed.
        assert num_joined == 3


@pytest.mark.parametrize(
    "point",
    [
        # Each costs a new set of ranks.
        *slow("snapshot_taken", "ranks_met"),
        "file_written",
    ],
)
def test_a_rank_that_dies_while_it_saves_is_not_waited_for(
    point: str, cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    model = models.get("qwen2", tied=True)
    world, actor = SPLITS["TP2"]
    setup = replace(setup_of(model, actor), timeout_s=5.0)
    with pytest.raises(AssertionError, match="rank 1 died"):
        cluster.run(world, save_jobs.lose_a_rank, setup, tmp_path / "saved", point, timeout_s=600)
    assert "was not saved" in (tmp_path / "rank 0").read_text()


def test_training_draws_no_random_numbers_so_there_are_none_to_save(cluster: Cluster, models: Models) -> None:
    model = models.get("qwen2", tied=True)
    world, actor = SPLITS["TP2-SP"]
    batch = batches_of(model, world, actor)[0]
    assert cluster.run(world, save_jobs.draw_no_random_number, setup_of(model, actor), batch) == [True, True]


@pytest.mark.parametrize(
    ("in_file", "in_trainer", "expected"),
    [("float32", "float32", False), ("bfloat16", "float32", True), ("float32", "bfloat16", True)],
)
def test_master_weights_are_saved_where_the_model_has_fewer_bits(in_file: str, in_trainer: str, expected: bool) -> None:
    shape = replace(make_shape(), dtype=in_file)
    assert has_own_master(megatron_layout(shape, MegatronParallel(), dtype=in_trainer)) is expected
