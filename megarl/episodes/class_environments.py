"""Environments of a user's class: one worker process per open episode, used again for the next one. Knows no tokens."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import cast

from megarl.episodes.protocol import Call, Observation, Row, ToolSchema, Transcript
from megarl.episodes.worker import EnvironmentTask
from megarl.errors import EnvironmentLostError, Problem, RewardError, ScoreLostError
from megarl.reward.pool import START_TIMEOUT_S, score_of
from megarl.reward.protocol import Answer, is_answer
from megarl.system.user_process import SourceWatch, UserProcess
from megarl.types import JsonValue, Score

logger = logging.getLogger(__name__)

_GRACE_S = 5.0
"""The worker keeps the deadline itself where it can; one that is this much later is killed."""
_MODULE = "megarl.episodes.worker"
_FIELDS = fields(Transcript)


class EnvironmentWorker:
    """One worker process. `handshake` is called first."""

    def __init__(self, task: EnvironmentTask, *, log_path: Path | None = None) -> None:
        self.tools: tuple[ToolSchema, ...] = ()
        self.sources: dict[str, str] = {}
        self.num_episodes = 0
        self.is_ready = False
        self.is_whole = True
        """Every request so far was answered: the process may be used again."""
        self._num_asked = 0
        self._process = UserProcess(_MODULE, cast("Mapping[str, object]", task), log_path=log_path)

    async def handshake(self) -> Problem | None:
        """Wait until the worker has loaded the code; return the problem, with the recipe's key, if it could not."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                loaded = json.loads(await self._process.receive())
        except TimeoutError:
            return Problem(key="environment.path", message=f"importing it took longer than {START_TIMEOUT_S:g} s")
        except (EOFError, ConnectionError, ValueError):
            reason = self._process.exit_reason()
            return Problem(key="environment.path", message=f"importing it ended the process: it {reason}")
        if "error" in loaded:
            return Problem(key=f"environment.{loaded['key']}", message=loaded["error"])
        self.sources = loaded["sources"]
        self.tools = tuple(ToolSchema(**tool) for tool in loaded["tools"])
        self.is_ready = True
        return None

    async def ask(
        self, does: str, *, timeout_s: float, name: str = "", arguments: Mapping[str, JsonValue]
    ) -> dict[str, JsonValue]:
        """Return the answer; an EnvironmentLostError if the process gives none, after which it is of no use."""
        self._num_asked += 1
        is_answered = False
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.send(
                    {"id": self._num_asked, "does": does, "name": name, "arguments": dict(arguments)}
                )
                answer: dict[str, JsonValue] = json.loads(await self._process.receive())
            if not isinstance(answer, dict) or answer.get("id") != self._num_asked:
                raise EnvironmentLostError("its process sent an answer to another request")
            is_answered = True
        except TimeoutError:
            raise EnvironmentLostError(f"{name or does} gave no answer within {timeout_s:g} s") from None
        except (EOFError, ConnectionError):
            raise EnvironmentLostError(f"{name or does} ended its process: it {self._process.exit_reason()}") from None
        except (ValueError, RecursionError) as error:
            raise EnvironmentLostError(f"its process sent something that is no answer: {error}") from None
        finally:
            self.is_whole &= is_answered
        return answer

    def discard(self) -> None:
        self._process.discard()


class EnvironmentWorkers:
    """At most `workers` processes, started on demand and used again by later episodes."""

    def __init__(
        self, task: EnvironmentTask, *, workers: int, episodes_per_worker: int, log_path: Path | None = None
    ) -> None:
        self._task = task
        self._episodes_per_worker = episodes_per_worker
        self._log_path = log_path
        self._slots = asyncio.Semaphore(workers)
        self._idle: list[EnvironmentWorker] = []
        self._busy: set[EnvironmentWorker] = set()
        self._sources = SourceWatch()
        self._is_closed = False

    async def take(self) -> EnvironmentWorker:
        """Wait for a free place; return a worker that has loaded the code."""
        await self._slots.acquire()
        worker = None
        try:
            _refuse_change(self._sources.changed())
            if self._is_closed:
                raise EnvironmentLostError("the environments are closed")
            worker = self._idle.pop() if self._idle else EnvironmentWorker(self._task, log_path=self._log_path)
            self._busy.add(worker)
            if not worker.is_ready:
                if problem := await worker.handshake():
                    raise EnvironmentLostError(str(problem))
                _refuse_change(self._sources.note(worker.sources))
        except BaseException:
            self._drop(worker)
            raise
        worker.num_episodes += 1
        return worker

    def give(self, worker: EnvironmentWorker, *, is_usable: bool) -> None:
        """Take a worker back; it is used again if it is whole."""
        if worker not in self._busy:
            return
        if self._is_closed or not is_usable or worker.num_episodes >= self._episodes_per_worker:
            self._drop(worker)
            return
        self._busy.remove(worker)
        self._idle.append(worker)
        self._slots.release()

    def _drop(self, worker: EnvironmentWorker | None) -> None:
        if worker is not None:
            self._busy.discard(worker)
            worker.discard()
        self._slots.release()

    def close(self) -> None:
        """Kill every worker, busy or idle, and what it has started. May be called twice."""
        self._is_closed = True
        for worker in (*self._idle, *self._busy):
            worker.discard()
        self._idle.clear()
        self._busy.clear()


