"""Agents of users, which decide their turns themselves: over a chat endpoint in a process, or by tokens in this one."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

from megarl.config.environment import ChatEnvironmentConfig, FunctionEnvironmentConfig
from megarl.data.tokenizer import Tokenizer
from megarl.episodes.chat_endpoint import ChatEndpoint
from megarl.episodes.class_environments import EnvironmentWorkers, read_score
from megarl.episodes.protocol import Row, TokenSession
from megarl.episodes.worker import EnvironmentTask, LoadedClass, score_answer
from megarl.errors import ConfigError, EnvironmentLostError, MegarlError, Problem
from megarl.system.sizes import GIB
from megarl.system.user_code import describe_error, load_code
from megarl.types import JsonValue, Score

_USER_FUNCTION = Callable[[Row, TokenSession, Tokenizer], Awaitable[object]]


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

    def __init__(self, config: ChatEnvironmentConfig, tokenizer: Tokenizer, *, log_path: Path | None = None) -> None:
        self._wall_s = config.wall_s
        self._endpoint = ChatEndpoint(tokenizer, call_format=config.call_format)
        self._workers = EnvironmentWorkers(
            agent_task(config),
            workers=config.workers,
            episodes_per_worker=config.episodes_per_worker,
            log_path=log_path,
        )

    async def start(self) -> None:
        await self._endpoint.start()

    async def run(self, row: Row, session: TokenSession) -> Score:
        worker = await self._workers.take()
        key = self._endpoint.admit(session)
        is_usable = False
        try:
            arguments: dict[str, JsonValue] = {"task": dict(row), "base_url": self._endpoint.base_url, "api_key": key}
            answer = await worker.ask("run", timeout_s=self._wall_s, arguments=arguments)
            is_usable = True
        finally:
            error = self._endpoint.dismiss(key)
            self._workers.give(worker, is_usable=is_usable)
        if error is not None:
            raise error
        if "error" in answer:
            raise EnvironmentLostError(f"agent {answer['error']}")
        return read_score(answer)

    async def close(self) -> None:
        self._workers.close()
        await self._endpoint.close()


def load_function(config: FunctionEnvironmentConfig) -> _USER_FUNCTION:
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
    return cast("_USER_FUNCTION", function)


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
