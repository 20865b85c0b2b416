"""The scorer of a run that compares with the ground truth, in the process that has the rollouts."""

from __future__ import annotations

import time
from typing import Protocol

from megarl.observe.observer import Observer
from megarl.stages import Scorer
from megarl.types import FinishReason, Prompt, Rollout, RolloutGroup, Score, ScoredGroup


class ClosableScorer(Scorer, Protocol):
    def close(self) -> None:
        """End all processes of the scorer. May be called twice."""
        ...


class ExactScorer:
    """1 if the response equals the ground truth, white space around both ignored, else 0. Needs no worker."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        assert_finished(group)
        return ScoredGroup(group=group, scores=tuple(self._score(group.prompt, rollout) for rollout in group.rollouts))

    def _score(self, prompt: Prompt, rollout: Rollout) -> Score:
        began = time.monotonic()
        value = float(rollout.text.strip() == prompt.ground_truth.strip())
        self._observer.scored(time.monotonic() - began)
        return Score(value=value, components={})

    def close(self) -> None:
        """Nothing to close."""


def assert_finished(group: RolloutGroup) -> None:
    for index, rollout in enumerate(group.rollouts):
        is_aborted = rollout.finish_reason is FinishReason.ABORT
        assert not is_aborted, f"prompt {group.prompt.uid}, rollout {index} was aborted: there is nothing to score"
