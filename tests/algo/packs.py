"""Packed micro-batches for tests: sequences of random tokens in any order, with or without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.loss import PolicyTokens, Segments

COLUMNS = ("logprobs", "entropy", "old_logprobs", "rollout_logprobs", "advantages", "reference_logprobs")


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """A mini-batch before packing: rows are sequences, the columns of a token are in the order of COLUMNS."""

    columns: tuple[Tensor, ...]  # per sequence [6, T]
    loss_masks: tuple[Tensor, ...]  # per sequence [T]

    @property
    def num_loss_tokens(self) -> int:
        return sum(int(mask.sum()) for mask in self.loss_masks)

    @property
    def num_sequences(self) -> int:
        return sum(bool(mask.any()) for mask in self.loss_masks)


def random_sequences(seed: int, lengths: Sequence[int], *, dtype: torch.dtype = torch.float64) -> Sequences:
    """Draw advantages of both signs, ratios on both sides of every clip, and some tokens outside the loss."""
    random = torch.Generator().manual_seed(seed)
    columns, loss_masks = [], []
    for length in lengths:
        tokens = torch.randn(len(COLUMNS), length, generator=random, dtype=torch.float64)
        tokens[4] = tokens[4, 0]
        columns.append(tokens.to(dtype))
        loss_masks.append(torch.rand(length, generator=random) < 0.7)
    return Sequences(columns=tuple(columns), loss_masks=tuple(loss_masks))


def pack(
    sequences: Sequences, members: Sequence[int], leaves: Sequence[Tensor] | None = None, *, padding: int = 0
) -> PolicyTokens:
    """Return one micro-batch of these sequences in this order; `leaves` replace the log-probabilities."""
    parts = [sequences.columns[i] for i in members]
    masks = [sequences.loss_masks[i] for i in members]
    logprobs = [sequences.columns[i][0] if leaves is None else leaves[i] for i in members]
    if padding:
        # Whatever stands in the padding must not matter.
        parts.append(torch.full((len(COLUMNS), padding), 3.7, dtype=parts[0].dtype))
        masks.append(torch.zeros(padding, dtype=torch.bool))
        logprobs.append(torch.full((padding,), -7.5, dtype=parts[0].dtype))
    starts = torch.tensor([0, *(len(mask) for mask in masks)]).cumsum(0).to(torch.int32)
    table = torch.cat(parts, dim=1)
    return PolicyTokens(
        logprobs=torch.cat(logprobs),
        entropy=table[1],
        old_logprobs=table[2],
        rollout_logprobs=table[3],
        advantages=table[4],
        segments=Segments.of(torch.cat(masks), starts),
        reference_logprobs=table[5],
        teacher=torch.stack([table[5], table[5] - 6, table[3] - 6, *torch.zeros_like(table[:2])], dim=1),
        candidates=torch.stack([torch.cat(logprobs) - 8, torch.cat(logprobs) - 9], dim=1),
    )


def one_sequence(
    logprobs: Sequence[float], old: Sequence[float], advantages: Sequence[float], *, entropy: Sequence[float] = ()
) -> PolicyTokens:
    """Return segments in which every token is a loss token."""
    num_tokens = len(logprobs)
    return PolicyTokens(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        entropy=torch.tensor(entropy or [0.0] * num_tokens),
        old_logprobs=torch.tensor(old),
        rollout_logprobs=torch.tensor(old),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        segments=Segments.of(torch.ones(num_tokens, dtype=torch.bool), torch.tensor([0, num_tokens])),
    )
