"""The trainer ranks of the saving tests: they load a folder and save it again together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from megarl.checkpoint.save import save_hf
from megarl.config.model import read_model_shape
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.hf import load_hf
from megarl.weights.executors.meeting import StoreServer
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout


def load_and_save(parallel: MegatronParallel, source_folder: Path, folder: Path) -> None:
    """Load a float32 model into ranks, each in a thread of its own, and save it from there."""
    server = StoreServer()
    layout = megatron_layout(read_model_shape(source_folder), parallel, dtype="float32")

    def save(rank: int) -> None:
        group = TransferGroup.join(server.address, name="save", peer=rank, num_peers=parallel.world_size, timeout_s=300)
        holding = layout.by_rank[rank]
        tensors = {name: torch.empty(spec.shape) for name, spec in holding.tensors.items()}
        load_hf(source_folder, holding, layout.canonical, tensors)
        save_hf(folder, source_folder=source_folder, layout=layout, tensors=tensors, group=group)
        group.close()

    with ThreadPoolExecutor(parallel.world_size) as pool:
        list(pool.map(save, range(parallel.world_size)))
