"""The process of a rollout worker, and what it leaves of groups: numbers for the driver, arrays in Ray's object store.

The driver has references to the arrays, and the numbers that a step is decided by. Both are handed over many groups at
a time: a call costs the driver a millisecond.
"""

from __future__ import annotations

import asyncio
import gc
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import ray

from megarl.algo.grade import answer_in
from megarl.cluster.remote_process import RemoteProcess, this_process
from megarl.cluster.stored import ResponseArrays, StoredContent, StoredResponses, fetch, rollouts_of
from megarl.config.model import ModelShape
from megarl.config.reward import RewardConfig
from megarl.data.rollout_files import EvaluatedRollout, SampledRollout, make_table, write_generations, write_tables
from megarl.data.tokenizer import load_tokenizer
from megarl.engine.client import EngineClient, EngineEndpoint
from megarl.episodes.play import EpisodeSetup
from megarl.errors import MegarlError
from megarl.observe.summary import repeated_share
from megarl.reward.build import build_scorer
from megarl.reward.pool import ScoringTask, WorkerPool
from megarl.rollout.frozen import FrozenAccess
from megarl.rollout.generator import Vocabulary
from megarl.rollout.worker import (
    AnsweredPrompt,
    EngineView,
    FollowingFleet,
    RolloutTask,
    RolloutWorker,
    WorkerReport,
    cache_sizes,
)
from megarl.tokens import Content, is_repeated, repeated
from megarl.types import Episode, FinishReason, Prompt, Rollout, RolloutGroup, Score, ScoredGroup

REPORT_EVERY_S = 5.0
"""Longest time between reports while nothing happens; a failed engine is reported at once."""
_PROBE_EVERY_S = 1.0
_GATHER_S = 0.5
"""Least time that an answer waits for others, unless `_FEW_OPEN` are under way."""
_DRIVER_CALL_S = 0.02
"""Least time between calls of all workers together: a call costs the driver a millisecond."""
_GATHER_SHARE = 0.04
"""Share of the time that an answer took for which it may wait: long ones can, a step of them takes minutes."""
_FEW_OPEN = 2
"""With this many answers under way for each that is done, or fewer, the engines may soon lack prompts."""
_MAX_BYTES = 1 << 27
"""Arrays of one delivery."""


