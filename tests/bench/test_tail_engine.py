"""The orders of a step on a real engine: what the simulation learns from it, and what becomes of runs that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import tail_engine
from bench.figures import Failure, Figure
from bench.tail import ORDERS, Engines, TailFigure, World
from bench.tail_engine import LOADS, begin_s, compared, measure_tail_engine
from megarl.errors import EngineError

LOAD = LOADS["cuda"]
ENGINE = Engines(
    step_s=lambda running, _context: 3e-3 + 1e-5 * running,
    num=1,
    num_running=LOAD.running_requests,
    most_outstanding=LOAD.running_requests + LOAD.running_requests // 8,
)


def test_requests_that_begin_in_one_moment_delay_those_that_run_once() -> None:
    engines = Engines(step_s=lambda _running, _context: 1.0, begin_s=5.0, num=1, num_running=2, most_outstanding=3)
    # Two begin at 0 and compute from 5; at 9 one ends and the third begins, which the other one waits for.
    assert World(engines, prompt_tokens=1).answer([(0, 4), (0, 6), (1, 3)]) == [9.0, 16.0, 17.0]


def test_the_time_of_a_begin_follows_from_requests_without_an_order() -> None:
    slow = replace(ENGINE, begin_s=0.011)
    seconds = World(slow, prompt_tokens=LOAD.prompt_tokens).answer(LOAD.unordered())[-1]
    assert begin_s(ENGINE, LOAD, seconds) == pytest.approx(0.011, rel=0.03)
    assert begin_s(ENGINE, LOAD, 0.1) == 0


def _ranked(outcome: tail_engine.Outcome) -> dict[str, object]:
    """Return how engine and simulator rank the orders."""
    assert isinstance(outcome, dict)
    ranked = outcome["tail, fastest first"]
    assert isinstance(ranked, dict)
    return ranked


@pytest.mark.parametrize(("seconds", "agree"), [((9.0, 8.0, 7.0), True), ((9.0, 7.0, 8.0), False)])
def test_engine_and_simulator_agree_if_they_rank_the_orders_alike(seconds: Sequence[float], agree: bool) -> None:
    def figures(seconds: Sequence[float]) -> list[TailFigure]:
        return [
            TailFigure(order=name, seconds=spent, tail=0.2, ratio=spent / seconds[0])
            for name, spent in zip(ORDERS, seconds, strict=True)
        ]

    *_, verdict = compared(figures(seconds), figures((19.0, 18.0, 17.0)), LOAD)
    assert _ranked(verdict)["agree"] is agree
    assert all(isinstance(each, Figure) for each in compared(figures(seconds), None, LOAD))


def test_a_run_that_fails_takes_its_step_and_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = replace(ENGINE, begin_s=0.01)
    calls = iter(range(1000))
    fails = 3 * len(LOAD.batches) + 2 + 1  # after those for the engine's times, the second order of the first step

    async def answer(bench: tail_engine._Bench, requests: Sequence[tuple[int, int]]) -> list[float]:
        if next(calls) == fails:
            raise EngineError("engine 0: gone")
        return World(engine, prompt_tokens=bench.load.prompt_tokens).answer(requests)

    @asynccontextmanager
    async def serving(*_: object, **__: object) -> AsyncIterator[object]:
        yield SimpleNamespace(role=SimpleNamespace(outstanding_requests=ENGINE.most_outstanding))

    async def full_publish(_: object) -> object:
        return SimpleNamespace(send=lambda: asyncio.sleep(0))

    monkeypatch.setattr(tail_engine, "serving", serving)
    monkeypatch.setattr(tail_engine, "full_publish", full_publish)
    monkeypatch.setattr(tail_engine._Bench, "_ask", answer)

    async def measure() -> list[tail_engine.Outcome]:
        return [outcome async for outcome in measure_tail_engine("qwen2.5-1.5b", tmp_path, {})]

    outcomes = asyncio.run(measure())
    (failure,) = (each for each in outcomes if isinstance(each, Failure))
    assert failure.part == "tail, step 0, longest in the epoch before first"
    figures = [each for each in outcomes if isinstance(each, Figure)]
    assert [each.key.removeprefix("tail, ") for each in figures] == list(ORDERS)
    assert _ranked(outcomes[-1])["agree"]
    # The simulation has seen no order, and gives what the engine takes within 2 %.
    simulated = [float(each.name.partition("simulated ")[2].partition(" s")[0]) for each in figures]
    assert simulated == pytest.approx([each.value for each in figures], rel=0.02)
