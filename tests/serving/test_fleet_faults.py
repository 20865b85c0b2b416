"""Real engines that are killed, frozen, and lost in the middle of things. In the order of the file, on one pair."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeAlias

import pytest

from megarl.config.recipe import StragglerConfig
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.lifecycle import EngineState
from megarl.errors import FleetError
from megarl.observe.events import Straggled
from megarl.observe.observer import Observer
from megarl.serving.stragglers import EngineWatch
from megarl.system.proc import all_processes
from megarl.types import PolicyVersion, Prompt, RolloutGroup
from tests.engine.engines import generator_of, prompt_of
from tests.observe.samples import ListSink
from tests.serving.fleet_scene import SILENCE_TIMEOUT_S, Duo, Scene, open_duo

Content: TypeAlias = tuple[list[int], list[float], list[int]]
DETECTED_S = 2.0
PROMPTS = [prompt_of(5, 17, 33, 90, 8 + number, uid=f"row-{number}") for number in range(8)]


@pytest.fixture(scope="module")
def duo(real_engines: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duo]:
    with open_duo(tmp_path_factory.mktemp("duo")) as duo:
        yield duo


async def generate(scene: Scene, prompts: Sequence[Prompt], *, num_tokens: int = 24) -> list[RolloutGroup]:
    generator = generator_of(scene.fleet, num_rollouts=4, max_response_tokens=num_tokens)
    return list(await asyncio.gather(*(generator.generate(prompt) for prompt in prompts)))


def contents(groups: Sequence[RolloutGroup]) -> list[Content]:
    return [
        (rollout.token_ids.tolist(), rollout.logprobs.tolist(), rollout.versions.tolist())
        for group in groups
        for rollout in group.rollouts
    ]


async def until_dead(engine: Engine, timeout_s: float = 60) -> float:
    """When it was noticed."""
    async with asyncio.timeout(timeout_s):
        while engine.status.is_reachable:
            await asyncio.sleep(0.01)
    return time.monotonic()


async def check_joined(scene: Scene, engine: Engine, version: int) -> None:
    """An engine that came back has, byte for byte, what the other one has, and says so token by token."""
    other = next(item for item in scene.fleet.engines if item is not engine)
    control = scene.control
    assert await control.among([engine]).fingerprints() == await control.among([other]).fingerprints()
    alone = [Fleet([item.client], max_outstanding=128, publish_timeout_s=1) for item in (engine, other)]
    answers = []
    for fleet in alone:
        await fleet.committed(PolicyVersion(version), fleet.engines)
        generator = generator_of(fleet, num_rollouts=4)
        answers.append(contents([await generator.generate(prompt) for prompt in PROMPTS[:2]]))
    assert answers[0] == answers[1]
    assert {number for _, _, versions in answers[0] for number in versions} == {version}


def scheduler_of(group: int) -> int:
    """The process of an engine that computes."""
    for process in all_processes():
        if process.group == group and process.name.startswith("sglang::sched"):
            return process.pid
    raise AssertionError("no scheduler")


@pytest.mark.fault(
    "kill -9 of an idle engine", "noticed within 2 s; started again, serves only after a publish with right digests"
)
async def test_an_engine_killed_while_idle_is_noticed_and_comes_back_with_the_right_weights(
    duo: Duo, record_property: Callable[[str, object], None]
) -> None:
    async with duo.scene() as scene:
        await scene.publish(1)
        expected = contents(await generate(scene, PROMPTS))
        lost = scene.fleet.engines[1]
        killed = time.monotonic()
        # Not the server, which would close its connections: the process that has the weights.
        os.kill(scheduler_of(scene.processes.running[1].pid), signal.SIGKILL)
        seconds = await until_dead(lost) - killed
        record_property("seen", f"noticed after {seconds:.1f} s")
        assert seconds < DETECTED_S
        assert not lost.is_live
        while not lost.is_live:
            # It joins while the other one generates, now and then: a start wants the cores, too.
            assert contents(await generate(scene, PROMPTS[:2])) == expected[:8]
            await asyncio.sleep(1)
        await check_joined(scene, lost, 1)


@pytest.mark.fault(
    "kill -9 of an engine while it generates",
    "noticed within 2 s; the other engine answers its requests at once, with the same tokens",
)
async def test_requests_of_an_engine_killed_in_the_middle_are_answered_by_the_other_as_if_nothing_had_been(
    duo: Duo, record_property: Callable[[str, object], None]
) -> None:
    async with duo.scene() as scene:
        # Lower than what the engines serve: as after a restart of the trainer ranks.
        await scene.publish(0)
        expected = contents(await generate(scene, PROMPTS, num_tokens=96))
        lost = scene.fleet.engines[0]
        generating = asyncio.create_task(generate(scene, PROMPTS, num_tokens=96))
        while not (lost.num_outstanding and scene.fleet.engines[1].num_outstanding):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert lost.num_outstanding
        killed = time.monotonic()
        scene.processes.signal(0, signal.SIGKILL)
        seconds = await until_dead(lost) - killed
        record_property("seen", f"noticed after {seconds:.1f} s")
        assert seconds < DETECTED_S
        assert contents(await generating) == expected
        assert not lost.is_live, "the others did not wait for it"
        assert "SIGKILL" in lost.reason
        # What was published meanwhile is what it joins with.
        await scene.publish(2)
        assert not lost.is_live
        await scene.until_live(0)
        await check_joined(scene, lost, 2)


@pytest.mark.fault(
    "an engine that is slow for several windows",
    "named, drained and restarted; its requests keep their tokens and go on elsewhere, with the same tokens",
)
@pytest.mark.slow
async def test_a_slow_engine_is_drained_and_comes_back_and_no_token_changes(
    duo: Duo, record_property: Callable[[str, object], None]
) -> None:
    async with duo.scene() as scene:
        await scene.publish(1)
        expected = contents(await generate(scene, PROMPTS))
        slow, sink = scene.fleet.engines[1], ListSink()
        config = StragglerConfig(windows=2, window_s=4)
        watch = EngineWatch(scene.fleet, config, Observer([sink]), drain=scene.supervisor.drain)
        states: list[EngineState] = []
        scene.fleet.listen(lambda engine, _: states.append(engine.state) if engine is slow else None)
        scheduler = scheduler_of(scene.processes.running[1].pid)
        hindering = asyncio.create_task(hinder(scheduler))
        began = time.monotonic()
        async with watch.running():
            while slow.state is not EngineState.DRAINING and time.monotonic() < began + 300:
                check_alike(contents(await generate(scene, PROMPTS)), expected)
            record_property("seen", f"drained after {time.monotonic() - began:.0f} s, two windows of 4 s")
            check_alike(contents(await generate(scene, PROMPTS)), expected)
        await hindering
        assert [event.index for event in sink.events if isinstance(event, Straggled)] == [1]
        await scene.until_live(1)
        assert [state for state in states if state is not EngineState.SUSPECT][-5:] == [
            *(EngineState.DRAINING, EngineState.DEAD, EngineState.RESTARTING, EngineState.STALE),
            EngineState.HEALTHY,
        ]
        await check_joined(scene, slow, 1)


def check_alike(found: Sequence[Content], expected: Sequence[Content]) -> None:
    """The same tokens; a prefix that another engine takes over is computed at once, and rounded otherwise."""
    for (tokens, logprobs, versions), (same_tokens, same_logprobs, same_versions) in zip(found, expected, strict=True):
        assert (tokens, versions) == (same_tokens, same_versions)
        assert logprobs == pytest.approx(same_logprobs, abs=1e-4)


async def hinder(pid: int) -> None:
    """Let a process run for a tenth of the time only, until it is gone."""
    with suppress(ProcessLookupError):
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.18)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.02)


@pytest.mark.fault(
    "kill -9 of one engine in a publish, SIGSTOP of the last",
    "the rest get the version in the same step; a frozen one is given up after `silence_timeout_s` + 2 s",
)
async def test_a_publish_goes_on_without_an_engine_killed_in_it_and_the_last_one_frozen_ends_the_wait(duo: Duo) -> None:
    async with duo.scene(max_restarts=0) as scene:
        await scene.publish(1)
        expected = contents(await generate(scene, PROMPTS[:2]))
        await scene.publish(2)

        async def kill() -> None:
            scene.ranks.before_send = None
            await asyncio.sleep(0.5)
            scene.processes.signal(1, signal.SIGKILL)

        scene.ranks.before_send = kill
        started = time.monotonic()
        await scene.publish(1)
        assert time.monotonic() - started < 20
        assert [engine.state for engine in scene.fleet.engines] == [EngineState.HEALTHY, EngineState.DEAD]
        assert contents(await generate(scene, PROMPTS[:2])) == expected

        scene.processes.signal(0, signal.SIGSTOP)
        stopped = time.monotonic()
        with pytest.raises(FleetError, match=r"no engine is left: engine 0 .* has not answered for 6 s"):
            await generate(scene, PROMPTS[:1])
        assert time.monotonic() - stopped < SILENCE_TIMEOUT_S + 2
        await asyncio.sleep(1)
        assert scene.processes.running[0].exit_code is not None


@pytest.mark.fault("SIGSTOP of an engine in a publish", "given up at the deadline, the rest get the version")
@pytest.mark.slow
async def test_a_publish_does_not_wait_for_an_engine_that_is_frozen_in_it(duo: Duo) -> None:
    async with duo.scene(max_restarts=0) as scene:
        await scene.publish(1)

        async def freeze() -> None:
            scene.ranks.before_send = None
            await asyncio.sleep(0.5)
            scene.processes.signal(1, signal.SIGSTOP)

        scene.ranks.before_send = freeze
        started = time.monotonic()
        await scene.publish(2)
        assert time.monotonic() - started < SILENCE_TIMEOUT_S + 5
        assert [engine.state for engine in scene.fleet.engines] == [EngineState.HEALTHY, EngineState.DEAD]
        assert {number for _, _, versions in contents(await generate(scene, PROMPTS[:1])) for number in versions} == {2}
