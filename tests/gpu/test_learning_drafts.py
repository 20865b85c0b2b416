"""A draft that learns while it serves, on one GPU with the policy's trainer and the engine."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import StepFinished
from megarl.tools.quickstart.arithmetic import make_arithmetic
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(480)]

ROOT = Path(__file__).parent.parent.parent
MAIN = "from megarl.cli.main import main; main()"
TIMEOUT_S = 420
NUM_STEPS = 24
POLICY = TinyShape(num_layers=12, hidden=1024, ffn_hidden=2816, num_heads=16, num_kv_heads=4, weight_std=0.3)
"""Chaotic with such weights: a draft learns answers to prompts it has seen, if they are nearly the same each time."""
DRAFT = TinyShape(num_layers=1, hidden=1024, ffn_hidden=2816, num_heads=16, num_kv_heads=4)


def test_more_tokens_of_a_draft_on_the_policys_gpu_are_kept_once_it_has_learned(tmp_path: Path) -> None:
    """The policy hardly moves; its draft begins with random weights and sees the same 8 prompts in every step."""
    files = make_arithmetic(tmp_path / "arithmetic", num_train=8, num_sft=16, num_eval=16, shape=POLICY)
    write_tiny_model(tmp_path / "draft", DRAFT, seed=5)
    settings = (
        f"run={{name: learning_draft, folder: {tmp_path}, steps: {NUM_STEPS}}}",
        f"model={{path: {files.model}}}",
        f"data={{train: [{files.train}], max_prompt_tokens: 16}}",
        f"roles.rollout.draft={{kind: model, path: {tmp_path / 'draft'}}}",
        "roles.drafter={pool: gpu, epochs: 16, optimizer: {learning_rate: 5e-4}}",
        "sampling={rollouts_per_prompt: 4, max_response_tokens: 128, temperature: 0.1}",
        "train={prompts_per_step: 8, tokens_per_micro_batch: 8192, optimizer: {learning_rate: 1e-7}}",
        "evaluation=null",
        "checkpoint={save_every_steps: null, save_at_end: false}",
    )
    words = ["recipes/gpu_smoke.yaml", *(word for setting in settings for word in ("--set", setting))]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "train", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    folder = tmp_path / "learning_draft"
    steps = []
    if (folder / EVENTS_FILE).exists():
        events = [record.event for record in read_events(folder / EVENTS_FILE)]
        steps = [event for event in events if isinstance(event, StepFinished)]
    for step in steps:
        summary = step.summary
        figures = {
            "step": summary.step,
            "tokens_per_pass": summary.tokens_per_pass,
            "draft_loss": None if summary.draft is None else summary.draft.loss,
            "tokens_per_second": summary.tokens_per_second,
            "seconds": {phase: round(seconds, 2) for phase, seconds in step.phase_seconds.items()},
        }
        logger.info("%s", json.dumps(figures))
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    log = (folder / "megarl.log").read_text()
    assert len(re.findall(r"sent drafts version=\d+", log)) == NUM_STEPS
    kept = [step.summary.tokens_per_pass or 1.0 for step in steps]
    assert sum(kept[-4:]) / 4 > kept[0] + 0.15, kept
