from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.engine import control, process
from megarl.engine.fleet import Fleet
from megarl.engine.lifecycle import EngineState
from megarl.errors import WeightSyncError
from megarl.results import PublishResult
from megarl.routes import RouteRequest, RouteShape
from megarl.serving.canary import Canary, CanaryProbe
from megarl.serving.phases import SharedPhases, SleepingFleet
from megarl.serving.publisher import EnginePublisher
from megarl.stages import SeparatePhases
from megarl.types import FloatArray, PolicyVersion, TrainSample
from tests.engine.engines import EOS, Handler, ServedModel, control_of, scripted_fleet, serve
from tests.engine.trainers import Trainers, transfer_to

PROBE = CanaryProbe(
    prompt_ids=np.arange(1, 17, dtype=np.int32) * 7919 % 99,
    max_response_tokens=8,
    temperature=1.0,
    vocab=99,
    eos_ids=(EOS,),
    dtype="float32",
)


class FolderTrainer:
    """Says what transformers makes of the model in a folder."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder)

    async def logprobs(self, samples: Sequence[TrainSample]) -> tuple[FloatArray, ...]:
        return tuple(self._score(sample) for sample in samples)

    def _score(self, sample: TrainSample) -> FloatArray:
        num_prompt = len(sample.prompt_ids)
        ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.rollout.token_ids.tolist()]])
        with torch.no_grad():
            scores = self._model(ids).logits[0, num_prompt - 1 : -1].log_softmax(-1)
        logprobs: FloatArray = scores.gather(1, ids[0, num_prompt:, None])[:, 0].numpy()
        return logprobs


def test_an_engine_with_the_trainers_weights_passes_and_one_with_others_does_not(qwen2_tp1: ServedModel) -> None:
    async def check(folder: Path) -> list[str]:
        warnings: list[str] = []
        async with qwen2_tp1.fleet() as fleet:
            canary = Canary(
                fleet,
                probe=PROBE,
                logprobs=FolderTrainer(folder).logprobs,
                phases=SharedPhases(SleepingFleet(fleet)),
                warn=warnings.append,
            )
            try:
                await canary.check(PolicyVersion(0))
                assert fleet.engines[0].is_live
            except WeightSyncError:
                assert fleet.engines[0].state is EngineState.STALE
                raise
            finally:
                await SleepingFleet(fleet).wake()
        return warnings

    assert asyncio.run(check(qwen2_tp1.folder)) == []
    with pytest.raises(WeightSyncError, match=r"no engine computes .* differ from .*canary_every: null"):
        asyncio.run(check(qwen2_tp1.other_folder))


@pytest.mark.usefixtures("real_engines")
def test_an_engine_that_decodes_with_what_it_derived_from_older_weights_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent attention has copies of a parameter that a publish does not write: bytes agree, and tokens do not."""
    for module in (process, control):
        monkeypatch.setattr(module, "LOADER", "tests.engine.stale_loader.load")
    served = serve(tmp_path, "deepseek_v3", tensor=1, tied=False)

    async def check() -> None:
        async with served.fleet() as fleet:
            trainers = Trainers(transfer_to(served), control_of(fleet), served.other_folder)
            await trainers.join()
            logprobs = FolderTrainer(served.other_folder).logprobs
            canary = Canary(fleet, probe=PROBE, logprobs=logprobs, phases=SeparatePhases(), warn=lambda _: None)
            await trainers.publish(PolicyVersion(1))
            with pytest.raises(WeightSyncError, match="no engine computes what the trainer computes"):
                await canary.check(PolicyVersion(1))
            await trainers.publish(PolicyVersion(2))
            await canary.check(PolicyVersion(2))
            assert fleet.engines[0].is_live
            trainers.close()

    try:
        asyncio.run(check())
    finally:
        served.process.stop()


