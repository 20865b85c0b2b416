from __future__ import annotations

import asyncio

import pytest
import ray

from megarl.cluster.adoption import AdoptableActors
from megarl.config.roles import RolloutRoleConfig
from megarl.engine import admin
from megarl.engine.client import EngineClient, EngineEndpoint, GenerateRequest
from megarl.errors import EngineError
from megarl.serving.adoption import Adoption, take_over
from tests.engine.engines import REQUEST_TIMEOUT_S, ServedModel


def test_an_engine_that_was_left_inside_an_update_serves_again(qwen2_tp1: ServedModel) -> None:
    """Paused, with an update open and a request under way, as a driver leaves it that dies in a publish."""
    endpoint = qwen2_tp1.process.endpoint
    request = GenerateRequest(rid="left", input_ids=(5, 6), max_new_tokens=64, temperature=1.0)

    async def scenario() -> None:
        client = EngineClient(endpoint, request_timeout_s=REQUEST_TIMEOUT_S)
        try:
            await admin.pause(client, admin.PauseMode.IN_PLACE)
            left = asyncio.create_task(client.generate(request))
            await client.control("begin", "/begin_weight_update", {})
            with pytest.raises(EngineError, match="already open"):
                await client.control("begin", "/begin_weight_update", {})

            version = await take_over(endpoint, timeout_s=REQUEST_TIMEOUT_S)

            assert version == str((await admin.model_info(client))["weight_version"])
            await left
            await client.control("begin", "/begin_weight_update", {})
            await client.control("end", "/end_weight_update", {})
            await take_over(endpoint, timeout_s=REQUEST_TIMEOUT_S)  # nothing is left: nothing changes
            await client.generate(request)
        finally:
            await client.close()

    asyncio.run(scenario())


def _adoption(notes: list[str], *, is_possible: bool = True) -> Adoption:
    actors = AdoptableActors(outlive_driver=False)
    actors.left = {name: object() for name in ("engine-0-0", "engine-0-1", "engine-1-0", "engine-1-1", "actor-0")}
    return Adoption(actors, RolloutRoleConfig(pool="rollout"), 3, is_possible=is_possible, noted=notes.append)


def test_engines_that_cannot_be_used_are_counted_once_all_were_asked() -> None:
    notes: list[str] = []
    adoption = _adoption(notes)

    async def refuse() -> EngineEndpoint:
        raise EngineError("was not running")

    assert asyncio.run(adoption.take_over(0, refuse)) is None
    assert notes == []
    assert asyncio.run(adoption.take_over(1, refuse)) is None
    assert notes == ["adopted 0 engines of 3"]


def test_engines_that_the_operator_had_added_are_ended_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr(ray, "kill", ended.append)
    actors, notes = AdoptableActors(outlive_driver=False), list[str]()
    actors.left = {"engine-0-0": "kept", "engine-1-0": "added"}
    adoption = Adoption(actors, RolloutRoleConfig(pool="rollout"), 1, is_possible=False, noted=notes.append)

    async def never() -> EngineEndpoint:
        raise AssertionError

    asyncio.run(adoption.take_over(0, never))
    assert (ended, list(actors.left), notes) == (["added"], ["engine-0-0"], ["adopted 0 engines of 1"])


def test_engines_whose_memory_is_unknown_are_not_asked() -> None:
    async def never() -> EngineEndpoint:
        raise AssertionError

    assert asyncio.run(_adoption([], is_possible=False).take_over(0, never)) is None


def test_an_actor_is_taken_once() -> None:
    actors = _adoption([]).actors
    assert actors.take("actor-0") is not None
    assert actors.take("actor-0") is None
    assert actors.options("actor-0") == {}
