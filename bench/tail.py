"""The end of a step's generation by simulation: what the last answers cost, and what other orders of prompts gain.

Requests go to engines by the product's own dispatcher; an engine takes as long for a token as the plan says. Lengths
are those of a run, or those that the plan assumes, with answers to one prompt more or less alike.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import numpy as np
import pyarrow.parquet as pq

from megarl.config.load import read_recipe
from megarl.data.rollout_files import list_rollouts
from megarl.engine.dispatch import Dispatcher
from megarl.errors import DataError
from megarl.planner.complete import complete
from megarl.planner.deployment import StepWorkload, find_shapes
from megarl.planner.hardware import gpu_of
from megarl.planner.timing import RolloutTime

LAST = 0.1
"""The share of the answers whose cost is shown."""
_NUM_MADE = 8
"""Steps whose lengths are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailFigure:
    order: str
    seconds: float
    """Generation of a step."""
    tail: float
    """Share of it after all but `LAST` of the answers are there."""
    ratio: float
    """Its part of the seconds in the order of the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The answers of a step: their lengths by prompt, and what is known of each prompt before."""

    lengths: Sequence[Sequence[int]]
    before: Sequence[float]
    """Mean length of the answers in the epoch before."""


@dataclass(slots=True, eq=False)
class _Engine:
    """An engine that computes a token of each running request at a time (a `Dispatched`)."""

    index: int
    num_outstanding: int = 0
    is_live: bool = True
    time: float = 0.0
    position: float = 0.0
    """Decoding steps that were made."""
    running: list[tuple[float, int, float]] = field(default_factory=list)
    """A heap of the steps at which requests end, their numbers, and the steps at which they began."""
    sum_began: float = 0.0
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """Numbers and lengths of requests that it has no room for."""
    num_changes: int = 0
    has_begun: bool = False
    """Whether requests began that have not cost time yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Engines of one kind: their times, and how many requests they have room for."""

    step_s: Callable[[int, float], float]
    """The time of a token for each of some running requests, whose contexts have so many tokens together."""
    begin_s: float = 0.0
    """Time that the running requests of an engine wait for those that begin in one moment."""
    num: int
    num_running: int
    """Requests that an engine computes at a time."""
    most_outstanding: int


class World:
    """Engines that answer requests of a step, given to them in one order."""

    def __init__(self, kind: Engines, *, prompt_tokens: int) -> None:
        self._kind = kind
        self._prompt_tokens = prompt_tokens
        self._engines = [_Engine(index) for index in range(kind.num)]
        self._dispatcher = Dispatcher(self._engines, max_outstanding=kind.most_outstanding)
        self._ends: list[tuple[float, int, int]] = []
        """A heap of the times at which a request of an engine ends, if nothing changes before."""
        self._now = 0.0

    def answer(self, requests: Sequence[tuple[int, int]]) -> list[float]:
        """Return the times at which requests end that are asked at once; each is the number of its prompt, and a
        length."""
        waiting, ended = deque(enumerate(requests)), list[float]()
        self._fill(waiting, touched=set())
        while self._ends:
            self._now, index, num_changes = heapq.heappop(self._ends)
            engine = self._engines[index]
            if num_changes != engine.num_changes:
                continue
            end, _, began = heapq.heappop(engine.running)
            engine.time, engine.position = self._now, end
            engine.sum_began -= began
            ended.append(self._now)
            self._begin(engine)
            self._dispatcher.release(engine)
            self._fill(waiting, touched={index})
        assert not waiting, f"{len(waiting)} requests are left"
        return ended

    def _fill(self, waiting: deque[tuple[int, tuple[int, int]]], *, touched: set[int]) -> None:
        while waiting:
            number, (prompt, length) = waiting[0]
            engine = self._dispatcher.take(frozenset(), (str(prompt),))
            if engine is None:
                break
            waiting.popleft()
            if engine.index not in touched:
                self._advance(engine)
                touched.add(engine.index)
            engine.waiting.append((number, length))
            self._begin(engine)
        for index in touched:
            self._expect(self._engines[index])

    def _begin(self, engine: _Engine) -> None:
        while engine.waiting and len(engine.running) < self._kind.num_running:
            number, length = engine.waiting.popleft()
            heapq.heappush(engine.running, (engine.position + length, number, engine.position))
            engine.sum_began += engine.position
            engine.has_begun = True

    def _advance(self, engine: _Engine) -> None:
        """Let the engine compute until now."""
        if engine.time > self._now:
            return  # requests begin
        if engine.running:
            engine.position += (self._now - engine.time) / self._step_s(engine, engine.position)
        engine.time = self._now

    def _expect(self, engine: _Engine) -> None:
        """Note when its next request ends."""
        engine.num_changes += 1
        engine.time += self._kind.begin_s if engine.has_begun else 0.0
        engine.has_begun = False
        if engine.running:
            left = max(0.0, engine.running[0][0] - engine.position)
            step_s = self._step_s(engine, engine.position + left / 2)
            heapq.heappush(self._ends, (engine.time + left * step_s, engine.index, engine.num_changes))

    def _step_s(self, engine: _Engine, position: float) -> float:
        num_running = len(engine.running)
        context = num_running * (self._prompt_tokens + position) - engine.sum_began
        return self._kind.step_s(num_running, context)


