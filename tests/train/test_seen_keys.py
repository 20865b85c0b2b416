"""Updates with shared prefixes, on real ranks: each token is computed once, and the gradients are the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl.types import TrainSample
from tests.train import jobs
from tests.train.cluster import Cluster, assembled
from tests.train.conftest import Models
from tests.train.samples import make_samples
from tests.train.splits import SPLITS, assert_close, packed, setup_of, whole_weights

TOLERANCE = 1e-6


def make_groups(num: int, size: int, *, vocab: int) -> list[TrainSample]:
    """Return samples whose groups have one prompt each."""
    samples = make_samples(num * size, vocab=vocab, seed=4)
    prompts = [samples[size * group].prompt_ids for group in range(num)]
    return [replace(sample, prompt_ids=prompts[index // size]) for index, sample in enumerate(samples)]


@pytest.mark.parametrize("split", ["TP1", "TP2-SP", "PP2-VPP2", "DP2"])
def test_an_update_with_shared_prompts_has_the_gradients_of_one_without(
    split: str, cluster: Cluster, models: Models
) -> None:
    model = models.get("qwen2", tied=False)
    samples = make_groups(3, 4, vocab=model.shape.vocab)
    world, actor = SPLITS[split]
    found = []
    for is_shared in (False, True):
        batch = packed(samples, world=world, actor=actor, budget=40, per_update=6, shares_prefixes=is_shared)
        scored = packed(
            samples, world=world, actor=actor, budget=40, per_update=6, is_forward=True, shares_prefixes=is_shared
        )
        outcomes = cluster.run(world, jobs.train, setup_of(model, actor), [scored], batch)
        logprobs = assembled(outcome.logprobs[0] for outcome in outcomes)
        found.append((logprobs, outcomes[0].stats, whole_weights(outcomes, model, actor)))
    (apart, stats, weights), (together, shared_stats, shared_weights) = found
    for mine, right in zip(together, apart, strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=TOLERANCE * 10)
    assert_close(shared_weights, weights, tolerance=TOLERANCE)
    for name in ("loss", "grad_norm", "entropy", "mismatch_mean"):
        assert getattr(shared_stats, name) == pytest.approx(getattr(stats, name), rel=1e-5, abs=TOLERANCE), name
