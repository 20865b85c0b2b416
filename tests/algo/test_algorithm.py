from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from megarl.algo.algorithm import PolicyGradient, build_algorithm
from megarl.algo.grade import grade
from megarl.algo.imitation import Sft
from megarl.algo.shaping import adapted_kl_coef, length_penalty
from megarl.config.algorithm import (
    AdaptiveKlConfig,
    AlgorithmConfig,
    EstimatorConfig,
    FilterConfig,
    GaeConfig,
    GdpoConfig,
    GroupConfig,
    GrpoConfig,
    KlLossConfig,
    KlRewardConfig,
    OnlineDpoConfig,
    OverlongConfig,
    PrimeConfig,
    RemaxConfig,
    SftConfig,
    SppoConfig,
)
from megarl.stages import Algorithm
from megarl.types import Episode, Estimates, Rollout, RolloutGroup, Score, ScoredGroup, Turn, TurnKind
from tests.algo.groups import scored_group, with_baseline
from tests.values import make_prompt, make_rollout

NOTHING = Estimates()
ADAPTIVE = AdaptiveKlConfig(target=0.1, horizon=10_000)


def build(config: AlgorithmConfig) -> Algorithm:
    return build_algorithm(config, max_response_tokens=10)


def last_token_credit(config: AlgorithmConfig, *groups: ScoredGroup, estimates: Estimates = NOTHING) -> list[float]:
    """Return the advantage of the last token of each rollout."""
    return [float(sample.advantages[-1]) for sample in build(config).assign(groups, estimates)]


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


def test_gdpo_weighs_named_components() -> None:
    components = [{"right": 1.0, "form": 0.0}, {"right": 0.0, "form": 1.0}]
    group = scored_group(0, [0, 0], components=components, lengths=[3, 3])
    equal, right = (
        last_token_credit(GdpoConfig(kind="gdpo", weights={"right": weight, "form": 1.0}), group)
        for weight in (1.0, 3.0)
    )
    assert equal == pytest.approx([0, 0], abs=1e-6)
    assert right[0] > 0.5
    assert right[1] == pytest.approx(-right[0])


def test_a_filter_looks_at_rewards_before_the_length_penalty() -> None:
    config = GrpoConfig(kind="grpo", filter=FilterConfig(), overlong=OverlongConfig(buffer_tokens=4))
    assert not build(config).keeps(scored_group(0, [1, 1], lengths=[5, 10]))
    assert build(config).keeps(scored_group(0, [1, 0], lengths=[5, 5]))


def test_the_length_penalty_enters_the_comparison() -> None:
    config = GrpoConfig(kind="grpo", normalize_std=False, overlong=OverlongConfig(buffer_tokens=4))
    assert last_token_credit(config, scored_group(0, [1, 1], lengths=[5, 10])) == [0.5, -0.5]


def test_remax_compares_with_the_greedy_rollout_whose_length_costs_as_much() -> None:
    group = with_baseline(scored_group(0, [1, 0], lengths=[3, 4]), score=1.0, length=10)
    shaped = RemaxConfig(kind="remax", overlong=OverlongConfig(buffer_tokens=4))
    # The greedy rollout is not trained on.
    assert last_token_credit(RemaxConfig(kind="remax"), group) == [0, -1]
    assert last_token_credit(shaped, group) == [1, 0]


def test_what_was_cut_leaves_the_loss_but_not_its_groups_baseline() -> None:
    config = GrpoConfig(kind="grpo", normalize_std=False, overlong=OverlongConfig(is_filtered=True))
    first, second = build(config).assign([scored_group(0, [1, 0], lengths=[3, 10], cut=[1])], NOTHING)
    assert first.advantages.tolist() == [0, 0.5, 0.5]
    assert first.rollout.loss_mask.tolist() == [False, True, True]
    assert not second.rollout.loss_mask.any()
    assert not second.advantages.any()
    assert second.rollout.num_tokens == 10


def estimates_of(group: ScoredGroup, *, distance: float, value: float | None = None) -> Estimates:
    """The policy finds every token `distance` nats more likely than the reference does."""
    lengths = [len(rollout.token_ids) for rollout in group.group.rollouts]
    return Estimates(
        logprobs=tuple(np.full(length, -1.0, np.float32) for length in lengths),
        reference_logprobs=tuple(np.full(length, -1.0 - distance, np.float32) for length in lengths),
        values=None if value is None else tuple(np.full(length, value, np.float32) for length in lengths),
    )


