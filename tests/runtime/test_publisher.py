"""The order of a publish: nothing is committed that did not arrive as it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from megarl.config.model import Family, ModelShape
from megarl.errors import WeightSyncError, WorkerError
from megarl.rollout.control import EngineControl
from megarl.rollout.orders import Route
from megarl.runtime.publisher import TransferPublisher
from megarl.runtime.ranks import ActorRanks
from megarl.types import PolicyVersion
from megarl.weights.group import LOOPBACK
from megarl.weights.megatron import MegatronParallel

ROUTE = Route(
    shape=ModelShape(
        family=Family.QWEN2,
        num_layers=2,
        hidden=8,
        ffn_hidden=16,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        vocab=32,
        max_context_tokens=64,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        has_tied_embeddings=False,
        has_qkv_bias=True,
        has_qk_norm=False,
        dtype="float32",
    ),
    parallel=MegatronParallel(tensor=2),
    trainer_dtype="float32",
    num_engines=1,
    tensor=1,
    engine_dtype="float32",
    is_cpu_engine=True,
)


class FakeRanks:
    def __init__(self, calls: list[str], *, dies: bool = False) -> None:
        self._calls = calls
        self._dies = dies

    async def send(self, version: int) -> list[dict[tuple[int, str], int]]:
        self._calls.append("send")
        if self._dies:
            raise WorkerError("actor rank 1: died during send")
        return [{(0, "w"): 5}, {(0, "w"): 7}]


class FakeControl:
    def __init__(self, calls: list[str], *, digest: int = 12) -> None:
        self._calls = calls
        self._digest = digest

    async def stage(self, version: PolicyVersion) -> dict[int, Mapping[str, int]]:
        self._calls.append("stage")
        return {0: {"w": self._digest}}

    async def commit(self, version: PolicyVersion) -> int:
        self._calls.append(f"commit {version}")
        return 1

    async def abort(self) -> None:
        self._calls.append("abort")


def publisher(ranks: FakeRanks, control: FakeControl) -> TransferPublisher:
    return TransferPublisher(
        ranks=cast(ActorRanks, ranks),
        control=cast(EngineControl, control),
        route=ROUTE,
        timeout_s=5,
        host=LOOPBACK,
    )


def test_a_version_that_arrived_whole_is_committed() -> None:
    calls: list[str] = []
    result = asyncio.run(publisher(FakeRanks(calls), FakeControl(calls)).publish(PolicyVersion(4)))
    assert calls == ["send", "stage", "commit 4"]
    assert (result.version, result.num_engines) == (4, 1)
    assert result.num_bytes == sum(ROUTE.plan().received_bytes.values())


def test_a_digest_that_differs_aborts_and_names_the_tensor() -> None:
    calls: list[str] = []
    with pytest.raises(WeightSyncError, match=r"version 4 was not published.* w "):
        asyncio.run(publisher(FakeRanks(calls), FakeControl(calls, digest=13)).publish(PolicyVersion(4)))
    assert calls == ["send", "stage", "abort"]


def test_a_sender_that_dies_aborts() -> None:
    calls: list[str] = []
    with pytest.raises(WeightSyncError, match="actor rank 1: died during send"):
        asyncio.run(publisher(FakeRanks(calls, dies=True), FakeControl(calls)).publish(PolicyVersion(4)))
    assert calls == ["send", "stage", "abort"]
