"""Environments of a user's class: one worker process per open episode, used again for the next one. Knows no tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import cast

from megarl.episodes.protocol import Call, Observation, Row, ToolSchema, Transcript
from megarl.episodes.worker import EnvironmentTask
from megarl.errors import EnvironmentLostError, ScoreLostError
from megarl.reward.pool import score_of
from megarl.reward.protocol import Answer, finite_list, is_answer
from megarl.system.foreign import finite32
from megarl.system.user_process import NoReplyError, UserLoadError, UserPool, UserProcess
from megarl.types import JsonValue, Score

_GRACE_S = 5.0
"""The worker keeps the deadline itself where it can; one that is this much later is killed."""
PROGRAM = "megarl.episodes.worker"
_FIELDS = fields(Transcript)


def open_pool(task: EnvironmentTask, *, workers: int, episodes_per_worker: int, log_path: Path | None) -> UserPool:
    """Return the processes of a class or an agent, of which an episode takes one."""
    return UserPool(
        PROGRAM,
        cast("Mapping[str, object]", task),
        section="environment",
        workers=workers,
        uses_per_worker=episodes_per_worker,
        log_path=log_path,
    )


async def take_process(pool: UserPool) -> UserProcess:
    """Wait for a process that has loaded the code; an EnvironmentLostError if there is none."""
    try:
        return await pool.take()
    except (UserLoadError, NoReplyError) as error:
        raise EnvironmentLostError(str(error)) from None


async def ask_process(
    process: UserProcess, does: str, *, timeout_s: float, name: str = "", arguments: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """Return the reply; an EnvironmentLostError if the process gives none."""
    request = {"does": does, "name": name, "arguments": dict(arguments)}
    try:
        return cast("dict[str, JsonValue]", await process.ask(request, timeout_s=timeout_s))
    except NoReplyError as error:
        raise EnvironmentLostError(f"{name or does} {error}") from None


class ClassEnvironments:
    """`Environments` of a class; `tools` are those that its first worker reported."""

    def __init__(
        self, pool: UserPool, *, tools: Sequence[ToolSchema], call_deadline_s: float, prepare_s: float = 0.0
    ) -> None:
        """`prepare_s` is how long a tool may take to get ready before a call."""
        self._pool = pool
        self._call_deadline_s = call_deadline_s
        self._prepare_s = prepare_s
        self.tools = tuple(tools)

    async def open(self, row: Row) -> ClassEnvironment:
        process = await take_process(self._pool)
        try:
            reply = await ask_process(process, "open", timeout_s=self._call_deadline_s + _GRACE_S, arguments=row)
            if "error" in reply:
                raise EnvironmentLostError(f"environment: {reply['error']}")
        except BaseException:
            self._pool.give(process, is_usable=False)
            raise
        return ClassEnvironment(
            process, self._pool, tools=self.tools, deadline_s=self._call_deadline_s, prepare_s=self._prepare_s
        )

    async def close(self) -> None:
        self._pool.close()


class ClassEnvironment:
    """The instance of one episode, in its process."""

    opening = None

    def __init__(
        self,
        process: UserProcess,
        pool: UserPool,
        *,
        tools: tuple[ToolSchema, ...],
        deadline_s: float,
        prepare_s: float,
    ) -> None:
        self.tools = tools
        self._process = process
        self._pool = pool
        self._deadline_s = deadline_s
        self._prepare_s = prepare_s
        self._is_open = True

    async def call(self, call: Call) -> Observation:
        names = [tool.name for tool in self.tools]
        if call.name not in names:
            text = f"error: there is no tool {call.name[:100]}; there are: {', '.join(names)}"
            return Observation(text=text, is_error=True)
        timeout_s = self._prepare_s + self._deadline_s + _GRACE_S
        reply = await ask_process(self._process, "call", name=call.name, timeout_s=timeout_s, arguments=call.arguments)
        return _observation(reply)

    async def score(self, transcript: Transcript) -> Score | None:
        try:
            answer = await ask_process(
                self._process,
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
            if self._process.is_whole:
                with suppress(EnvironmentLostError):
                    reply = await ask_process(self._process, "close", timeout_s=self._deadline_s, arguments={})
                    is_usable = "error" not in reply
        finally:
            self._pool.give(self._process, is_usable=is_usable)


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
