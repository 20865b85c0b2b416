"""The kinds that learn from preferences, each in a whole run with a real engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megarl.config.model import read_model_shape
from megarl.data.tokenizer import load_tokenizer
from megarl.engine.client import EngineClient
from megarl.engine.fleet import Fleet
from megarl.engine.process import EngineProcess
from megarl.rollout.frozen import FrozenEngines
from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.engine.engines import engine_spec
from tests.run.runs import run
from tests.tiny_models import answer_logprob

KINDS = {
    "spin": (
        "roles.reference={}",
        "algorithm={kind: spin, iteration_steps: 1}",
        "data.train=[FOLDER/arithmetic/pairs.parquet]",
        "data.response_key=chosen",
    ),
    "prime": ("roles.critic={pool: train, tensor: 2}", "algorithm={kind: prime}"),
    "online_dpo": ("roles.reference={}", "algorithm={kind: online_dpo}"),
    "ipo": ("roles.reference={}", "algorithm={kind: online_dpo, preference: ipo, kl: {kind: reward, coef: 1.0}}"),
    "sppo": ("algorithm={kind: sppo}", "train.prompts_per_update=4"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_from_preferences(kind: str, tmp_path: Path) -> None:
    make_arithmetic(tmp_path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    done = run(tmp_path, kind, *(option.replace("FOLDER", str(tmp_path)) for option in KINDS[kind]))
    assert done.exit_code == 0, done.output
    updates = [event.summary.update for event in done.steps]
    assert len(updates) == 2
    assert all(update is not None and update.grad_norm > 0 and update.mismatch_max < 1e-4 for update in updates)


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
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


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
def test_a_trained_reward_model_scores_in_transformers_as_in_training(tmp_path: Path) -> None:
    files = make_arithmetic(tmp_path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    done = run(
        tmp_path,
        "scorer",
        "run.steps=6",
        "algorithm={kind: reward_model}",
        f"data={{train: [{files.pairs}], eval_pairs: [{files.eval_pairs}], max_prompt_tokens: 16}}",
        "pools={train: {gpus_per_node: 2}}",
        "roles={actor: {pool: train, tensor: 2}}",
        "train.prompts_per_step=32",
        "reward={kind: exact}",
        "evaluation={}",
    )
    assert done.exit_code == 0, done.output
    before, after = done.evaluations[0].held_out_pairs, done.evaluations[6].held_out_pairs
    assert before is not None
    assert after is not None
    assert (before.loss, before.margin) == pytest.approx((np.log(2), 0.0)), "a new value head finds no difference"
    assert after.loss < before.loss
    scores = np.array(scores_of(done.model, files.eval_pairs))
    assert np.abs(scores).max() > 1e-2
    found = (after.chosen_reward, after.rejected_reward)
    assert found == pytest.approx(tuple(scores.mean(axis=0)), abs=1e-5)
    assert after.accuracy == (scores[:, 0] > scores[:, 1]).mean()
    served = np.array(served_scores(done.model, files.eval_pairs, tmp_path / "served"))
    assert np.abs(served - scores).max() < 1e-5, "an engine of roles.reward_model scores otherwise"


def served_scores(model: Path, pairs: Path, folder: Path) -> list[tuple[float, float]]:
    """Return the scores of both answers of each pair, by an engine as `roles.reward_model` starts it."""
    shape = read_model_shape(model)
    process = EngineProcess(replace(engine_spec(model, folder), is_classifier=True, role="reward_model.trained"))
    process.start()

    async def scores() -> list[tuple[float, float]]:
        await process.wait_ready()
        fleet = Fleet([EngineClient(process.endpoint, request_timeout_s=600)], max_outstanding=8, publish_timeout_s=600)
        tokenizer = load_tokenizer(model, vocab=shape.vocab)
        engines = FrozenEngines(fleet, tokenizer, shape, role="reward_model.trained", max_attempts=2)

        async def score(row: dict[str, Any], key: str) -> float:
            return await engines.classify([*row["prompt"], {"role": "assistant", "content": row[key]}])

        rows = pq.read_table(pairs).to_pylist()
        found = [(await score(row, "chosen"), await score(row, "rejected")) for row in rows]
        await fleet.close()
        return found

    try:
        return asyncio.run(scores())
    finally:
        process.stop()


def scores_of(model: Path, pairs: Path) -> list[tuple[float, float]]:
    """Return the scores of both answers of each pair, by transformers on the text of the whole chat."""
    classifier = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def score(row: dict[str, Any], key: str) -> float:
        chat = [*row["prompt"], {"role": "assistant", "content": row[key]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            hidden = classifier.model(ids).last_hidden_state
            return float(classifier.score(hidden)[0, -1, 0])

    return [(score(row, "chosen"), score(row, "rejected")) for row in pq.read_table(pairs).to_pylist()]


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
