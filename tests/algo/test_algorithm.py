from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from megarl.algo.algorithm import Grpo, Sft, build_algorithm
from megarl.config.algorithm import GrpoConfig, SftConfig
from megarl.types import FinishReason, Prompt, Rollout, RolloutGroup, Score, ScoredGroup


def scored_group(number: int, rewards: Sequence[float]) -> ScoredGroup:
    prompt = Prompt(
        uid=f"train.parquet:{number}",
        position=number,
        epoch=0,
        token_ids=np.array([number, number], dtype=np.int32),
        data_source="sums",
        ground_truth="",
        extra_info={},
    )
    rollouts = tuple(_rollout(length=place + 2) for place in range(len(rewards)))
    return ScoredGroup(
        group=RolloutGroup(prompt=prompt, rollouts=rollouts),
        scores=tuple(Score(value=reward, components={}) for reward in rewards),
    )


def _rollout(*, length: int) -> Rollout:
    """Whose first token came from a tool, say, not from the policy."""
    return Rollout(
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.zeros(length, dtype=np.float32),
        versions=np.zeros(length, dtype=np.int32),
        loss_mask=np.arange(length) > 0,
        finish_reason=FinishReason.STOP,
        text="",
    )


def test_the_recipe_chooses_the_algorithm() -> None:
    assert isinstance(build_algorithm(SftConfig(kind="sft")), Sft)
    assert isinstance(build_algorithm(GrpoConfig(kind="grpo")), Grpo)


def test_grpo_compares_within_the_group_and_keeps_the_order() -> None:
    groups = [scored_group(3, [1, 0]), scored_group(5, [0.25, 0.25, 1])]
    algorithm = build_algorithm(GrpoConfig(kind="grpo", normalize_std=False))
    assert all(algorithm.keeps(group) for group in groups)
    samples = algorithm.assign(groups)
    assert [sample.prompt_ids.tolist() for sample in samples] == [[3, 3]] * 2 + [[5, 5]] * 3
    assert [sample.rollout for sample in samples] == [rollout for each in groups for rollout in each.group.rollouts]
    assert [sample.advantages.tolist() for sample in samples] == [
        [0, 0.5],
        [0, -0.5, -0.5],
        [0, -0.25],
        [0, -0.25, -0.25],
        [0, 0.5, 0.5, 0.5],
    ]


def test_grpo_divides_by_the_groups_spread_unless_told_not_to() -> None:
    group = scored_group(0, [1, 0, 0, 0])
    normalized, raw = (
        build_algorithm(GrpoConfig(kind="grpo", normalize_std=normalize_std)).assign([group])[0].advantages[1]
        for normalize_std in (True, False)
    )
    assert (normalized, raw) == (pytest.approx(1.499997, abs=1e-6), 0.75)


def test_sft_gives_every_token_of_a_demonstration_the_same_credit() -> None:
    samples = build_algorithm(SftConfig(kind="sft")).assign([scored_group(1, [1.0]), scored_group(2, [0.0])])
    assert [sample.advantages.tolist() for sample in samples] == [[0, 1], [0, 1]]
    assert {sample.advantages.dtype for sample in samples} == {np.dtype(np.float32)}
