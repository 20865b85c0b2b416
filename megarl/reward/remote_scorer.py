"""The scorer that asks a backend, be it worker processes, a server or models on engines, and `on_error` in action."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol, assert_never

from megarl.config.reward import (
    FrozenRewardConfig,
    FunctionRewardConfig,
    HttpRewardConfig,
    JudgeRewardConfig,
    WorkerRewardConfig,
)
from megarl.errors import RewardError, ScoreError
from megarl.observe.observer import Observer
from megarl.reward.pool import ForeignAnswerError, LateError, MachineFaultError, RewardWorkerDiedError, score_of
from megarl.reward.protocol import Answer, Request
from megarl.reward.scorer import assert_finished
from megarl.types import Prompt, RolloutGroup, Score, ScoredGroup

logger = logging.getLogger(__name__)

MAX_ERRORS_IN_A_ROW = 256
"""Above it the reward is broken: the run stops, whatever `on_error` says about single rollouts."""


class ScoringBackend(Protocol):
    """Scores responses: worker processes, a judge over HTTP, or models on engines."""

    async def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """Return an answer per response.

        Raises a ScoreError if none of these has a score, another RewardError if no response will have one.
        """
        ...

    def close(self) -> None: ...


class RemoteScorer:
    """Scores rollouts in a backend, each by itself or a group at once. `on_error` handles those without a score."""

    def __init__(
        self,
        backend: ScoringBackend,
        observer: Observer,
        *,
        name: str,
        config: WorkerRewardConfig | HttpRewardConfig | JudgeRewardConfig | FrozenRewardConfig,
    ) -> None:
        """`name` stands for the reward in messages."""
        self._backend = backend
        self._observer = observer
        self._name = name
        self._config = config
        self._num_errors = 0
        """Errors since the last score."""

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        assert_finished(group)
        requests = _requests(group)
        is_whole = isinstance(self._config, FunctionRewardConfig) and self._config.scores_groups
        size = len(requests) if is_whole else 1
        tasks = [
            asyncio.create_task(self._score(group.prompt, first, requests[first : first + size]))
            for first in range(0, len(requests), size)
        ]
        try:
            scores = [score for part in await asyncio.gather(*tasks) for score in part]
        finally:
            # After a failure the rest of the group is useless.
            for task in tasks:
                task.cancel()
        return ScoredGroup(group=group, scores=tuple(scores))

    def close(self) -> None:
        self._backend.close()

    async def _score(self, prompt: Prompt, first: int, requests: Sequence[Request]) -> list[Score]:
        """Return the scores of some rollouts of a group, from the first of these on."""
        began = time.monotonic()
        try:
            answers = await self._backend.answers(requests)
        except ScoreError as error:
            return [self._without_score(error, prompt, first + offset) for offset in range(len(requests))]
        except RewardError as error:
            raise RewardError(self._named(error, prompt, first)) from error
        seconds = (time.monotonic() - began) / len(requests)
        return [self._read(answer, prompt, first + offset, seconds) for offset, answer in enumerate(answers)]

    def _read(self, answer: Answer, prompt: Prompt, index: int, seconds: float) -> Score:
        try:
            score = score_of(answer)
        except ScoreError as error:
            return self._without_score(error, prompt, index)
        self._num_errors = 0
        self._observer.scored(seconds)
        return score

    def _without_score(self, error: ScoreError, prompt: Prompt, index: int) -> Score:
        self._num_errors += 1
        self._observer.score_failed(_cause(error))
        message, config = self._named(error, prompt, index), self._config
        if config.on_error != "fail" and self._num_errors > MAX_ERRORS_IN_A_ROW:
            raise RewardError(f"{self._num_errors} rollouts in a row have no score; the last: {message}")
        match config.on_error:
            case "fail":
                raise ScoreError(message)
            case "value" if isinstance(error, MachineFaultError):
                logger.warning("masked, since not the sample is at fault: %s", message)
                return Score(value=0.0, components={}, is_masked=True)
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
    """Return the metric's label; `error` if the reward itself failed."""
    match error:
        case LateError():
            return "late"
        case MachineFaultError():
            return "machine_fault"
        case ForeignAnswerError():
            return "foreign_answer"
        case RewardWorkerDiedError():
            return "worker_died"
        case _:
            return "error"


def _requests(group: RolloutGroup) -> list[Request]:
    """Return one request per rollout, with all that a reward may ask for."""
    prompt, texts = group.prompt, [rollout.text for rollout in group.rollouts]
    return [
        Request(
            data_source=prompt.data_source,
            solution_str=text,
            ground_truth=prompt.ground_truth,
            extra_info=dict(prompt.extra_info),
            response=text,
            prompt=str(prompt.messages[-1]["content"]) if prompt.messages else "",
            messages=prompt.messages,
            token_ids=rollout.token_ids.tolist(),
            finish_reason=rollout.finish_reason.value,
            group=texts,
        )
        for rollout, text in zip(group.rollouts, texts, strict=True)
    ]
