from __future__ import annotations

import torch

from megarl.algo.loss import Segments

NAN = torch.nan
SEGMENTS = Segments.of(
    torch.tensor([True, True, False, False, True, False, False]), torch.tensor([0, 3, 5, 7], dtype=torch.int32)
)
VALUES = torch.tensor([1.0, 2.0, NAN, NAN, 5.0, NAN, NAN])


def test_sums_and_means_are_over_loss_tokens_whatever_the_others_hold() -> None:
    assert SEGMENTS.sums(VALUES).tolist() == [3, 5, 0]
    assert SEGMENTS.means(VALUES).tolist() == [1.5, 5, 0]


def test_every_token_gets_the_value_of_its_sequence() -> None:
    assert SEGMENTS.spread(torch.tensor([7.0, 8.0, 9.0])).tolist() == [7, 7, 7, 8, 8, 9, 9]


def test_gradients_flow_back_to_loss_tokens_only() -> None:
    values = VALUES.clone().requires_grad_()
    (SEGMENTS.spread(SEGMENTS.means(values)) * torch.arange(1.0, 8.0)).sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert values.grad.tolist() == [3, 3, 0, 0, 9, 0, 0]


def test_long_sequences_are_summed_without_drift() -> None:
    values = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    segments = Segments.of(torch.ones(200_000, dtype=torch.bool), torch.tensor([0, 200_000]))
    assert segments.sums(values).item() == values.double().sum().float().item()
