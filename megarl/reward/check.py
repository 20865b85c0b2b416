"""Whether a recipe's reward can be had at all, before anything is started. No rollout, no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

from megarl.config.reward import (
    BySourceRewardConfig,
    CodeTestsRewardConfig,
    ExactRewardConfig,
    FunctionRewardConfig,
    HttpRewardConfig,
    RewardConfig,
    SingleRewardConfig,
    WorkerRewardConfig,
)
from megarl.errors import Problem, RewardError
from megarl.reward.judge import read_key
from megarl.reward.pool import START_TIMEOUT_S, RewardWorker
from megarl.reward.sandbox import Sandbox, SandboxError
from megarl.reward.workload import limits_of, python_of, workload_of


def check_reward(config: RewardConfig, *, timeout_s: float = START_TIMEOUT_S) -> list[Problem]:
    """Every problem of the section: files, imports, the function's arguments, the sandbox. Not inside an event loop."""
    if not isinstance(config, BySourceRewardConfig):
        return [*_single(config, timeout_s=timeout_s)]
    return [
        replace(problem, key=problem.key.replace("reward.", f"reward.sources.{name}.", 1))
        for name, part in config.sources.items()
        for problem in _single(part, timeout_s=timeout_s)
    ]


def _single(config: SingleRewardConfig, *, timeout_s: float) -> Iterator[Problem]:
    match config:
        case ExactRewardConfig():
            return
        case HttpRewardConfig():
            if config.api_key_file is not None:
                try:
                    read_key(config.api_key_file)
                except RewardError as error:
                    yield Problem(key="reward.api_key_file", message=str(error))
            return
        case FunctionRewardConfig() if not config.path.is_file():
            yield Problem(key="reward.path", message=f"{config.path} is not a file; name your Python file")
            return
        case CodeTestsRewardConfig():
            try:
                Sandbox(config.sandbox, limits_of(config), python=python_of(config))
            except SandboxError as error:
                yield Problem(key="reward.sandbox", message=str(error))
            return
        case _:
            problem = asyncio.run(_try_import(config, timeout_s=timeout_s))
            if problem is not None:
                yield problem


async def _try_import(config: WorkerRewardConfig, *, timeout_s: float) -> Problem | None:
    worker = RewardWorker(workload_of(config))
    try:
        return await worker.handshake(timeout_s=timeout_s)
    finally:
        worker.discard()
