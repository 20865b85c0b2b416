"""The buffer's two promises: nothing trained is older than allowed, and timing does not choose the batch."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from megarl.runtime.buffer import Buffer, Counts
from megarl.types import FinishReason, Prompt, Rollout, RolloutGroup, Score, ScoredGroup


def scored_group(position: int) -> ScoredGroup:
    prompt = Prompt(
        uid=str(position),
        position=position,
        epoch=0,
        token_ids=np.array([1], dtype=np.int32),
        data_source="test",
        ground_truth="",
        extra_info={},
    )
    rollout = Rollout(
        token_ids=np.array([2], dtype=np.int32),
        logprobs=np.zeros(1, dtype=np.float32),
        versions=np.zeros(1, dtype=np.int32),
        loss_mask=np.ones(1, dtype=np.bool_),
        finish_reason=FinishReason.STOP,
        text="",
    )
    score = Score(value=0.0, components={})
    return ScoredGroup(group=RolloutGroup(prompt=prompt, rollouts=(rollout,)), scores=(score,))


async def simulate(
    *,
    seed: int,
    num_steps: int,
    max_staleness: int,
    keeps: int,
    oversampling: float = 1.0,
    counts: list[Counts] | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Producers of random speed; one prompt in `keeps` + 1 is given up. Positions and ages of every step."""
    rng = random.Random(seed)
    buffer = Buffer(prompts_per_step=4, max_staleness=max_staleness, oversampling=oversampling)
    version = 0
    position = 0
    admitted_version: dict[int, int] = {}

    async def produce() -> None:
        nonlocal position
        while True:
            ticket = await buffer.reserve()
            mine, position = position, position + 1
            admitted_version[mine] = version
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            if mine % (keeps + 1) == keeps:
                await buffer.give_up(ticket)
            else:
                await buffer.put(ticket, scored_group(mine))

    producers = [asyncio.create_task(produce()) for _ in range(buffer.capacity)]
    steps, ages = [], []
    for _ in range(num_steps):
        groups = await asyncio.wait_for(buffer.take_step(), timeout=5)
        if counts is not None:
            counts.append(buffer.counts)
        taken = [scored.group.prompt.position for scored in groups]
        steps.append(taken)
        ages.append([version - admitted_version[mine] for mine in taken])
        version += 1
        await buffer.release_step()
    for producer in producers:
        producer.cancel()
    await asyncio.gather(*producers, return_exceptions=True)
    return steps, ages


def plain(counts: Counts) -> tuple[int, int, tuple[int, ...], list[int]]:
    carried = [group.group.prompt.position for group in counts.carried]
    return counts.num_taken, counts.num_given_up, counts.under_way, carried


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_never_trains_on_older_than_allowed(max_staleness: int, seed: int) -> None:
    _, ages = asyncio.run(simulate(seed=seed, num_steps=12, max_staleness=max_staleness, keeps=3))
    assert max(age for step in ages for age in step) <= max_staleness


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_producers_do_run_ahead_when_they_may(max_staleness: int) -> None:
    _, ages = asyncio.run(simulate(seed=0, num_steps=12, max_staleness=max_staleness, keeps=3))
    assert max(age for step in ages for age in step) == max_staleness


@pytest.mark.parametrize("keeps", [1, 3])
def test_a_synchronous_step_does_not_depend_on_timing(keeps: int) -> None:
    runs = [asyncio.run(simulate(seed=seed, num_steps=6, max_staleness=0, keeps=keeps))[0] for seed in range(10)]
    assert all(run == runs[0] for run in runs)


def test_every_ticket_is_accounted_for() -> None:
    async def main() -> list[tuple[int, int, tuple[int, ...], list[int]]]:
        buffer = Buffer(prompts_per_step=2, max_staleness=1)
        tickets = [await buffer.reserve() for _ in range(4)]
        await buffer.give_up(tickets[1])
        replacement = await buffer.reserve()
        for ticket in (tickets[0], tickets[2], replacement):
            await buffer.put(ticket, scored_group(ticket.number))
        before = buffer.counts
        await buffer.take_step()
        return [plain(before), plain(buffer.counts)]

    assert asyncio.run(main()) == [(0, 1, (3,), [0, 2, 4]), (2, 1, (3,), [4])]


@pytest.mark.parametrize("keeps", [1, 3])
def test_a_synchronous_step_leaves_nothing_waiting(keeps: int) -> None:
    counts: list[Counts] = []
    asyncio.run(simulate(seed=1, num_steps=6, max_staleness=0, keeps=keeps, counts=counts))
    assert [(each.under_way, each.carried) for each in counts] == [((), ())] * 6


@pytest.mark.parametrize("oversampling", [1.3, 2.0, 3.0])
@pytest.mark.parametrize("keeps", [1, 3])
def test_what_is_sampled_beyond_a_step_is_carried_and_timing_does_not_choose_it(
    oversampling: float, keeps: int
) -> None:
    runs = []
    for seed in range(10):
        counts: list[Counts] = []
        steps, _ = asyncio.run(
            simulate(seed=seed, num_steps=6, max_staleness=0, keeps=keeps, oversampling=oversampling, counts=counts)
        )
        runs.append((steps, [plain(each) for each in counts]))
    assert all(run == runs[0] for run in runs)
    steps, states = runs[0]
    trained = [position for step in steps for position in step]
    assert trained == sorted(trained), "the oldest first"
    assert all(not under_way for _, _, under_way, _ in states)
    if oversampling > 1 + 1 / keeps:
        assert any(carried for _, _, _, carried in states)
    # Nothing is lost: every prompt is trained, given up, or carried.
    for num_taken, num_given_up, _, carried in states:
        drawn = num_taken + num_given_up + len(carried)
        assert sorted([*trained[:num_taken], *carried]) == [n for n in range(drawn) if n % (keeps + 1) != keeps]


def test_a_buffer_goes_on_with_what_another_had_left_over() -> None:
    async def main() -> list[int]:
        buffer = Buffer(prompts_per_step=2, max_staleness=0, oversampling=2.0, carried=[scored_group(7)])
        tickets = [await buffer.reserve() for _ in range(3)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(buffer.reserve(), timeout=0.05)
        for ticket in tickets:
            await buffer.put(ticket, scored_group(8 + ticket.number))
        taken = await buffer.take_step()
        return [group.group.prompt.position for group in (*taken, *buffer.counts.carried)]

    assert asyncio.run(main()) == [7, 8, 9, 10]


def test_every_prompt_is_trained_once_or_given_up() -> None:
    steps, _ = asyncio.run(simulate(seed=3, num_steps=12, max_staleness=2, keeps=3))
    trained = [position for step in steps for position in step]
    assert len(trained) == len(set(trained)) == 12 * 4
    assert all(position % 4 != 3 for position in trained)
