"""Agents, which decide their turns themselves: a user's code in worker processes, and a user's function in this one.

`ChatAgents` talk to a `ChatEndpoint` of this process; `FunctionAgents` have the tokens in their hands.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias, cast

from megarl.config.environment import ChatEnvironmentConfig, FunctionEnvironmentConfig
from megarl.config.section import GIB
from megarl.data.tokenizer import Tokenizer
from megarl.episodes.chat_endpoint import ChatEndpoint
from megarl.episodes.class_environments import ask_process, open_pool, read_score, take_process
from megarl.episodes.protocol import Row, TokenSession
from megarl.episodes.worker import EnvironmentTask, LoadedClass, score_answer
from megarl.errors import ConfigError, EnvironmentLostError, MegarlError, Problem
from megarl.system.user_code import describe_error, load_code
from megarl.types import JsonValue, Score

_UserFunction: TypeAlias = Callable[[Row, TokenSession, Tokenizer], Awaitable[object]]


def agent_task(config: ChatEnvironmentConfig) -> EnvironmentTask:
    """Return what a worker process of an agent runs."""
    return EnvironmentTask(
        classes=[LoadedClass(path=str(config.path.resolve()), name=None, options={})],
        agent=config.name,
        has_user_class=False,
        memory_bytes=None if config.memory_gib is None else int(config.memory_gib * GIB),
        cpu_s=config.cpu_s,
        call_deadline_s=config.wall_s,
    )


class ChatAgents:
    """`Agents` that talk to a chat endpoint of this process."""

    def __init__(
        self, config: ChatEnvironmentConfig, tokenizer: Tokenizer, *, host: str, log_path: Path | None = None
    ) -> None:
        self._wall_s = config.wall_s
        self._endpoint = ChatEndpoint(tokenizer, call_format=config.call_format, host=host)
        self._pool = open_pool(
            agent_task(config),
            workers=config.workers,
            episodes_per_worker=config.episodes_per_worker,
            log_path=log_path,
        )

    async def start(self) -> None:
        await self._endpoint.start()

    async def run(self, row: Row, session: TokenSession) -> Score:
        process = await take_process(self._pool)
        is_usable = False
        try:
            async with self._endpoint.episode(session) as access:
                arguments: dict[str, JsonValue] = {
                    "task": dict(row),
                    "base_url": access.base_url,
                    "api_key": access.key,
                }
                answer = await ask_process(process, "run", timeout_s=self._wall_s, arguments=arguments)
                is_usable = True
        finally:
            self._pool.give(process, is_usable=is_usable)
        if "error" in answer:
            raise EnvironmentLostError(f"agent {answer['error']}")
        return read_score(answer)

    async def close(self) -> None:
        self._pool.close()
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
