"""Imitation of demonstrations: nothing is compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.results import PreferenceStats
from megarl.types import Estimates, ScoredGroup, TrainSample


class Sft:
    """Imitation: every token of a demonstration has advantage 1."""

    def keeps(self, group: ScoredGroup) -> bool:
        return True

    def take_dropped(self) -> dict[str, int]:
        return {}

    kl_coef: float | None = None
    pairs: PreferenceStats | None = None

    def credit_task(self, groups: Sequence[ScoredGroup]) -> None:
        return None

    def measure(self, groups: Sequence[ScoredGroup], estimates: Estimates) -> None:
        return None

    def assign(self, groups: Sequence[ScoredGroup], estimates: Estimates) -> list[TrainSample]:
        return [
            TrainSample(
                prompt_ids=scored.group.prompt.token_ids,
                images=scored.group.prompt.images,
                rollout=rollout,
                advantages=rollout.loss_mask.astype(np.float32),
            )
            for scored in groups
            for rollout in scored.group.rollouts
        ]
