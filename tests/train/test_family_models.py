"""Families whose layers are not those of Llama: log-probabilities and one update, against transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.schedule import slow
from tests.train import jobs
from tests.train.cluster import Cluster, assembled
from tests.train.conftest import Models
from tests.train.reference import Reference
from tests.train.samples import make_samples
from tests.train.splits import (
    CONTEXT_SPLITS,
    DESCENT,
    GRPO,
    MIXTURE_SPLITS,
    SPLITS,
    TEMPERATURE,
    TOLERANCE,
    assert_close,
    assert_same_logprobs,
    packed,
    setup_of,
    whole_weights,
)

ALL_SPLITS = {**SPLITS, **CONTEXT_SPLITS, **MIXTURE_SPLITS}
CASES = {
    "deepseek_v2": ("TP2-EP2",),
    "deepseek_v3": ("CP2-TP2-EP4-ETP1", "EP2-PP2"),
    "glm4_moe": ("TP2-EP2", "PP2-VPP2"),
    "gpt_oss": ("TP2-EP2-ETP1", "CP2-EP2"),
    "gemma3_text": ("PP2-VPP2", "CP2"),
    "qwen3_next": ("CP2-TP2-EP4-ETP1",),
    "qwen3_5_text": ("PP2-VPP2",),
    "qwen3_5_moe": ("TP2-EP2",),
}
SLOW_CASES = {
    "deepseek_v2": ("TP1", "EP2-PP2", "CP2-EP2"),
    "deepseek_v3": ("TP1", "TP2-EP2"),
    "moonlight": ("TP2-EP2",),
    "glm4_moe": ("TP1", "CP2-EP2"),
    "gpt_oss": ("TP1", "EP2-PP2"),
    "gemma3_text": ("TP1", "TP2-SP"),
    "qwen3_next": ("TP1", "TP2-SP", "PP2-VPP2", "CP2-EP2", "EP2-PP2"),
    "qwen3_5": ("TP1", "TP2-SP", "CP2"),
    "qwen3_5_text": ("TP2-SP", "CP2"),
    "qwen3_5_moe": ("TP1", "CP2-TP2-EP4-ETP1", "EP2-PP2"),
    "qwen3_5_moe_text": ("TP2-EP2", "CP2-EP2"),
}


def each_of(cases: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    return [(family, split) for family, splits in cases.items() for split in splits]


@pytest.mark.parametrize(("family", "split"), [*each_of(CASES), *slow(*each_of(SLOW_CASES))])
def test_an_update_is_that_of_transformers(family: str, split: str, cluster: Cluster, models: Models) -> None:
    model = models.get(family, tied=family == "gemma3_text")
    samples = make_samples(7, vocab=model.shape.vocab)
    reference = Reference(model, DESCENT, GRPO, TEMPERATURE)
    old = reference.logprobs(samples)
    loss, _, grad_norm = reference.update(samples, old)
    world, actor = ALL_SPLITS[split]
    asked = packed(samples, world=world, actor=actor, budget=24, is_forward=True)
    trained = packed(samples, world=world, actor=actor, budget=24)
    outcomes = cluster.run(world, jobs.train, setup_of(model, actor), [asked], trained)
    assert_same_logprobs(assembled(outcome.logprobs[0] for outcome in outcomes), old)
    assert_close(whole_weights(outcomes, model, actor), reference.weights())
    assert outcomes[0].stats.loss == pytest.approx(loss, abs=TOLERANCE)
    assert outcomes[0].stats.grad_norm == pytest.approx(grad_norm, rel=TOLERANCE, abs=TOLERANCE)
