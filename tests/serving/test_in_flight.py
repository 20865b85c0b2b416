"""Weights that change under running requests: nothing is lost, and every token is told by the policy that chose it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

from megarl.config.roles import InFlight
from megarl.engine.fleet import Fleet
from megarl.errors import WeightSyncError
from megarl.results import PublishResult
from megarl.types import FinishReason, PolicyVersion, Rollout, RolloutGroup
from tests.engine.engines import (
    EOS,
    ScriptedEngine,
    ServedModel,
    generator_of,
    prompt_of,
    reply_of,
    scripted_fleet,
)
from tests.serving.pauses import DiskPublisher, pausing

PROMPT = (5, 17, 33, 90, 8)
MAX_TOKENS = 400
MIN_MIXED = 4


def generate_through_publishes(served: ServedModel, mode: InFlight) -> RolloutGroup:
    """Generate until the publishes came neither too late nor too early for most of the rollouts."""
    for pause_s in (0.7, 0.3, 1.5):
        group = asyncio.run(generate_once(served, mode, pause_s))
        if num_mixed(group) >= MIN_MIXED:
            break
    return group


def num_mixed(group: RolloutGroup) -> int:
    return sum(map(is_mixed, group.rollouts))


def is_mixed(rollout: Rollout) -> bool:
    return bool(rollout.versions[0] != rollout.versions[-1])


async def generate_once(served: ServedModel, mode: InFlight, pause_s: float) -> RolloutGroup:
    async with served.fleet() as fleet:
        publisher = pausing(DiskPublisher(served, fleet, mode), fleet, mode)
        generator = generator_of(fleet, num_rollouts=16, max_response_tokens=MAX_TOKENS, in_flight=mode)
        generating = asyncio.create_task(generator.generate(prompt_of(*PROMPT)))
        for version in (1, 2):
            await asyncio.sleep(pause_s)
            await publisher.publish(PolicyVersion(version))
        return await generating


def models_of(served: ServedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    first, other = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (served.folder, served.other_folder)
    )
    return first, other


def check_whole(group: RolloutGroup) -> None:
    """Each rollout is one response, from its first token to its end."""
    for rollout in group.rollouts:
        assert len(rollout.token_ids) == len(rollout.logprobs) == len(rollout.versions)
        assert EOS not in rollout.token_ids[:-1]
        is_stopped = rollout.token_ids[-1] == EOS
        assert rollout.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
        assert is_stopped or len(rollout.token_ids) == MAX_TOKENS
        assert (np.diff(rollout.versions) >= 0).all()
    assert num_mixed(group) >= MIN_MIXED, "the publishes came too late or too early to test anything"


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_every_token_is_as_likely_as_its_version_says(qwen2_tp1: ServedModel, mode: InFlight) -> None:
    group = generate_through_publishes(qwen2_tp1, mode)
    check_whole(group)
    models = models_of(qwen2_tp1)
    for rollout in group.rollouts:
        ids = torch.tensor([[*PROMPT, *rollout.token_ids.tolist()]])
        with torch.no_grad():
            tables = [model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1) for model in models]
        expected = [table.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy() for table in tables]
        of_version = np.where(rollout.versions % 2 == 0, expected[0], expected[1])
        of_other = np.where(rollout.versions % 2 == 0, expected[1], expected[0])
        np.testing.assert_allclose(rollout.logprobs, of_version, atol=1e-4)
        assert (np.abs(rollout.logprobs - of_other) > 1e-2).mean() > 0.9, "the test could not tell the two apart"


def test_in_place_no_token_is_taken_for_younger_than_it_is(qwen2_tp1: ServedModel) -> None:
    group = generate_through_publishes(qwen2_tp1, "in_place")
    check_whole(group)
    models = models_of(qwen2_tp1)
    # Some of them: every token takes a pass of transformers.
    mixed = [rollout for rollout in group.rollouts if is_mixed(rollout)][:4]
    num_older = 0
    for rollout in mixed:
        truth = versions_of(rollout, models)
        assert (rollout.versions <= truth).all()
        num_older += int((rollout.versions < truth).sum())
    # One token per publish and rollout at most, and the first one of a request that began meanwhile.
    assert num_older <= 3 * len(mixed)


def versions_of(rollout: Rollout, models: Sequence[PreTrainedModel]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Found out from the log-probabilities alone: each token goes on with the KV cache of the versions before."""
    cache = DynamicCache()
    version, inputs = 0, torch.tensor([PROMPT])
    truth: list[int] = []
    for token_id, logprob in zip(rollout.token_ids.tolist(), rollout.logprobs.tolist(), strict=True):
        length = cache.get_seq_length()
        while True:
            assert version <= 2, f"token {len(truth)} is of no version"
            with torch.no_grad():
                logits = models[version % 2](inputs, past_key_values=cache, use_cache=True).logits[0, -1]
            if abs(logits.log_softmax(-1)[token_id].item() - logprob) < 1e-4:
                break
            cache.crop(length)
            version += 1
        truth.append(version)
        inputs = torch.tensor([[token_id]])
    return np.array(truth, dtype=np.int32)


