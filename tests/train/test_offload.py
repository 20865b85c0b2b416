from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.config.lora import LoraConfig
from megarl.train import optimizer as optimizer_module
from megarl.train.offload import Offload, host_places, host_zeros
from megarl.train.optimizer import ModelOptimizer
from tests.schedule import slow
from tests.train import jobs
from tests.train.cluster import Cluster
from tests.train.conftest import Models
from tests.train.samples import make_samples
from tests.train.splits import MIXTURE_SPLITS, SPLITS, packed, saved_tensors, setup_of

CPU = torch.device("cpu")


def test_every_view_has_its_values_again() -> None:
    buffer, state = torch.randn(100), torch.randn(7, 3)
    view = buffer[10:40].view(5, 6).t()
    before = [tensor.clone() for tensor in (buffer, view, state)]
    offload = Offload(CPU)
    for _ in range(3):
        offload.release([view, buffer, state])
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (buffer, view, state))
        offload.reload()
        assert all(torch.equal(*pair) for pair in zip((buffer, view, state), before, strict=True))


def test_what_is_away_is_at_hand_in_host_memory() -> None:
    buffer, other = torch.randn(100), torch.randn(3)
    view = buffer[10:40].view(5, 6).t()
    before = view.clone()
    offload = Offload(CPU)
    assert offload.at_hand(view) is view
    offload.release([other, buffer])
    assert torch.equal(offload.at_hand(view), before)
    offload.reload()
    view.zero_()
    assert offload.at_hand(view) is view


def test_new_values_are_taken_along_and_host_memory_is_kept() -> None:
    buffer = torch.zeros(50)
    offload = Offload(CPU)
    offload.release([buffer])
    places = {key: place.data_ptr() for key, (_, place) in offload._places.items()}
    offload.reload()
    buffer.fill_(3.0)
    later = torch.ones(8)
    offload.release([buffer, later])
    offload.reload()
    assert buffer.eq(3.0).all()
    assert later.eq(1.0).all()
    assert places.items() <= {key: place.data_ptr() for key, (_, place) in offload._places.items()}.items()


def test_places_in_host_memory_have_their_exact_sizes_and_begin_where_any_dtype_may() -> None:
    places = host_places([3, 128, 0, 65], CPU)
    assert [place.nbytes for place in places] == [3, 128, 0, 65]
    assert [place.storage_offset() for place in places] == [0, 64, 192, 192]
    assert places[0].untyped_storage().nbytes() == 192 + 128, "one block, and no power of two"


def test_pinned_memory_has_pages_of_its_own_and_is_unpinned_before_they_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: dict[int, int] = {}
    library = SimpleNamespace(
        cudaHostRegister=lambda address, num_bytes, _flags: pinned.update({address: num_bytes}) or 0,
        cudaHostUnregister=pinned.pop,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: library)
    blocks = [host_zeros(number, torch.float32, torch.device("cuda")) for number in (5, 3000, 156_736)]
    assert sorted(pinned.values()) == [20, 12_000, 626_944]
    assert all(address % mmap.PAGESIZE == 0 for address in pinned)
    part = blocks[1][7:].fill_(2.5)
    assert [float(block.sum()) for block in blocks] == [0.0, 2.5 * 2993, 0.0]
    del blocks
    assert list(pinned.values()) == [12_000], "a view keeps its block"
    del part
    assert not pinned


def test_an_optimizer_that_offloads_nothing_gives_back_what_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[torch.device] = []
    monkeypatch.setattr(optimizer_module, "free_cache", freed.append)
    optimizer = object.__new__(ModelOptimizer)
    optimizer._device = CPU
    optimizer.chunks = []
    optimizer.release()
    assert (freed, optimizer.is_released, optimizer.has_weights) == ([CPU], False, True)


@pytest.mark.parametrize(
    ("split", "lora"),
    [*slow(("DP2", None)), ("PP2-VPP2", None), ("DP2", LoraConfig(rank=4))],
    ids=["DP2", "PP2-VPP2", "DP2-LoRA"],
)
def test_a_rank_that_takes_turns_learns_the_same_to_the_last_bit(
    split: str, lora: LoraConfig | None, cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    model = models.get("qwen2", tied=True)
    world, actor = SPLITS[split]
    samples = make_samples(6, vocab=model.shape.vocab, seed=8)
    batches = [packed(samples[:3], world=world, actor=actor), packed(samples[3:], world=world, actor=actor)] * 2
    setup = replace(setup_of(model, actor), lora=lora)
    whole = cluster.run(world, jobs.train_and_save, setup, batches, tmp_path / "whole")
    for offload in ("optimizer", "everything"):
        taking_turns = replace(setup, actor=actor.model_copy(update={"offload": offload}))
        found = cluster.run(world, jobs.train_in_turns, taking_turns, batches, tmp_path / offload)
        for (_, expected_files, expected), (files, tensors, message) in zip(whole, found, strict=True):
            assert all(np.array_equal(tensors[name], expected[name]) for name in expected)
            # Saved while away.
            assert files == expected_files
            assert message == "released; reload comes first"


@pytest.mark.parametrize(
    ("family", "split"), [("qwen2", "DP2"), ("qwen3_5_text", "DP2"), *slow(("qwen3_moe", "EP2-DP2"))]
)
def test_states_in_host_memory_are_updated_in_pieces_as_whole_ones_on_the_device(
    family: str, split: str, cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    """Weights are bfloat16, as on a GPU: master weights are apart, and a piece has parts of several parameters. Some of
    a delta net's are float32: they are their own masters, and Megatron puts them first."""
    model = models.get(family, tied=family == "qwen2")
    world, actor = (SPLITS | MIXTURE_SPLITS)[split]
    samples = make_samples(6, vocab=model.shape.vocab, seed=8)
    batches = [packed(samples[:3], world=world, actor=actor), packed(samples[3:], world=world, actor=actor)] * 2
    on_host = actor.model_copy(update={"offload": "optimizer"})
    plain, pieces = (jobs.train_and_save, setup_of(model, actor)), (jobs.train_in_turns, setup_of(model, on_host))
    whole = cluster.run(world, jobs.as_on_a_gpu, *plain, batches, tmp_path / "whole")
    found = cluster.run(world, jobs.as_on_a_gpu, *pieces, batches, tmp_path / "pieces")
    for (_, expected_files, expected), (files, tensors, _) in zip(whole, found, strict=True):
        assert all(np.array_equal(tensors[name], expected[name]) for name in expected)
        assert any("master" in name for name in files)
        assert files == expected_files
    saved = saved_tensors(tmp_path / "pieces")
    masters = {name: tensor for name, tensor in saved.items() if name.startswith("optimizer/master/")}
    for name, master in masters.items():
        assert torch.equal(master.bfloat16(), saved[name.replace("optimizer/master", "model")].bfloat16()), name
