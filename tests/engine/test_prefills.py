"""Requests are let in together: when, in what time, and by the function that SGLang calls."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.engine.client import GenerateRequest
from megarl.engine.prefills import MOST_PASSES, TARGET, Company, taken_in
from megarl.types import JsonValue
from tests.engine.engines import ServedModel

NUM_RUNNING, NUM_TOKENS, NUM_SHORT = 24, 300, 16
"""Requests that run, their tokens, and requests for one token that come meanwhile."""


def passes_until_in(company: Company, *, waiting: int, running: int) -> int:
    """Return the passes after which so many that wait are let in."""
    passes = 0
    while not company.admits(waiting=waiting, running=running):
        passes += 1
    return passes


@pytest.mark.parametrize(
    ("waiting", "running", "passes"), [(1, 0, 0), (8, 8, 0), (1, 8, 7), (3, 8, 2), (1, 1000, MOST_PASSES)]
)
def test_those_that_wait_lose_as_many_passes_as_those_that_run(waiting: int, running: int, passes: int) -> None:
    assert passes_until_in(Company(), waiting=waiting, running=running) == passes


def test_without_a_place_nobody_loses_a_pass_by_waiting() -> None:
    company = Company()
    company.let_in(running=8, is_full=True)
    assert passes_until_in(company, waiting=100, running=8) == MOST_PASSES
    company.let_in(running=8, is_full=True)
    assert passes_until_in(company, waiting=100, running=6) == 2
    company.let_in(running=8, is_full=False)
    assert passes_until_in(company, waiting=100, running=6) == 0


@dataclass
class Scheduler:
    """The part of SGLang's that the hook sees; `places` is for how many more it has room."""

    waiting_queue: list[object]
    places: int
    chunked_req: object | None = None
    ready: list[object] = field(default_factory=list)
    """Requests whose grammar becomes ready."""

    def plan(self, running: SimpleNamespace) -> Any:
        self.waiting_queue.extend(self.ready)
        self.ready = []
        taken, self.waiting_queue = self.waiting_queue[: self.places], self.waiting_queue[self.places :]
        running.batch_is_full = bool(self.waiting_queue)
        return SimpleNamespace(batch_to_run=SimpleNamespace(reqs=taken) if taken else None, running_batch=running)


def taken(company: Company, scheduler: Scheduler, running: int) -> list[object] | None:
    """Return those that the scheduler takes beside so many that run; None if it takes none."""
    batch: Any = SimpleNamespace(reqs=[object()] * running, batch_is_full=False)
    get: Callable[..., Any] = Scheduler.plan
    plan: Any = taken_in(company, get, scheduler, batch)
    return None if plan.batch_to_run is None else plan.batch_to_run.reqs


def test_a_scheduler_that_may_let_nobody_in_sees_an_empty_queue_and_keeps_all_that_wait() -> None:
    scheduler, company = Scheduler(["first"], places=4), Company()
    assert taken(company, scheduler, 3) is None
    assert scheduler.waiting_queue == ["first"]
    assert taken(company, scheduler, 3) is None
    assert taken(company, scheduler, 3) == ["first"]
    assert scheduler.waiting_queue == []


def test_one_whose_grammar_becomes_ready_waits_with_the_others() -> None:
    scheduler, company = Scheduler(["first"], places=0, ready=["second"]), Company()
    assert taken(company, scheduler, 3) is None
    assert scheduler.waiting_queue == ["first", "second"]
    scheduler.places = 4
    assert taken(company, scheduler, 3) == ["first", "second"]


def test_a_prompt_in_parts_goes_on() -> None:
    scheduler = Scheduler(["other"], places=1, chunked_req="long")
    assert taken(Company(), scheduler, 100) == ["other"]


def test_a_full_engine_waits_until_enough_have_ended() -> None:
    scheduler, company = Scheduler(["a", "b", "c"], places=1), Company()
    assert taken(company, scheduler, 3) == ["a"]
    # Four ran when it was full: nothing is lost before one of them has ended.
    assert taken(company, scheduler, 4) is None
    assert [taken(company, scheduler, 3) for _ in range(3)] == [None, None, ["b"]]


