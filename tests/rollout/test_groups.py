"""The source of a loop's groups: groups outlive the loop that asked for them, and prompts without an answer."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest

from megarl.checkpoint.carried import OPEN_STEP_FOLDER
from megarl.errors import FleetError, QuarantineError
from megarl.observe.metrics import Meter
from megarl.observe.observer import Observer
from megarl.rollout import groups as groups_module
from megarl.rollout.generator import Sampling
from megarl.rollout.groups import RetainedGroups, SampledGroups
from megarl.rollout.worker import AnsweredPrompt, RolloutTask
from megarl.run.buffer import Buffer
from megarl.types import PolicyVersion, Prompt, ScoredGroup
from tests.engine.engines import scripted_fleet
from tests.observe.samples import scored_group, step_summary
from tests.values import versioned_group

TASK = RolloutTask(sampling=Sampling.greedy(max_response_tokens=4), seed=1)


class Engines:
    """A `RolloutSource` that answers when it may, with the version that it serves."""

    def __init__(self) -> None:
        self.fleet = scripted_fleet(lambda _: httpx.Response(500))
        self.version = PolicyVersion(3)
        self.asked: list[int] = []
        self.failures: dict[int, Exception] = {}
        self.may_answer = asyncio.Event()

    @property
    def version(self) -> PolicyVersion:
        return self.fleet.committed_version

    @version.setter
    def version(self, version: PolicyVersion) -> None:
        self.fleet.committed_version = version

    async def answer(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
        self.asked.append(prompt.position)
        await self.may_answer.wait()
        if prompt.position in self.failures:
            raise self.failures[prompt.position]
        return AnsweredPrompt(scored=versioned_group(prompt.position, self.version), seconds=0.0)

    async def announce(self) -> None: ...

    async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
        return []


class Asking:
    """One loop after the other."""

    def __init__(self) -> None:
        self.engines = Engines()
        self.retained = RetainedGroups()

    async def ask(self, *positions: int) -> list[ScoredGroup | BaseException | None]:
        source = SampledGroups(self.engines, TASK, Observer(()), retained=self.retained, fleet=self.engines.fleet)
        prompts = [versioned_group(position, 0).group.prompt for position in positions]
        return await asyncio.gather(*map(source.scored_group, prompts), return_exceptions=True)

    def take_left(self, folder: Path) -> int:
        """Begin with what another driver left for version 3."""
        return self.retained.take_left(
            folder,
            PolicyVersion(3),
            identity="a run",
            prompt_at=lambda position: versioned_group(position, 0).group.prompt,
            warn=pytest.fail,
        )

    async def lose(self, *positions: int) -> None:
        """Ask in a loop whose ranks are lost before an answer comes."""
        loop = asyncio.create_task(self.ask(*positions))
        while len(self.engines.asked) < len(positions):
            await asyncio.sleep(0)
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loop


@pytest.fixture
def asking() -> Asking:
    return Asking()


async def test_a_step_that_is_taken_again_asks_only_for_what_is_missing(asking: Asking) -> None:
    await asking.lose(7, 8)
    asking.engines.may_answer.set()
    assert await asking.retained.finish() == 2
    groups = await asking.ask(7, 8, 9)
    assert [group.group.prompt.position for group in groups if isinstance(group, ScoredGroup)] == [7, 8, 9]
    assert asking.engines.asked == [7, 8, 9]


async def test_answers_of_another_version_are_not_used(asking: Asking) -> None:
    asking.engines.may_answer.set()
    await asking.ask(7)
    asking.engines.version = PolicyVersion(2)
    await asking.ask(7)
    asking.engines.version = PolicyVersion(3)
    await asking.ask(7)
    assert asking.engines.asked == [7, 7, 7]


async def test_an_answer_of_two_versions_is_asked_for_again(asking: Asking) -> None:
    await asking.lose(7)
    asking.engines.version = PolicyVersion(4)  # an engine that took the next one already
    asking.engines.may_answer.set()
    assert await asking.retained.finish() == 0


async def test_what_failed_is_asked_for_again_and_what_is_quarantined_is_not(asking: Asking) -> None:
    asking.engines.failures = {7: FleetError("no engine is left"), 8: QuarantineError("lost two engines")}
    asking.engines.may_answer.set()
    first = await asking.ask(7, 8)
    assert [type(each) for each in first] == [FleetError, type(None)]
    assert await asking.retained.finish() == 1
    asking.engines.failures.clear()
    answered, quarantined = await asking.ask(7, 8)
    assert isinstance(answered, ScoredGroup)
    assert quarantined is None
    assert asking.engines.asked == [7, 8, 7]


async def test_cancelled_answers_are_asked_for_again(asking: Asking) -> None:
    await asking.lose(7)
    await asking.retained.cancel()
    assert await asking.retained.finish() == 0
    asking.engines.may_answer.set()
    (group,) = await asking.ask(7)
    assert isinstance(group, ScoredGroup)


async def test_between_two_loops_nothing_waits_for_engines_that_wait_for_ranks(asking: Asking) -> None:
    async with asking.retained.watched(lambda: False):
        with asking.retained.used():
            await asking.lose(7)
            await asyncio.sleep(0.7)
            asking.engines.may_answer.set()
            assert await asking.retained.finish() == 1
            asking.engines.may_answer.clear()
            await asking.lose(7, 8)
        assert await asking.retained.finish() == 1
        assert asking.engines.asked == [7, 8]


async def test_nothing_is_under_way_at_the_end(asking: Asking) -> None:
    async with asking.retained.watched(lambda: True):
        await asking.lose(7)
    assert await asking.retained.finish() == 0


async def test_a_step_that_is_trained_is_forgotten(asking: Asking) -> None:
    asking.engines.may_answer.set()
    await asking.ask(7, 8)
    asking.retained.forget()
    assert asking.retained.finished(PolicyVersion(3)) == ()
    await asking.ask(7)
    assert asking.engines.asked == [7, 8, 7]


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
    await asking.retained.leave(tmp_path, PolicyVersion(3), identity="a run")
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
    monkeypatch.setattr(groups_module, "JOURNAL_EVERY_S", 0.01)
    asking.engines.may_answer.set()
    async with asking.retained.journalled(tmp_path, identity="a run", warn=pytest.fail):
        asking.engines.version = PolicyVersion(2)
        await asking.ask(5, 6)
        await until(lambda: asking.retained._written == {5, 6})
        asking.engines.version = PolicyVersion(3)
        await asking.ask(7, 8)
        await until(lambda: asking.retained._written == {7, 8})
        await asking.ask(9)
        await until(lambda: asking.retained._written == {7, 8, 9})
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
        patch.setattr(groups_module, "JOURNAL_EVERY_S", 0.01)
        async with asking.retained.journalled(tmp_path / "file", identity="a run", warn=told.append):
            await asking.ask(7)
            await until(lambda: bool(told))
            await asyncio.sleep(0.1)
    assert len(told) == 1


def parts_in(folder: Path) -> int:
    return len(list((folder / OPEN_STEP_FOLDER).glob("*/part.json")))


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_what_another_driver_left_is_not_taken_once_something_was_asked(asking: Asking, tmp_path: Path) -> None:
    asking.engines.may_answer.set()
    await asking.ask(7)
    await asking.retained.leave(tmp_path, PolicyVersion(3), identity="a run")
    assert asking.take_left(tmp_path) == 0


def test_groups_are_counted_and_the_slowest_is_told_with_the_step() -> None:
    seconds = iter([0.01, 0.01, 0.05])
    scored = scored_group([0.0, 1.0], lengths=[2, 4])

    class Slow:
        async def answer(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
            return AnsweredPrompt(scored=scored, seconds=next(seconds))

        async def announce(self) -> None: ...

        async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
            return []

    meter = Meter("sample")
    observer = Observer((), meter=meter)
    task = RolloutTask(sampling=Sampling.greedy(max_response_tokens=4), seed=1)
    groups = SampledGroups(Slow(), task, observer)
    for _ in range(3):
        assert asyncio.run(groups.scored_group(scored.group.prompt)) is scored
    observer.step_summarized(step_summary(1))
    values = meter.values("rollout")
    assert (values["rollout/generated_rollouts"], values["rollout/generated_tokens"]) == (6, 18)
    assert values["rollout/group_tail_ratio"] > 2


async def test_groups_whose_tokens_are_lost_are_answered_again() -> None:
    groups = [scored_group([0.0, 1.0], lengths=[2, 4]) for _ in range(3)]
    again = scored_group([0.0, 1.0], lengths=[2, 4])
    asked = []

    class Lossy:
        async def answer(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
            asked.append(prompt)
            return AnsweredPrompt(scored=again, seconds=0.0)

        async def announce(self) -> None: ...

        async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
            return [1]

    task = RolloutTask(sampling=Sampling.greedy(max_response_tokens=4), seed=1)

    buffer = Buffer(
        prompts_per_step=3,
        max_staleness=0,
        versions=(PolicyVersion(3),),
        replace_lost=SampledGroups(Lossy(), task, Observer(())).replace_lost,
    )
    for scored in groups:
        await buffer.put(await buffer.reserve(), scored)
    taken = await buffer.take_step()
    assert [id(scored) for scored in taken] == [id(groups[0]), id(again), id(groups[2])]
    assert asked == [groups[1].group.prompt]
