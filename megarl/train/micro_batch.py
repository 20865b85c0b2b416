"""A micro-batch as tensors on the device, in the shapes Megatron wants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megarl.train.attention import PackedSequences
from megarl.types import FloatArray, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMicroBatch:
    token_ids: Tensor  # [1, N], int64
    positions: Tensor  # [1, N], int64
    sequences: PackedSequences
    targets: Tensor  # [N], int64
    loss_mask: Tensor  # [N], bool
    rollout_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    old_logprobs: Tensor | None  # [N], as the next three
    reference_logprobs: Tensor | None
    values: Tensor | None
    returns: Tensor | None
    versions: Tensor | None  # [N], int32
    temperature: float


def to_device(micro_batch: MicroBatch, device: torch.device, *, temperature: float) -> DeviceMicroBatch:
    def tensor(array: npt.NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype, non_blocking=True)

    def column(array: FloatArray | None) -> Tensor | None:
        return None if array is None else tensor(array, torch.float32)

    starts = micro_batch.sequence_starts
    return DeviceMicroBatch(
        token_ids=tensor(micro_batch.token_ids, torch.int64)[None],
        positions=tensor(micro_batch.positions, torch.int64)[None],
        sequences=PackedSequences(starts=tensor(starts, torch.int32), lengths=np.diff(starts).tolist()),
        targets=tensor(micro_batch.targets, torch.int64),
        loss_mask=tensor(micro_batch.loss_mask, torch.bool),
        rollout_logprobs=tensor(micro_batch.rollout_logprobs, torch.float32),
        advantages=tensor(micro_batch.advantages, torch.float32),
        old_logprobs=column(micro_batch.old_logprobs),
        reference_logprobs=column(micro_batch.reference_logprobs),
        values=column(micro_batch.values),
        returns=column(micro_batch.returns),
        versions=None if micro_batch.versions is None else tensor(micro_batch.versions, torch.int32),
        temperature=temperature,
    )
