"""How many episodes are open, with engines and tools of simulated latencies on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from random import Random

import pytest

from megarl.episodes.admission import Admission, most_open


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes at once, wherever all tasks wait for it. It knows no other events."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector.select = self._pass  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now

    def _pass(self, timeout: float | None) -> list[object]:
        assert timeout is not None, "all tasks wait for something that does not come"
        self._now += timeout
        return []


def on_virtual_time(main: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


@dataclass
class World:
    """Engines that compute `num_slots` turns at once, and episodes that wait for tools between their turns."""

    admission: Admission
    num_slots: int
    start_s: float
    turn_s: float
    tool_s: float
    num_turns: int = 5
    random: Random = field(default_factory=lambda: Random(1))
    most_open: int = 0
    busy_s: float = 0.0
    num_asking: int = 0
    most_asking: int = 0

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.num_slots)

    async def episode(self) -> None:
        place = self.admission.place()
        async with place:
            self.most_open = max(self.most_open, self.admission.num_open)
            await self._wait(self.start_s)
            for _ in range(self.num_turns):
                with place.turn():
                    self.num_asking += 1
                    self.most_asking = max(self.most_asking, self.num_asking)
                    async with self._slots:
                        seconds = await self._wait(self.turn_s)
                    self.busy_s += seconds
                    self.num_asking -= 1
                await self._wait(self.tool_s)

    async def _wait(self, mean_s: float) -> float:
        seconds = mean_s * self.random.uniform(0.5, 1.5)
        await asyncio.sleep(seconds)
        return seconds

    async def busy_share(self, *, num_episodes: int, from_s: float, to_s: float) -> float:
        """Return the share of the engines' places that are used in a window of time."""
        tasks = [asyncio.create_task(self.episode()) for _ in range(num_episodes)]
        await asyncio.sleep(from_s)
        before = self.busy_s
        await asyncio.sleep(to_s - from_s)
        share = (self.busy_s - before) / (self.num_slots * (to_s - from_s))
        assert not all(task.done() for task in tasks), "episodes wait throughout the window"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return share


@pytest.mark.patient
@pytest.mark.parametrize(
    ("start_s", "tool_s"), [(0.0, 0.0), (0.0, 19.0), (1.0, 99.0), (50.0, 0.0), (50.0, 20.0)], ids=str
)
def test_engines_stay_busy_whatever_episodes_wait_for(start_s: float, tool_s: float) -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        admission = Admission(max_running=8, max_open=100_000, clock=clock)
        world = World(admission=admission, num_slots=8, start_s=start_s, turn_s=1.0, tool_s=tool_s)
        assert await world.busy_share(num_episodes=4000, from_s=500, to_s=1500) > 0.9
        num_needed = 8 * (start_s + 5 * (1.0 + tool_s)) / 5
        assert world.most_open < 1.25 * num_needed + 8
        assert admission.num_open == admission.num_turns == admission.num_starting == 0

    on_virtual_time(main)


def test_a_fixed_number_of_episodes_would_leave_engines_empty() -> None:
    async def main() -> None:
        admission = Admission(max_running=8, max_open=8, clock=asyncio.get_running_loop().time)
        world = World(admission=admission, num_slots=8, start_s=0.0, turn_s=1.0, tool_s=19.0)
        assert await world.busy_share(num_episodes=2000, from_s=500, to_s=1500) < 0.1

    on_virtual_time(main)


def test_memory_bounds_the_number_of_open_episodes() -> None:
    async def main() -> None:
        admission = Admission(max_running=8, max_open=20, clock=asyncio.get_running_loop().time)
        world = World(admission=admission, num_slots=8, start_s=5.0, turn_s=1.0, tool_s=99.0)
        await world.busy_share(num_episodes=400, from_s=1, to_s=1000)
        assert world.most_open == 20

    on_virtual_time(main)


def test_the_bound_of_memory_follows_from_the_longest_context() -> None:
    assert most_open(16 << 30, 2048) == 43_690
    assert most_open(16 << 30, 131_072) == 1_016
    assert most_open(0, 131_072) == 1


def test_an_episode_that_is_cancelled_at_the_door_takes_no_place() -> None:
    async def main() -> None:
        admission = Admission(max_running=1, max_open=1)

        async def play() -> None:
            async with admission.place():
                await asyncio.sleep(1)

        first, second, third = (asyncio.create_task(play()) for _ in range(3))
        await asyncio.sleep(0)
        second.cancel()
        await first
        assert admission.num_open == 1, "the third has the place of the first"
        third.cancel()
        await asyncio.gather(second, third, return_exceptions=True)
        assert admission.num_open == admission.num_starting == 0

    on_virtual_time(main)
