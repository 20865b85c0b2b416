"""A pool that trainer and engine share on a GPU: the engine gives up its cache and its weights, and serves again."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.config.roles import RolloutRoleConfig
from megarl.engine import admin
from megarl.engine.client import EngineClient, GenerateRequest
from megarl.engine.process import EngineProcess
from megarl.families import PUBLIC_MODELS
from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import EngineChanged, StepFinished, Warned
from megarl.tools.quickstart.arithmetic import ArithmeticFiles, make_arithmetic
from megarl.tools.quickstart.tiny_model import TinyShape, write_config
from megarl.types import PolicyVersion
from megarl.weights.layouts.canonical import canonical_tensors
from tests.engine.engines import engine_spec

logger = logging.getLogger(__name__)

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
            await admin.load_weights_from_disk(client, files.model, version=PolicyVersion(0), timeout_s=TIMEOUT_S)

        async def answer() -> bytes:
            request = GenerateRequest(rid="pool", input_ids=(3, 4, 5), max_new_tokens=16, temperature=0.0)
            content = (await client.generate(request)).content
            return content[: content.index(b'"meta_info"')]

        try:
            random = await answer()
            await fill()
            # The cache has the prompt as the random weights saw it.
            await client.flush_cache()
            expected, awake = await answer(), used_bytes()
            assert expected != random
            for _ in range(3):
                await admin.sleep(client, releases_weights=False)
                without_cache = used_bytes()
                await admin.sleep(client, releases_weights=True)
                without_all = used_bytes()
                assert without_cache - without_all > 0.8 * weight_bytes
                assert awake - without_cache > 1 << 30, "200,000 tokens of cache have more than 2 GB"
                await admin.take_weights(client)
                await fill()
                await admin.wake(client)
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
    _megarl("train", "recipes/gpu_smoke.yaml", *(word for setting in settings for word in ("--set", setting)))
    events = [record.event for record in read_events(tmp_path / "pool" / EVENTS_FILE)]
    assert len([event for event in events if isinstance(event, StepFinished)]) == 3
    assert [event.text for event in events if isinstance(event, Warned) and "canary" in event.text] == []
    assert {event.state for event in events if isinstance(event, EngineChanged)} <= {"stale", "healthy"}


LARGE = PUBLIC_MODELS["qwen2.5-7b"]
GIB = 1 << 30
PEAK_TOLERANCE = 0.15
NUM_LARGE_STEPS = 5
REWARD = """
import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return zlib.crc32(solution_str.encode()) % 1000 / 1000
"""


@pytest.fixture
def large(tmp_path: Path) -> Iterator[ArithmeticFiles]:
    """A model of the size of Qwen2.5-7B with random weights, made on the GPU, and the problems of the small one."""
    files = make_arithmetic(tmp_path / "arithmetic", num_sft=16)
    folder = tmp_path / "model"
    write_config(folder, TinyShape.like(LARGE))
    weights = {}
    for name, spec in canonical_tensors(LARGE).items():
        weight = torch.empty(spec.shape, dtype=torch.bfloat16, device="cuda")
        is_matrix = len(spec.shape) == 2
        weights[name] = (weight.normal_(0.0, 0.02) if is_matrix else weight.fill_(float("norm" in name))).cpu()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    weights.clear()
    torch.cuda.empty_cache()
    yield replace(files, model=folder)
    shutil.rmtree(folder)


class UsageWatch:
    """Notes how much of the GPU all processes together use, without what was used before."""

    def __init__(self) -> None:
        self._before = used_bytes()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.seen: list[tuple[float, int]] = []

    def __enter__(self) -> UsageWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.02):
            self.seen.append((time.time(), used_bytes() - self._before))

    @property
    def peak_bytes(self) -> int:
        return max(used for _, used in self.seen)

    @property
    def course(self) -> str:
        """The highest use of each five seconds."""
        peaks: dict[int, int] = {}
        for moment, used in self.seen:
            second = int(moment - self.seen[0][0]) // 5 * 5
            peaks[second] = max(peaks.get(second, 0), used)
        return ", ".join(f"{second} s: {used / GIB:.1f}" for second, used in peaks.items())


def test_five_steps_of_a_7b_model_stay_within_the_memory_of_the_plan(large: ArithmeticFiles, tmp_path: Path) -> None:
    """The optimizer, 85 GiB, is in host memory: beside it the GPU would have no room for a pass."""
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    settings = [
        f"run={{name: pool, folder: {tmp_path}, steps: {NUM_LARGE_STEPS}}}",
        f"model.path={large.model}",
        f"data={{train: [{large.train}], max_prompt_tokens: 16}}",
        "cluster.gpu=h200",
        "roles.actor.offload=optimizer",
        "roles.rollout.release=everything",
        "sampling.max_response_tokens=64",
        f"reward={{kind: function, path: {reward}}}",
        "evaluation=null",
        "checkpoint={save_every_steps: null, save_at_end: false}",
    ]
    words = ["recipes/gpu_smoke.yaml", *(word for setting in settings for word in ("--set", setting))]
    planned = json.loads(_megarl("plan", *words, "--json").stdout)["sizes"]["ledgers"]
    totals = {ledger["phase"]: sum(item["num_bytes"] for item in ledger["items"]) for ledger in planned}
    began = time.monotonic()
    with UsageWatch() as usage:
        _megarl("train", *words)
    events = [record.event for record in read_events(tmp_path / "pool" / EVENTS_FILE)]
    steps = [event for event in events if isinstance(event, StepFinished)]
    ratio = usage.peak_bytes / max(totals.values())
    logger.info("planned GiB: %s", {phase: round(total / GIB, 1) for phase, total in totals.items()})
    logger.info("peak: %.1f GiB, %.3f of the plan; %.0f s", usage.peak_bytes / GIB, ratio, time.monotonic() - began)
    logger.info("GiB in use: %s", usage.course)
    for step in steps:
        seconds = {phase: round(value, 1) for phase, value in step.phase_seconds.items()}
        logger.info("step %d: %s %s", step.summary.step, seconds, step.summary.usage)
    assert len(steps) == NUM_LARGE_STEPS
    updates = [step.summary.update for step in steps]
    assert all(update is not None and update.grad_norm > 0 for update in updates)
    assert abs(ratio - 1) < PEAK_TOLERANCE


def _megarl(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done