_ScoreNumbers: TypeAlias = tuple[float, Mapping[str, float], str | None, bool, tuple[float, ...] | None]
"""A score as pickle reads it quickest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNumbers:
    """A scored group without its prompt and its content; the baseline, where there is one, comes last.

    One number stands for all tokens of a rollout where all have the same.
    """

    num_tokens: tuple[int, ...]
    versions: tuple[int | npt.NDArray[np.int32], ...]
    loss_masks: tuple[bool | npt.NDArray[np.bool_], ...]
    finish_reasons: tuple[FinishReason, ...]
    episodes: tuple[Episode, ...]
    scores: tuple[_ScoreNumbers, ...]
    baseline: _ScoreNumbers | None
    seconds: float
    repetition: float
    """The repeated share of the first rollout: the driver's summary of a step needs one of each group."""
    answers: tuple[str | None, ...]
    """Made of the texts, where a scorer read no answer out of them and there are several to compare."""

    @classmethod
    def of(cls, answered: AnsweredPrompt) -> GroupNumbers:
        scored = answered.scored
        rollouts = rollouts_of(scored.group)
        return cls(
            num_tokens=tuple(rollout.num_tokens for rollout in rollouts),
            versions=tuple(int(each[0]) if is_repeated(each) else each for each in (one.versions for one in rollouts)),
            loss_masks=tuple(
                bool(each[0]) if is_repeated(each) else each for each in (one.loss_mask for one in rollouts)
            ),
            finish_reasons=tuple(rollout.finish_reason for rollout in rollouts),
            episodes=tuple(rollout.episode for rollout in rollouts),
            scores=tuple(map(_score_numbers, scored.scores)),
            baseline=None if scored.baseline is None else _score_numbers(scored.baseline),
            seconds=answered.seconds,
            repetition=repeated_share(rollouts[0].token_ids),
            answers=tuple(map(_answer, rollouts, scored.scores)) if len(scored.scores) > 1 else (),
        )

    def answered(self, prompt: Prompt, stored: StoredResponses, first: int) -> AnsweredPrompt:
        """Return the group; `first` is the place of its first response."""
        rollouts = tuple(self._rollouts(stored, first))
        num_trained = len(self.scores)
        group = RolloutGroup(
            prompt=prompt,
            rollouts=rollouts[:num_trained],
            baseline=rollouts[num_trained] if len(rollouts) > num_trained else None,
        )
        scored = ScoredGroup(
            group=group,
            scores=tuple(map(_score, self.scores)),
            baseline=None if self.baseline is None else _score(self.baseline),
        )
        return AnsweredPrompt(scored=scored, seconds=self.seconds)

    def _rollouts(self, stored: StoredResponses, first: int) -> Iterator[Rollout]:
        # A slice of a repeated number is made far quicker than another one.
        longest = max(self.num_tokens)
        masks = {is_chosen: repeated(np.bool_(is_chosen), longest) for is_chosen in (False, True)}
        served = {each: repeated(np.int32(each), longest) for each in self.versions if isinstance(each, int)}
        rows = zip(self.num_tokens, self.versions, self.loss_masks, self.finish_reasons, self.episodes, strict=True)
        answers = chain(self.answers, repeat(None))
        for index, (num_tokens, versions, mask, finish_reason, episode) in enumerate(rows, start=first):
            yield Rollout(
                versions=served[versions][:num_tokens] if isinstance(versions, int) else versions,
                loss_mask=masks[mask][:num_tokens] if isinstance(mask, bool) else mask,
                finish_reason=finish_reason,
                content=StoredContent(stored, index, self.repetition if index == first else None, next(answers)),
                episode=episode,
            )


def _answer(rollout: Rollout, score: Score) -> str | None:
    return None if score.prediction is not None else answer_in(rollout.text)


def _score_numbers(score: Score) -> _ScoreNumbers:
    return score.value, score.components, score.prediction, score.is_masked, score.tokens


