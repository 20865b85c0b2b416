"""Draws tokens as often as the policy's probabilities say, in the schedulers of SGLang on a GPU.

SGLang lets tokens race: the smallest exponential number divided by a probability wins. On a GPU torch's numbers are
multiples of 6e-8 near zero, where those of rare tokens lie that win. With a vocabulary of 152,064 tokens, of which
all but one share 18 % alike, these were drawn in 18.8 % of the cases. Here one number is looked up in the sums of the
probabilities: the share of any set of tokens is right to about 1e-6, for as much memory and time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_DRAW = "sglang.srt.layers.sampler.sampling_from_probs_torch"
"""Draws without top-p, top-k and min-p, of which megarl's requests seldom have one."""


def register_hook() -> None:
    """Register the hook; a scheduler applies it when it loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - only in the server

    HookRegistry.register(_DRAW, unless_seeded, HookType.AROUND)


def unless_seeded(
    draw: Callable[..., torch.Tensor],
    probabilities: torch.Tensor,
    sampling_seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Leave seeded draws to SGLang, which makes their numbers in float64."""
    if sampling_seed is not None:
        return draw(probabilities, sampling_seed, positions)
    return drawn(probabilities)


def drawn(probabilities: torch.Tensor) -> torch.Tensor:
    """Return [rows], int32: an index for each row of [rows, tokens]. The ranks of an engine draw the same."""
    # A row alone would be summed in an order that differs from run to run.
    rows = probabilities if len(probabilities) > 1 else probabilities.repeat(2, 1)
    sums = rows.cumsum(dim=-1)
    total = sums[:, -1:]
    place = torch.rand_like(total) * total  # always less than the total: of a number below 1, rounded or not
    return torch.searchsorted(sums, place, right=True).view(-1)[: len(probabilities)].to(torch.int32)