class ClassEnvironments:
    """`Environments` of a class; `tools` are those that its first worker reported."""

    def __init__(self, workers: EnvironmentWorkers, *, tools: Sequence[ToolSchema], call_deadline_s: float) -> None:
        self._workers = workers
        self._call_deadline_s = call_deadline_s
        self.tools = tuple(tools)

    async def open(self, row: Row) -> ClassEnvironment:
        worker = await self._workers.take()
        environment = ClassEnvironment(worker, self._workers, tools=self.tools, deadline_s=self._call_deadline_s)
        try:
            answer = await worker.ask("open", timeout_s=self._call_deadline_s + _GRACE_S, arguments=row)
            if "error" in answer:
                raise EnvironmentLostError(f"environment: {answer['error']}")
        except BaseException:
            self._workers.give(worker, is_usable=False)
            raise
        return environment

    async def close(self) -> None:
        self._workers.close()


class ClassEnvironment:
    """The instance of one episode, in its worker."""

    opening = None

    def __init__(
        self,
        worker: EnvironmentWorker,
        workers: EnvironmentWorkers,
        *,
        tools: tuple[ToolSchema, ...],
        deadline_s: float,
    ) -> None:
        self.tools = tools
        self._worker = worker
        self._workers = workers
        self._deadline_s = deadline_s
        self._is_open = True

    async def call(self, call: Call) -> Observation:
        names = [tool.name for tool in self.tools]
        if call.name not in names:
            text = f"error: there is no tool {call.name[:100]}; there are: {', '.join(names)}"
            return Observation(text=text, is_error=True)
        timeout_s = self._deadline_s + _GRACE_S
        answer = await self._worker.ask("call", name=call.name, timeout_s=timeout_s, arguments=call.arguments)
        return _observation(answer)

    async def score(self, transcript: Transcript) -> Score | None:
        try:
            answer = await self._worker.ask(
                "score",
                timeout_s=self._deadline_s + _GRACE_S,
                arguments=cast("dict[str, JsonValue]", {each.name: getattr(transcript, each.name) for each in _FIELDS}),
            )
        except EnvironmentLostError as error:
            raise ScoreLostError(f"environment: {error}") from None
        answer.pop("id")
        return read_score(answer) if answer else None

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        is_usable = False
        try:
            if self._worker.is_whole:
                with suppress(EnvironmentLostError):
                    answer = await self._worker.ask("close", timeout_s=self._deadline_s, arguments={})
                    is_usable = "error" not in answer
        finally:
            self._workers.give(self._worker, is_usable=is_usable)


def read_score(answer: Mapping[str, JsonValue]) -> Score:
    """Return the score of an answer; a ScoreLostError if it is an error or nonsense."""
    if not is_answer(answer):
        raise ScoreLostError("environment: its process sent something that is no score")
    if "error" in answer:
        raise ScoreLostError(f"environment: score {answer['error']}")
    turns = cast("list[float] | None", answer.get("turns"))
    return replace(score_of(cast("Answer", answer)), turns=None if turns is None else tuple(turns))


def _observation(answer: Mapping[str, JsonValue]) -> Observation:
    if "lost" in answer:
        raise EnvironmentLostError(str(answer["lost"]))
    text, reward = answer.get("text"), answer.get("reward")
    if not isinstance(text, str) or not isinstance(reward, float | int | None):
        raise EnvironmentLostError("its process sent something that is no observation")
    observation = Observation(
        text=text, ended=answer.get("ended") is True, reward=reward, is_error=answer.get("is_error") is True
    )
    num_characters = answer.get("num_characters")
    if isinstance(num_characters, int) and num_characters > len(text):
        return replace(observation, text=f"{text}\n[{num_characters - len(text)} characters more]")
    return observation


def _refuse_change(path: str | None) -> None:
    if path is not None:
        raise RewardError(
            f"{path} changed during the run; episodes before and after would not be comparable: start the run again"
        )