def test_gae_compares_with_what_the_critic_expects() -> None:
    group = scored_group(0, [1, 0], lengths=[3, 3])
    samples = build(GaeConfig(kind="gae", lam=1.0)).assign([group], estimates_of(group, distance=0, value=0.25))
    for sample, reward in zip(samples, [1.0, 0.0], strict=True):
        assert sample.returns is not None
        assert sample.returns.tolist() == pytest.approx([0, reward, reward])
        assert sample.values is not None
        assert sample.values.tolist() == [0.25] * 3
        assert np.sign(sample.advantages).tolist() == [0, *[1 if reward else -1] * 2]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Two chosen tokens a rollout in the first group member, four in the second; k1 takes 0.5 * 0.2 off each.
        (GrpoConfig(kind="grpo", normalize_std=False), [(0.8 - 0.6) / 2, (0.6 - 0.8) / 2]),
        (RemaxConfig(kind="remax"), [0.9 - 0.0, 0.9 - 0.0]),
    ],
    ids=["grpo", "remax"],
)
def test_kl_in_the_reward_is_taken_off_token_by_token(config: EstimatorConfig, expected: list[float]) -> None:
    group = with_baseline(scored_group(0, [1, 1], lengths=[3, 5]), score=0.0, length=3)
    near = config.model_copy(update={"kl": KlRewardConfig(kind="reward", coef=0.5)})
    algorithm = build(near)
    samples = algorithm.assign([group], estimates_of(group, distance=0.2))
    assert [float(sample.advantages[-1]) for sample in samples] == pytest.approx(expected, abs=1e-6)
    assert algorithm.kl_coef == 0.5, "a fixed coefficient stays"
    assert all(sample.old_logprobs is not None for sample in samples), "what was asked for is not asked for again"
    assert all(sample.reference_logprobs is None for sample in samples), "the loss has no use for it"


def test_the_penalty_of_a_token_reaches_the_tokens_before_it() -> None:
    group = scored_group(0, [0], lengths=[4])
    near = GaeConfig(kind="gae", lam=1.0, kl=KlRewardConfig(kind="reward", coef=1.0, estimate="k2"))
    (sample,) = build(near).assign([group], estimates_of(group, distance=0.2, value=0.0))
    assert sample.returns is not None
    assert sample.returns.tolist() == pytest.approx([0, -0.06, -0.04, -0.02])


def test_an_adaptive_coefficient_moves_after_it_was_used_and_goes_on_where_it_stood() -> None:
    group = scored_group(0, [1, 1], lengths=[3, 5])
    adaptive = AdaptiveKlConfig(target=0.1, horizon=10)
    near = GrpoConfig(kind="grpo", normalize_std=False, kl=KlRewardConfig(kind="reward", coef=0.5, adaptive=adaptive))
    algorithm = build(near)
    first = algorithm.assign([group], estimates_of(group, distance=0.2))
    assert algorithm.kl_coef == pytest.approx(0.5 * (1 + 0.2 * 2 / 10))
    resumed = build_algorithm(near, max_response_tokens=10, kl_coef=algorithm.kl_coef)
    second, third = (each.assign([group], estimates_of(group, distance=0.2)) for each in (algorithm, resumed))
    assert [s.advantages.tolist() for s in second] == [s.advantages.tolist() for s in third]
    assert first[0].advantages[-1] < second[0].advantages[-1]


def test_the_coefficient_follows_sequences_and_not_the_longest_one() -> None:
    group = scored_group(0, [1, 1], lengths=[2, 10])
    config = KlRewardConfig(kind="reward", coef=0.5, adaptive=AdaptiveKlConfig(target=1.0, horizon=1000))
    algorithm = build(GrpoConfig(kind="grpo", kl=config))
    far = estimates_of(group, distance=0.0)
    near = (far.reference_logprobs or ())[0]
    algorithm.assign([group], replace(far, reference_logprobs=(near - np.float32(2.2), (far.logprobs or ())[1])))
    # Means 2.2 and 0: 1.1 is a tenth above the target. The mean of all tokens would be far below it.
    assert algorithm.kl_coef == pytest.approx(0.5 * (1 + 0.1 * 2 / 1000), rel=1e-6)


def test_kl_in_the_loss_leaves_rewards_alone_and_gives_the_trainer_the_reference() -> None:
    group = scored_group(0, [1, 0], lengths=[3, 5])
    near = GrpoConfig(kind="grpo", kl=KlLossConfig(kind="loss"))
    estimates = estimates_of(group, distance=0.2)
    samples = build(near).assign([group], estimates)
    plain = build(GrpoConfig(kind="grpo")).assign([group], NOTHING)
    assert [s.advantages.tolist() for s in samples] == [s.advantages.tolist() for s in plain]
    assert [s.reference_logprobs for s in samples] == list(estimates.reference_logprobs or ())


def test_the_length_penalty_has_the_golden_values() -> None:
    lengths = np.array([100, 16384, 18432, 20480])
    penalty = length_penalty(lengths, max_tokens=20480, buffer_tokens=4096, factor=1.0)
    assert penalty.tolist() == pytest.approx([0, 0, -0.5, -1])
    assert length_penalty(np.array([8]), max_tokens=10, buffer_tokens=4, factor=3.0).tolist() == [-1.5]