def _score(numbers: _ScoreNumbers) -> Score:
    value, components, prediction, is_masked, tokens = numbers
    return Score(value=value, components=components, prediction=prediction, is_masked=is_masked, tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAnswer:
    """Why a prompt has no answer."""

    error: MegarlError | None
    """None for an error that nobody expects."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Prompts that a worker has to answer, by task and number, and numbers that nobody waits for any more."""

    asked: tuple[tuple[RolloutTask, Mapping[int, Prompt]], ...]
    dropped: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A worker's report, and the answers since the last one. The responses of the groups are stored in their order."""

    report: WorkerReport
    answers: tuple[tuple[int, GroupNumbers | FailedAnswer], ...]
    """By the number of the prompt."""
    node: str
    """Ray's id of the worker's node."""


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
    reward: RewardConfig | None  # None: the driver scores
    num_on_node: int
    """Workers of the node: they divide its reward processes."""
    num_workers: int
    """Workers of the run: they divide the driver's time."""
    log_path: Path
    episodes: EpisodeSetup | None
    max_outstanding: int
    max_attempts: int
    publish_timeout_s: float
    request_timeout_s: float
    silence_timeout_s: float
    frozen: FrozenAccess | None = None
    """The models on engines that the reward may ask."""


class RolloutHost:
    """The process of one rollout worker."""

    def __init__(self, setup: WorkerSetup, endpoints: Sequence[EngineEndpoint]) -> None:
        """`endpoints` are those of all engines that it may use."""
        self._silence_timeout_s = setup.silence_timeout_s
        self._gather_s = max(_GATHER_S, setup.num_workers * _DRIVER_CALL_S)
        self._node = str(ray.get_runtime_context().get_node_id())
        self._probing: asyncio.Task[None] | None = None
        self._open: dict[int, asyncio.Task[AnsweredPrompt]] = {}
        self._ended: deque[tuple[int, asyncio.Task[AnsweredPrompt]]] = deque()
        self._gathering: asyncio.TimerHandle | None = None
        episodes = setup.episodes
        tokenizer = load_tokenizer(
            setup.model_folder,
            vocab=setup.shape.vocab,
            template="chat" if episodes is None else episodes.template,
            tools=() if episodes is None else episodes.tools,
        )
        self._decode, self._singles = tokenizer.decode, dict[int, str]()
        self._following = FollowingFleet(
            endpoints,
            connect=partial(EngineClient, request_timeout_s=setup.request_timeout_s),
            lent=frozenset(endpoint.index for endpoint in endpoints) - set(setup.own),
            max_outstanding=setup.max_outstanding,
            publish_timeout_s=setup.publish_timeout_s,
        )
        self._frozen = setup.frozen.open() if setup.frozen else None
        own = [engine for engine in self._following.fleet.engines if engine.index in setup.own]
        self._worker = RolloutWorker(
            self._following.fleet,
            vocabulary=Vocabulary.of(setup.shape, tokenizer),
            scorer=build_scorer(
                setup.reward,
                observer=self._following.scores,
                open_pool=partial(_open_pool, setup=setup),
                frozen=self._frozen.models if self._frozen else {},
            ),
            max_attempts=setup.max_attempts,
            teachers=self._frozen.models if self._frozen else {},
            open_player=None
            if episodes is None
            else episodes.opener(
                tokenizer,
                cache_sizes=partial(cache_sizes, own),
                retried=lambda cause: self._following.fleet.requests.request_retried(cause),
                log_path=setup.log_path.with_name(f"environment_{setup.index}.log"),
            ),
        )
        gc.freeze()  # objects from the start stay for good: they are no garbage to look for

    async def take(self, orders: Orders) -> None:
        """Begin to answer prompts; the answers are in the next reports, by the same numbers."""
        for task, prompts in orders.asked:
            for number, prompt in prompts.items():
                self._open[number] = answering = asyncio.create_task(self._worker.answer(prompt, task))
                answering.add_done_callback(partial(self._end, number))
        for number in orders.dropped:
            if number in self._open:
                self._open[number].cancel()

    async def follow(self, views: Sequence[EngineView]) -> None:
        await self._following.follow(views)

    @ray.method(num_returns=2)
    async def report(self, orders: Orders, views: Sequence[EngineView]) -> tuple[Delivery, ResponseArrays | None]:
        """Return what happened since the last report: one heartbeat for all engines of the worker."""
        await self._following.follow(views)
        await self.take(orders)
        if self._probing is None:
            probe = self._following.probe(every_s=_PROBE_EVERY_S, timeout_s=self._silence_timeout_s)
            self._probing = asyncio.create_task(probe)
            if self._frozen:
                self._frozen.follow()
        every_s = min(REPORT_EVERY_S, self._silence_timeout_s / 8)
        report = await self._following.report(within_s=every_s)
        answers, groups = self._answers()
        arrays = ResponseArrays.of(groups) if groups else None
        return Delivery(report=report, answers=tuple(answers), node=self._node), arrays

    async def cut(
        self, references: Sequence[ray.ObjectRef], pieces: Sequence[Sequence[tuple[int, int]]]
    ) -> tuple[None, *tuple[ResponseArrays, ...]]:
        """Return the responses of each piece, given by their deliveries' places among the references and indices."""
        stored = await asyncio.gather(*references)
        contents = [[stored[place].content(index) for place, index in piece] for piece in pieces]
        return None, *(await asyncio.to_thread(lambda: tuple(map(ResponseArrays.joined, contents))))

    async def tabulate(self, rollouts: Sequence[SampledRollout]) -> pa.Table:
        """Return the rows of rollouts for a file; their responses are stored, here in most cases."""
        return await asyncio.to_thread(self._tabulate, rollouts)

    def _tabulate(self, rollouts: Sequence[SampledRollout]) -> pa.Table:
        fetch([rollout.sample.rollout.content.locate()[0] for rollout in rollouts])
        return make_table(rollouts, self._decode, self._singles)

    async def write(self, path: Path, tables: Sequence[ray.ObjectRef]) -> None:
        """Write a file of the rows that the workers made."""
        await asyncio.to_thread(write_tables, path, map(ray.get, tables))

    async def tell(self, answers: Sequence[EvaluatedRollout]) -> list[bytes]:
        """Return the lines of an evaluation's answers for a file; most of them are stored here."""
        return await asyncio.to_thread(self._tell, answers)

    def _tell(self, answers: Sequence[EvaluatedRollout]) -> list[bytes]:
        fetch([answer.content.locate()[0] for answer in answers])
        return [answer.line(self._decode) for answer in answers]

    async def write_lines(self, path: Path, parts: Sequence[ray.ObjectRef], order: Sequence[int]) -> None:
        """Write a file of the lines that the workers made; `order` says of each line which part has it."""
        lines = [iter(part) for part in await asyncio.gather(*parts)]
        await asyncio.to_thread(write_generations, path, (next(lines[part]) for part in order))

    def _answers(self) -> tuple[list[tuple[int, GroupNumbers | FailedAnswer]], list[RolloutGroup]]:
        """Return the answers of one delivery, and the groups among them."""
        answers: list[tuple[int, GroupNumbers | FailedAnswer]] = []
        groups: list[RolloutGroup] = []
        num_bytes = 0
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        while self._ended and num_bytes < _MAX_BYTES:
            number, answering = self._ended.popleft()
            error = answering.exception()
            if error is not None:
                answers.append((number, _failure(error)))
                continue
            numbers = GroupNumbers.of(answering.result())
            answers.append((number, numbers))
            groups.append(answering.result().scored.group)
            num_bytes += sum(_num_bytes(rollout.content.load()) for rollout in rollouts_of(groups[-1]))
        if self._ended:
            self._following.report_now()
        return answers, groups

    def _end(self, number: int, answering: asyncio.Task[AnsweredPrompt]) -> None:
        del self._open[number]
        if answering.cancelled():
            return
        self._ended.append((number, answering))
        seconds = 0.0 if answering.exception() is not None else answering.result().seconds
        may_wait_s = gather_s(seconds, num_done=len(self._ended), num_open=len(self._open), least_s=self._gather_s)
        if not may_wait_s:
            self._following.report_now()
        elif self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(may_wait_s, self._following.report_now)

    async def process(self) -> RemoteProcess:
        return this_process()


def gather_s(seconds: float, *, num_done: int, num_open: int, least_s: float) -> float:
    """Return how long an answer that took these seconds waits for others; 0 where engines may soon lack prompts."""
    if num_open <= _FEW_OPEN * num_done:
        return 0.0
    return max(least_s, min(_GATHER_SHARE * seconds, REPORT_EVERY_S))


def _num_bytes(content: Content) -> int:
    arrays = (content.token_ids, content.logprobs, content.routes, content.teacher)
    return sum(array.nbytes for array in arrays if array is not None)


def _open_pool(task: ScoringTask, *, setup: WorkerSetup) -> WorkerPool:
    return WorkerPool(replace(task, workers=-(-task.workers // setup.num_on_node)), log_path=setup.log_path)


def _failure(error: BaseException) -> FailedAnswer:
    detail = "".join(traceback.format_exception(error))
    return FailedAnswer(error=error if isinstance(error, MegarlError) else None, detail=detail)
