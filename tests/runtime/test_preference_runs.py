"""The kinds that learn from preferences, each in a whole run with a real engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from megarl.config.model import read_model_shape
from megarl.data.tokenizer import load_tokenizer
from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.runtime.runs import run
from tests.tiny_models import answer_logprob

KINDS = {
    "online_dpo": ("roles.reference={}", "algorithm={kind: online_dpo}"),
    "ipo": ("roles.reference={}", "algorithm={kind: online_dpo, preference: ipo, kl: {kind: reward, coef: 1.0}}"),
    "sppo": ("algorithm={kind: sppo}", "train.prompts_per_update=4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_from_preferences(kind: str, tmp_path: Path) -> None:
    make_arithmetic(tmp_path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    done = run(tmp_path, kind, *KINDS[kind])
    assert done.exit_code == 0, done.output
    updates = [event.summary.update for event in done.steps]
    assert len(updates) == 2
    assert all(update is not None and update.grad_norm > 0 and update.mismatch_max < 1e-4 for update in updates)


@pytest.mark.slow
def test_a_run_learns_from_pairs_of_the_data(tmp_path: Path) -> None:
    """Without engines: after a few steps a chosen answer is likelier, and a rejected one less likely, than before."""
    files = make_arithmetic(tmp_path / "arithmetic", num_train=32, num_sft=16, num_eval=16)
    done = run(
        tmp_path,
        "dpo",
        "run.steps=4",
        "algorithm={kind: dpo}",
        f"data={{train: [{files.pairs}], max_prompt_tokens: 16}}",
        "pools={train: {gpus_per_node: 2}}",
        "roles={actor: {pool: train, tensor: 2}, reference: {}}",
        "train.prompts_per_step=32",
        "reward={kind: exact}",
        "evaluation=null",
    )
    assert done.exit_code == 0, done.output
    assert all(event.summary.update is not None and event.summary.update.grad_norm > 0 for event in done.steps)
    before, after = (margin_of(folder, files.pairs) for folder in (files.model, done.model))
    assert after > before + 0.5, (before, after)


def margin_of(model: Path, pairs: Path) -> float:
    """Return by how much the chosen answers are likelier than the rejected ones, by transformers."""
    tokenizer = load_tokenizer(model, vocab=read_model_shape(model).vocab)
    margins = []
    for row in pq.read_table(pairs).to_pylist():
        prompt = tokenizer.encode([tokenizer.render_chat(row["prompt"])])[0].tolist()
        answers = [[*ids.tolist(), tokenizer.eos_ids[0]] for ids in tokenizer.encode([row["chosen"], row["rejected"]])]
        chosen, rejected = (answer_logprob(model, prompt, answer) for answer in answers)
        margins.append(chosen - rejected)
    return float(np.mean(margins))
