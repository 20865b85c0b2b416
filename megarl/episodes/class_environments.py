"""Environments of a user's class, whose instances live in worker processes. Knows no tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import cast

from megarl.episodes.processes import EpisodeProcess, EpisodeProcesses
from megarl.episodes.protocol import Call, Observation, Row, ToolSchema, Transcript
from megarl.errors import EnvironmentLostError, NeighbourError, ScoreLostError
from megarl.reward.pool import score_of
from megarl.reward.protocol import Answer, finite_list, is_answer
from megarl.system.foreign import finite32
from megarl.types import JsonValue, Score

_GRACE_S = 5.0
"""The worker keeps the deadline itself where it can; one that is this much later is killed."""
_FIELDS = fields(Transcript)


class ClassEnvironments:
    """`Environments` of a class; `tools` are those that its first worker reported."""

    def __init__(
        self,
        processes: EpisodeProcesses,
        *,
        tools: Sequence[ToolSchema],
        call_deadline_s: float,
        prepare_s: float = 0.0,
    ) -> None:
        """`prepare_s` is how long a tool may take to get ready before a call."""
        self._processes = processes
        self._call_deadline_s = call_deadline_s
        self._prepare_s = prepare_s
        self.tools = tuple(tools)

    async def open(self, row: Row) -> ClassEnvironment:
        process = await self._processes.take(str(row.get("uid")))
        try:
            reply = await process.ask("open", timeout_s=self._call_deadline_s + _GRACE_S, arguments=row)
            if "error" in reply:
                raise EnvironmentLostError(f"environment: {reply['error']}")
        except BaseException:
            process.give(False)
            raise
        return ClassEnvironment(process, tools=self.tools, deadline_s=self._call_deadline_s, prepare_s=self._prepare_s)

    @property
    def most_open(self) -> int | None:
        return self._processes.most_open

    async def close(self) -> None:
        self._processes.close()


class ClassEnvironment:
    """The instance of one episode, in its process."""

    opening = None

    def __init__(
        self,
        process: EpisodeProcess,
        *,
        tools: tuple[ToolSchema, ...],
        deadline_s: float,
        prepare_s: float,
    ) -> None:
        self.tools = tools
        self._process = process
        self._deadline_s = deadline_s
        self._prepare_s = prepare_s
        self._is_open = True

    async def call(self, call: Call) -> Observation:
        names = [tool.name for tool in self.tools]
        if call.name not in names:
            text = f"error: there is no tool {call.name[:100]}; there are: {', '.join(names)}"
            return Observation(text=text, is_error=True)
        timeout_s = self._prepare_s + self._deadline_s + _GRACE_S
        reply = await self._process.ask("call", name=call.name, timeout_s=timeout_s, arguments=call.arguments)
        return _observation(reply)

    async def score(self, transcript: Transcript) -> Score | None:
        try:
            answer = await self._process.ask(
                "score",
                timeout_s=self._deadline_s + _GRACE_S,
                arguments=cast("dict[str, JsonValue]", {each.name: getattr(transcript, each.name) for each in _FIELDS}),
            )
        except NeighbourError:
            raise
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
            if self._process.is_whole:
                with suppress(EnvironmentLostError):
                    reply = await self._process.ask("close", timeout_s=self._deadline_s, arguments={})
                    is_usable = "error" not in reply
        finally:
            self._process.give(is_usable)


def read_score(answer: Mapping[str, JsonValue]) -> Score:
    """Return the score of an answer; a ScoreLostError if it is an error or nonsense."""
    if not is_answer(answer):
        raise ScoreLostError("environment: its process sent something that is no score")
    if "error" in answer:
        raise ScoreLostError(f"environment: score {answer['error']}")
    score = score_of(cast("Answer", answer))
    if answer.get("turns") is None:
        return score
    turns = finite_list(answer["turns"])
    if turns is None:
        raise ScoreLostError("environment: its process sent something that is no list of rewards")
    return replace(score, turns=tuple(turns))


def _observation(answer: Mapping[str, JsonValue]) -> Observation:
    if "lost" in answer:
        raise EnvironmentLostError(str(answer["lost"]))
    text, given = answer.get("text"), answer.get("reward")
    reward = finite32(given)
    if not isinstance(text, str) or (given is not None and reward is None):
        raise EnvironmentLostError("its process sent something that is no observation")
    observation = Observation(
        text=text, ended=answer.get("ended") is True, reward=reward, is_error=answer.get("is_error") is True
    )
    num_characters = answer.get("num_characters")
    if isinstance(num_characters, int) and num_characters > len(text):
        return replace(observation, text=f"{text}\n[{num_characters - len(text)} characters more]")
    return observation