def test_the_length_penalty_of_an_episode_is_that_of_its_longest_row() -> None:
    """Ten rows of 500 tokens, each under a limit of 1,000, cost nothing; one of 900 costs half, whatever the others."""
    config = GroupConfig(kind="rloo", overlong=OverlongConfig(buffer_tokens=200, factor=1.0))
    algorithm = PolicyGradient(config, max_response_tokens=1000)

    def rewards(*episodes: list[int]) -> list[float]:
        scored = ScoredGroup(
            group=RolloutGroup(prompt=make_prompt(), rollouts=tuple(in_rows(sizes) for sizes in episodes)),
            scores=(Score(value=1.0, components={}),) * len(episodes),
        )
        samples = algorithm.assign([scored], NOTHING)
        return [float(sample.advantages[-1]) for sample in samples]

    assert rewards([500] * 10, [10]) == [0.0, 0.0]
    assert rewards([500] * 4 + [900], [10]) == pytest.approx([-0.5, 0.5])
    assert length_penalty(np.array([5000]), max_tokens=1000, buffer_tokens=200, factor=0.5).tolist() == [-0.5]


def in_rows(sizes: list[int]) -> Rollout:
    """Return an episode whose rows each have one given token and this many that the policy chose."""
    starts = np.cumsum([0, *(size + 1 for size in sizes)]).tolist()
    mask = np.ones(starts[-1], np.bool_)
    mask[starts[:-1]] = False
    turns = tuple(Turn(start=start + 1, end=end, kind=TurnKind.SAMPLED) for start, end in pairwise(starts))
    return make_rollout(range(len(mask)), loss_mask=mask, episode=Episode(turns=turns, rows=tuple(starts[:-1])))


@pytest.mark.parametrize(
    ("scores", "overlong", "tokens"),
    [
        # 0.7 + 0.2 + 0.1 of a composed reward is less than 1 by a rounding error.
        ((0.7 + 0.2 + 0.1, 0.0), None, None),
        ((1.0, 0.0), OverlongConfig(buffer_tokens=3, factor=0.5), None),
        ((1.0, 0.0), None, (-0.5, 0.0)),
    ],
    ids=["rounding", "overlong", "rewards of tokens"],
)
def test_prime_labels_answers_as_an_evaluation_grades_them(
    scores: tuple[float, float], overlong: OverlongConfig | None, tokens: tuple[float, ...] | None
) -> None:
    """A right answer stays one when its reward is shaped: rounding, length and rewards of tokens do not count."""
    group = scored_group(0, scores, lengths=[3, 3])
    group = replace(group, scores=(replace(group.scores[0], tokens=tokens), group.scores[1]))
    algorithm = PolicyGradient(PrimeConfig(kind="prime", overlong=overlong), max_response_tokens=4)
    samples = algorithm.assign([group], Estimates(values=(np.zeros(3, np.float32),) * 2))
    assert [grade([group], right_from=1.0).overall.accuracy] == [0.5]
    returns = np.array([sample.returns for sample in samples])
    # The cross-entropy of probability 1/2, negative for the wrong answer.
    assert returns[:, -1].tolist() == pytest.approx([np.log(2), -np.log(2)])


@pytest.mark.parametrize(("kl", "direction"), [(0.0, -1), (0.05, -1), (0.1, 0), (0.11, 1), (5.0, 1)])
def test_the_coefficient_follows_the_distance_by_a_fifth_at_most(kl: float, direction: int) -> None:
    assert adapted_kl_coef(0.001, ADAPTIVE, kl=0.3, num_sequences=1024) == pytest.approx(0.00102048, abs=1e-10)
    change = adapted_kl_coef(1.0, ADAPTIVE, kl=kl, num_sequences=10_000) - 1
    assert change * direction >= 0
    assert (change == 0) == (direction == 0)
    assert abs(change) <= 0.2 + 1e-12


def test_sppo_aims_at_the_golden_log_ratios() -> None:
    credit = last_token_credit(SppoConfig(kind="sppo"), scored_group(0, [1, 0, 0, 0]))
    assert credit == pytest.approx([0.642626, -0.357374, -0.357374, -0.357374], abs=1e-6)


def pairs_of_tokens(group: ScoredGroup, last: list[float]) -> tuple[np.ndarray, ...]:
    """Log-probabilities, 0 but for the last token of each rollout. The first token, not the policy's, is ignored."""
    arrays = []
    for rollout, number in zip(group.group.rollouts, last, strict=True):
        array = np.zeros(rollout.num_tokens, np.float32)
        array[0], array[-1] = 7.0, number
        arrays.append(array)
    return tuple(arrays)


def test_online_dpo_averages_over_pairs_and_replaces_ties() -> None:
    config = OnlineDpoConfig(kind="online_dpo")
    algorithm = build(config)
    groups = [scored_group(0, [1.0, 0.0]), scored_group(1, [0.0, 0.0, 2.0])]
    tie = scored_group(2, [1.0, 1.0])
    assert [algorithm.keeps(group) for group in (*groups, tie)] == [True, True, False]
    assert algorithm.take_dropped() == {"equal": 1}
    nothing = tuple(array for group in groups for array in pairs_of_tokens(group, [0.0] * len(group.scores)))
    estimates = Estimates(logprobs=nothing, reference_logprobs=nothing)
    push = 0.1 * 0.5 * 5 / 2
    credit = last_token_credit(config, *groups, estimates=estimates)
    assert credit == pytest.approx([push, -push, -push, 0, push])
