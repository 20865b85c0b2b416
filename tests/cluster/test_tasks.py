from __future__ import annotations

import asyncio

import pytest

from megarl.cluster.tasks import beside


async def test_work_beside_a_block_ends_with_it_and_an_error_of_it_is_logged_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("ended")

    async def fail() -> None:
        raise ValueError("no such node")

    async with beside(wait), beside(fail):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert "no such node" in caplog.text
        assert not seen
    assert seen == ["ended"]
