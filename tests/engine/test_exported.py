"""What `megarl export` writes, served: SGLang makes of it what transformers makes of the model it came from."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.checkpoint.export import export_model
from megarl.checkpoint.folder import find_model
from megarl.checkpoint.save import copy_companions
from megarl.engine import admin
from megarl.engine.client import EngineClient
from megarl.engine.fleet import Fleet
from megarl.engine.process import EngineProcess
from megarl.types import PolicyVersion, Rollout
from tests.engine.engines import REQUEST_TIMEOUT_S, ServedModel, engine_spec, generator_of, prompt_of
from tests.tiny_models import is_read, write_tiny_model

PROMPT = (5, 6, 7, 8, 9)


def assert_of_model(rollout: Rollout, folder: Path) -> None:
    """Its log-probabilities are those of the model in `folder`."""
    ids = torch.tensor([[*PROMPT, *rollout.token_ids.tolist()]])
    with torch.no_grad():
        logprobs = AutoModelForCausalLM.from_pretrained(folder)(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()
    np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-4)


def test_an_engine_takes_the_weights_of_an_exported_folder(qwen2_tp1: ServedModel, tmp_path: Path) -> None:
    export_model(find_model(qwen2_tp1.other_folder), tmp_path / "out", max_shard_bytes=100_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1

    async def generate() -> Rollout:
        async with qwen2_tp1.fleet() as fleet:
            client = EngineClient(qwen2_tp1.process.endpoint, request_timeout_s=REQUEST_TIMEOUT_S)
            try:
                await admin.load_weights_from_disk(
                    client, tmp_path / "out", version=PolicyVersion(0), timeout_s=REQUEST_TIMEOUT_S
                )
            finally:
                await client.close()
            group = await generator_of(fleet).generate(prompt_of(*PROMPT))
            return group.rollouts[0]

    assert_of_model(asyncio.run(generate()), qwen2_tp1.other_folder)


def without_images(folder: Path, model: Path) -> None:
    """Write what a run saves of a model that sees images."""
    folder.mkdir()
    (file,) = model.glob("*.safetensors")
    save_file({name: tensor for name, tensor in load_file(file).items() if is_read(name)}, folder / file.name)
    copy_companions(model, folder, is_text_alone=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.usefixtures("real_engines")
def test_an_engine_starts_on_an_exported_folder(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", family, layers=2)
    if family != "qwen2":
        (tmp_path / "model").rename(tmp_path / "released")
        without_images(tmp_path / "model", tmp_path / "released")
    export_model(find_model(tmp_path / "model"), tmp_path / "out")
    process = EngineProcess(engine_spec(tmp_path / "out", tmp_path / "run"))
    process.start()

    async def generate() -> Rollout:
        await process.wait_ready()
        client = EngineClient(process.endpoint, request_timeout_s=REQUEST_TIMEOUT_S)
        fleet = Fleet([client], max_outstanding=8, publish_timeout_s=10)
        try:
            return (await generator_of(fleet).generate(prompt_of(*PROMPT))).rollouts[0]
        finally:
            await fleet.close()

    try:
        assert_of_model(asyncio.run(generate()), tmp_path / "model")
    finally:
        process.stop()