Order = Callable[[Step], list[int]]
"""The order in which the prompts of a step are asked."""

ORDERS: dict[str, Order] = {
    "as the data has them": lambda step: list(range(len(step.lengths))),
    "longest in the epoch before first": lambda step: _descending(step.before),
    "longest first, if they were known": lambda step: _descending([mean(group) for group in step.lengths]),
}


def _descending(lengths: Sequence[float]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda prompt: -lengths[prompt])


def measure_tail(
    path: Path, overrides: Sequence[str] = (), *, run_folder: Path | None = None, mean_share: float, alike: float
) -> list[TailFigure]:
    """Return the time of a step of a recipe in each order, with the lengths of a run, or else with answers of
    `mean_share` of the limit and `alike` of their variance between prompts."""
    recipe = read_recipe(path, overrides).recipe
    recipe, deployment = complete(recipe, find_shapes(recipe.model, recipe.roles), gpu_of(recipe.cluster, ()))
    rollout = deployment.roles.rollout
    if rollout is None:
        raise DataError(f"{path}: no engines, so nothing is generated")
    num_prompts, num_rollouts = recipe.train.prompts_per_step, recipe.sampling.rollouts_per_prompt
    limit = recipe.sampling.max_response_tokens
    workload = StepWorkload(
        mean_prompt_tokens=max(1, recipe.data.max_prompt_tokens // 2),
        mean_response_tokens=max(1, round(mean_share * limit)),
        max_response_tokens=limit,
    )
    if run_folder is None:
        steps = [
            made_step(workload, num_prompts=num_prompts, num_rollouts=num_rollouts, alike=alike, seed=seed)
            for seed in range(_NUM_MADE)
        ]
    else:
        steps = recorded_steps(run_folder)
    times = RolloutTime(deployment, workload, num_sequences=num_prompts * num_rollouts)
    engines = Engines(
        step_s=times.step_s,
        num=times.num_engines,
        num_running=times.num_running,
        most_outstanding=rollout.outstanding_requests,
    )
    return simulate(engines, steps, prompt_tokens=workload.mean_prompt_tokens)


def simulate(engines: Engines, steps: Sequence[Step], *, prompt_tokens: int) -> list[TailFigure]:
    """Return the time of steps in each order."""
    ended = {
        name: [World(engines, prompt_tokens=prompt_tokens).answer(requests_of(step, order)) for step in steps]
        for name, order in ORDERS.items()
    }
    return tail_figures(ended)


def requests_of(step: Step, order: Order) -> list[tuple[int, int]]:
    """Return the number of the prompt and the length of each answer, in the order in which they are asked."""
    return [(prompt, length) for prompt in order(step) for length in step.lengths[prompt]]


def tail_figures(ended: Mapping[str, Sequence[Sequence[float]]]) -> list[TailFigure]:
    """Compare orders by the times at which the answers of each step ended; the first one is that of the data."""
    figures: list[TailFigure] = []
    for name, steps in ended.items():
        spent = sum(step[-1] for step in steps)
        tail = sum(step[-1] - step[int((1 - LAST) * len(step)) - 1] for step in steps)
        seconds = spent / len(steps)
        first = figures[0].seconds if figures else seconds
        figures.append(TailFigure(order=name, seconds=seconds, tail=tail / spent, ratio=seconds / first))
    return figures


def made_step(workload: StepWorkload, *, num_prompts: int, num_rollouts: int, alike: float, seed: int) -> Step:
    """Return answers whose lengths are those of the plan; those of one prompt share a part of their rank."""
    chance = np.random.default_rng(seed)
    prompts = alike**0.5 * chance.standard_normal((num_prompts, 1))
    now, before = (prompts + (1 - alike) ** 0.5 * chance.standard_normal((num_prompts, num_rollouts)) for _ in range(2))
    lengths = np.sort(workload.lengths(now.size))
    ordered = lengths[now.ravel().argsort().argsort()].reshape(now.shape)
    return Step(lengths=ordered.tolist(), before=before.mean(1).tolist())


def recorded_steps(run_folder: Path) -> list[Step]:
    """Return the steps of a run all of whose prompts were answered before."""
    before: dict[str, float] = {}
    steps: list[Step] = []
    for lengths in _recorded(run_folder):
        if before.keys() >= lengths.keys():
            steps.append(Step(lengths=list(lengths.values()), before=[before[uid] for uid in lengths]))
        before |= {uid: mean(group) for uid, group in lengths.items()}
    if not steps:
        raise DataError(f"{run_folder}: no step has prompts that were all answered before; take a run of two epochs")
    return steps


def _recorded(run_folder: Path) -> Iterator[dict[str, list[int]]]:
    """Yield the lengths of the answers by prompt, of each step."""
    for path in list_rollouts(run_folder).values():
        lengths: dict[str, list[int]] = {}
        table = pq.read_table(path, columns=["prompt_uid", "num_tokens"])
        for uid, num_tokens in zip(*(table[name].to_pylist() for name in table.column_names), strict=True):
            lengths.setdefault(uid, []).append(num_tokens)
        yield lengths
