"""Updates with shared prefixes, on real ranks: each token is computed once, and the gradients are the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megarl.config.algorithm import AlgorithmConfig, GrpoConfig, KlLossConfig, SftConfig
from megarl.config.lora import ALL_MODULES
from megarl.data.row_prefixes import row_prefixes
from megarl.routes import prompt_digest
from megarl.tokens import Content, RouteArray
from megarl.types import Episode, FloatArray, Rollout, TokenArray, TrainBatch, TrainSample
from tests.schedule import slow
from tests.tiny_models import NUM_EXPERTS
from tests.train import jobs
from tests.train.cluster import Cluster, assembled
from tests.train.conftest import Models
from tests.train.samples import make_samples
from tests.train.splits import (
    CONTEXT_SPLITS,
    FULL,
    GRPO,
    MIXTURE_SPLITS,
    SELECTIVE,
    assert_close,
    packed,
    setup_of,
    whole_weights,
)
from tests.train.splits import SPLITS as DENSE_SPLITS
from tests.train.test_critic import of_split
from tests.train.test_critic import setup_of as critic_setup
from tests.train.test_distillation import KINDS, PLAIN, with_teacher
from tests.train.test_lora import random_adapter, whole_adapter
from tests.train.test_objectives import ALGORITHMS

TOLERANCE = 1e-6
SPLITS = {**DENSE_SPLITS, **CONTEXT_SPLITS, **MIXTURE_SPLITS}


def make_groups(num: int, size: int, *, vocab: int, num_routed: int = 0) -> list[TrainSample]:
    """Return samples whose groups have one prompt each; with routed layers, two kinds of experts in each prompt."""
    samples = make_samples(num * size, vocab=vocab, seed=4)
    prompts = [samples[size * group].prompt_ids for group in range(num)]
    groups = [replace(sample, prompt_ids=prompts[index // size]) for index, sample in enumerate(samples)]
    random = np.random.default_rng(6)

    def noise(sample: TrainSample, size: float) -> FloatArray:
        return (size * random.standard_normal(len(sample.advantages))).astype(np.float32)

    if num_routed:
        groups = [
            _routed(sample, num_routed, seed=2 * (index // size) + index % 2, random=random)
            for index, sample in enumerate(groups)
        ]
    return [
        replace(
            sample,
            reference_logprobs=sample.rollout.logprobs + noise(sample, 0.2),
            values=noise(sample, 0.3),
            returns=noise(sample, 1),
        )
        for sample in groups
    ]


def _routed(sample: TrainSample, num_layers: int, *, seed: int, random: np.random.Generator) -> TrainSample:
    """Return the sample with experts; those of the prompt follow from `seed`."""
    num_tokens = sample.rollout.num_tokens
    routes = np.concatenate(
        [
            _routes(len(sample.prompt_ids), num_layers, np.random.default_rng(seed)),
            _routes(num_tokens - 1, num_layers, random),
        ]
    )
    content = replace(sample.rollout.content.load(), routes=routes)
    rollout = replace(sample.rollout, content=content, prompt_routes=prompt_digest(routes, num_tokens))
    return replace(sample, rollout=rollout)


def _routes(num_tokens: int, num_layers: int, random: np.random.Generator) -> RouteArray:
    return random.random((num_tokens, num_layers, NUM_EXPERTS)).argsort(axis=-1)[..., :2].astype(np.uint8)


def make_episodes(num: int, *, vocab: int, has_routes: bool = False, num_layers: int = 0) -> list[TrainSample]:
    """Return episodes of four rows: the prompt with an answer, then histories that branch at different places."""
    random = np.random.default_rng(9)

    def new(size: int) -> TokenArray:
        return random.integers(0, vocab, size).astype(np.int32)

    samples = []
    for _ in range(num):
        prompt = new(6)
        rows = [np.concatenate([prompt, new(5)])]
        chosen = [_routes(len(rows[0]), num_layers, random)]
        for earlier, common in ((0, 9), (1, 12), (0, 4)):
            rows.append(np.concatenate([rows[earlier][:common], new(7)]))
            chosen.append(np.concatenate([chosen[earlier][:common], _routes(7, num_layers, random)]))
        token_ids = np.concatenate([rows[0][len(prompt) :], *rows[1:]])
        starts = np.cumsum([len(rows[0]) - len(prompt), *map(len, rows[1:-1])]).tolist()
        joined = np.concatenate(chosen)[:-1] if has_routes else None
        content = Content(
            token_ids=token_ids,
            logprobs=np.log(random.uniform(0.001, 0.05, len(token_ids))).astype(np.float32),
            text="",
            routes=joined,
        )
        mask = np.concatenate([np.ones(5, np.bool_), *(np.arange(len(row)) >= len(row) - 6 for row in rows[1:])])
        base = make_samples(1, vocab=vocab)[0].rollout
        episode = Episode(rows=tuple(starts), shared=row_prefixes(prompt, token_ids, starts, joined))
        rollout: Rollout = replace(
            base, content=content, loss_mask=mask, versions=np.zeros(len(token_ids), np.int32), episode=episode
        )
        advantages = np.where(mask, random.standard_normal(len(token_ids)), 0).astype(np.float32)
        samples.append(TrainSample(prompt_ids=prompt, rollout=rollout, advantages=advantages))
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    family: str = "qwen2"
    split: str = "TP1"
    algorithm: AlgorithmConfig = GRPO
    megatron: Mapping[str, object] | None = None
    has_lora: bool = False
    has_routes: bool = False
    are_episodes: bool = False

    def samples(self, vocab: int, num_layers: int) -> list[TrainSample]:
        if self.are_episodes:
            return make_episodes(6, vocab=vocab, has_routes=self.has_routes, num_layers=num_layers)
        return make_groups(3, 4, vocab=vocab, num_routed=num_layers if self.has_routes else 0)


KL = GrpoConfig(kind="grpo", kl=KlLossConfig(kind="loss", coef=0.2), entropy_coef=0.1)
CASES = {
    **{f"GRPO {split}": Case(split=split, algorithm=KL) for split in ("TP1", "TP2-SP", "PP2-VPP2", "DP2", "CP2")},
    **{f"GRPO {split}": Case(split=split, algorithm=KL) for split in CONTEXT_SPLITS},
    **{name: Case(algorithm=algorithm) for name, algorithm in ALGORITHMS.items()},
    "DAPO": Case(algorithm=GrpoConfig(kind="grpo", loss=PLAIN.model_copy(update={"clip_high": 0.28}))),
    "SFT": Case(algorithm=SftConfig(kind="sft")),
    "LoRA with dropout": Case(has_lora=True),
    "recomputed whole": Case(megatron=FULL),
    "recomputed in part": Case(megatron=SELECTIVE, split="TP2-SP"),
    "recomputed in part CP2": Case(megatron=SELECTIVE, split="CP2"),
    "windows and two bases": Case(family="gemma3_text"),
    "windows and sinks": Case(family="gpt_oss"),
    "windows and sinks EP2": Case(family="gpt_oss", split="EP2"),
    "MLA": Case(family="deepseek_v3"),
    "MLA TP2-EP2-ETP1": Case(family="deepseek_v3", split="TP2-EP2-ETP1"),
    "mixture with replayed experts": Case(family="qwen3_moe", has_routes=True),
    "mixture EP2": Case(family="qwen3_moe", split="EP2"),
    "episodes": Case(are_episodes=True),
    "episodes PP2-VPP2": Case(are_episodes=True, split="PP2-VPP2"),
    "episodes CP2": Case(are_episodes=True, split="CP2"),
    "episodes CP4": Case(are_episodes=True, split="CP4"),
    "sequences as a whole CP2": Case(algorithm=ALGORITHMS["gspo"], split="CP2"),
    "windows and sinks CP2": Case(family="gpt_oss", split="CP2"),
    "MLA CP2-TP2-EP4-ETP1": Case(family="deepseek_v3", split="CP2-TP2-EP4-ETP1"),
    "episodes with replayed experts CP2-EP2": Case(
        are_episodes=True, family="qwen3_moe", has_routes=True, split="CP2-EP2"
    ),
    "episodes with windows": Case(are_episodes=True, family="gemma3_text"),
    "episodes with replayed experts": Case(are_episodes=True, family="qwen3_moe", has_routes=True),
    "episodes with replayed experts EP2": Case(are_episodes=True, family="qwen3_moe", has_routes=True, split="EP2"),
}
SLOW = (
    "gmpo",
    "sapo",
    "gpg",
    "recomputed in part",
    "recomputed in part CP2",
    "windows and sinks CP2",
    *(name for name in CASES if name.endswith(("EP2", "ETP1", "CP4")) or name == "episodes PP2-VPP2"),
    *(f"GRPO {split}" for split in CONTEXT_SPLITS if split != "CP4"),
)


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in SLOW), *slow(*SLOW)])
def test_an_update_with_shared_prefixes_is_one_with_rows_apart(
    name: str, cluster: Cluster, models: Models, tmp_path: Path
) -> None:
    case = CASES[name]
    model = models.get(case.family, tied=case.family == "gemma3_text")
    samples = case.samples(model.shape.vocab, model.shape.num_layers)
    world, actor = SPLITS[case.split]
    if case.megatron is not None:
        actor = actor.model_copy(update={"megatron": case.megatron})
    setup = setup_of(model, actor, case.algorithm)
    if case.has_lora:
        lora = random_adapter(tmp_path, model, ALL_MODULES).model_copy(update={"dropout": 0.25})
        setup = replace(setup, lora=lora)
    pack = partial(packed, samples, world=world, actor=actor, budget=90, per_update=6 if case.are_episodes else 12)
    found, num_computed = [], []
    for is_shared in (False, True):
        batch = pack(shares_prefixes=is_shared, has_routes=case.has_routes)
        num_computed.append(sum(num_inputs(share) for share in batch))
        scored = pack(shares_prefixes=is_shared, is_forward=True, has_routes=case.has_routes)
        outcomes = cluster.run(world, jobs.train, setup, [scored], batch)
        weights = (
            whole_weights(outcomes, model, actor)
            if setup.lora is None
            else whole_adapter(outcomes, model, actor, setup.lora)
        )
        found.append((assembled(outcome.logprobs[0] for outcome in outcomes), outcomes[0].stats, weights))
    (apart, stats, weights), (together, shared_stats, shared_weights) = found
    assert num_computed[1] < 0.95 * num_computed[0], f"{num_computed}: nothing was shared"
    for mine, right in zip(together, apart, strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=TOLERANCE * 10)
    for key, weight in shared_weights.items():
        assert (weight - weights[key]).abs().max() <= TOLERANCE * max(1.0, float(weights[key].abs().max())), key
    for field in ("loss", "grad_norm", "entropy", "mismatch_mean"):
        assert getattr(shared_stats, field) == pytest.approx(getattr(stats, field), rel=1e-5, abs=TOLERANCE), field


def num_inputs(share: TrainBatch) -> int:
    """Return the tokens that a rank computes, without padding."""
    micro_batches = [each for mini_batch in share.mini_batches for each in mini_batch.micro_batches]
    return sum(
        len(each.token_ids if each.shared is None else each.shared.computed)
        - sum((each.sequence_starts[1:] - each.sequence_starts[:-1])[each.sample_ids < 0].tolist())
        for each in micro_batches
    )


def test_a_critic_computes_values_of_shared_tokens_once(cluster: Cluster, models: Models) -> None:
    model = models.get("qwen2", tied=False)
    samples = make_groups(3, 4, vocab=model.shape.vocab)
    world, actor = SPLITS["TP1"]
    # The head begins with zeros: only in the second update does the body have a gradient.
    critic = of_split(actor, epochs=2)
    setup = critic_setup(model, critic)
    found = []
    for is_shared in (False, True):
        batch = packed(samples, world=world, actor=actor, budget=90, shares_prefixes=is_shared)
        outcomes = cluster.run(world, jobs.train_critic, setup, batch)
        after = assembled(outcome.after for outcome in outcomes)
        found.append((after, outcomes[0].stats.loss, whole_weights(outcomes, model, critic)))
    (apart, loss, weights), (together, shared_loss, shared_weights) = found
    assert any(values.any() for values in apart)
    for mine, right in zip(together, apart, strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=TOLERANCE * 10)
    assert shared_loss == pytest.approx(loss, rel=TOLERANCE)
    assert_close(shared_weights, weights, tolerance=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_answers_once_for_shared_tokens_and_teaches_the_same(
    kind: str, cluster: Cluster, models: Models
) -> None:
    model, teacher = models.get("qwen2", tied=False), models.get("llama", tied=True, seed=2)
    samples = make_groups(3, 4, vocab=model.shape.vocab)
    config = GrpoConfig(kind="grpo", loss=PLAIN, distillation=KINDS[kind])
    world, actor = SPLITS["TP1"]
    found = []
    for is_shared in (False, True):
        pack = partial(packed, samples, world=world, actor=actor, budget=90, shares_prefixes=is_shared)
        question = pack()
        answers = cluster.run(world, jobs.teach, setup_of(teacher, actor), KINDS[kind].top_k, question)
        batch = with_teacher(pack(), [each for each in answers if each is not None])
        outcomes = cluster.run(world, jobs.train, setup_of(model, actor, config), [], batch)
        found.append((outcomes[0].stats.teacher_kl, whole_weights(outcomes, model, actor)))
    (distance, weights), (shared_distance, shared_weights) = found
    assert shared_distance == pytest.approx(distance, rel=1e-5)
    assert_close(shared_weights, weights, tolerance=TOLERANCE)


def test_a_model_with_states_is_never_given_shared_rows(cluster: Cluster, models: Models) -> None:
    """A packing that a plan would not make ends in an assertion, not in wrong gradients."""
    model = models.get("qwen3_next", tied=False)
    world, actor = SPLITS["TP1"]
    samples = make_groups(1, 4, vocab=model.shape.vocab)

    def train_shared() -> None:
        batch = packed(samples, world=world, actor=actor, shares_prefixes=True)
        cluster.run(world, jobs.train, setup_of(model, actor), [], batch)

    with pytest.raises(AssertionError, match="a state has no branches"):
        train_shared()
