"""Teachers on real ranks against Hugging Face models: their scores, and the update of a policy that learns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.config.algorithm import (
    DistillationConfig,
    DistillConfig,
    ForwardTopkConfig,
    GrpoConfig,
    PpoLossConfig,
    ReverseKlConfig,
)
from megarl.config.roles import ActorConfig, OptimizerConfig
from megarl.data.shares import with_columns
from megarl.tokens import SampleColumn
from megarl.types import TrainSample
from tests.train import jobs
from tests.train.cluster import Cluster, Shares, assembled
from tests.train.conftest import Models
from tests.train.reference import Model, Reference
from tests.train.samples import make_samples
from tests.train.splits import (
    CONTEXT_SPLITS,
    DESCENT,
    SPLITS,
    TEMPERATURE,
    TOLERANCE,
    assert_close,
    packed,
    setup_of,
    whole_weights,
)

KINDS: dict[str, DistillationConfig] = {
    "reverse_kl": ReverseKlConfig(kind="reverse_kl", coef=0.5),
    "forward_topk": ForwardTopkConfig(kind="forward_topk", coef=0.5, top_k=5),
}
PLAIN = PpoLossConfig(kind="ppo")


class TaughtReference(Reference):
    """The slow trainer with a slow teacher beside it: all logits of both, token by token."""

    def log_probs(self, sample: TrainSample) -> Tensor:
        """Return the log-probabilities of the whole vocabulary at each response token. [T, vocab]"""
        ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.rollout.token_ids.tolist()])
        logits = self._model(ids[None]).logits[0, -sample.rollout.num_tokens - 1 : -1] / self._temperature
        log_probs: Tensor = logits.log_softmax(dim=-1)
        return log_probs

    def learn(
        self, samples: Sequence[TrainSample], teacher: TaughtReference, config: GrpoConfig
    ) -> tuple[float, float]:
        """Take one update at ratio 1; return its loss and the mean distance from the teacher."""
        losses, distances = [], []
        for sample in samples:
            own = self.log_probs(sample)
            with torch.no_grad():
                taught = teacher.log_probs(sample)
            for t in np.flatnonzero(sample.rollout.loss_mask):
                token, advantage = int(sample.rollout.token_ids[t]), float(sample.advantages[t])
                match config.distillation:
                    case ReverseKlConfig(coef=coef):
                        distance = own[t, token] - taught[t, token]
                        advantage -= coef * distance.item()
                        added = torch.zeros(())
                    case ForwardTopkConfig(coef=coef, top_k=top_k):
                        chosen = taught[t].topk(top_k).indices
                        rest, own_rest = (1 - taught[t, chosen].exp().sum()), (1 - own[t, chosen].exp().sum())
                        distance = (taught[t, chosen].exp() * (taught[t, chosen] - own[t, chosen])).sum()
                        distance = distance + rest * (rest / own_rest).log()
                        added = coef * distance
                    case _:
                        raise AssertionError(config.distillation)
                losses.append(-advantage * (own[t, token] - own[t, token].detach()).exp() + added)
                distances.append(distance.detach())
        loss = torch.stack(losses).mean()
        self._adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.clip_grad_norm)
        self._adam.step()
        return loss.item(), torch.stack(distances).mean().item()


def asked(
    cluster: Cluster,
    samples: Sequence[TrainSample],
    teacher: Model,
    split: tuple[int, ActorConfig],
    *,
    num_top: int,
    is_about_all: bool = False,
) -> list[SampleColumn]:
    """Return the answers of a teacher's replicas, about the tokens in the loss or about all."""
    world, actor = split
    question = packed(samples, world=world, actor=actor, is_forward=is_about_all)
    found = cluster.run(world, jobs.teach, setup_of(teacher, actor), num_top, question)
    return [numbers for numbers in found if numbers is not None]


def with_teacher(shares: Shares, answers: Sequence[SampleColumn]) -> Shares:
    filled = (with_columns(share, {"teacher": answers}) for share in shares)
    return Shares.of(filled, ranks_per_share=shares.ranks_per_share)


