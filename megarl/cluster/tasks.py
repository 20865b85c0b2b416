"""Concurrent work: tasks that fail together, and one that runs beside a block."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a TaskGroup that raises its first error itself, not in a group with the errors that cancelling caused."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


@asynccontextmanager
async def beside(work: Callable[[], Coroutine[None, None, None]]) -> AsyncIterator[None]:
    """Run `work` inside the block, and cancel it at the end."""
    task = logged_task(work())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def logged_task(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Start a task that is not awaited while it works; an error that ends it is logged at once."""
    task = asyncio.create_task(work)
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s ended", task.get_coro(), exc_info=error)