def answering(logprob: float, *, version: int = 3) -> Handler:
    """An engine that gives every token the same log-probability."""

    def handle(request: httpx.Request) -> httpx.Response:
        tokens = [7] * PROBE.max_response_tokens
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[logprob, token, None] for token in tokens],
            "weight_version": str(version),
        }
        return httpx.Response(200, json={"output_ids": tokens, "meta_info": meta})

    return handle


async def saying(samples: Sequence[TrainSample]) -> tuple[FloatArray, ...]:
    return tuple(np.full(len(sample.rollout.token_ids), -1.0, np.float32) for sample in samples)


def canary_of(fleet: Fleet, warnings: list[str]) -> Canary:
    return Canary(fleet, probe=PROBE, logprobs=saying, phases=SeparatePhases(), warn=warnings.append)


async def test_only_the_engine_that_differs_is_stale_and_the_run_says_so() -> None:

    warnings: list[str] = []
    fleet = scripted_fleet(answering(-1.0), answering(-1.5), answering(-1.0, version=2), lambda _: httpx.Response(500))
    await canary_of(fleet, warnings).check(PolicyVersion(3))
    states, warnings = ([engine.state for engine in fleet.engines], warnings)
    assert states == [EngineState.HEALTHY, EngineState.STALE, EngineState.STALE, EngineState.STALE]
    assert len(warnings) == 3
    assert "engine 1" in warnings[0]
    assert "differ from the trainer's by 0.5 (median)" in warnings[0]
    assert "8 tokens of version 2, expected version 3" in warnings[1]


async def test_the_trainer_follows_the_experts_of_the_engine_where_training_does() -> None:
    """One expert that rounding exchanges would change every token after it."""
    shape = RouteShape(num_layers=2, per_token=2, num_experts=8)
    routes = RouteRequest(shape=shape, first=0, num_sent=len(PROBE.prompt_ids))
    num_routed = len(PROBE.prompt_ids) + PROBE.max_response_tokens - 1
    chosen = np.arange(num_routed * 4, dtype="<u4").reshape(num_routed, 2, 2) % 8
    seen: list[TrainSample] = []

    def handle(request: httpx.Request) -> httpx.Response:
        sent = json.loads(request.content)
        assert (sent["return_routed_experts"], sent["routed_experts_start_len"]) == (True, 0)
        reply = json.loads(answering(-1.0)(request).content)
        reply["meta_info"]["routed_experts"] = base64.b64encode(chosen.tobytes()).decode()
        return httpx.Response(200, json=reply)

    async def follow(samples: Sequence[TrainSample]) -> tuple[FloatArray, ...]:
        seen.extend(samples)
        return await saying(samples)

    fleet, probe = scripted_fleet(handle), replace(PROBE, routes=routes)
    await Canary(fleet, probe=probe, logprobs=follow, phases=SeparatePhases(), warn=print).check(PolicyVersion(3))
    (sample,) = seen
    followed = sample.rollout.content.load().routes
    assert followed is not None
    assert followed.tolist() == chosen.tolist()


class CountingPublisher:
    async def publish(self, version: PolicyVersion) -> PublishResult:
        return PublishResult(version=version, num_bytes=0, seconds=0.0, num_engines=1)


class CountingCanary(Canary):
    def __init__(self, fleet: Fleet, *, every: int) -> None:
        super().__init__(fleet, probe=PROBE, logprobs=saying, phases=SeparatePhases(), warn=lambda _: None, every=every)
        self.checked: list[int] = []

    async def check(self, version: PolicyVersion) -> None:
        self.checked.append(version)


async def test_the_first_and_every_further_kth_publish_is_checked() -> None:

    fleet = scripted_fleet(lambda _: httpx.Response(500))
    canary = CountingCanary(fleet, every=3)
    publisher = EnginePublisher(transport=CountingPublisher(), fleet=fleet, phases=SeparatePhases(), canary=canary)
    for version in range(8):
        await publisher.publish(PolicyVersion(version))
    assert canary.checked == [0, 3, 6]
