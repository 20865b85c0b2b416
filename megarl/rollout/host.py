"""The process of a rollout worker: reports groups to the driver every few seconds, arrays go to Ray's object store.

The driver has references to the arrays, and the columns that a step is decided by. Both are handed over many groups at
a time: a call costs the driver a millisecond.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import ray

from megarl.algo.grade import answer_in
from megarl.cluster.remote_process import RemoteProcess, this_process
from megarl.cluster.stored import StoredContent, StoredResponses, fetch
from megarl.config.reward import RewardConfig
from megarl.data.evaluation_files import EvaluatedRollout, write_generations
from megarl.data.group_encoding import ContentArrays, GroupRecord
from megarl.data.rollout_files import SampledRollout, make_table, write_tables
from megarl.data.tokenizer import load_tokenizer
from megarl.engine.client import EngineClient, EngineEndpoint
from megarl.episodes.play import EpisodeSetup
from megarl.errors import MegarlError
from megarl.families.shape import ModelShape
from megarl.reward.build import build_scorer
from megarl.reward.pool import ScoringTask, WorkerPool
from megarl.rollout.following import EngineView, FollowingFleet, WorkerReport
from megarl.rollout.frozen import FollowedModels, FrozenAccess
from megarl.rollout.task import AnsweredPrompt, RolloutTask, Vocabulary
from megarl.rollout.worker import RolloutWorker, cache_sizes
from megarl.tokens import OF_ROLLOUT, is_repeated, repeated, repeated_share
from megarl.types import Prompt, Rollout, RolloutGroup, Score

REPORT_EVERY_S = 5.0
"""Longest time between reports while nothing happens; a failed engine is reported at once."""
_PROBE_EVERY_S = 1.0
_GATHER_S = 0.5
"""Least time that an answer waits for others, unless `_FEW_OPEN` are under way."""
_DRIVER_CALL_S = 0.02
"""Least time between calls of all workers together: a call costs the driver a millisecond."""
_GATHER_FRACTION = 0.04
"""Fraction of the time that an answer took for which it may wait: long ones can, a step of them takes minutes."""
_FEW_OPEN = 2
"""With this many answers under way for each that is done, or fewer, the engines may soon lack prompts."""
_MAX_BYTES = 1 << 27
"""Arrays of one delivery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredGroup:
    """A scored group without its prompt and its contents, which are stored."""

    record: GroupRecord
    columns: Mapping[str, tuple[int | bool | npt.NDArray[Any], ...]]
    """The columns of the rollouts; one number stands for all tokens of a rollout where all have the same."""
    seconds: float
    repetition: float
    """The repeated share of the first rollout: the driver's summary of a step needs one of each group."""
    answers: tuple[str | None, ...]
    """Read from the texts, where a scorer read no answer from them and there are several to compare."""

    @classmethod
    def of(cls, answered: AnsweredPrompt) -> DeliveredGroup:
        scored = answered.scored
        rollouts = scored.group.with_baseline
        return cls(
            record=GroupRecord.of(scored),
            columns={
                column.name: tuple(_compact(getattr(rollout, column.name)) for rollout in rollouts)
                for column in OF_ROLLOUT
            },
            seconds=answered.seconds,
            repetition=repeated_share(rollouts[0].token_ids),
            answers=tuple(map(_answer, rollouts, scored.scores)) if len(scored.scores) > 1 else (),
        )

    @property
    def num_responses(self) -> int:
        return len(self.record.num_tokens)

    def answered(self, prompt: Prompt, stored: StoredResponses, first: int) -> AnsweredPrompt:
        """Return the group; `first` is the index of its first response among those stored."""
        answers = chain(self.answers, repeat(None))
        contents = (
            StoredContent(stored, index, self.repetition if index == first else None, next(answers))
            for index in range(first, first + self.num_responses)
        )
        scored = self.record.scored_group(prompt, contents, self._columns())
        return AnsweredPrompt(scored=scored, seconds=self.seconds)

    def _columns(self) -> Iterator[dict[str, npt.NDArray[Any]]]:
        # A slice of a repeated number is made far quicker than another one.
        longest = max(self.record.num_tokens)
        dtypes = {column.name: column.dtype for column in OF_ROLLOUT}
        shared = {
            (name, value): repeated(dtypes[name](value), longest)
            for name, values in self.columns.items()
            for value in {each for each in values if not isinstance(each, np.ndarray)}
        }
        for index, num_tokens in enumerate(self.record.num_tokens):
            values = {name: of_column[index] for name, of_column in self.columns.items()}
            yield {
                name: value if isinstance(value, np.ndarray) else shared[name, value][:num_tokens]
                for name, value in values.items()
            }


def _compact(array: npt.NDArray[Any]) -> int | bool | npt.NDArray[Any]:
    if not is_repeated(array):
        return array
    number: int | bool = array.item(0)
    return number


