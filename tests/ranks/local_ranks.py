"""A group of ranks without processes: one object of this process answers for all of them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megarl.config.roles import ModelParallelConfig
from megarl.data.shares import Share
from megarl.ranks.ranks import RankGroup
from megarl.ranks.remote_columns import RemoteColumn
from megarl.tokens import ColumnName, SampleColumn
from megarl.types import TrainBatch

Result = TypeVar("Result")


class LocalRanks(RankGroup[Any]):
    """Calls the methods of `answers`, which may be coroutines; one that returns a list has a result per rank.

    A method that takes shares gets them with the columns that ranks have computed before, and one that computes a
    column returns it.
    """

    def __init__(self, answers: object, *, role: str = "actor") -> None:
        super().__init__(
            role, [], split=ModelParallelConfig(), timeout_s=60, run_folder=Path(), device_lock=asyncio.Lock()
        )
        self._answers = answers

    def __len__(self) -> int:
        return 1

    async def _call_all(
        self,
        method: Callable[..., Result],
        arguments: Sequence[object],
        named: dict[str, object],
        *,
        waits_for_all: bool = False,
    ) -> list[Result]:
        return await self._answer(method.__name__, *arguments, **named)

    async def call_beside(
        self,
        is_moving: Callable[[], Awaitable[bool]],
        method: Callable[..., Result],
        *arguments: object,
        **named: object,
    ) -> list[Result]:
        return await self._answer(method.__name__, *arguments, **named)

    async def compute_column(
        self, method: Callable[[Any, TrainBatch], SampleColumn | None], shares: Iterator[Share]
    ) -> RemoteColumn:
        (column,) = await self._answer(method.__name__, shares)
        assert isinstance(column, RemoteColumn), column
        return column

    async def _compute_shares(
        self, method: str, shares: Iterator[Share], columns: Mapping[ColumnName, RemoteColumn]
    ) -> list[Any]:
        return await self._answer(method, shares, columns)

    async def _answer(self, method: str, *arguments: object, **named: object) -> list[Any]:
        result = getattr(self._answers, method)(*arguments, **named)
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, list) else [result]
