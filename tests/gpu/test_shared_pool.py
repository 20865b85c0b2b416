"""A pool that trainer and engine share on a GPU: the engine gives up its cache and its weights, and serves again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.config.public_models import PUBLIC_MODELS
from megarl.config.roles import RolloutRoleConfig
from megarl.observe.events import EVENTS_FILE, EngineChanged, StepFinished, Warned, read_events
from megarl.rollout.client import EngineClient, GenerateRequest
from megarl.rollout.process import EngineProcess
from megarl.tools.quickstart.arithmetic import ArithmeticFiles, make_arithmetic
from megarl.tools.quickstart.tiny_model import TinyShape
from megarl.types import PolicyVersion
from tests.rollout.engines import engine_spec

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent.parent
NUM_CACHED_TOKENS = 200_000
TIMEOUT_S = 400
MAIN = "from megarl.cli.main import main; main()"
SGLANG: dict[str, object] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ArithmeticFiles:
    """A model of the size of Qwen2.5-0.5B, with random weights."""
    folder = tmp_path_factory.mktemp("arithmetic")
    return make_arithmetic(folder, num_sft=16, shape=TinyShape.like(PUBLIC_MODELS["qwen2.5-0.5b"]))


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_an_engine_that_gave_everything_up_answers_as_before_once_it_has_its_weights(
    files: ArithmeticFiles, tmp_path: Path
) -> None:
    config = RolloutRoleConfig(
        pool="gpu", max_cached_tokens=NUM_CACHED_TOKENS, is_deterministic=True, release="everything", sglang=SGLANG
    )
    spec = replace(
        engine_spec(files.model, tmp_path),
        config=config,
        device="cuda",
        loads_weights=False,
        shares_devices=True,
    )
    weight_bytes = (files.model / "model.safetensors").stat().st_size
    process = EngineProcess(spec)

    async def scenario() -> None:
        await process.wait_ready()
        client = EngineClient(process.endpoint, request_timeout_s=TIMEOUT_S)

        async def fill() -> None:
            await client.load_weights_from_disk(files.model, version=PolicyVersion(0), timeout_s=TIMEOUT_S)

        async def answer() -> bytes:
            request = GenerateRequest(rid="pool", input_ids=(3, 4, 5), max_new_tokens=16, temperature=0.0)
            content = (await client.generate(request)).content
            return content[: content.index(b'"meta_info"')]

        try:
            random = await answer()
            await fill()
            expected, awake = await answer(), used_bytes()
            assert expected != random
            for _ in range(3):
                await client.sleep(releases_weights=False)
                without_cache = used_bytes()
                await client.sleep(releases_weights=True)
                without_all = used_bytes()
                assert without_cache - without_all > 0.8 * weight_bytes
                assert awake - without_cache > 1 << 30, "200,000 tokens of cache have more than 2 GB"
                await client.take_weights()
                await fill()
                await client.wake()
                assert await answer() == expected
                assert abs(used_bytes() - awake) < 256 << 20
        finally:
            await client.close()

    process.start()
    try:
        asyncio.run(scenario())
    finally:
        process.stop()


@pytest.mark.parametrize("offload", ["nothing", "optimizer", "everything"])
def test_three_steps_with_an_engine_that_keeps_nothing_while_the_actor_trains(
    offload: str, files: ArithmeticFiles, tmp_path: Path
) -> None:
    settings = [
        f"run={{name: pool, folder: {tmp_path}, steps: 3}}",
        f"model.path={files.model}",
        f"data.train=[{files.train}]",
        f"data.eval=[{files.eval}]",
        f"roles.actor.offload={offload}",
        "roles.rollout.release=everything",
        # The canary compares the engine's log-probabilities with the trainer's after every publish.
        "roles.rollout.canary_every=1",
        "evaluation.max_prompts=16",
        "checkpoint={save_every_steps: null, save_at_end: false}",
    ]
    command = [sys.executable, "-c", MAIN, "train", "recipes/gpu_smoke.yaml"]
    done = subprocess.run(
        [*command, *(word for setting in settings for word in ("--set", setting))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    events = [record.event for record in read_events(tmp_path / "pool" / EVENTS_FILE)]
    assert len([event for event in events if isinstance(event, StepFinished)]) == 3
    assert [event.text for event in events if isinstance(event, Warned) and "canary" in event.text] == []
    assert {event.state for event in events if isinstance(event, EngineChanged)} <= {"stale", "healthy"}
