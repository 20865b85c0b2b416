"""Whether a recipe's reward can be had at all, before anything is started. No rollout, no engine."""

from __future__ import annotations

import asyncio
from typing import assert_never

from megarl.config.recipe import ExactRewardConfig, FunctionRewardConfig, RewardConfig
from megarl.errors import Problem
from megarl.reward.pool import START_TIMEOUT_S, RewardWorker


def check_reward(config: RewardConfig, *, timeout_s: float = START_TIMEOUT_S) -> list[Problem]:
    """Every problem of the section: the file, its imports, the function and its arguments. Not inside an event loop."""
    match config:
        case ExactRewardConfig():
            return []
        case FunctionRewardConfig():
            if not config.path.is_file():
                return [Problem(key="reward.path", message=f"{config.path} is not a file; name your Python file")]
            problem = asyncio.run(_try_import(config, timeout_s=timeout_s))
            return [] if problem is None else [problem]
        case _:
            assert_never(config)


async def _try_import(config: FunctionRewardConfig, *, timeout_s: float) -> Problem | None:
    worker = RewardWorker(config)
    try:
        return await worker.handshake(timeout_s=timeout_s)
    finally:
        worker.discard()
