"""The process of a rollout worker, and what it leaves of a group: numbers for the driver, arrays in Ray's object store.

The arrays stay on the node that made them until a rank loads its share. The driver has a reference, and the numbers
that a step is decided by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import ray

from megarl.config.model import ModelShape
from megarl.config.reward import RewardConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import WorkerError
from megarl.reward.build import build_scorer
from megarl.reward.pool import ScoringTask, WorkerPool
from megarl.rollout.client import EngineClient, EngineEndpoint
from megarl.rollout.generator import Vocabulary
from megarl.rollout.worker import (
    AnsweredPrompt,
    EngineView,
    FollowingFleet,
    RolloutTask,
    RolloutWorker,
    WorkerReport,
)
from megarl.runtime.trainers.remote_process import RemoteProcess, this_process
from megarl.tokens import Content, ContentHandle, is_repeated
from megarl.turns import Episode
from megarl.types import FinishReason, Prompt, Rollout, RolloutGroup, Score, ScoredGroup

REPORT_EVERY_S = 0.5
_PROBE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupArrays:
    """The responses of one group, end to end."""

    token_ids: npt.NDArray[np.int32]  # [sum of T]
    logprobs: npt.NDArray[np.float32]  # [sum of T]
    starts: npt.NDArray[np.int64]  # [R + 1], where each response begins
    texts: tuple[str, ...]

    @classmethod
    def of(cls, group: RolloutGroup) -> GroupArrays:
        contents = [rollout.content.load() for rollout in _rollouts(group)]
        return cls(
            token_ids=np.concatenate([content.token_ids for content in contents]),
            logprobs=np.concatenate([content.logprobs for content in contents]),
            starts=np.cumsum([0, *(len(content.token_ids) for content in contents)], dtype=np.int64),
            texts=tuple(content.text for content in contents),
        )

    def content(self, index: int) -> Content:
        part = slice(self.starts[index], self.starts[index + 1])
        return Content(token_ids=self.token_ids[part], logprobs=self.logprobs[part], text=self.texts[index])


@dataclass(slots=True, eq=False)
class StoredGroup:
    """A reference to the arrays of one group; the responses of the group share it."""

    reference: ray.ObjectRef
    arrays: GroupArrays | None = field(default=None, repr=False)
    """Set where `fetch` brought them."""

    def load(self) -> GroupArrays:
        return self.arrays or _get([self.reference])[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredContent:
    """A `ContentHandle`: one response of a stored group."""

    group: StoredGroup
    index: int

    def load(self) -> Content:
        return self.group.load().content(self.index)


def fetch(handles: Sequence[ContentHandle]) -> None:
    """Bring the arrays of all these responses into this process, each once and many at a time."""
    groups = {id(handle.group): handle.group for handle in handles if isinstance(handle, StoredContent)}
    missing = [group for group in groups.values() if group.arrays is None]
    for group, arrays in zip(missing, _get([group.reference for group in missing]), strict=True):
        group.arrays = arrays


def _get(references: Sequence[ray.ObjectRef]) -> list[GroupArrays]:
    try:
        arrays: list[GroupArrays] = ray.get(list(references))
    except ray.exceptions.ObjectLostError as error:
        raise WorkerError(f"rollouts are lost with the node that held them: {str(error).splitlines()[0]}") from error
    return arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutNumbers:
    """One rollout without its content."""

    num_tokens: int
    versions: int | npt.NDArray[np.int32]
    loss_mask: bool | npt.NDArray[np.bool_]
    finish_reason: FinishReason
    episode: Episode

    @classmethod
    def of(cls, rollout: Rollout) -> RolloutNumbers:
        versions, mask = rollout.versions, rollout.loss_mask
        return cls(
            num_tokens=rollout.num_tokens,
            versions=int(versions[0]) if is_repeated(versions) else versions,
            loss_mask=bool(mask[0]) if is_repeated(mask) else mask,
            finish_reason=rollout.finish_reason,
            episode=rollout.episode,
        )

    def rollout(self, group: StoredGroup, index: int) -> Rollout:
        return Rollout(
            versions=np.broadcast_to(np.int32(self.versions), self.num_tokens)
            if isinstance(self.versions, int)
            else self.versions,
            loss_mask=np.broadcast_to(np.bool_(self.loss_mask), self.num_tokens)
            if isinstance(self.loss_mask, bool)
            else self.loss_mask,
            finish_reason=self.finish_reason,
            content=StoredContent(group=group, index=index),
            episode=self.episode,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNumbers:
    """A scored group without its prompt and its content; the baseline, where there is one, comes last."""

    rollouts: tuple[RolloutNumbers, ...]
    scores: tuple[Score, ...]
    baseline: Score | None
    seconds: float

    @classmethod
    def of(cls, answered: AnsweredPrompt) -> GroupNumbers:
        scored = answered.scored
        return cls(
            rollouts=tuple(RolloutNumbers.of(rollout) for rollout in _rollouts(scored.group)),
            scores=scored.scores,
            baseline=scored.baseline,
            seconds=answered.seconds,
        )

    def answered(self, prompt: Prompt, stored: StoredGroup) -> AnsweredPrompt:
        rollouts = tuple(numbers.rollout(stored, index) for index, numbers in enumerate(self.rollouts))
        num_trained = len(self.scores)
        group = RolloutGroup(
            prompt=prompt,
            rollouts=rollouts[:num_trained],
            baseline=rollouts[num_trained] if len(rollouts) > num_trained else None,
        )
        scored = ScoredGroup(group=group, scores=self.scores, baseline=self.baseline)
        return AnsweredPrompt(scored=scored, seconds=self.seconds)


def _rollouts(group: RolloutGroup) -> tuple[Rollout, ...]:
    return group.rollouts if group.baseline is None else (*group.rollouts, group.baseline)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """All that a worker needs to start."""

    index: int
    node: str
    """Ray's id of the node."""
    own: tuple[int, ...]
    """Engines that it uses; others are lent to it."""
    model_folder: Path
    shape: ModelShape
    reward: RewardConfig
    num_on_node: int
    """Workers of the node: they divide its reward processes."""
    log_path: Path
    max_outstanding: int
    max_attempts: int
    publish_timeout_s: float
    request_timeout_s: float
    silence_timeout_s: float


