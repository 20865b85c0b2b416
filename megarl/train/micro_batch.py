"""A micro-batch as tensors on the device, in the shapes Megatron wants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megarl.train.attention import PackedSequences
from megarl.types import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMicroBatch:
    token_ids: Tensor  # [1, N], int64
    positions: Tensor  # [1, N], int64
    sequences: PackedSequences
    targets: Tensor  # [N], int64
    loss_mask: Tensor  # [N], bool
    advantages: Tensor  # [N]
    rollout_logprobs: Tensor  # [N]


def to_device(micro_batch: MicroBatch, device: torch.device) -> DeviceMicroBatch:
    def tensor(array: npt.NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype, non_blocking=True)

    starts = micro_batch.sequence_starts
    return DeviceMicroBatch(
        token_ids=tensor(micro_batch.token_ids, torch.int64)[None],
        positions=tensor(micro_batch.positions, torch.int64)[None],
        sequences=PackedSequences(starts=tensor(starts, torch.int32), lengths=np.diff(starts).tolist()),
        targets=tensor(micro_batch.targets, torch.int64),
        loss_mask=tensor(micro_batch.loss_mask, torch.bool),
        advantages=tensor(micro_batch.advantages, torch.float32),
        rollout_logprobs=tensor(micro_batch.rollout_logprobs, torch.float32),
    )
