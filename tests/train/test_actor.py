"""The actor beyond one update: a reference in its ranks, KL in the loss, epochs, skipped updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.algo.loss import kl
from megarl.config.algorithm import GrpoConfig, KlLossConfig
from megarl.types import FloatArray, TrainSample
from tests.train import jobs
from tests.train.cluster import Cluster, assembled
from tests.train.conftest import Models
from tests.train.reference import Reference
from tests.train.samples import make_samples
from tests.train.splits import (
    DESCENT,
    GRPO,
    SPLITS,
    TEMPERATURE,
    assert_close,
    assert_same_logprobs,
    packed,
    setup_of,
    whole_weights,
)

SPOILT = np.float32(np.nan)


def same(found: Sequence[FloatArray], expected: Sequence[FloatArray]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_reference_in_the_actors_ranks_answers_and_leaves_the_policy_as_it_was(
    cluster: Cluster, models: Models
) -> None:
    model, other = models.get("qwen2", tied=True), models.get("qwen2", tied=True, seed=5)
    samples = make_samples(6, vocab=model.shape.vocab, seed=8)
    expected = Reference(other, DESCENT, GRPO, TEMPERATURE).logprobs(samples)
    world, actor = SPLITS["TP2-PP2"]
    batch = packed(samples, world=world, actor=actor)
    answers = cluster.run(world, jobs.ask_reference, setup_of(model, actor), other.folder, batch)
    before, reference, after = (assembled(parts, data_parallel=1) for parts in zip(*answers, strict=True))
    assert same(before, after)
    assert not same(before, reference)
    assert_same_logprobs(reference, expected)


def test_a_reference_with_ranks_of_its_own_says_the_same(cluster: Cluster, models: Models) -> None:
    model = models.get("qwen2", tied=True)
    samples = make_samples(6, vocab=model.shape.vocab, seed=8)
    expected = Reference(model, DESCENT, GRPO, TEMPERATURE).logprobs(samples)
    for split in ("PP2-VPP2", "TP2-SP", "CP2"):
        world, actor = SPLITS[split]
        batch = packed(samples, world=world, actor=actor)
        parts = cluster.run(world, jobs.ask_separate_reference, setup_of(model, actor), batch)
        assert_same_logprobs(assembled(parts, data_parallel=1), expected)


def with_references(samples: Sequence[TrainSample], logprobs: Sequence[torch.Tensor]) -> list[TrainSample]:
    """Add log-probabilities of a reference that differs a little from the policy."""
    random = np.random.default_rng(3)
    return [
        replace(sample, reference_logprobs=(tensor.numpy() + random.normal(0, 0.3, len(tensor))).astype(np.float32))
        for sample, tensor in zip(samples, logprobs, strict=True)
    ]


def test_a_kl_term_is_reported(cluster: Cluster, models: Models) -> None:
    """tests/train/test_objectives.py has the update with such a term in every split."""
    model = models.get("qwen2", tied=False)
    bare = make_samples(8, vocab=model.shape.vocab, seed=5)
    logprobs = Reference(model, DESCENT, GRPO, TEMPERATURE).logprobs(bare)
    samples = with_references(bare, logprobs)
    near = GrpoConfig(kind="grpo", kl=KlLossConfig(kind="loss", coef=0.5))
    distances = torch.cat(
        [
            kl("k3", policy, torch.from_numpy(sample.reference_logprobs))[torch.from_numpy(sample.rollout.loss_mask)]
            for policy, sample in zip(logprobs, samples, strict=True)
        ]
    )
    world, actor = SPLITS["DP2"]
    batch = packed(samples, world=world, actor=actor, budget=20)
    with_term, plain = (
        cluster.run(world, jobs.train, setup_of(model, actor, config), [], batch)[0].stats for config in (near, GRPO)
    )
    assert with_term.reference_kl == pytest.approx(distances.mean().item(), abs=1e-6)
    assert plain.reference_kl is None


def test_epochs_train_on_the_same_samples_again(cluster: Cluster, models: Models) -> None:
    model = models.get("llama", tied=False)
    samples = make_samples(8, vocab=model.shape.vocab, seed=3)
    reference = Reference(model, DESCENT, GRPO, TEMPERATURE)
    old = reference.logprobs(samples)
    for _ in range(2):
        for i in (0, 4):
            reference.update(samples[i : i + 4], old[i : i + 4])
    world, actor = SPLITS["DP2"]
    batch = packed(samples, world=world, actor=actor, per_update=4)
    twice = replace(setup_of(model, actor), epochs=2)
    outcomes = cluster.run(world, jobs.train, twice, [], batch)
    assert outcomes[0].result.version == 4
    assert_close(whole_weights(outcomes, model, actor), reference.weights())
    usages = [outcome.result.usage["actor"] for outcome in outcomes]
    assert usages[0] == usages[1], "all ranks tell the worst of all"
    assert 0 < usages[0].resident_bytes < usages[0].host_total_bytes


def test_log_probabilities_that_somebody_asked_for_already_are_not_asked_for_again(
    cluster: Cluster, models: Models
) -> None:
    model = models.get("llama", tied=False)
    samples = make_samples(8, vocab=model.shape.vocab, seed=3)
    old = Reference(model, DESCENT, GRPO, TEMPERATURE).logprobs(samples)
    known = [replace(s, old_logprobs=tensor.numpy()) for s, tensor in zip(samples, old, strict=True)]
    shifted = [
        replace(s, old_logprobs=tensor.numpy() + np.float32(0.1)) for s, tensor in zip(samples, old, strict=True)
    ]
    world, actor = SPLITS["TP1"]
    plain, same_known, other = (
        cluster.run(world, jobs.train, setup_of(model, actor), [], packed(each, world=1, actor=actor, per_update=4))
        for each in (samples, known, shifted)
    )
    assert_close(whole_weights(same_known, model, actor), whole_weights(plain, model, actor))
    assert abs(other[0].stats.loss - plain[0].stats.loss) > 1e-3, "they were not used"


def test_three_updates_that_are_not_finite_are_skipped_and_the_fourth_ends_the_run(
    cluster: Cluster, models: Models
) -> None:
    model = models.get("qwen2", tied=True)
    samples = make_samples(4, vocab=model.shape.vocab, seed=3)
    spoilt = [replace(samples[0], advantages=samples[0].advantages * SPOILT), *samples[1:]]
    world, actor = SPLITS["PP2"]
    bad = packed(spoilt, world=world, actor=actor)
    good = packed(samples, world=world, actor=actor)
    setup = setup_of(model, actor)
    for results, message, is_unchanged in cluster.run(world, jobs.update_until_error, setup, [bad] * 4):
        assert [result.num_skipped_updates for result in results] == [1, 1, 1]
        assert all(result.stats is None and result.version == 0 for result in results)
        assert message.startswith("step 4: the loss is nan")
        assert is_unchanged
    for results, message, is_unchanged in cluster.run(
        world, jobs.update_until_error, setup, [bad, bad, bad, good, bad]
    ):
        assert message == "no error", "a good update starts the count anew"
        assert [result.version for result in results] == [0, 0, 0, 1, 1]
        assert not is_unchanged
