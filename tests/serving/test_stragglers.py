"""Slow members of a group: who is named, who is drained, and a rank that is really slow."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config.recipe import StragglerConfig
from megarl.engine.dispatch import Throughput
from megarl.engine.lifecycle import EngineState
from megarl.observe.events import Straggled
from megarl.observe.observer import Observer
from megarl.serving.stragglers import EngineWatch, SlowStreaks
from tests.observe.samples import ListSink
from tests.serving.supervised import supervised, until

CONFIG = StragglerConfig(windows=2, window_s=0.5)


def judged(*windows: Mapping[int, float]) -> list[list[tuple[int, int]]]:
    streaks = SlowStreaks(ratio=2)
    return [[(slow.index, slow.num_windows) for slow in streaks.judge(times)] for times in windows]


def test_a_member_is_slow_beside_the_median_and_its_windows_are_counted_in_a_row() -> None:
    even, uneven = {0: 1.0, 1: 1.1, 2: 1.2}, {0: 1.0, 1: 1.1, 2: 2.5}
    assert judged(uneven, uneven, even, uneven) == [[(2, 1)], [(2, 2)], [], [(2, 1)]]
    assert judged(uneven, {0: 1.0, 1: 1.1}, uneven) == [[(2, 1)], [], [(2, 2)]]


def test_of_two_the_slow_one_is_named_and_one_alone_never_is() -> None:
    assert judged({0: 1.0, 1: 9.0}) == [[(1, 1)]]
    assert judged({0: 9.0}) == [[]]


def test_when_half_are_slow_nobody_knows_who_is_and_none_but_the_slower_half_is_named() -> None:
    assert judged({0: 1.0, 1: 1.0, 2: 9.0, 3: 8.0}) == [[(2, 1), (3, 1)]]


async def test_a_slow_engine_is_named_drained_and_restarted_and_the_last_one_never() -> None:
    async with supervised() as (scripted, fleet, supervisor):
        seen: list[EngineState] = []
        fleet.listen(lambda engine, _before: seen.append(engine.state))
        sink = ListSink()
        watch = EngineWatch(fleet, CONFIG, Observer([sink]), drain=supervisor.drain)

        def window() -> None:
            for engine, seconds in zip(fleet.engines, (1.0, 5.0), strict=True):
                fleet.answered(engine, Throughput(num_requests=8, num_tokens=100, seconds=seconds))
            watch.end_window()

        window()
        assert not sink.events
        window()
        (event,) = sink.events
        assert isinstance(event, Straggled)
        assert (event.role, event.index, event.ratio) == ("rollout", 1, 5.0)
        assert "a token takes 50.0 ms, 5.0 times the median, for 2 windows" in event.text
        assert event.text.endswith("it is drained and restarted")
        # It is the only one left while the other is away.
        assert not supervisor.drain(fleet.engines[0], "is slow")
        await until(lambda: fleet.engines[1].is_live)
        assert seen == ["draining", "dead", "restarting", "stale", "healthy"]
        assert fleet.engines[1].status.num_restarts == 1
        assert "is slow: a token" in scripted.reasons[0]


async def test_an_engine_with_few_answers_is_compared_when_it_has_more() -> None:
    async with supervised() as (_, fleet, supervisor):
        sink = ListSink()
        watch = EngineWatch(fleet, StragglerConfig(windows=1), Observer([sink]), drain=supervisor.drain)
        for _ in range(2):
            fleet.answered(fleet.engines[0], Throughput(num_requests=8, num_tokens=100, seconds=1.0))
            fleet.answered(fleet.engines[1], Throughput(num_requests=4, num_tokens=50, seconds=5.0))
            watch.end_window()
        (text,) = [event.text for event in sink.events if isinstance(event, Straggled)]
    assert "a token takes 100.0 ms, 10.0 times the median" in text


async def test_an_engine_without_restarts_left_is_named_and_stays() -> None:
    async with supervised() as (scripted, fleet, supervisor):
        for _ in range(2):
            scripted.kill(1)
            await until(lambda: not fleet.engines[1].is_live)
            await until(lambda: fleet.engines[1].is_live)
        assert not supervisor.drain(fleet.engines[1], "is slow")
        assert fleet.engines[1].is_live
