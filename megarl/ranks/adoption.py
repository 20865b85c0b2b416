"""A driver takes over the trainer ranks that an earlier driver of the run left."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from megarl.errors import WorkerError
from megarl.ranks.calls import ModelCalls
from megarl.ranks.ranks import ALWAYS, BESIDE_TRAINING, RankGroup

logger = logging.getLogger(__name__)

Rank = TypeVar("Rank", bound=ModelCalls)

_TIMEOUT_S = 60.0
"""Time for ranks to end the calls that the earlier driver began."""


async def adopt_ranks(ranks: RankGroup[Rank], fill: Callable[[Rank], bool], *, is_shared: bool) -> bool:
    """Let `fill` bring every rank to this driver's state; return False if they must be started again.

    `fill` returns whether its rank was there already. `is_shared`: engines are on the devices of the ranks.
    """
    try:
        if is_shared:
            raise WorkerError("they may have given up memory to engines of their devices")
        is_there = await _adopt(ranks, fill)
    except WorkerError as error:
        logger.warning("role=%s ranks are not adopted, but started again: %s", ranks.role, error)
        return False
    logger.info("adopted role=%s %s", ranks.role, "as they are" if is_there else "with the checkpoint")
    return True


async def _adopt(ranks: RankGroup[Rank], fill: Callable[[Rank], bool]) -> bool:
    for group in (ALWAYS, BESIDE_TRAINING):  # in the latter after the calls that the earlier driver began
        started = [worker.process.options(concurrency_group=group).remote() for worker in ranks.workers]
        ranks.processes = await ranks.gather("process", started, timeout_s=_TIMEOUT_S)
    filling = [worker.adopt.remote(fill) for worker in ranks.workers]
    return all(await ranks.gather("adopt", filling, timeout_s=max(_TIMEOUT_S, ranks.timeout_s)))
