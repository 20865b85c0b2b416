"""The journal of a step: another driver goes on with the groups that are in the folder."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.checkpoint.carried import OPEN_STEP_FOLDER
from megarl.rollout import journal as journal_module
from megarl.types import PolicyVersion
from tests.rollout.asking import Asking


@pytest.fixture
def asking() -> Asking:
    return Asking()


async def test_what_was_answered_is_left_to_another_driver(asking: Asking, tmp_path: Path) -> None:
    asking.engines.may_answer.set()
    await asking.ask(8, 7)
    asking.engines.may_answer.clear()
    under_way = asyncio.create_task(asking.ask(9))
    while 9 not in asking.engines.asked:
        await asyncio.sleep(0)
    under_way.cancel()
    assert asking.retained.finished(PolicyVersion(4)) == ()
    left = asking.retained.finished(PolicyVersion(3))
    assert [scored.group.prompt.position for scored in left] == [7, 8]
    await asking.journal(tmp_path).write(PolicyVersion(3))
    await asking.retained.cancel()

    later = Asking()
    assert later.take_left(tmp_path) == 2
    assert later.take_left(tmp_path) == 0
    later.engines.may_answer.set()
    assert await later.retained.finish() == 2
    await later.ask(7, 8, 9)
    assert later.engines.asked == [9]


async def test_a_driver_that_is_killed_leaves_what_was_answered(
    asking: Asking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is called at its end: the answers are in the folder as they come, those of the step that goes on."""
    monkeypatch.setattr(journal_module, "JOURNAL_EVERY_S", 0.01)
    asking.engines.may_answer.set()
    journal = asking.journal(tmp_path)
    async with journal.kept():
        asking.engines.version = PolicyVersion(2)
        await asking.ask(5, 6)
        await until(lambda: journal._written == {5, 6})
        asking.engines.version = PolicyVersion(3)
        await asking.ask(7, 8)
        await until(lambda: journal._written == {7, 8})
        await asking.ask(9)
        await until(lambda: journal._written == {7, 8, 9})
        assert parts_in(tmp_path) == 2
        shutil.copytree(tmp_path, tmp_path / "killed")
    assert not parts_in(tmp_path), "a run that is done leaves nothing"
    later = Asking()
    assert later.take_left(tmp_path / "killed") == 3
    later.engines.may_answer.set()
    await later.ask(7, 8, 9, 10)
    assert later.engines.asked == [10]


async def test_a_disk_that_takes_no_answers_is_told_once(asking: Asking, tmp_path: Path) -> None:
    told: list[str] = []
    asking.engines.may_answer.set()
    (tmp_path / "file").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "JOURNAL_EVERY_S", 0.01)
        async with asking.journal(tmp_path / "file", warn=told.append).kept():
            await asking.ask(7)
            await until(lambda: bool(told))
            await asyncio.sleep(0.1)
    assert len(told) == 1


async def test_what_another_driver_left_is_not_taken_once_something_was_asked(asking: Asking, tmp_path: Path) -> None:
    asking.engines.may_answer.set()
    await asking.ask(7)
    await asking.journal(tmp_path).write(PolicyVersion(3))
    assert asking.take_left(tmp_path) == 0


def parts_in(folder: Path) -> int:
    return len(list((folder / OPEN_STEP_FOLDER).glob("*/part.json")))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)
