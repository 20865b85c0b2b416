"""The critic against the Hugging Face model with a value head, for every split; and saved as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from megarl.config.algorithm import GaeConfig
from megarl.config.model import read_model_shape
from megarl.config.roles import ActorConfig, CriticConfig
from megarl.types import FloatArray, TrainSample
from megarl.weights.layouts.canonical import VALUE_HEAD
from tests.schedule import slow
from tests.train import jobs
from tests.train.cluster import Cluster, assembled
from tests.train.conftest import Models
from tests.train.reference import Model, adamw, checkpoint_weights
from tests.train.samples import make_samples
from tests.train.splits import DESCENT, MIXTURE_SPLITS, TOLERANCE, assert_close, packed, whole_weights
from tests.train.splits import SPLITS as DENSE_SPLITS

GAE = GaeConfig(kind="gae")
SPLITS = {**DENSE_SPLITS, **MIXTURE_SPLITS}


def critic_samples(model: Model, *, num: int = 7, seed: int = 11) -> list[TrainSample]:
    """Return samples with random values and returns: a zero value head would only give values of 0."""
    random = np.random.default_rng(seed)
    return [
        replace(
            sample,
            values=(0.3 * random.standard_normal(len(sample.advantages))).astype(np.float32),
            returns=random.standard_normal(len(sample.advantages)).astype(np.float32),
        )
        for sample in make_samples(num, vocab=model.shape.vocab, seed=seed)
    ]


def of_split(actor: ActorConfig, *, epochs: int = 1) -> CriticConfig:
    return CriticConfig(**actor.model_dump(), optimizer=DESCENT, epochs=epochs)


def setup_of(model: Model, critic: CriticConfig) -> jobs.Setup:
    shape = model.shape.as_critic()
    return jobs.Setup(actor=critic, folder=model.folder, shape=shape, optimizer=DESCENT, algorithm=GAE)


class SlowCritic:
    """The Hugging Face body and a linear layer, one sequence at a time."""

    def __init__(self, model: Model) -> None:
        whole = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32, attn_implementation="eager")
        self.body = whole.model
        # transformers gives the padding token no gradient; a trainer that packs sequences has no such token.
        self.body.embed_tokens.padding_idx = None
        self.head = torch.nn.Linear(model.shape.hidden, 1, bias=False)
        torch.nn.init.zeros_(self.head.weight)
        parameters = [*self.body.parameters(), *self.head.parameters()]
        self._adam = adamw(parameters, DESCENT)
        self._parameters = parameters

    def values(self, sample: TrainSample) -> Tensor:
        ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.rollout.token_ids.tolist()])
        hidden = self.body(ids[None]).last_hidden_state[0]
        values: Tensor = self.head(hidden)[-len(sample.rollout.token_ids) - 1 : -1, 0]
        return values

    def update(self, samples: Sequence[TrainSample], *, clip: float) -> tuple[float, float]:
        losses = []
        for sample in samples:
            assert sample.values is not None
            assert sample.returns is not None
            values = self.values(sample)
            for t in np.flatnonzero(sample.rollout.loss_mask):
                old, target = float(sample.values[t]), float(sample.returns[t])
                near = values[t].clamp(old - clip, old + clip)
                losses.append(0.5 * torch.maximum((values[t] - target) ** 2, (near - target) ** 2))
        loss = torch.stack(losses).mean()
        self._adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        grad_norm = torch.nn.utils.clip_grad_norm_(self._parameters, DESCENT.clip_grad_norm)
        self._adam.step()
        return loss.item(), grad_norm.item()

    def weights(self) -> dict[str, Tensor]:
        body = {f"model.{name}": tensor for name, tensor in checkpoint_weights(self.body).items()}
        return {**body, VALUE_HEAD: self.head.weight.detach()}


@cache
def updated_twice(model: Model) -> tuple[SlowCritic, list[tuple[float, float]]]:
    """Return a slow critic after two updates, with loss and gradient norm of each.

    Only in the second one does the body have a gradient, for the head starts at zero.
    """
    slow = SlowCritic(model)
    return slow, [slow.update(critic_samples(model), clip=0.5) for _ in range(2)]


@pytest.mark.parametrize(
    ("family", "tied", "split"),
    [
        *[("qwen2", True, split) for split in ("TP2-SP", "CP2", "DP2")],
        *slow(*[("qwen2", True, split) for split in DENSE_SPLITS if split not in ("TP2-SP", "CP2", "DP2")]),
        ("llama", False, "PP2-VPP2"),
        ("qwen3_moe", False, "TP2-EP2"),
    ],
)
def test_equals_a_slow_critic_for_every_split(
    family: str, tied: bool, split: str, cluster: Cluster, models: Models
) -> None:
    model = models.get(family, tied=tied)
    samples = critic_samples(model)
    slow, losses = updated_twice(model)
    world, actor = SPLITS[split]
    critic = of_split(actor, epochs=2)

    outcomes = cluster.run(world, jobs.train_critic, setup_of(model, critic), packed(samples, world=world, actor=actor))

    values = assembled((outcome.values for outcome in outcomes), data_parallel=world // critic.model_parallel)
    assert not any(of_sample.any() for of_sample in values), "a new value head expects nothing"
    for outcome in outcomes:
        assert outcome.stats.loss == pytest.approx(np.mean([loss for loss, _ in losses]), abs=TOLERANCE)
        assert outcome.stats.grad_norm == pytest.approx(np.mean([norm for _, norm in losses]), rel=1e-4)
        assert outcome.state.num_updates == 2
    assert_close(whole_weights(outcomes, model, critic), slow.weights())


def test_statistics_are_of_the_values_before_the_step(cluster: Cluster, models: Models) -> None:
    model = models.get("qwen2", tied=True)
    samples = critic_samples(model)
    masks = [sample.rollout.loss_mask for sample in samples]
    values = np.concatenate([s.values[m] for s, m in zip(samples, masks, strict=True) if s.values is not None])
    returns = np.concatenate([s.returns[m] for s, m in zip(samples, masks, strict=True) if s.returns is not None])
    world, actor = SPLITS["DP2"]
    batch = packed(samples, world=world, actor=actor, budget=20)
    outcome, _ = cluster.run(world, jobs.train_critic, setup_of(model, of_split(actor)), batch)
    assert outcome.stats.value_mean == pytest.approx(values.mean(), abs=1e-6)
    assert outcome.stats.return_mean == pytest.approx(returns.mean(), abs=1e-6)
    assert outcome.stats.explained_variance == pytest.approx(1 - (returns - values).var() / returns.var(), abs=1e-6)


def test_a_critic_is_saved_as_a_hugging_face_model_and_goes_on_in_another_layout(
    cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    model = models.get("qwen2", tied=True)
    samples = critic_samples(model)
    world, actor = SPLITS["TP2-PP2"]
    batch = packed(samples, world=world, actor=actor)
    outcomes = cluster.run(world, jobs.train_critic, setup_of(model, of_split(actor)), batch, tmp_path / "critic")

    saved = tmp_path / "critic" / "model"
    assert read_model_shape(saved) == model.shape.as_critic()
    loaded = AutoModelForSequenceClassification.from_pretrained(saved, dtype=torch.float32)
    expected = [_values(loaded, sample) for sample in samples]
    assert max(np.abs(values).max() for values in expected) > 0.01

    world, actor = SPLITS["DP2"]
    setup = setup_of(model, of_split(actor))
    again = packed(samples, world=world, actor=actor)
    parts = cluster.run(world, jobs.resume_critic, setup, tmp_path / "critic", outcomes[0].state, again)
    for found, of_sample in zip(assembled(parts, data_parallel=2), expected, strict=True):
        np.testing.assert_allclose(found, of_sample, atol=TOLERANCE)


def _values(model: PreTrainedModel, sample: TrainSample) -> FloatArray:
    ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.rollout.token_ids.tolist()])
    with torch.no_grad():
        hidden = model.model(ids[None]).last_hidden_state[0]
        values = model.score(hidden)[-len(sample.rollout.token_ids) - 1 : -1, 0]
    array: FloatArray = values.numpy()
    return array
