"""Publishing to real engines. The trainer ranks are threads of the test; see `trainers`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.engine.fleet import Fleet
from megarl.errors import WeightSyncError
from megarl.families import BY_NAME, family_of
from megarl.serving.phases import SleepingFleet
from megarl.types import PolicyVersion
from megarl.weights.layouts.megatron import MegatronParallel
from tests.engine.engines import (
    ServedModel,
    control_of,
    fingerprints_from_disk,
    generator_of,
    prompt_of,
    serve,
)
from tests.engine.trainers import SPLIT, FlippingGroup, Trainers, rendezvous_at, transfer_to
from tests.tiny_models import FAMILIES

PROMPT = prompt_of(5, 17, 33, 90, 8)


async def greedy(fleet: Fleet) -> tuple[list[int], list[int]]:
    """Tokens and versions of the likeliest answer."""
    group = await generator_of(fleet, temperature=0.0, max_attempts=1).generate(PROMPT)
    (rollout,) = group.rollouts
    return rollout.token_ids.tolist(), rollout.versions.tolist()


async def test_an_engine_has_the_parameters_its_layout_says(served: ServedModel) -> None:
    async with served.fleet() as fleet:
        control = control_of(fleet)
        await control.check_layout(transfer_to(served))
        assert len(await control.inspect()) == served.process.endpoint.tensor


def test_an_engine_of_another_shape_is_refused_with_the_tensor_named(qwen2_tp1: ServedModel) -> None:
    async def scenario() -> None:
        transfer = transfer_to(qwen2_tp1)
        async with qwen2_tp1.fleet() as fleet:
            await control_of(fleet).check_layout(replace(transfer, shape=replace(transfer.shape, ffn_hidden=96)))

    with pytest.raises(WeightSyncError, match=r"TP rank 0 does not match .*layers.0.mlp.gate_up_proj.weight has shape"):
        asyncio.run(scenario())


async def publish_and_compare(served: ServedModel, parallel: MegatronParallel = SPLIT) -> None:
    """Publish the other weights; nothing may tell them from those SGLang loads from disk."""
    async with served.fleet() as fleet:
        control = control_of(fleet)
        expected = await fingerprints_from_disk(control, fleet, served.other_folder)
        expected_tokens, _ = await greedy(fleet)
        before = await fingerprints_from_disk(control, fleet, served.folder)
        for rank, (old, new) in enumerate(zip(before, expected, strict=True)):
            assert old.keys() == new.keys()
            alike = [name for name, fingerprint in new.items() if fingerprint in old.values()]
            # On all ranks but the first the bias of experts is zero, and 16 positions of images are padding.
            zeros = ("w2_weight_bias", "pos_embed.weight") if rank else ()
            assert [name for name in alike if not name.endswith(zeros)] == []

        if served.shape.has_biases:
            parallel = replace(parallel, expert_tensor=1)  # experts with biases are whole
        trainers = Trainers(transfer_to(served, parallel), control, served.other_folder)
        await trainers.join()
        await trainers.publish(PolicyVersion(1))
        own = family_of(served.shape).engine.unplanned  # a tower stays what it was, which needs an image to be seen
        assert await control.fingerprints() == [
            {**new, **{name: value for name, value in old.items() if name.startswith(own)}}
            for old, new in zip(before, expected, strict=True)
        ]
        assert fleet.committed_version() == 1
        tokens, versions = await greedy(fleet)
        assert tokens == expected_tokens
        assert set(versions) == {1}

        trainers.close()


def test_published_parameters_are_byte_equal_to_those_sglang_loads_itself(served: ServedModel) -> None:
    asyncio.run(publish_and_compare(served))


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(
    ("family", "tied"),
    [(family, tied) for family in FAMILIES for tied in (False, True) if BY_NAME[family].engine.ties_head or not tied],
)
@pytest.mark.usefixtures("real_engines")
def test_every_family_can_be_published_to(family: str, tied: bool, tensor: int, tmp_path: Path) -> None:
    served = serve(tmp_path, family, tensor=tensor, tied=tied)
    try:
        asyncio.run(publish_and_compare(served))
    finally:
        served.process.stop()


MIXTURE_SPLITS = {
    "EP2": MegatronParallel(data=2, expert=2),
    "TP2-EP2": MegatronParallel(tensor=2, data=2, expert=2),
    "TP2-EP4-ETP1": MegatronParallel(tensor=2, data=2, expert=4, expert_tensor=1),
    "EP2-PP2": MegatronParallel(pipeline=2, data=2, expert=2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tensor", "expert"),
    [
        ("qwen3_moe", 1, 1),
        ("qwen3_moe", 2, 1),
        ("qwen3_moe", 2, 2),
        ("qwen2_moe", 2, 2),
        ("mixtral", 2, 2),
        ("glm4_moe", 2, 2),
        ("deepseek_v3", 2, 2),
    ],
    ids=["TP1", "TP2", "EP2", "shared-EP2", "mixtral-EP2", "glm4_moe-EP2", "deepseek_v3-EP2"],
)
@pytest.mark.usefixtures("real_engines")
def test_a_mixture_can_be_published_from_every_split_of_its_experts(
    family: str, tensor: int, expert: int, tmp_path: Path
) -> None:
    served = serve(tmp_path, family, tensor=tensor, tied=False, expert=expert)
    try:
        for parallel in MIXTURE_SPLITS.values():
            asyncio.run(publish_and_compare(served, parallel))
    finally:
        served.process.stop()


async def test_one_group_publishes_version_after_version(qwen2_tp1: ServedModel) -> None:
    async with qwen2_tp1.fleet() as fleet:
        control = control_of(fleet)
        trainers = Trainers(transfer_to(qwen2_tp1), control, qwen2_tp1.other_folder)
        await trainers.join()
        for version in (1, 2, 3):
            await trainers.publish(PolicyVersion(version))
            _, versions = await greedy(fleet)
            assert set(versions) == {version}
        trainers.close()


async def test_a_sleeping_engine_can_be_published_to(qwen2_tp1: ServedModel) -> None:
    async with qwen2_tp1.fleet() as fleet:
        control = control_of(fleet)
        trainers = Trainers(transfer_to(qwen2_tp1), control, qwen2_tp1.other_folder)
        await trainers.join()
        await SleepingFleet(fleet).sleep()
        await trainers.publish(PolicyVersion(1))
        await SleepingFleet(fleet).wake()
        _, versions = await greedy(fleet)
        assert set(versions) == {1}
        trainers.close()


@pytest.mark.fault("one flipped byte on the way", "not served; the next publish repairs it")
async def test_a_corrupted_publish_is_found_and_the_next_one_repairs_it(served: ServedModel) -> None:
    async with served.fleet() as fleet:
        control = control_of(fleet)
        trainers = Trainers(transfer_to(served), control, served.other_folder, group_type=FlippingGroup)
        await trainers.join()
        with pytest.raises(WeightSyncError, match=r"target rank \d: .* has digest .*, the senders' is"):
            await trainers.publish(PolicyVersion(1))
        assert fleet.committed_version() == 0
        # The wire is honest from now on.
        await trainers.publish(PolicyVersion(2))
        served_now = await control.fingerprints()
        assert fleet.committed_version() == 2
        assert await fingerprints_from_disk(control, fleet, served.other_folder) == served_now
        trainers.close()


@pytest.mark.fault("trainer and engine with different plans", "refused before a byte is sent")
def test_another_plan_hash_is_refused(qwen2_tp1: ServedModel) -> None:
    async def scenario() -> None:
        async with qwen2_tp1.fleet() as fleet:
            control = control_of(fleet)
            await control.join(transfer_to(qwen2_tp1), plan_hash="0" * 32, rendezvous=rendezvous_at(control))

    with pytest.raises(WeightSyncError, match=r"TP rank 0: join: plan hash is .* here and 0{32} at the driver"):
        asyncio.run(scenario())


@pytest.fixture
def llama_tp1(real_engines: None, tmp_path: Path) -> Iterator[ServedModel]:
    """An engine of its own: the test ends it."""
    served = serve(tmp_path, "llama", tensor=1, tied=False)
    yield served
    served.process.stop()


@pytest.mark.fault("kill -9 of an engine that receives", "an error long before the deadline")
async def test_an_engine_killed_while_it_receives_is_an_error_long_before_the_deadline(llama_tp1: ServedModel) -> None:
    async with llama_tp1.fleet() as fleet:
        control = control_of(fleet)
        await control.check_layout(transfer_to(llama_tp1))
        trainers = Trainers(transfer_to(llama_tp1), control, llama_tp1.other_folder)
        await trainers.join()
        receiving = asyncio.create_task(control.receive(PolicyVersion(1)))
        await asyncio.sleep(1)
        assert not receiving.done()
        killed = time.monotonic()
        os.killpg(llama_tp1.process.pid, signal.SIGKILL)
        with pytest.raises(WeightSyncError, match=r"engine 0 .*: load weights: "):
            await receiving
        # The senders do not wait either: they find the connection closed, or what they owe fits its buffer.
        with suppress(WeightSyncError):
            await trainers.send(PolicyVersion(1))
        trainers.close()
        assert time.monotonic() - killed < 10
    assert "SIGKILL" in llama_tp1.process.describe_end()
