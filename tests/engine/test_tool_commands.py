"""The commands of tools, from the driver's control to a module in this process that stands for a TP rank."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from collections.abc import Callable, Coroutine
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from megarl.engine.loader import load
from megarl.engine.tool_commands import ToolControl, dump_file
from megarl.errors import WeightSyncError
from megarl.weights.algebra.slices import TensorSpec
from tests.engine.engines import scripted_fleet
from tests.weights.reference import transfer_spec


def engine_of(model: torch.nn.Module) -> Callable[[httpx.Request], httpx.Response]:
    """An engine of one TP rank that hands every payload to the loader."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/load_weights":
            (payload,) = json.loads(request.content)["payloads"]
            load(model, pickle.loads(base64.b64decode(payload)))
        return httpx.Response(200, json={})

    return answer


def run(use: Callable[[ToolControl], Coroutine[None, None, None]], *models: torch.nn.Module) -> None:
    async def scenario() -> None:
        await use(ToolControl(scripted_fleet(*map(engine_of, models)), timeout_s=30))

    asyncio.run(scenario())


def test_every_engine_replies_in_the_order_of_its_index() -> None:
    async def use(control: ToolControl) -> None:
        small, large = await control.inspect()
        assert small["weight"] == TensorSpec(shape=(1, 3), dtype="float32")
        assert large["weight"] == TensorSpec(shape=(2, 3), dtype="float32")

    run(use, torch.nn.Linear(3, 1), torch.nn.Linear(3, 2))


def test_a_fingerprint_changes_with_one_bit_of_its_parameter() -> None:
    model = torch.nn.Linear(3, 2)

    async def use(control: ToolControl) -> None:
        (before,) = await control.fingerprints()
        assert await control.fingerprints() == [before]
        model.get_parameter("weight").data.view(torch.int32)[1, 2] ^= 1
        (after,) = await control.fingerprints()
        assert after["bias"] == before["bias"]
        assert after["weight"] != before["weight"]

    run(use, model)


def test_a_dump_has_the_parameters_of_every_rank(tmp_path: Path) -> None:
    models = torch.nn.Linear(3, 1), torch.nn.Linear(3, 2)

    async def use(control: ToolControl) -> None:
        await control.dump(tmp_path)
        for engine, model in enumerate(models):
            written = load_file(tmp_path / dump_file(engine=engine, tp_rank=0))
            assert all(torch.equal(written[name], tensor) for name, tensor in model.named_parameters())

    run(use, *models)


def test_a_recording_that_was_not_started_cannot_be_written(tmp_path: Path) -> None:
    async def use(control: ToolControl) -> None:
        with pytest.raises(WeightSyncError, match="nothing was recorded; start_recording comes first"):
            await control.write_recording(tmp_path)

    run(use, torch.nn.Linear(3, 2))


def test_modules_that_are_not_those_of_the_layout_are_named() -> None:
    async def use(control: ToolControl) -> None:
        with pytest.raises(WeightSyncError, match=r"there is no module model\.embed_tokens "):
            await control.start_recording(transfer_spec())

    run(use, torch.nn.Linear(3, 2))
