"""Families that see images, on one card: trainer and engine differ no more about images than about text."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from megarl.tools.quickstart.arithmetic import make_arithmetic
from megarl.tools.quickstart.squares import make_squares
from tests.gpu.family_runs import REWARD, recipe, run
from tests.tiny_models import TOWERS, write_tiny_model

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

STEPS = 6
LAYERS = 3
TASKS = ("squares", "arithmetic")
MOST = 1.5
"""A multiple of the mismatch about text. With the angles of other tokens, images had twenty times as much."""


@pytest.fixture(scope="module")
def mismatches(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], Future[float]]:
    """Mean |p_train - p_rollout| of runs by family and task."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "reward.py").write_text(REWARD)
    made = make_squares(folder / "squares", num_train=256, num_sft=16, num_eval=16).model
    make_arithmetic(folder / "arithmetic", num_train=256, num_sft=16, num_eval=16)
    for family in TOWERS:
        write_model(folder / family, family, made)
    with ThreadPoolExecutor(2 * len(TOWERS)) as pool:
        return {(family, task): pool.submit(train, family, task, folder) for family in TOWERS for task in TASKS}


def write_model(model: Path, family: str, made: Path) -> None:
    """Write a random model in bfloat16 with the tokenizer and the numbered tokens of the quickstart."""
    sizes = json.loads((made / "config.json").read_text())
    write_tiny_model(model, family, vocab=sizes["text_config"]["vocab_size"], layers=LAYERS, seed=1)
    whole = AutoModelForImageTextToText.from_pretrained(model)
    with torch.no_grad():
        for name, weights in whole.named_parameters():
            # Attention that looks at places, and tokens that are much likelier than others.
            if "visual" not in name and weights.dim() > 1:
                weights *= 3
    whole.to(torch.bfloat16).save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    config |= {name: value for name, value in sizes.items() if name.endswith("token_id")}
    config["text_config"] |= {name: sizes[name] for name in ("eos_token_id", "pad_token_id")}
    (model / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "preprocessor_config.json"):
        shutil.copy(made / name, model / name)


def train(family: str, task: str, folder: Path) -> float:
    content = recipe(f"{family}_{task}", folder, folder / task / "train.parquet", steps=STEPS, device="cuda")
    backend = "roles.rollout.sglang.mm_attention_backend=triton_attn"
    done = run(
        f"{family}_{task}", folder, content, f"model.path={folder / family}", "data.max_prompt_tokens=32", backend
    )
    assert done.error is None, done.error
    assert len(done.updates) == STEPS
    return float(np.mean([update.mismatch_mean for update in done.updates]))


@pytest.mark.parametrize("family", TOWERS)
def test_images_differ_between_trainer_and_engine_no_more_than_text(
    family: str, mismatches: Mapping[tuple[str, str], Future[float]]
) -> None:
    images, text = (mismatches[family, task].result() for task in TASKS)
    logger.info("%s: mean |p_train - p_rollout| %.5f on images, %.5f on text", family, images, text)
    assert images <= MOST * text
