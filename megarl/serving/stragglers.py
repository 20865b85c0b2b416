"""Ranks and engines that are slow: the times of each window are compared with the median of their kind.

`engine.dispatch` and `engine.fleet` measure engines; this module decides which one is slow, and drains it.
The time of an engine is that of a token in the requests that it answered; requests are spread evenly, so that all
engines have the same to do. The time of a rank is that of a fixed product of matrices: the ranks of a step wait for
each other, and the time of their calls does not tell who is late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from statistics import median_low

from megarl.cluster.tasks import beside
from megarl.config.recipe import StragglerConfig
from megarl.engine.dispatch import Throughput
from megarl.engine.fleet import Engine, Fleet
from megarl.errors import WorkerError
from megarl.observe.events import Straggled
from megarl.observe.observer import Observer
from megarl.ranks.calls import ModelCalls
from megarl.ranks.ranks import RankGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowMember:
    index: int
    ratio: float
    """Its time over the median's."""
    num_windows: int
    """Slow windows in a row."""


class SlowStreaks:
    """Counts for how many windows in a row each member of a group has been slow."""

    def __init__(self, *, ratio: float) -> None:
        self._ratio = ratio
        self._streaks: dict[int, int] = {}

    def judge(self, times: Mapping[int, float]) -> list[SlowMember]:
        """Return the members that are slow in this window, the slowest first; one without a time keeps its streak."""
        if not times:
            return []
        # The lower one of two: beside a single other engine the mean of both would hide a slow one.
        middle = median_low(times.values())
        ratios = {index: seconds / middle for index, seconds in times.items() if seconds > self._ratio * middle}
        for index in times:
            self._streaks[index] = self._streaks.get(index, 0) + 1 if index in ratios else 0
        slow = [SlowMember(index=i, ratio=ratio, num_windows=self._streaks[i]) for i, ratio in ratios.items()]
        return sorted(slow, key=lambda member: -member.ratio)

    def forget(self, index: int) -> None:
        self._streaks.pop(index, None)


@dataclass(eq=False)
class EngineWatch:
    """Compares the engines of a fleet, window by window."""

    fleet: Fleet
    config: StragglerConfig
    observer: Observer
    _: KW_ONLY
    drain: Callable[[Engine, str], bool]
    """Returns False if the engine cannot be spared now."""

    def __post_init__(self) -> None:
        self._streaks = SlowStreaks(ratio=self.config.ratio)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Compare the engines at the end of each window, inside the block."""

        async def compare() -> None:
            while True:
                await asyncio.sleep(self.config.window_s)
                self.end_window()

        async with beside(compare):
            yield

    def end_window(self) -> None:
        """Compare the times since the last call; an engine with too few answers is compared later."""
        times: dict[int, float] = {}
        for engine in self.fleet.engines:
            if not engine.is_live:
                engine.throughput = Throughput()
                self._streaks.forget(engine.index)
            elif (token_s := engine.throughput.token_s) is not None:
                times[engine.index] = token_s
                engine.throughput = Throughput()
        self.observer.measured("rollout", times)
        engines = {engine.index: engine for engine in self.fleet.engines}
        for slow in self._streaks.judge(times):
            if slow.num_windows % self.config.windows == 0:
                self._name(slow, engines[slow.index], times[slow.index])

    def _name(self, slow: SlowMember, engine: Engine, token_s: float) -> None:
        reason = (
            f"a token takes {token_s * 1e3:.1f} ms, {slow.ratio:.1f} times the median, for {slow.num_windows} windows "
            f"of {self.config.window_s:g} s"
        )
        is_drained = self.config.drains_engines and self.drain(engine, f"is slow: {reason}")
        then = "it is drained and restarted" if is_drained else "it stays"
        self.observer.emit(
            Straggled(role="rollout", index=slow.index, ratio=slow.ratio, text=f"{engine} is slow: {reason}; {then}")
        )


@asynccontextmanager
async def watched_ranks(
    ranks: RankGroup[ModelCalls], config: StragglerConfig, observer: Observer
) -> AsyncIterator[None]:
    """Measure and compare the ranks of a model once in each window, inside the block."""
    streaks = SlowStreaks(ratio=config.ratio)

    async def compare() -> None:
        while len(ranks) > 1:
            await asyncio.sleep(config.window_s)
            try:
                async with ranks.device_lock:
                    times = dict(enumerate(await ranks.call(ModelCalls.measure)))
            except WorkerError as error:
                logger.info("role=%s not measured: %s", ranks.role, error)
                return  # the run notices the loss of its ranks as well and handles it
            observer.measured(ranks.role, times)
            for slow in streaks.judge(times):
                if slow.num_windows % config.windows == 0:
                    node = await asyncio.to_thread(ranks.node_of, slow.index)
                    text = (
                        f"{ranks.role} rank {slow.index} on {node} is slow: a product of matrices "
                        f"takes {times[slow.index] * 1e3:.1f} ms, {slow.ratio:.1f} times the median, for "
                        f"{slow.num_windows} windows of {config.window_s:g} s; every step waits for it"
                    )
                    observer.emit(Straggled(role=ranks.role, index=slow.index, ratio=slow.ratio, text=text))

    async with beside(compare):
        yield
