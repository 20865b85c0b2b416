"""From a group of rollouts to its scores. Knows rewards and text; not where rollouts come from or what scores do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol, assert_never

from megarl.config.recipe import ExactRewardConfig, FunctionRewardConfig, RewardConfig
from megarl.errors import RewardError
from megarl.reward.pool import WorkerPool
from megarl.reward.protocol import Request
from megarl.stages import Scorer
from megarl.types import FinishReason, RolloutGroup, Score, ScoredGroup


class ClosableScorer(Scorer, Protocol):
    def close(self) -> None:
        """Leave no process behind. May be called twice."""
        ...


def build_scorer(config: RewardConfig, *, log_path: Path | None = None) -> ClosableScorer:
    """The scorer of a recipe; what user code prints goes to `log_path`, else to standard error."""
    match config:
        case ExactRewardConfig():
            return ExactScorer()
        case FunctionRewardConfig():
            return FunctionScorer(config, log_path=log_path)
        case _:
            assert_never(config)


class ExactScorer:
    """1 when the response equals the ground truth, white space around either ignored, else 0."""

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        _assert_finished(group)
        truth = group.prompt.ground_truth.strip()
        scores = (Score(value=float(rollout.text.strip() == truth), components={}) for rollout in group.rollouts)
        return ScoredGroup(group=group, scores=tuple(scores))

    def close(self) -> None:
        """Nothing to close."""


class FunctionScorer:
    """The user's function, in worker processes, with a deadline per rollout. Any failure is an error, never a zero."""

    def __init__(self, config: FunctionRewardConfig, *, log_path: Path | None = None) -> None:
        self._config = config
        self._pool = WorkerPool(config, log_path=log_path)

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        _assert_finished(group)
        tasks = [asyncio.create_task(self._score_rollout(group, index)) for index in range(len(group.rollouts))]
        try:
            scores = await asyncio.gather(*tasks)
        finally:
            # After a failure the rest of the group is of no use to anybody.
            for task in tasks:
                task.cancel()
        return ScoredGroup(group=group, scores=tuple(scores))

    def close(self) -> None:
        self._pool.close()

    async def _score_rollout(self, group: RolloutGroup, index: int) -> Score:
        prompt = group.prompt
        request = Request(
            data_source=prompt.data_source,
            solution_str=group.rollouts[index].text,
            ground_truth=prompt.ground_truth,
            extra_info=dict(prompt.extra_info),
        )
        try:
            return await self._pool.ask(request)
        except RewardError as error:
            sample = f"data_source {prompt.data_source}, prompt {prompt.uid}, rollout {index}"
            raise RewardError(f"reward {self._config.path} {self._config.name}: {sample}: {error}") from error


def _assert_finished(group: RolloutGroup) -> None:
    for index, rollout in enumerate(group.rollouts):
        is_aborted = rollout.finish_reason is FinishReason.ABORT
        assert not is_aborted, f"prompt {group.prompt.uid}, rollout {index} was aborted: there is nothing to score"
