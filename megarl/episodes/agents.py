"""Agents, which decide their turns themselves: a user's code or program in worker processes, a function in this one.

`ChatAgents` talk to a `ChatEndpoint` of this process; `FunctionAgents` have the tokens in their hands.
"""

from __future__ import annotations

import asyncio
import inspect
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias, assert_never, cast

from megarl.config.environment import ChatEnvironmentConfig, CommandEnvironmentConfig, FunctionEnvironmentConfig
from megarl.config.section import GIB
from megarl.data.tokenizer import Tokenizer
from megarl.episodes.chat_endpoint import ChatEndpoint
from megarl.episodes.class_environments import read_score
from megarl.episodes.processes import EpisodeProcesses, ProcessLimits
from megarl.episodes.program import ProgramTask
from megarl.episodes.protocol import Row, TokenSession
from megarl.episodes.worker import EnvironmentTask, LoadedClass, score_answer
from megarl.errors import ConfigError, EnvironmentLostError, MegarlError, Problem
from megarl.system.user_code import describe_error, load_code
from megarl.types import JsonValue, Score

_UserFunction: TypeAlias = Callable[[Row, TokenSession, Tokenizer], Awaitable[object]]
_PROGRAMS_PER_WORKER = 1 << 30
"""The worker of a program runs none of the user's code itself: nothing leaks."""


def agent_task(config: ChatEnvironmentConfig | CommandEnvironmentConfig) -> EnvironmentTask:
    """Return what a worker process of an agent runs."""
    match config:
        case ChatEnvironmentConfig():
            return EnvironmentTask(
                classes=[LoadedClass(path=str(config.path.resolve()), name=None, options={})],
                agent=config.name,
                has_user_class=False,
                memory_bytes=None if config.memory_gib is None else int(config.memory_gib * GIB),
                cpu_s=config.cpu_s,
                call_deadline_s=config.wall_s,
            )
        case CommandEnvironmentConfig():
            program = ProgramTask(
                command=[str(Path(word).absolute()) if Path(word).is_file() else word for word in config.command],
                is_given_row=config.given == "row",
                result=config.result,
                memory_bytes=int(config.memory_gib * GIB),
                max_processes=config.max_processes,
                cpu_s=config.cpu_s,
            )
            return EnvironmentTask(
                classes=[],
                program=program,
                has_user_class=False,
                memory_bytes=None,
                cpu_s=None,
                call_deadline_s=config.wall_s,
            )
        case _:
            assert_never(config)


class ChatAgents:
    """`Agents` that talk to a chat endpoint of this process."""

    def __init__(
        self,
        config: ChatEnvironmentConfig | CommandEnvironmentConfig,
        tokenizer: Tokenizer,
        *,
        gives_way: bool,
        host: str,
        log_path: Path | None = None,
    ) -> None:
        """`gives_way`: the agent's function is `async`, or a program runs beside others."""
        self._is_program = isinstance(config, CommandEnvironmentConfig)
        self._wall_s = config.wall_s
        self._endpoint = ChatEndpoint(tokenizer, call_format=config.call_format, host=host)
        limits = ProcessLimits(
            workers=config.workers,
            episodes_per_process=config.episodes_per_process if isinstance(config, ChatEnvironmentConfig) else None,
            episodes_per_worker=config.episodes_per_worker
            if isinstance(config, ChatEnvironmentConfig)
            else _PROGRAMS_PER_WORKER,
        )
        self._processes = EpisodeProcesses(agent_task(config), limits, gives_way=gives_way, log_path=log_path)

    @property
    def most_open(self) -> int | None:
        """Episodes that can be open; None: as many as there is memory for."""
        return self._processes.most_open

    async def start(self) -> None:
        await self._endpoint.start()

    async def run(self, row: Row, session: TokenSession) -> Score | None:
        if not self._is_program:
            return await self._run(row, session, None)
        try:
            folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="megarl-agent-")
        except OSError as error:
            raise EnvironmentLostError(f"the agent has no working folder: {error}") from None
        try:
            return await self._run(row, session, folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _run(self, row: Row, session: TokenSession, folder: str | None) -> Score | None:
        process = await self._processes.take(str(row.get("uid")))
        is_usable = False
        try:
            async with self._endpoint.episode(session) as access:
                arguments: dict[str, JsonValue] = {"task": dict(row)}
                if folder is None:
                    arguments |= {"base_url": access.base_url, "api_key": access.key}
                else:
                    arguments |= {"folder": folder, "variables": dict(access.variables)}
                answer = await process.ask("run", timeout_s=self._wall_s, arguments=arguments)
                is_usable = True
        finally:
            process.give(is_usable)
        if "error" in answer:
            raise EnvironmentLostError(f"agent {answer['error']}")
        answer.pop("id")
        return read_score(answer) if answer else None

    async def close(self) -> None:
        self._processes.close()
        await self._endpoint.close()


def load_function(config: FunctionEnvironmentConfig) -> _UserFunction:
    """Return the user's function; a ConfigError if it cannot be one."""
    function = load_code(config.code, key="environment.code")
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError:
        message = f"{config.code} must take row, session and tokenizer"
        raise ConfigError("recipe", (Problem(key="environment.code", message=message),)) from None
    if not inspect.iscoroutinefunction(function):
        message = f"{config.code} must be an async function: it awaits the model"
        raise ConfigError("recipe", (Problem(key="environment.code", message=message),))
    return cast("_UserFunction", function)


class FunctionAgents:
    """`Agents` of a function in this process."""

    def __init__(self, config: FunctionEnvironmentConfig, tokenizer: Tokenizer) -> None:
        self._function = load_function(config)
        self._tokenizer = tokenizer

    async def run(self, row: Row, session: TokenSession) -> Score:
        try:
            value = await self._function(row, session, self._tokenizer)
        except MegarlError:
            raise
        except Exception as error:
            # The user's code may raise anything.
            raise EnvironmentLostError(f"environment.code {describe_error(error)}") from error
        return read_score(cast("dict[str, JsonValue]", score_answer(value)))

    async def close(self) -> None:
        """Nothing to close."""
