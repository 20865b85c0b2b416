"""Whole runs on one card: a mixture with replayed and with live routes, and engines with FP8 weights."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import pytest
from safetensors.torch import save_file

from megarl.families import PUBLIC_MODELS
from megarl.families.shape import Experts
from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import Evaluated, StepFinished, Warned
from megarl.tools.quickstart.arithmetic import ArithmeticFiles, make_arithmetic
from megarl.tools.quickstart.tiny_model import TinyShape
from tests.gpu.test_fp8_rollouts import random_model, write_config
from tests.gpu.test_shared_pool import _megarl

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

NUM_STEPS = 6
SMALL_ENGINE = ("roles.rollout.memory_fraction=0.1", "roles.rollout.max_cached_tokens=60000")
"""Where no time is measured: several such runs share the card."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ArithmeticFiles:
    folder = tmp_path_factory.mktemp("arithmetic")
    return make_arithmetic(folder, num_sft=16, shape=TinyShape.like(PUBLIC_MODELS["qwen2.5-0.5b"]))


@pytest.fixture(scope="module")
def mixture(files: ArithmeticFiles) -> Path:
    """A mixture of 32 experts in 12 layers with random weights and the tokenizer of the arithmetic."""
    sizes = json.loads((files.model / "config.json").read_text())
    shape = replace(
        PUBLIC_MODELS["qwen3-30b-a3b"],
        num_layers=12,
        hidden=1024,
        ffn_hidden=512,
        num_heads=8,
        num_kv_heads=2,
        vocab=sizes["vocab_size"],
        experts=Experts(num=32, per_token=4, is_normalized=True),
    )
    folder = files.model.parent / "mixture"
    ids = {name: sizes[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in sizes}
    write_config(folder, shape, **ids)
    tensors = {name: tensor.cpu() for name, tensor in random_model(shape, 1).items()}
    save_file(tensors, folder / "model.safetensors")
    for path in files.model.glob("*token*"):
        shutil.copy(path, folder / path.name)
    if (files.model / "generation_config.json").exists():
        shutil.copy(files.model / "generation_config.json", folder)
    return folder


def train(name: str, folder: Path, files: ArithmeticFiles, *settings: str) -> list[object]:
    words = [
        f"run={{name: {name}, folder: {folder}, steps: {NUM_STEPS}}}",
        f"data.train=[{files.train}]",
        f"data.eval=[{files.eval}]",
        "evaluation.max_prompts=16",
        "checkpoint={save_every_steps: null, save_at_end: false}",
        *settings,
    ]
    _megarl("train", "recipes/gpu_smoke.yaml", *(word for setting in words for word in ("--set", setting)))
    events: list[object] = [record.event for record in read_events(folder / name / EVENTS_FILE)]
    for event in events:
        if isinstance(event, StepFinished):
            seconds = {phase: round(value, 2) for phase, value in event.phase_seconds.items()}
            update = event.summary.update
            assert update is not None
            routes = update.routing_disagreement or {}
            logger.info(
                "%s step %d: %s, |dp| %s, replayed %s, disagreement %s, loss %s, grad norm %s",
                *(name, event.summary.step, seconds, update.mismatch_mean, update.replayed_fraction),
                *(mean(routes.values()) if routes else None, update.loss, update.grad_norm),
            )
        elif isinstance(event, Warned | Evaluated):
            logger.info("%s: %s", name, event)
    return events


def steps_of(events: list[object]) -> list[StepFinished]:
    return [event for event in events if isinstance(event, StepFinished)]


def test_replayed_routes_cost_little_and_end_the_disagreement(
    files: ArithmeticFiles, mixture: Path, tmp_path: Path
) -> None:
    settings = (
        f"model.path={mixture}",
        "sampling.max_response_tokens=256",
        "train.tokens_per_micro_batch=16384",
        "roles.rollout.canary_every=1",
    )
    runs = {
        kind: steps_of(train(kind, tmp_path, files, *settings, f"train.routing={kind}")) for kind in ("live", "replay")
    }
    for phase in runs["live"][-1].phase_seconds:
        live, replay = (
            median(step.phase_seconds[phase] for step in runs[kind][2:] if phase in step.phase_seconds)
            for kind in ("live", "replay")
        )
        logger.info("%s: live %.3f s, replay %.3f s, ratio %.3f", phase, live, replay, replay / max(live, 1e-9))
    whole = {kind: median(step.summary.seconds for step in steps[2:]) for kind, steps in runs.items()}
    mismatch = {
        kind: mean(step.summary.update.mismatch_mean or 0.0 for step in steps if step.summary.update is not None)
        for kind, steps in runs.items()
    }
    logger.info("step: %s, ratio %.3f; |dp| %s", whole, whole["replay"] / whole["live"], mismatch)
    assert len(runs["replay"]) == len(runs["live"]) == NUM_STEPS
    assert all(step.summary.update and step.summary.update.replayed_fraction == 1.0 for step in runs["replay"])
    assert mismatch["replay"] <= mismatch["live"]


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_dense_model_is_trained_with_engines_in_fp8(files: ArithmeticFiles, tmp_path: Path, precision: str) -> None:
    """The engine gives up its weights while the actor trains, and the actor its FP8 tensors while the engine works."""
    events = train(
        precision,
        tmp_path,
        files,
        f"model.path={files.model}",
        f"roles.rollout.precision={precision}",
        "roles.rollout.release=everything",
        "roles.rollout.canary_every=1",
        *SMALL_ENGINE,
    )
    assert len(steps_of(events)) == NUM_STEPS
    logger.info("%s: canary warnings %s", precision, [each.text for each in events if isinstance(each, Warned)])


def test_a_mixture_is_trained_with_engines_in_fp8(files: ArithmeticFiles, mixture: Path, tmp_path: Path) -> None:
    settings = (f"model.path={mixture}", "roles.rollout.precision=fp8", "sampling.max_response_tokens=64")
    others = ("train.tokens_per_micro_batch=16384", *SMALL_ENGINE)
    steps = steps_of(train("mixture_fp8", tmp_path, files, *settings, *others))
    assert len(steps) == NUM_STEPS
