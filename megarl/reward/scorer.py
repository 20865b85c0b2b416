"""The scorers: from a group of rollouts to its scores. Knows neither workers nor HTTP, nor what scores are used for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Protocol, assert_never

from megarl.config.reward import HttpRewardConfig, WorkerRewardConfig
from megarl.errors import RewardError, ScoreError
from megarl.observe.observer import Observer
from megarl.reward.pool import LateError, RewardWorkerDiedError
from megarl.reward.protocol import Request
from megarl.stages import Scorer
from megarl.types import FinishReason, Prompt, Rollout, RolloutGroup, Score, ScoredGroup

logger = logging.getLogger(__name__)

MAX_ERRORS_IN_A_ROW = 256
"""Above it the reward is broken: the run stops, whatever `on_error` says about single rollouts."""


class ClosableScorer(Scorer, Protocol):
    def close(self) -> None:
        """End all processes of the scorer. May be called twice."""
        ...


class ScoringBackend(Protocol):
    """Scores one response: worker processes, or an LLM judge over HTTP."""

    async def score(self, request: Request) -> Score:
        """Raises a ScoreError if this response has no score, another RewardError if no response will have one."""
        ...

    def close(self) -> None: ...


class ExactScorer:
    """1 if the response equals the ground truth, white space around both ignored, else 0. Needs no worker."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        _assert_finished(group)
        return ScoredGroup(group=group, scores=tuple(self._score(group.prompt, rollout) for rollout in group.rollouts))

    def _score(self, prompt: Prompt, rollout: Rollout) -> Score:
        began = time.monotonic()
        value = float(rollout.text.strip() == prompt.ground_truth.strip())
        self._observer.scored(time.monotonic() - began)
        return Score(value=value, components={})

    def close(self) -> None:
        """Nothing to close."""


class BySourceScorer:
    """Scores each group with the scorer of its data source."""

    def __init__(self, scorers: Mapping[str, ClosableScorer]) -> None:
        self._scorers = scorers

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        source = group.prompt.data_source
        if source not in self._scorers:
            known = ", ".join(self._scorers)
            raise RewardError(
                f"reward.sources has no scorer for data_source {source}, prompt {group.prompt.uid}; it has {known}"
            )
        return await self._scorers[source].score(group)

    def close(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()


class RemoteScorer:
    """Scores each rollout by itself in a backend. A rollout without a score is handled as `on_error` says."""

    def __init__(
        self, backend: ScoringBackend, observer: Observer, *, name: str, config: WorkerRewardConfig | HttpRewardConfig
    ) -> None:
        """`name` stands for the reward in messages."""
        self._backend = backend
        self._observer = observer
        self._name = name
        self._config = config
        self._num_errors = 0
        """Errors since the last score."""

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        _assert_finished(group)
        tasks = [asyncio.create_task(self._score_rollout(group, index)) for index in range(len(group.rollouts))]
        try:
            scores = await asyncio.gather(*tasks)
        finally:
            # After a failure the rest of the group is useless.
            for task in tasks:
                task.cancel()
        return ScoredGroup(group=group, scores=tuple(scores))

    def close(self) -> None:
        self._backend.close()

    async def _score_rollout(self, group: RolloutGroup, index: int) -> Score:
        began = time.monotonic()
        try:
            score = await self._backend.score(_request(group.prompt, group.rollouts[index].text))
        except ScoreError as error:
            self._num_errors += 1
            self._observer.score_failed(_cause(error))
            return self._without_score(self._named(error, group.prompt, index))
        except RewardError as error:
            raise RewardError(self._named(error, group.prompt, index)) from error
        self._num_errors = 0
        self._observer.scored(time.monotonic() - began)
        return score

    def _without_score(self, message: str) -> Score:
        config = self._config
        if config.on_error != "fail" and self._num_errors > MAX_ERRORS_IN_A_ROW:
            raise RewardError(f"{self._num_errors} rollouts in a row have no score; the last: {message}")
        match config.on_error:
            case "fail":
                raise ScoreError(message)
            case "mask":
                logger.warning("masked: %s", message)
                return Score(value=0.0, components={}, is_masked=True)
            case "value":
                assert config.error_value is not None, "on_error value without error_value"
                logger.warning("scored %g: %s", config.error_value, message)
                return Score(value=config.error_value, components={})
            case _:
                assert_never(config.on_error)

    def _named(self, error: RewardError, prompt: Prompt, index: int) -> str:
        where = f"data_source {prompt.data_source}, prompt {prompt.uid}, rollout {index}"
        return f"reward {self._name}: {where}: {error}"


def _cause(error: ScoreError) -> str:
    """Return the metric's label: `late`, `worker_died`, or `error` if the reward itself failed."""
    match error:
        case LateError():
            return "late"
        case RewardWorkerDiedError():
            return "worker_died"
        case _:
            return "error"


def _request(prompt: Prompt, text: str) -> Request:
    return Request(
        data_source=prompt.data_source,
        solution_str=text,
        ground_truth=prompt.ground_truth,
        extra_info=dict(prompt.extra_info),
    )


def _assert_finished(group: RolloutGroup) -> None:
    for index, rollout in enumerate(group.rollouts):
        is_aborted = rollout.finish_reason is FinishReason.ABORT
        assert not is_aborted, f"prompt {group.prompt.uid}, rollout {index} was aborted: there is nothing to score"
