"""A drafter sends to the draft of a real engine: its bytes arrive there, and the policy's stay as they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NotRequired, TypedDict

import pytest

from megarl.config.draft import ModelDraftConfig
from megarl.config.roles import RolloutRoleConfig
from megarl.engine.client import EngineClient, GenerateRequest
from megarl.engine.fleet import Fleet
from megarl.engine.process import EngineProcess
from megarl.engine.tool_commands import ToolControl
from megarl.families.shape import ModelShape
from megarl.types import PolicyVersion
from megarl.weights.layouts.megatron import MegatronParallel
from megarl.weights.layouts.transfer_spec import TransferSpec
from tests.engine.engines import COMMAND_TIMEOUT_S, REQUEST_TIMEOUT_S, control_of, engine_spec
from tests.engine.trainers import Trainers
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

TOKENS = 48
VERSION = PolicyVersion(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """An engine with the policy of one folder and the draft of another; a third is what the draft learns."""

    process: EngineProcess
    folder: Path
    shape: ModelShape

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[Fleet]:
        async with fleet_of(self.process) as fleet:
            yield fleet


@asynccontextmanager
async def fleet_of(process: EngineProcess) -> AsyncIterator[Fleet]:
    fleet = Fleet(
        [EngineClient(process.endpoint, request_timeout_s=REQUEST_TIMEOUT_S)], max_outstanding=64, publish_timeout_s=10
    )
    try:
        yield fleet
    finally:
        await fleet.close()


@pytest.fixture(scope="module", params=[1, 2], ids=["TP1", "TP2"])
def drafting(
    real_engines: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drafting]:
    folder = tmp_path_factory.mktemp("drafting")
    for seed, name in enumerate(("model", "draft"), start=1):
        shape = write_tiny_model(folder / name, "qwen2", layers=2, seed=seed)
    config = RolloutRoleConfig(
        pool="rollout",
        tensor=request.param,
        max_running_requests=8,
        draft=ModelDraftConfig(kind="model", path=folder / "draft", num_tokens=1),
    )
    process = EngineProcess(replace(engine_spec(folder / "model", folder / "run"), config=config))
    process.start()
    try:
        asyncio.run(process.wait_ready())
        yield Drafting(process=process, folder=folder, shape=shape)
    finally:
        process.stop()


class Meta(TypedDict):
    completion_tokens: int
    spec_verify_ct: NotRequired[int]


class Reply(TypedDict):
    """SGLang's, as far as it is read here."""

    output_ids: list[int]
    meta_info: Meta


async def answers(fleet: Fleet, temperature: float) -> tuple[list[list[int]], float]:
    """Return the tokens of some requests with seeds, and how many a pass over drafts kept."""

    async def answer(number: int) -> Reply:
        request = GenerateRequest(
            rid=f"{temperature}-{number}",
            input_ids=tuple(range(3, 12 + number)),
            max_new_tokens=TOKENS,
            temperature=temperature,
            sampling_seed=7 + number,
        )
        (engine,) = fleet.engines
        reply: Reply = json.loads((await engine.client.generate(request)).content)
        return reply

    replies = await asyncio.gather(*(answer(number) for number in range(4)))
    details = [reply["meta_info"] for reply in replies]
    num_tokens = sum(each["completion_tokens"] for each in details)
    num_passes = sum(each.get("spec_verify_ct", 0) for each in details)
    return [reply["output_ids"] for reply in replies], num_tokens / max(1, num_passes)


async def test_what_a_draft_learns_arrives_in_it_alone_and_keeps_more_tokens(drafting: Drafting) -> None:
    """It learns to be the policy here; tokens are the same before and after, drawn ones too."""
    transfer = TransferSpec(
        shape=drafting.shape,
        parallel=MegatronParallel(tensor=2, pipeline=2),
        trainer_dtype="float32",
        num_engines=1,
        tensor=drafting.process.endpoint.tensor,
        engine_dtype="float32",
        is_cpu_engine=True,
    )
    async with drafting.fleet() as fleet:
        policy = control_of(fleet)
        drafts = ToolControl(fleet, timeout_s=COMMAND_TIMEOUT_S, is_for_drafts=True)
        to_policy = Trainers(transfer, policy, drafting.folder / "model")
        to_draft = Trainers(transfer, drafts, drafting.folder / "model")
        try:
            await to_policy.join()
            await to_policy.publish(VERSION)
            before = {temperature: await answers(fleet, temperature) for temperature in (0.0, 1.0)}
            served, folder = await policy.fingerprints(), await drafts.fingerprints()
            await drafts.check_layout(transfer)
            await to_draft.join()
            arrived, _ = await asyncio.gather(drafts.receive(PolicyVersion(9)), to_draft.send(PolicyVersion(9)))
            learned = await drafts.fingerprints()
            assert await policy.fingerprints() == served
            assert learned == served
            for rank, names in arrived.items():
                assert names.keys() == folder[rank].keys()
                assert all(folder[rank][name] != learned[rank][name] for name in names)
            (engine,) = fleet.engines
            assert await engine.client.probe(timeout_s=REQUEST_TIMEOUT_S) == str(VERSION)
            await engine.client.flush_cache()  # of keys and values of the draft before
            for temperature, (tokens, kept) in before.items():
                same, more = await answers(fleet, temperature)
                assert same == tokens
                assert more > kept, temperature
        finally:
            to_policy.close()
            to_draft.close()