@pytest.mark.parametrize("split", ["TP2-SP", "PP2-VPP2", "DP2", "CP2-TP2"])
def test_a_teacher_of_any_split_answers_as_transformers_does(split: str, cluster: Cluster, models: Models) -> None:
    teacher = models.get("qwen3", tied=True, seed=3)
    samples = make_samples(6, vocab=teacher.shape.vocab, seed=4)
    answers = asked(cluster, samples, teacher, (SPLITS | CONTEXT_SPLITS)[split], num_top=5, is_about_all=True)
    slow = TaughtReference(teacher, DESCENT, DistillConfig(kind="distill"), TEMPERATURE)
    for sample, numbers in zip(samples, assembled(answers), strict=True):
        with torch.no_grad():
            expected = slow.log_probs(sample)
        chosen = expected.gather(1, torch.tensor(sample.rollout.token_ids, dtype=torch.int64)[:, None])
        np.testing.assert_allclose(numbers[:, :1], chosen.numpy(), atol=TOLERANCE)
        np.testing.assert_allclose(numbers[:, 1:6], expected.topk(5).values.numpy(), atol=TOLERANCE)
        at_ids = expected.gather(1, torch.tensor(numbers[:, 6:], dtype=torch.int64))
        np.testing.assert_allclose(numbers[:, 1:6], at_ids.numpy(), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "splits"), [("reverse_kl", ("TP1", "TP2-SP", "CP2")), ("forward_topk", ("PP2-VPP2", "DP2", "CP2"))]
)
def test_an_update_towards_a_teacher_equals_the_slow_one(
    kind: str, splits: Sequence[str], cluster: Cluster, models: Models
) -> None:
    model, teacher = models.get("qwen2", tied=False), models.get("llama", tied=True, seed=2)
    samples = make_samples(6, vocab=model.shape.vocab, seed=6)
    config = GrpoConfig(kind="grpo", loss=PLAIN, distillation=KINDS[kind])
    slow = TaughtReference(model, DESCENT, config, TEMPERATURE)
    loss, distance = slow.learn(samples, TaughtReference(teacher, DESCENT, config, TEMPERATURE), config)
    assert abs(distance) > 0.01
    answers = asked(cluster, samples, teacher, SPLITS["TP2-SP"], num_top=KINDS[kind].top_k)
    for split in splits:
        world, actor = SPLITS[split]
        batch = with_teacher(packed(samples, world=world, actor=actor), answers)
        outcomes = cluster.run(world, jobs.train, setup_of(model, actor, config), [], batch)
        assert outcomes[0].stats.loss == pytest.approx(loss, abs=TOLERANCE)
        assert outcomes[0].stats.teacher_kl == pytest.approx(distance, abs=TOLERANCE)
        assert_close(whole_weights(outcomes, model, actor), slow.weights())


@pytest.mark.parametrize("split", ["TP2-SP", "CP2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_that_equals_the_policy_teaches_exactly_nothing(
    kind: str, split: str, cluster: Cluster, models: Models
) -> None:
    model = models.get("qwen2", tied=False)
    world, actor = SPLITS[split]
    samples = make_samples(6, vocab=model.shape.vocab, seed=7)
    samples = [TrainSample(prompt_ids=s.prompt_ids, rollout=s.rollout, advantages=0 * s.advantages) for s in samples]
    answers = asked(cluster, samples, model, (world, actor), num_top=KINDS[kind].top_k)
    config = DistillConfig(kind="distill", distillation=KINDS[kind])
    batch = with_teacher(packed(samples, world=world, actor=actor), answers)
    setup = jobs.Setup(
        actor=actor, folder=model.folder, shape=model.shape, optimizer=OptimizerConfig(), algorithm=config
    )
    stats = cluster.run(world, jobs.train, setup, [], batch)[0].stats
    assert stats.teacher_kl == 0.0
    # The rest of a distribution is a difference of float32 numbers.
    assert stats.grad_norm == 0.0 if kind == "reverse_kl" else stats.grad_norm < 1e-6
