"""The turns of frozen models on GPUs of other engines: both are scripted at their wire, and so are the scores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import httpx
import numpy as np
import pytest

from megarl.engine.client import EngineClient, EngineEndpoint, EngineKeys
from megarl.engine.fleet import Fleet
from megarl.engine.lifecycle import Ended, RestartPolicy
from megarl.errors import FleetError, ScoreError
from megarl.rollout.generator import Sampling
from megarl.rollout.worker import AnsweredPrompt, RolloutTask
from megarl.serving.frozen_phases import ScoredAfterGeneration, SleepingModels
from megarl.serving.shared_phases import SharedPhases
from megarl.tokens import Content
from megarl.types import FinishReason, Prompt, Rollout, RolloutGroup, Score, ScoredGroup
from tests.engine.engines import prompt_of, scripted

SAMPLING = Sampling(num_rollouts=1, temperature=1.0, top_p=1.0, top_k=None, max_response_tokens=4)
TASK = RolloutTask(sampling=SAMPLING, seed=0)
MEMORY = {"/release_memory_occupation": "releases", "/resume_memory_occupation": "takes"}


class Scene:
    """A rollout engine and a judge on one GPU; `calls` has what happened, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.may_end = asyncio.Event()
        self.rollout, self.judge = self._fleet("rollout"), self._fleet("judge")
        self.phases = SharedPhases(self.rollout)
        self.models = SleepingModels([self.judge])
        self.scored = ScoredAfterGeneration(self, self, phases=self.phases, models=self.models)

    def _fleet(self, name: str) -> Fleet:
        def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path in MEMORY:
                tags = " and ".join(json.loads(request.content)["tags"])
                self.calls.append(f"{name} {MEMORY[request.url.path]} {tags}")
            return httpx.Response(200, json={})

        endpoint = EngineEndpoint(
            index=0, host="127.0.0.1", port=30000, tensor=1, device="cuda", keys=EngineKeys(api="a", admin="b")
        )
        client = EngineClient(endpoint, request_timeout_s=5, send=scripted(answer))
        return Fleet([client], max_outstanding=8, publish_timeout_s=5, policy=RestartPolicy(max_restarts=0))

    async def answer(self, prompt: Prompt, task: RolloutTask) -> AnsweredPrompt:
        """Generate, as the rollout workers do; the last prompt ends when it may."""
        self.calls.append(f"generate {prompt.uid}")
        await asyncio.sleep(0.01)
        if prompt.uid == "last":
            await self.may_end.wait()
        if prompt.uid == "lost":
            raise FleetError("no engine is left")
        nothing = Score(value=0.0, components={}, is_masked=True)
        group = RolloutGroup(prompt=prompt, rollouts=(rollout(prompt.uid),))
        if task.baseline is not None:
            group = replace(group, baseline=rollout(f"greedy {prompt.uid}"))
        return AnsweredPrompt(scored=ScoredGroup(group=group, scores=(nothing,)), seconds=0.0)

    async def announce(self) -> None:
        """Nothing to tell."""

    async def lost(self, groups: Sequence[ScoredGroup]) -> list[int]:
        return [len(groups)]

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        async with self.judge.lease():
            text = group.rollouts[0].text
            self.calls.append(f"score {text}")
            if text == "bad":
                raise ScoreError("no score")
            return ScoredGroup(group=group, scores=(Score(value=float(len(text)), components={}),))

    async def ask(self, *uids: str, task: RolloutTask = TASK) -> list[ScoredGroup | BaseException]:
        answers = [self.scored.answer(prompt_of(1, uid=uid), task) for uid in uids]
        found = await asyncio.gather(*answers, return_exceptions=True)
        return [each if isinstance(each, BaseException) else each.scored for each in found]


def rollout(text: str) -> Rollout:
    one = np.zeros(1, np.int32)
    content = Content(token_ids=one, logprobs=one.astype(np.float32), text=text)
    mask = one.astype(bool)
    return Rollout(versions=one, loss_mask=mask, finish_reason=FinishReason.STOP, content=content)


def play(scenario: Callable[[Scene], object]) -> list[str]:
    async def run() -> list[str]:
        scene = Scene()
        await scene.models.sleep()
        scene.calls.clear()
        await scenario(scene)  # type: ignore[misc]
        return scene.calls

    return asyncio.run(run())


TURN = ["rollout releases kv_cache", "judge takes weights", "judge takes kv_cache"]
END = ["judge releases kv_cache and weights", "rollout takes kv_cache"]


def test_a_step_is_scored_when_its_last_group_is_generated() -> None:
    async def scenario(scene: Scene) -> None:
        asking = asyncio.create_task(scene.ask("a", "last", "bb"))
        await asyncio.sleep(0.05)
        assert scene.calls == ["generate a", "generate last", "generate bb"], "scored while another is generated"
        scene.may_end.set()
        found = await asking
        assert [each.scores[0].value for each in found if isinstance(each, ScoredGroup)] == [1.0, 4.0, 2.0]

    calls = play(scenario)
    assert calls[3:6] == TURN
    assert sorted(calls[6:9]) == ["score a", "score bb", "score last"]
    assert calls[9:] == END


def test_a_prompt_that_comes_in_a_turn_is_generated_after_it() -> None:
    async def scenario(scene: Scene) -> None:
        first = asyncio.create_task(scene.ask("a"))
        while TURN[0] not in scene.calls:
            await asyncio.sleep(0)
        await scene.ask("bb")
        await first

    calls = play(scenario)
    assert calls == ["generate a", *TURN, "score a", *END, "generate bb", *TURN, "score bb", *END]


def test_a_lost_prompt_and_one_without_a_score_cost_no_other() -> None:
    async def scenario(scene: Scene) -> None:
        lost, bad, good = await scene.ask("lost", "bad", "good")
        assert isinstance(lost, FleetError)
        assert isinstance(bad, ScoreError)
        assert isinstance(good, ScoredGroup)

    assert play(scenario)[-2:] == END


def test_the_greedy_rollout_of_a_group_is_scored_as_well() -> None:
    async def scenario(scene: Scene) -> None:
        (found,) = await scene.ask("a", task=replace(TASK, baseline=SAMPLING))
        assert isinstance(found, ScoredGroup)
        assert found.baseline is not None
        assert found.baseline.value == len("greedy a")

    play(scenario)


def test_a_run_that_has_ended_takes_no_turn() -> None:
    async def scenario(scene: Scene) -> None:
        asking = asyncio.create_task(scene.ask("a"))
        while "generate a" not in scene.calls:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0.05)

    assert play(scenario) == ["generate a"]


def test_new_trainers_wait_until_a_turn_has_ended() -> None:
    async def scenario(scene: Scene) -> None:
        asking = asyncio.create_task(scene.ask("a"))
        while TURN[0] not in scene.calls:
            await asyncio.sleep(0)
        await scene.phases.make_room()
        scene.calls.append("trainers start")
        await asking

    calls = play(scenario)
    assert calls == ["generate a", *TURN, "score a", *END, "rollout releases kv_cache", "trainers start"]


def test_a_judge_that_died_in_its_sleep_ends_the_wait_with_the_reason() -> None:
    async def scenario(scene: Scene) -> None:
        scene.judge.report(scene.judge.engines[0], Ended(reason="it was killed"))
        (found,) = await scene.ask("a")
        assert isinstance(found, FleetError)
        assert "it was killed" in str(found)
        assert scene.rollout.is_awake

    play(scenario)
