"""The trainer ranks of the saving tests: they load a folder and save it again together."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.checkpoint.save import save_hf
from megarl.config.model import read_model_shape
from megarl.weights.executors.group import StoreAddress, TransferGroup
from megarl.weights.executors.hf import load_hf
from megarl.weights.executors.tensors import torch_dtype
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout

TIMEOUT_S = 300.0


def load_and_save(
    address: StoreAddress,
    rank: int,
    parallel: MegatronParallel,
    source_folder: Path,
    folders: dict[Path, str | None],
    dtype: str,
) -> bool:
    """Save to every folder, in the dtype given for it."""
    torch.set_num_threads(1)
    group = TransferGroup.join(address, name="save", peer=rank, num_peers=parallel.world_size, timeout_s=TIMEOUT_S)
    layout = megatron_layout(read_model_shape(source_folder), parallel, dtype=dtype)
    holding = layout.by_rank[rank]
    tensors = {
        name: torch.nn.Parameter(torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)))
        for name, spec in holding.tensors.items()
    }
    load_hf(source_folder, holding, layout.canonical, tensors)
    for folder, saved_dtype in folders.items():
        save_hf(
            folder,
            source_folder=source_folder,
            layout=layout,
            tensors=tensors,
            group=group,
            dtype=saved_dtype,
            bucket_bytes=10_000,
        )
    return True
