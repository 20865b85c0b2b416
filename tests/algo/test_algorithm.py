from __future__ import annotations

import numpy as np
import pytest

from megarl.algo.algorithm import Sft, build_algorithm
from megarl.config.algorithm import (
    AlgorithmConfig,
    FilterConfig,
    GdpoConfig,
    GroupConfig,
    GrpoConfig,
    OverlongConfig,
    ReinforcePpConfig,
    RemaxConfig,
    SftConfig,
)
from megarl.errors import DataError
from megarl.stages import Algorithm
from megarl.types import Estimates
from tests.algo.groups import scored_group, with_baseline

NOTHING = Estimates()


def build(config: AlgorithmConfig) -> Algorithm:
    return build_algorithm(config, max_response_tokens=10)


def last_token_credit(config: AlgorithmConfig, rewards: list[float]) -> list[float]:
    return [float(sample.advantages[-1]) for sample in build(config).assign([scored_group(0, rewards)], NOTHING)]


def test_sft_gives_every_token_of_a_demonstration_the_same_credit() -> None:
    algorithm = build(SftConfig(kind="sft"))
    assert isinstance(algorithm, Sft)
    samples = algorithm.assign([scored_group(1, [1.0]), scored_group(2, [0.0])], NOTHING)
    assert [sample.advantages.tolist() for sample in samples] == [[0, 1], [0, 1]]
    assert {sample.advantages.dtype for sample in samples} == {np.dtype(np.float32)}


def test_grpo_compares_within_the_group_and_keeps_the_order() -> None:
    groups = [scored_group(3, [1, 0]), scored_group(5, [0.25, 0.25, 1])]
    algorithm = build(GrpoConfig(kind="grpo", normalize_std=False))
    assert all(algorithm.keeps(group) for group in groups)
    samples = algorithm.assign(groups, NOTHING)
    assert [sample.prompt_ids.tolist() for sample in samples] == [[3, 3]] * 2 + [[5, 5]] * 3
    assert [sample.rollout for sample in samples] == [rollout for each in groups for rollout in each.group.rollouts]
    assert [sample.advantages.tolist() for sample in samples] == [
        [0, 0.5],
        [0, -0.5, -0.5],
        [0, -0.25],
        [0, -0.25, -0.25],
        [0, 0.5, 0.5, 0.5],
    ]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GrpoConfig(kind="grpo"), [1.499997, -0.499999, -0.499999, -0.499999]),
        (GroupConfig(kind="rloo"), [1, -1 / 3, -1 / 3, -1 / 3]),
        (GroupConfig(kind="opo"), [0.9, -0.1, -0.1, -0.1]),
        (GroupConfig(kind="gpg"), [3, -1, -1, -1]),
        (GroupConfig(kind="grpo_passk"), [1.999996, 0, 0, 0]),
        (GroupConfig(kind="reinforce_pp_baseline"), [2.846050, -0.316228, -0.316228, -0.316228]),
        (ReinforcePpConfig(kind="reinforce_pp"), [2.846050, -0.316228, -0.316228, -0.316228]),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_the_recipe_chooses_the_estimator(config: AlgorithmConfig, expected: list[float]) -> None:
    assert last_token_credit(config, [1, 0, 0, 0]) == pytest.approx(expected, abs=1e-5)


def test_gdpo_weighs_named_components() -> None:
    components = [{"right": 1.0, "form": 0.0}, {"right": 0.0, "form": 1.0}]
    group = scored_group(0, [0, 0], components=components, lengths=[3, 3])
    equal, right = (
        [
            float(sample.advantages[-1])
            for sample in build(GdpoConfig(kind="gdpo", weights={"right": weight, "form": 1.0})).assign(
                [group], NOTHING
            )
        ]
        for weight in (1.0, 3.0)
    )
    assert equal == pytest.approx([0, 0], abs=1e-6)
    assert right[0] > 0.5
    assert right[1] == pytest.approx(-right[0])


def test_gdpo_names_a_component_the_reward_does_not_give() -> None:
    with pytest.raises(DataError, match="no component form; it has none"):
        build(GdpoConfig(kind="gdpo", weights={"form": 1.0})).assign([scored_group(0, [1, 0])], NOTHING)


def test_a_filter_looks_at_rewards_before_the_length_penalty() -> None:
    config = GrpoConfig(kind="grpo", filter=FilterConfig(), overlong=OverlongConfig(buffer_tokens=4))
    assert not build(config).keeps(scored_group(0, [1, 1], lengths=[5, 10]))
    assert build(config).keeps(scored_group(0, [1, 0], lengths=[5, 5]))


def test_the_length_penalty_enters_the_comparison() -> None:
    config = GrpoConfig(kind="grpo", normalize_std=False, overlong=OverlongConfig(buffer_tokens=4))
    samples = build(config).assign([scored_group(0, [1, 1], lengths=[5, 10])], NOTHING)
    assert [float(sample.advantages[-1]) for sample in samples] == [0.5, -0.5]


def test_remax_compares_with_the_greedy_rollout_whose_length_costs_as_much() -> None:
    group = with_baseline(scored_group(0, [1, 0], lengths=[3, 4]), score=1.0, length=10)
    plain = RemaxConfig(kind="remax")
    shaped = RemaxConfig(kind="remax", overlong=OverlongConfig(buffer_tokens=4))
    assert [float(sample.advantages[-1]) for sample in build(plain).assign([group], NOTHING)] == [0, -1]
    samples = build(shaped).assign([group], NOTHING)
    assert [float(sample.advantages[-1]) for sample in samples] == [1, 0]
    assert len(samples) == 2, "the greedy rollout is not trained on"


def test_what_was_cut_leaves_the_loss_but_not_its_groups_baseline() -> None:
    config = GrpoConfig(kind="grpo", normalize_std=False, overlong=OverlongConfig(is_filtered=True))
    first, second = build(config).assign([scored_group(0, [1, 0], lengths=[3, 10], cut=[1])], NOTHING)
    assert first.advantages.tolist() == [0, 0.5, 0.5]
    assert first.rollout.loss_mask.tolist() == [False, True, True]
    assert not second.rollout.loss_mask.any()