class RolloutHost:
    """The process of one rollout worker."""

    def __init__(self, setup: WorkerSetup, endpoints: Sequence[EngineEndpoint]) -> None:
        """`endpoints` are those of all engines that it may use."""
        self._silence_timeout_s = setup.silence_timeout_s
        self._probing: asyncio.Task[None] | None = None
        tokenizer = load_tokenizer(setup.model_folder, vocab=setup.shape.vocab)
        self._following = FollowingFleet(
            endpoints,
            connect=partial(EngineClient, request_timeout_s=setup.request_timeout_s),
            lent=frozenset(endpoint.index for endpoint in endpoints) - set(setup.own),
            max_outstanding=setup.max_outstanding,
            publish_timeout_s=setup.publish_timeout_s,
        )
        self._worker = RolloutWorker(
            self._following.fleet,
            vocabulary=Vocabulary.of(setup.shape, tokenizer),
            scorer=build_scorer(
                setup.reward, observer=self._following.scores, open_pool=partial(_open_pool, setup=setup)
            ),
            max_attempts=setup.max_attempts,
        )

    async def answer(self, prompt: Prompt, task: RolloutTask) -> tuple[GroupNumbers, GroupArrays]:
        answered = await self._worker.answer(prompt, task)
        return GroupNumbers.of(answered), GroupArrays.of(answered.scored.group)

    async def follow(self, views: Sequence[EngineView]) -> None:
        await self._following.follow(views)

    async def report(self, views: Sequence[EngineView]) -> WorkerReport:
        """Return what happened in half a second: one heartbeat for all engines of the worker."""
        await self._following.follow(views)
        if self._probing is None:
            probe = self._following.probe(every_s=_PROBE_EVERY_S, timeout_s=self._silence_timeout_s)
            self._probing = asyncio.create_task(probe)
        return await self._following.report(within_s=REPORT_EVERY_S)

    async def process(self) -> RemoteProcess:
        return this_process()


def _open_pool(task: ScoringTask, *, setup: WorkerSetup) -> WorkerPool:
    return WorkerPool(replace(task, workers=-(-task.workers // setup.num_on_node)), log_path=setup.log_path)
