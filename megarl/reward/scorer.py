"""From a group of rollouts to its scores. Knows rewards and text; not where rollouts come from or what scores do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, assert_never

from megarl.config.reward import (
    BySourceRewardConfig,
    ExactRewardConfig,
    FunctionRewardConfig,
    HttpRewardConfig,
    RewardConfig,
    SingleRewardConfig,
    WorkerRewardConfig,
)
from megarl.errors import RewardError, ScoreError
from megarl.observe.observer import Observer
from megarl.reward.judge import HttpJudge
from megarl.reward.pool import LateError, RewardWorkerDiedError, WorkerPool
from megarl.reward.protocol import Request
from megarl.reward.scorers import exact
from megarl.reward.workload import workload_of
from megarl.stages import Scorer
from megarl.types import FinishReason, Prompt, Rollout, RolloutGroup, Score, ScoredGroup

logger = logging.getLogger(__name__)

MAX_ERRORS_IN_A_ROW = 256
"""More than chance explains: the reward is broken, whatever `on_error` says about single rollouts."""


class ClosableScorer(Scorer, Protocol):
    def close(self) -> None:
        """Leave no process behind. May be called twice."""
        ...


class Asked(Protocol):
    """Whoever scores one response: worker processes, or a judge over HTTP."""

    async def ask(self, request: Request) -> Score:
        """Raises a ScoreError where this one has no score, another RewardError where none will have one."""
        ...

    def close(self) -> None: ...


def build_scorer(
    config: RewardConfig, *, log_path: Path | None = None, observer: Observer | None = None
) -> ClosableScorer:
    """The scorer of a recipe; what user code prints goes to `log_path`, else to standard error."""
    watched = observer or Observer(())
    if isinstance(config, BySourceRewardConfig):
        return BySourceScorer({name: _single(part, log_path, watched) for name, part in config.sources.items()})
    return _single(config, log_path, watched)


def _single(config: SingleRewardConfig, log_path: Path | None, observer: Observer) -> ClosableScorer:
    match config:
        case ExactRewardConfig():
            return ExactScorer(observer)
        case HttpRewardConfig():
            return AskingScorer(config, HttpJudge(config), observer)
        case _:
            return AskingScorer(config, WorkerPool(workload_of(config), log_path=log_path), observer)


class ExactScorer:
    """1 when the response equals the ground truth, white space around either ignored, else 0. Needs no worker."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        _assert_finished(group)
        return ScoredGroup(group=group, scores=tuple(self._score(group.prompt, rollout) for rollout in group.rollouts))

    def _score(self, prompt: Prompt, rollout: Rollout) -> Score:
        began = time.monotonic()
        value = exact.compute_score("", rollout.text, prompt.ground_truth)
        self._observer.scored(time.monotonic() - began)
        return Score(value=value, components={})

    def close(self) -> None:
        """Nothing to close."""


class BySourceScorer:
    """The scorer that the recipe names for a prompt's data source."""

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


class AskingScorer:
    """Each rollout on its own. What has no score is an error, or what `on_error` says; never a silent zero."""

    def __init__(self, config: WorkerRewardConfig | HttpRewardConfig, asked: Asked, observer: Observer) -> None:
        self._config = config
        self._asked = asked
        self._observer = observer
        self._num_errors = 0
        """Since the last score."""

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
        self._asked.close()

    async def _score_rollout(self, group: RolloutGroup, index: int) -> Score:
        began = time.monotonic()
        try:
            score = await self._asked.ask(_request(group.prompt, group.rollouts[index].text))
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
        config = self._config
        match config:
            case FunctionRewardConfig():
                reward = f"reward {config.path} {config.name}"
            case HttpRewardConfig():
                reward = f"reward {config.url}"
            case _:
                reward = f"reward {config.kind}"
        return f"{reward}: data_source {prompt.data_source}, prompt {prompt.uid}, rollout {index}: {error}"


def _cause(error: ScoreError) -> str:
    """In one word: `late`, `worker_died`, or `error` where the reward itself said so."""
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