def seconds_of(lets_in: Callable[[int, int], bool], *, mean_tokens: int, num_turns: int, prompts_s: float) -> float:
    """Return how long 256 episodes take an engine whose pass over those that run takes a second."""
    random = Random(0)
    turns = [[1 + int(random.expovariate(1 / mean_tokens)) for _ in range(num_turns)] for _ in range(256)]
    waiting, running, clock = list(turns), list[list[int]](), 0.0
    while waiting or running:
        if waiting and lets_in(len(waiting), len(running)):
            running, waiting, clock = running + waiting, [], clock + prompts_s
        clock += 1
        for turn in running:
            turn[0] -= 1
        ended = [turn for turn in running if turn[0] == 0]
        running = [turn for turn in running if turn[0] > 0]
        waiting += [turn for turn in ended if turn.pop(0) == 0 and turn]
    return clock


def in_company() -> Callable[[int, int], bool]:
    company = Company()

    def lets_in(waiting: int, running: int) -> bool:
        if not company.admits(waiting=waiting, running=running):
            return False
        company.let_in(running=running + waiting, is_full=False)
        return True

    return lets_in


def every(passes: int) -> Callable[[int, int], bool]:
    """Return a policy that lets in after so many passes, or when nothing runs."""
    count = 0

    def lets_in(waiting: int, running: int) -> bool:
        nonlocal count
        count += 1
        if running and count < passes:
            return False
        count = 0
        return True

    return lets_in


@pytest.mark.parametrize("prompts_s", [1.0, 2.0])
@pytest.mark.parametrize(("mean_tokens", "num_turns"), [(20, 8), (40, 4), (200, 3)])
def test_episodes_take_about_as_long_as_with_the_best_fixed_interval(
    mean_tokens: int, num_turns: int, prompts_s: float
) -> None:
    """A pass over a few prompts takes longer than one with graphs over those that run, on a GPU."""

    def seconds(lets_in: Callable[[int, int], bool]) -> float:
        return seconds_of(lets_in, mean_tokens=mean_tokens, num_turns=num_turns, prompts_s=prompts_s)

    ours, at_once = seconds(in_company()), seconds(every(1))
    assert ours < 1.15 * min(seconds(every(passes)) for passes in (2, 4, 8, 16))
    assert ours < 0.9 * at_once


class Exact(GenerateRequest):
    """A request for as many tokens as it says."""

    def to_json(self) -> dict[str, JsonValue]:
        fields = super().to_json()
        sampling = fields["sampling_params"]
        assert isinstance(sampling, dict)
        return {**fields, "sampling_params": {**sampling, "ignore_eos": True}}


async def test_requests_come_into_the_batch_of_a_real_engine_together(qwen2_tp1: ServedModel) -> None:
    log = qwen2_tp1.process.spec.log_path

    def batches() -> int:
        return log.read_text().count("Prefill batch")

    async with qwen2_tp1.fleet() as fleet:
        client = fleet.engines[0].client

        def ask(name: str, num_tokens: int) -> asyncio.Task[object]:
            request = Exact(rid=f"company-{name}", input_ids=(5, 6, 7), max_new_tokens=num_tokens, temperature=1.0)
            return asyncio.create_task(client.generate(request))

        running = [ask(f"long-{index}", NUM_TOKENS) for index in range(NUM_RUNNING)]
        await asyncio.sleep(0.1)
        before = batches()
        short = list[asyncio.Task[object]]()
        for index in range(NUM_SHORT):
            short.append(ask(f"short-{index}", 1))
            await asyncio.sleep(0.01)
        await asyncio.gather(*short)
        seen = batches() - before
        assert not any(task.done() for task in running), "the engine had others to hold up"
        await asyncio.gather(*running)
    assert 0 < seen <= NUM_SHORT // 2


def test_the_function_that_is_hooked_is_there() -> None:
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    module, kind, name = TARGET.rsplit(".", 2)
    text = Path(spec.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
    (scheduler,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == kind]
    (function,) = [node for node in scheduler.body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert [each.arg for each in function.args.args] == ["self", "running_batch"]
    assert isinstance(function.returns, ast.Name)
    assert function.returns.id == "NextBatchPlan"
    assert "self.waiting_queue = " in text
