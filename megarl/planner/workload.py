"""The lengths of a step's prompts and responses: assumed from a recipe's limits, or recorded by a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.config.recipe import DataConfig, SamplingConfig

_NUM_SAMPLES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorkload:
    """Lengths that an estimate assumes; a recipe states only their upper bounds."""

    mean_prompt_tokens: int
    mean_response_tokens: int
    max_response_tokens: int
    """Length of the longest response."""
    quantiles: tuple[int, ...] = ()
    """Recorded lengths of responses at equal distances of rank, from the shortest to the longest; empty assumes a
    power of the rank that has the mean and the maximum, which is a uniform distribution for a mean of half the
    maximum."""
    kept_share: float | None = None
    """Share of the groups that `algorithm.filter` keeps; None assumes that what oversampling adds is dropped."""

    @classmethod
    def half(cls, data: DataConfig, sampling: SamplingConfig) -> StepWorkload:
        """Assume half of the upper bounds."""
        return cls(
            mean_prompt_tokens=max(1, data.max_prompt_tokens // 2),
            mean_response_tokens=max(1, sampling.max_response_tokens // 2),
            max_response_tokens=sampling.max_response_tokens,
        )

    def limited(self, max_response_tokens: int) -> StepWorkload:
        """Return the lengths that a limit leaves of these."""
        if max_response_tokens >= self.max_response_tokens:
            return self
        cut = [min(length, max_response_tokens) for length in self.lengths(_NUM_SAMPLES)]
        return replace(
            self,
            mean_response_tokens=max(1, round(sum(cut) / len(cut))),
            max_response_tokens=max_response_tokens,
            quantiles=tuple(min(length, max_response_tokens) for length in self.quantiles),
        )

    @property
    def sequence_tokens(self) -> int:
        return self.mean_prompt_tokens + self.mean_response_tokens

    @property
    def mean_squared_tokens(self) -> float:
        """Mean of the squared length of a sequence, which attention costs."""
        lengths = self.lengths(_NUM_SAMPLES)
        return sum((self.mean_prompt_tokens + length) ** 2 for length in lengths) / len(lengths)

    def lengths(self, count: int) -> list[int]:
        """Return the lengths of `count` responses, in an order without a trend; one of them is the longest."""
        ranks = [(index + 0.5) / count for index in range(count - 1)] + [1.0]
        ordered = [max(1, round(self._length_at(rank))) for rank in ranks]
        step = _coprime_step(count)
        return [ordered[index * step % count] for index in range(count)]

    def _length_at(self, rank: float) -> float:
        if self.quantiles:
            return _interpolated(self.quantiles, rank)
        mean = min(self.mean_response_tokens, self.max_response_tokens)
        return self.max_response_tokens * math.pow(rank, self.max_response_tokens / mean - 1)


def _interpolated(quantiles: Sequence[int], rank: float) -> float:
    place = rank * (len(quantiles) - 1)
    low = min(int(place), len(quantiles) - 2) if len(quantiles) > 1 else 0
    high = min(low + 1, len(quantiles) - 1)
    return quantiles[low] + (place - low) * (quantiles[high] - quantiles[low])


def _coprime_step(count: int) -> int:
    """Return a step near the golden section of `count` that visits every place once."""
    candidates = range(max(1, int(0.618 * count)), count + 2)
    return next(step for step in candidates if math.gcd(step, count) == 1)
