"""The buffer's two promises: nothing trained is older than allowed, and timing does not choose the batch."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import CheckpointError
from megarl.observe.summary import Flow
from megarl.run.buffer import Buffer, Counts
from megarl.types import DEMONSTRATION, PolicyVersion, ScoredGroup
from tests.values import versioned_group


@dataclass(frozen=True, kw_only=True)
class Simulated:
    steps: list[list[int]]
    """Positions of the prompts of every step."""
    ages: list[list[int]]
    """In steps, of the oldest token of each of them."""
    counts: list[Counts]
    """After each step was taken."""
    flows: list[Flow]


async def simulate(
    *,
    seed: int,
    num_steps: int,
    max_staleness: int,
    keeps: int,
    oversampling: float = 1.0,
    carried: Sequence[ScoredGroup] = (),
    versions: Sequence[int] = (0,),
    prompts_per_step: int = 4,
    slowest: int = 12,
    updates: Sequence[int] = (1,),
) -> Simulated:
    """Producers of random speed, whose tokens are of any version between their start and their end.

    One prompt in `keeps` + 1 is given up. Step s makes `updates[s % len(updates)]` versions.
    """
    rng = random.Random(seed)
    buffer = Buffer(
        prompts_per_step=prompts_per_step,
        max_staleness=max_staleness,
        oversampling=oversampling,
        versions=[PolicyVersion(version) for version in versions],
        carried=carried,
    )
    version = versions[-1]
    step = len(versions) - 1
    step_of = {served: number for number, served in enumerate(versions)}
    position = 0

    async def produce() -> None:
        nonlocal position
        while True:
            ticket = await buffer.reserve()
            mine, position = position, position + 1
            served = [version]
            for _ in range(rng.randrange(slowest)):
                await asyncio.sleep(0)
                served.append(version)
            if mine % (keeps + 1) == keeps:
                await buffer.give_up(ticket)
            else:
                await buffer.put(ticket, versioned_group(mine, *served))

    producers = [asyncio.create_task(produce()) for _ in range(buffer.capacity)]
    result = Simulated(steps=[], ages=[], counts=[], flows=[])
    for number in range(num_steps):
        groups = await asyncio.wait_for(buffer.take_step(), timeout=60)
        result.counts.append(buffer.counts)
        result.flows.append(buffer.flow)
        result.steps.append([scored.group.prompt.position for scored in groups])
        oldest = [int(scored.group.rollouts[0].versions.min()) for scored in groups]
        result.ages.append([step - step_of[each] for each in oldest])
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)  # while it is trained
        version += updates[number % len(updates)]
        step += 1
        step_of[version] = step
        await buffer.release_step(PolicyVersion(version))
    for producer in producers:
        producer.cancel()
    await asyncio.gather(*producers, return_exceptions=True)
    return result


def plain(counts: Counts) -> tuple[int, int, tuple[int, ...], list[int]]:
    carried = [group.group.prompt.position for group in counts.carried]
    return counts.num_taken, counts.num_given_up, counts.under_way, carried


@pytest.mark.patient
@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    max_staleness=st.integers(0, 4),
    keeps=st.integers(1, 5),
    oversampling=st.floats(1, 3.5),
    prompts_per_step=st.integers(1, 5),
    slowest=st.integers(1, 60),
    updates=st.lists(st.integers(0, 3), min_size=1, max_size=4),
)
def test_never_trains_on_older_than_allowed_and_loses_nothing(
    seed: int,
    max_staleness: int,
    keeps: int,
    oversampling: float,
    prompts_per_step: int,
    slowest: int,
    updates: list[int],
) -> None:
    done = asyncio.run(
        simulate(
            seed=seed,
            num_steps=10,
            max_staleness=max_staleness,
            keeps=keeps,
            oversampling=oversampling,
            prompts_per_step=prompts_per_step,
            slowest=slowest,
            updates=updates,
        )
    )
    surplus = math.ceil(math.ceil(oversampling * prompts_per_step) / prompts_per_step) - 1
    assert max(age for step in done.ages for age in step) <= max(max_staleness, surplus)
    assert [max(step) for step in done.ages] == [flow.age_max for flow in done.flows]
    trained = [position for step in done.steps for position in step]
    assert len(trained) == len(set(trained)) == 10 * prompts_per_step
    assert all(position % (keeps + 1) != keeps for position in trained)
    for number, counts in enumerate(done.counts):
        num_drawn = counts.num_taken + counts.num_given_up + len(counts.under_way) + len(counts.carried)
        carried = [group.group.prompt.position for group in counts.carried]
        taken = trained[: (number + 1) * prompts_per_step]
        given_up = {position for position in range(num_drawn) if position % (keeps + 1) == keeps}
        known = {*taken, *carried, *counts.under_way}
        assert known | given_up == set(range(num_drawn))


async def test_a_step_waits_for_older_prompts_that_would_otherwise_come_too_late() -> None:
    buffer = Buffer(prompts_per_step=1, max_staleness=2)
    slow, slower, fast = [await buffer.reserve() for _ in range(3)]
    await buffer.put(fast, versioned_group(2))
    assert len(await buffer.take_step()) == 1
    await buffer.release_step(PolicyVersion(1))
    another = await buffer.reserve()
    await buffer.put(another, versioned_group(3, 1))
    # Two prompts of version 0 are open, and two steps that may still train on it: this one and the next.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(buffer.take_step(), timeout=0.05)
    await buffer.put(slower, versioned_group(1))
    (group,) = await buffer.take_step()
    assert group.group.prompt.position == 1
    await buffer.release_step(PolicyVersion(2))
    await buffer.put(slow, versioned_group(0))
    (group,) = await buffer.take_step()
    assert (group.group.prompt.position, buffer.flow.age_max) == (0, 2)


@pytest.mark.parametrize("versions", [(0,), (3,), (1, 3)])
def test_tokens_of_versions_that_may_not_be_trained_are_noticed(versions: tuple[int, ...]) -> None:
    """Which cannot happen: whoever made them was not admitted."""

    async def main() -> None:
        buffer = Buffer(prompts_per_step=1, max_staleness=1, versions=[PolicyVersion(1), PolicyVersion(2)])
        await buffer.put(await buffer.reserve(), versioned_group(0, *versions))
        await buffer.take_step()

    with pytest.raises(AssertionError, match=r"allowed are versions \(1, 2\)"):
        asyncio.run(main())


@pytest.mark.parametrize("max_staleness", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_goes_on_keeps_the_bound_though_it_carries_old_groups(max_staleness: int, seed: int) -> None:
    first = asyncio.run(simulate(seed=seed, num_steps=6, max_staleness=max_staleness, keeps=3))
    carried = first.counts[-1].carried
    versions = range(6 - max_staleness, 7)
    second = asyncio.run(
        simulate(seed=seed, num_steps=6, max_staleness=max_staleness, keeps=3, carried=carried, versions=[*versions])
    )
    assert max(age for step in second.ages for age in step) <= max_staleness
    trained = [position for step in second.steps for position in step]
    assert trained[: len(carried)] == [group.group.prompt.position for group in carried]


def test_carried_groups_that_are_too_old_for_a_changed_recipe_are_refused() -> None:
    versions = [PolicyVersion(version) for version in range(4)]
    with pytest.raises(CheckpointError, match=r"prompt train\.parquet:1.* 4 steps old, 3 are allowed; .*max_staleness"):
        Buffer(
            prompts_per_step=1,
            max_staleness=3,
            versions=versions,
            carried=[versioned_group(0, 0), versioned_group(1, 0)],
        )


@pytest.mark.parametrize("oversampling", [1.0, 1.3, 2.0, 3.0])
@pytest.mark.parametrize("keeps", [1, 3])
def test_timing_does_not_choose_a_synchronous_step_and_what_is_sampled_beyond_it_is_carried(
    oversampling: float, keeps: int
) -> None:
    runs = []
    for seed in range(10):
        done = asyncio.run(simulate(seed=seed, num_steps=6, max_staleness=0, keeps=keeps, oversampling=oversampling))
        runs.append((done.steps, [plain(each) for each in done.counts]))
    assert all(run == runs[0] for run in runs)
    steps, states = runs[0]
    trained = [position for step in steps for position in step]
    assert trained == sorted(trained), "the oldest first"
    assert all(not under_way for _, _, under_way, _ in states)
    if oversampling == 1 or oversampling > 1 + 1 / keeps:
        assert any(carried for _, _, _, carried in states) is (oversampling > 1)
    # Nothing is lost: every prompt is trained, given up, or carried.
    for num_taken, num_given_up, _, carried in states:
        drawn = num_taken + num_given_up + len(carried)
        assert sorted([*trained[:num_taken], *carried]) == [n for n in range(drawn) if n % (keeps + 1) != keeps]


async def test_a_buffer_goes_on_with_what_another_had_left_over() -> None:

    buffer = Buffer(prompts_per_step=2, max_staleness=0, oversampling=2.0, carried=[versioned_group(7)])
    tickets = [await buffer.reserve() for _ in range(3)]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(buffer.reserve(), timeout=0.05)
    for ticket in tickets:
        await buffer.put(ticket, versioned_group(8 + ticket.number))
    taken = await buffer.take_step()
    assert [group.group.prompt.position for group in (*taken, *buffer.counts.carried)] == [7, 8, 9, 10]


async def test_a_producer_that_is_cancelled_with_its_turn_gives_it_to_another() -> None:
    buffer = Buffer(prompts_per_step=1, max_staleness=0)
    first = await buffer.reserve()
    waiting = [asyncio.create_task(buffer.reserve()) for _ in range(2)]
    await asyncio.sleep(0)
    await buffer.give_up(first)
    waiting[0].cancel()
    ticket = await asyncio.wait_for(waiting[1], timeout=60)
    assert (ticket.number, buffer.counts.under_way) == (1, (1,))


async def test_tickets_are_numbered_in_the_order_in_which_producers_go_on() -> None:

    buffer = Buffer(prompts_per_step=4, max_staleness=0)
    numbers: list[int] = []

    async def produce(rounds: int) -> None:
        for _ in range(rounds):
            ticket = await buffer.reserve()
            numbers.append(ticket.number)  # a prompt is drawn here
            await asyncio.sleep(0)
            await buffer.give_up(ticket)

    await asyncio.gather(*(produce(rounds) for rounds in (5, 1, 7, 3, 2, 9, 4)))
    assert numbers == list(range(31))


def seconds_per_prompt(prompts_per_step: int, *, max_staleness: int) -> float:
    """Return the CPU time of reserving and handing over one prompt, with every producer waiting for the next step."""

    async def main() -> float:
        buffer = Buffer(prompts_per_step=prompts_per_step, max_staleness=max_staleness)

        async def produce() -> None:
            while True:
                ticket = await buffer.reserve()
                await asyncio.sleep(0)
                await buffer.put(ticket, group)

        producers = [asyncio.create_task(produce()) for _ in range(buffer.capacity)]
        began = time.process_time()
        for version in range(1, 4):
            await buffer.take_step()
            await buffer.release_step(PolicyVersion(version))
        seconds = time.process_time() - began
        for producer in producers:
            producer.cancel()
        await asyncio.gather(*producers, return_exceptions=True)
        return seconds / (3 * prompts_per_step)

    group = versioned_group(0, DEMONSTRATION)
    return min(asyncio.run(main()) for _ in range(3))


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_prompt_costs_the_same_in_a_large_step(max_staleness: int) -> None:
    small, large = (seconds_per_prompt(number, max_staleness=max_staleness) for number in (64, 1024))
    # Each prompt waking all others would cost 16 times as much.
    assert large < 6 * small