class PausedEngine:
    """Ends its first request when it is paused, with what it has; answers all others when it goes on."""

    def __init__(self, *, retracts: bool = False) -> None:
        """With `retracts` the first one too is answered only then."""
        self._retracts = retracts
        self.prompts: list[list[int]] = []
        self.limits: list[int] = []
        self.orders: list[str] = []
        self.has_begun = asyncio.Event()
        self._is_paused = asyncio.Event()
        self._is_resumed = asyncio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path != "/generate":
            self.orders.append(path)
            match path:
                case "/pause_generation":
                    self._is_paused.set()
                case "/continue_generation":
                    self._is_resumed.set()
            return httpx.Response(200, json={})
        body = json.loads(request.content)
        self.prompts.append(body["input_ids"])
        self.limits.append(body["sampling_params"]["max_new_tokens"])
        self.has_begun.set()
        if len(self.prompts) > 1 or self._retracts:
            await self._is_resumed.wait()
            return reply_of(9, EOS, version="1")
        await self._is_paused.wait()
        return reply_of(7, 8, 8, kind="abort")


class Publisher:
    def __init__(self, fleet: Fleet, *, failing: int | None = None) -> None:
        self._fleet = fleet
        self._failing = failing

    async def publish(self, version: PolicyVersion) -> PublishResult:
        engines = [engine for engine in self._fleet.engines if engine.index != self._failing]
        for engine in self._fleet.engines:
            if engine.index == self._failing:
                await self._fleet.mark_stale(engine, "commit failed")
        if not engines:
            raise WeightSyncError("committed nowhere")
        await self._fleet.committed(version, engines)
        return PublishResult(version=version, num_bytes=0, seconds=0.0, num_engines=len(engines))


async def test_an_aborted_rollout_goes_on_from_where_it_was_with_the_versions_of_both_parts() -> None:
    engine = PausedEngine()
    fleet = scripted_fleet(engine)
    generating = asyncio.create_task(generator_of(fleet, in_flight="abort").generate(prompt_of(5, 6)))
    await engine.has_begun.wait()
    await pausing(Publisher(fleet), fleet, "abort").publish(PolicyVersion(1))
    (rollout,) = (await generating).rollouts
    assert rollout.token_ids.tolist() == [7, 8, 9, EOS]
    assert rollout.versions.tolist() == [0, 0, 1, 1]
    assert engine.prompts == [[5, 6], [5, 6, 7, 8]]
    assert engine.limits == [12, 10]
    assert engine.orders == ["/pause_generation", "/continue_generation"]


async def test_what_an_engine_says_after_a_failed_publish_is_not_trusted() -> None:
    broken, good = PausedEngine(retracts=True), PausedEngine(retracts=True)
    fleet = scripted_fleet(broken, good)
    generating = asyncio.create_task(generator_of(fleet, in_flight="retract").generate(prompt_of(5, 6)))
    await broken.has_begun.wait()
    await pausing(Publisher(fleet, failing=0), fleet, "retract").publish(PolicyVersion(1))
    (rollout,) = (await generating).rollouts
    assert rollout.versions.tolist() == [1, 1]
    assert (len(broken.prompts), len(good.prompts)) == (1, 1)
    assert broken.orders[:3] == ["/pause_generation", "/abort_request", "/continue_generation"]


async def test_engines_go_on_though_the_publish_fails() -> None:
    engine = PausedEngine()
    fleet = scripted_fleet(engine)
    with pytest.raises(WeightSyncError, match="committed nowhere"):
        await pausing(Publisher(fleet, failing=0), fleet, "retract").publish(PolicyVersion(1))
    assert engine.orders[-1] == "/continue_generation"


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_prefixes_are_kept_apart_by_version_where_the_cache_outlives_a_publish(mode: InFlight) -> None:
    engine = ScriptedEngine(reply_of(EOS))
    generator = generator_of(scripted_fleet(engine), in_flight=mode)
    asyncio.run(generator.generate(prompt_of(5, 6)))
    assert engine.requests[0].get("extra_key") == ("0" if mode == "in_place" else None)
