"""Which sequence each token of a packed micro-batch belongs to. Pure torch; no loop over sequences.

A sequence is always whole within a micro-batch, so a sum over a sequence needs no other micro-batch and no other rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The S sequences of one micro-batch of N tokens, padding among them. Only loss tokens count."""

    loss_mask: Tensor  # [N], bool
    lengths: Tensor  # [S], int64: all tokens
    sequence_ids: Tensor  # [N], int64
    num_loss_tokens: Tensor  # [S], float64

    @classmethod
    def of(cls, loss_mask: Tensor, starts: Tensor) -> Segments:
        """From where each sequence starts, [S + 1], ending with N."""
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
        # `where`, not a product: zero times a value that is not finite would spread it.
        counted = torch.where(self.loss_mask, values, torch.zeros_like(values))
        return _segment_sums(counted.double(), self.lengths).to(values.dtype)

    def means(self, values: Tensor) -> Tensor:
        """[N] -> [S], over loss tokens; 0 for a sequence without any."""
        return self.sums(values) / self.num_loss_tokens.clamp(min=1).to(values.dtype)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[S] -> [N]: to every token the value of its sequence."""
        return per_sequence[self.sequence_ids]


def _segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    # Not index_add: on a GPU it adds in any order, and the same step would give other bits each time.
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
