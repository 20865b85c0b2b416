"""Environments of a class that a test writes, closed after it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

_T = TypeVar("_T")

CALCULATOR = '''
class Calculator:
    def __init__(self, ground_truth: str, **row):
        self.truth = ground_truth
        self.last = 0

    def add(self, a: int, b: int = 1) -> str:
        """Add two numbers."""
        self.last = a + b
        return str(self.last)

    def repeat(self) -> str:
        """Return the last sum."""
        return str(self.last)

    def score(self, transcript) -> float:
        return float(transcript.last_text.strip() == self.truth)
'''


@pytest.fixture
def write_class(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "environment.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def run() -> Iterator[Callable[[Awaitable[_T]], _T]]:
    """Run coroutines in one event loop."""
    with asyncio.Runner() as runner:

        async def finish(value: Awaitable[_T]) -> _T:
            return await value

        yield lambda value: runner.run(finish(value))
