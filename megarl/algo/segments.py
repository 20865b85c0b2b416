"""Sums and means over the sequences of a packed micro-batch. Pure torch; no loop over sequences.

A sequence is never split over micro-batches, so a sum over it needs no other micro-batch and no other rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The S sequences of one micro-batch of N tokens, padding included. Sums are over loss tokens only."""

    loss_mask: Tensor  # [N], bool
    lengths: Tensor  # [S], int64: all tokens
    sequence_ids: Tensor  # [N], int64
    num_loss_tokens: Tensor  # [S], float64

    @classmethod
    def of(cls, loss_mask: Tensor, starts: Tensor) -> Segments:
        """`starts`: where each sequence starts, then N. [S + 1]"""
        lengths = starts.diff().to(torch.int64)
        numbers = torch.arange(len(lengths), device=lengths.device)
        return cls(
            loss_mask=loss_mask,
            lengths=lengths,
            sequence_ids=numbers.repeat_interleave(lengths, output_size=len(loss_mask)),
            num_loss_tokens=_segment_sums(loss_mask.double(), lengths),
        )

    def sums(self, values: Tensor) -> Tensor:
        """[N] -> [S], over loss tokens. In double precision: a sequence may have tens of thousands of tokens."""
        # `where`, not a product: zero times a value that is not finite is not zero.
        counted = torch.where(self.loss_mask, values, torch.zeros_like(values))
        return _segment_sums(counted.double(), self.lengths).to(values.dtype)

    def means(self, values: Tensor) -> Tensor:
        """[N] -> [S], over loss tokens; 0 for a sequence without any."""
        return self.sums(values) / self.num_loss_tokens.clamp(min=1).to(values.dtype)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[S] -> [N], each token with the value of its sequence."""
        return per_sequence[self.sequence_ids]


def _segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    # Not index_add: on a GPU its order of addition varies, and with it the last bits of the result.
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