def _answer(rollout: Rollout, score: Score) -> str | None:
    return None if score.prediction is not None else answer_in(rollout.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAnswer:
    """Why a prompt has no answer."""

    error: MegarlError | None
    """None for an unexpected exception."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChanges:
    """Changes of the open prompts of a worker."""

    added: tuple[tuple[RolloutTask, Mapping[int, Prompt]], ...]
    """New prompts, by task and number."""
    cancelled: tuple[int, ...]
    """Numbers of prompts whose groups are not needed any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A worker's report, and the answers since the last one. The responses of the groups are stored in their order."""

    report: WorkerReport
    answers: tuple[tuple[int, DeliveredGroup | FailedAnswer], ...]
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
    reward: RewardConfig | None
    """None: the driver scores."""
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

    @property
    def num_open(self) -> int:
        """Rollouts that it can have under way at once: requests at its engines, and episodes that wait for tools."""
        num_requests = self.max_outstanding * len(self.own)
        if self.episodes is None:
            return num_requests
        return max(num_requests, self.episodes.environment.most_open or sys.maxsize)


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
        self._decode = tokenizer.decode
        self._singles: dict[int, str] = {}
        """The text of every token alone that a file needed."""
        self._following = FollowingFleet(
            endpoints,
            connect=partial(EngineClient, request_timeout_s=setup.request_timeout_s),
            lent=frozenset(endpoint.index for endpoint in endpoints) - set(setup.own),
            max_outstanding=setup.max_outstanding,
            publish_timeout_s=setup.publish_timeout_s,
        )
        self._frozen = FollowedModels(setup.frozen) if setup.frozen else None
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
                num_on_node=setup.num_on_node,
            ),
        )
        gc.freeze()  # objects from the start stay for good: they are no garbage to look for

    async def take(self, changes: PromptChanges) -> None:
        """Begin to answer prompts; the answers are in the next reports, by the same numbers."""
        for task, prompts in changes.added:
            for number, prompt in prompts.items():
                self._open[number] = answering = asyncio.create_task(self._worker.answer(prompt, task))
                answering.add_done_callback(partial(self._end, number))
        for number in changes.cancelled:
            if number in self._open:
                self._open[number].cancel()

    async def follow(self, views: Sequence[EngineView]) -> None:
        await self._following.follow(views)

    @ray.method(num_returns=2)
    async def report(
        self, changes: PromptChanges, views: Sequence[EngineView]
    ) -> tuple[Delivery, ContentArrays | None]:
        """Return what happened since the last report: one heartbeat for all engines of the worker."""
        await self._following.follow(views)
        await self.take(changes)
        if self._probing is None:
            probe = self._following.probe(every_s=_PROBE_EVERY_S, timeout_s=self._silence_timeout_s)
            self._probing = asyncio.create_task(probe)
            if self._frozen:
                self._frozen.follow()
        every_s = min(REPORT_EVERY_S, self._silence_timeout_s / 8)
        report = await self._following.report(within_s=every_s)
        answers, groups = self._answers()
        contents = [rollout.content.load() for group in groups for rollout in group.with_baseline]
        arrays = ContentArrays.of(contents) if groups else None
        return Delivery(report=report, answers=tuple(answers), node=self._node), arrays

    async def cut(
        self, references: Sequence[ray.ObjectRef], pieces: Sequence[Sequence[tuple[int, int]]]
    ) -> tuple[None, *tuple[ContentArrays, ...]]:
        """Return the responses of each piece, given by their deliveries' places among the references and indices."""
        stored = await asyncio.gather(*references)
        contents = [[stored[place].content(index) for place, index in piece] for piece in pieces]
        return None, *(await asyncio.to_thread(lambda: tuple(map(ContentArrays.of, contents))))

    async def tabulate(self, rollouts: Sequence[SampledRollout]) -> pa.Table:
        """Return the rows of rollouts for a file; their responses are stored, here in most cases."""
        return await asyncio.to_thread(self._tabulate, rollouts)

    def _tabulate(self, rollouts: Sequence[SampledRollout]) -> pa.Table:
        fetch([rollout.sample.rollout.content.locate()[0] for rollout in rollouts])
        return make_table(rollouts, self._decode, self._singles)

    async def write(self, path: Path, tables: Sequence[ray.ObjectRef]) -> None:
        """Write a file of the rows that the workers made."""
        await asyncio.to_thread(write_tables, path, map(ray.get, tables))

    async def lines_of(self, answers: Sequence[EvaluatedRollout]) -> list[bytes]:
        """Return the lines of an evaluation's answers for a file; most of them are stored here."""
        return await asyncio.to_thread(self._lines_of, answers)

    def _lines_of(self, answers: Sequence[EvaluatedRollout]) -> list[bytes]:
        fetch([answer.content.locate()[0] for answer in answers])
        return [answer.line(self._decode) for answer in answers]

    async def write_lines(self, path: Path, parts: Sequence[ray.ObjectRef], order: Sequence[int]) -> None:
        """Write a file of the lines that the workers made; `order` says of each line which part has it."""
        lines = [iter(part) for part in await asyncio.gather(*parts)]
        await asyncio.to_thread(write_generations, path, (next(lines[part]) for part in order))

    def _answers(self) -> tuple[list[tuple[int, DeliveredGroup | FailedAnswer]], list[RolloutGroup]]:
        """Return the answers of one delivery, and the groups among them."""
        answers: list[tuple[int, DeliveredGroup | FailedAnswer]] = []
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
            answers.append((number, DeliveredGroup.of(answering.result())))
            groups.append(answering.result().scored.group)
            num_bytes += sum(rollout.content.load().num_bytes for rollout in groups[-1].with_baseline)
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
    return max(least_s, min(_GATHER_FRACTION * seconds, REPORT_EVERY_S))


def _open_pool(task: ScoringTask, *, setup: WorkerSetup) -> WorkerPool:
    return WorkerPool(replace(task, workers=-(-task.workers // setup.num_on_node)), log_path=setup.log_path)


def _failure(error: BaseException) -> FailedAnswer:
    detail = "".join(traceback.format_exception(error))
    return FailedAnswer(error=error if isinstance(error, MegarlError) else None, detail=detail)
