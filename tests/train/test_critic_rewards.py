"""The implicit reward model against the Hugging Face model, for every kind of split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config.algorithm import PrimeConfig
from megarl.types import TrainSample
from tests.schedule import slow
from tests.train import jobs
from tests.train.cluster import Cluster, assembled
from tests.train.conftest import Models
from tests.train.reference import Model, adamw, checkpoint_weights
from tests.train.samples import make_samples
from tests.train.splits import DESCENT, SPLITS, TEMPERATURE, assert_close, packed, setup_of, whole_weights

BETA = 0.5
LABELS = (1, 0, 1, 1, 0, 0)


def slow_update(model: Model, samples: list[TrainSample]) -> tuple[float, float, dict[str, torch.Tensor], torch.Tensor]:
    """Take one update of the cross-entropy, one sequence at a time; return loss, gradient norm and weights, and then
    the sum of the rewards of each answer."""
    now, start = (
        AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32, attn_implementation="eager")
        for _ in range(2)
    )
    now.model.embed_tokens.padding_idx = None
    parameters = list(now.parameters())
    adam = adamw(parameters, DESCENT)

    def rewards() -> torch.Tensor:
        return torch.stack([BETA * (_logprob(now, sample) - _logprob(start, sample).detach()) for sample in samples])

    loss = torch.nn.functional.binary_cross_entropy_with_logits(rewards(), torch.tensor(LABELS, dtype=torch.float32))
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(parameters, DESCENT.clip_grad_norm)
    adam.step()
    with torch.no_grad():
        return loss.item(), norm.item(), checkpoint_weights(now), rewards()


def _logprob(model: torch.nn.Module, sample: TrainSample) -> torch.Tensor:
    ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.rollout.token_ids.tolist()])
    num_response = len(sample.rollout.token_ids)
    logprobs = (model(ids[None]).logits[0, -num_response - 1 : -1] / TEMPERATURE).log_softmax(dim=-1)
    chosen = logprobs.gather(1, ids[-num_response:, None])[:, 0]
    total: torch.Tensor = chosen[torch.from_numpy(sample.rollout.loss_mask)].sum()
    return total


@pytest.mark.parametrize(("split", "budget"), [("TP2-SP", 30), ("CP2", 20), *slow(("TP1", 400), ("PP2", 24))])
def test_equals_a_slow_reward_model_for_every_split(split: str, budget: int, cluster: Cluster, models: Models) -> None:
    model = models.get("qwen2", tied=False)
    samples = [
        replace(
            sample,
            values=np.zeros(len(sample.advantages), np.float32),
            # Before it has learned, the model finds right as likely as wrong.
            returns=np.where(sample.rollout.loss_mask, np.log(2) * (2 * label - 1), 0.0).astype(np.float32),
        )
        for sample, label in zip(make_samples(6, vocab=model.shape.vocab, seed=5), LABELS, strict=True)
    ]
    loss, grad_norm, weights, rewards = slow_update(model, samples)
    world, actor = SPLITS[split]
    setup = setup_of(model, actor, PrimeConfig(kind="prime", beta=BETA))
    batch = packed(samples, world=world, actor=actor, budget=budget)
    outcomes = cluster.run(world, jobs.learn_rewards, setup, batch)

    data_parallel = world // actor.model_parallel
    before = assembled((outcome.values for outcome in outcomes), data_parallel=data_parallel)
    assert not any(part.any() for part in before), "a model that has learned nothing rewards nothing"
    stats = outcomes[0].stats
    assert stats.loss == pytest.approx(loss, abs=1e-6)
    assert stats.grad_norm == pytest.approx(grad_norm, rel=1e-4)
    assert stats.value_mean == pytest.approx(0.5)
    assert_close(whole_weights(outcomes, model, actor), weights, tolerance=1e-5)
    after = assembled((outcome.after for outcome in outcomes), data_parallel=data_parallel)
    found = [part[sample.rollout.loss_mask].sum() for part, sample in zip(after, samples, strict=True)]
    assert found == pytest.approx(rewards.tolist(), abs=2e-5)
