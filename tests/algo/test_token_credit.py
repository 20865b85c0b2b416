"""Credit that is assigned in parts, where the numbers of tokens are, against that of a step in one place."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algo.algorithm import PolicyGradient
from megarl.algo.token_credit import CreditTask, PartCredit
from megarl.config.algorithm import (
    AdaptiveKlConfig,
    DpoConfig,
    EstimatorConfig,
    GaeConfig,
    GrpoConfig,
    KlRewardConfig,
    OnlineDpoConfig,
    PairConfig,
    PrimeConfig,
    ReinforcePpConfig,
    RemaxConfig,
    SpinConfig,
)
from megarl.tokens import ColumnName, SampleColumn, by_sample, repeated
from megarl.types import Estimates, FloatArray, Score, ScoredGroup, TrainSample
from tests.algo.groups import scored_group, with_baseline

MASKED = Score(value=0.0, components={}, is_masked=True)
KL = KlRewardConfig(kind="reward", coef=0.5, estimate="k3", adaptive=AdaptiveKlConfig(target=0.1, horizon=10))
CONFIGS: dict[str, EstimatorConfig] = {
    "gae": GaeConfig(kind="gae", gamma=0.99, lam=0.9),
    "gae_kl": GaeConfig(kind="gae", lam=0.95, kl=KL),
    "reinforce_pp": ReinforcePpConfig(kind="reinforce_pp", gamma=0.98, kl=KL),
    "remax": RemaxConfig(kind="remax", kl=KL),
    "grpo": GrpoConfig(kind="grpo", kl=KL),
    "prime": PrimeConfig(kind="prime", gamma=0.9, process_coef=2.0),
    "online_dpo": OnlineDpoConfig(kind="online_dpo", kl=KlRewardConfig(kind="reward", coef=0.1)),
    "simpo": OnlineDpoConfig(kind="online_dpo", preference="simpo"),
    "spin": SpinConfig(kind="spin", kl=KlRewardConfig(kind="reward", coef=0.1)),
}


def a_step(seed: int) -> tuple[list[ScoredGroup], dict[ColumnName, dict[int, FloatArray]]]:
    """Groups of a step, one rollout of which has no score, and the numbers of all tokens."""
    random = np.random.default_rng(seed)
    groups = []
    for index in range(4):
        lengths = random.integers(2, 9, size=3).tolist()
        group = scored_group(index, random.normal(size=3).tolist(), lengths=lengths)
        rollouts = list(group.group.rollouts)
        rollouts[0] = replace(rollouts[0], loss_mask=repeated(np.True_, lengths[0]))
        group = replace(group, group=replace(group.group, rollouts=tuple(rollouts)))
        groups.append(with_baseline(group, score=0.3, length=3))
    groups[1] = replace(groups[1], scores=(groups[1].scores[0], MASKED, groups[1].scores[2]))
    lengths = [rollout.num_tokens for scored in groups for rollout in scored.group.rollouts]
    names: tuple[ColumnName, ...] = ("old_logprobs", "reference_logprobs", "values")
    columns = {
        name: {i: random.normal(size=length).astype(np.float32) for i, length in enumerate(lengths)} for name in names
    }
    return groups, columns


def in_one_place(
    config: EstimatorConfig, groups: list[ScoredGroup], columns: dict[ColumnName, dict[int, FloatArray]]
) -> tuple[list[TrainSample], PolicyGradient]:
    logprobs, references, values = (tuple(column.values()) for column in columns.values())
    estimates = Estimates(
        logprobs=logprobs,
        reference_logprobs=references,
        values=values if isinstance(config, GaeConfig | PrimeConfig) else None,
    )
    algorithm = PolicyGradient(config, max_response_tokens=16)
    return algorithm.assign(groups, estimates), algorithm


def in_parts(
    config: EstimatorConfig,
    groups: list[ScoredGroup],
    columns: dict[ColumnName, dict[int, FloatArray]],
    owners: list[int],
) -> tuple[list[TrainSample], dict[ColumnName, dict[int, FloatArray]], PolicyGradient]:
    """Return the samples, the columns that the ranks have of them, and the algorithm after it."""
    algorithm = PolicyGradient(config, max_response_tokens=16)
    task = algorithm.credit_task(groups)
    assert task is not None
    rows = np.zeros((len(task.sample_ids), 4))
    parts: list[PartCredit] = []
    for rank in sorted(set(owners)):
        mine = {i for i, owner in enumerate(owners) if owner == rank}
        of_rank: CreditTask = pickle.loads(pickle.dumps(task.among(mine)))
        parts.append(of_rank.compute({name: {i: columns[name][i] for i in mine} for name in task.columns}))
        rows[[task.sample_ids.index(i) for i in of_rank.sample_ids]] = parts[-1].rows
    sums, scales, found = task.sums(rows), task.scales(rows), dict[ColumnName, dict[int, FloatArray]]()
    if scales is not None:
        places = [[task.sample_ids.index(i) for i in part.sample_ids] for part in parts]
        settled = [part.normalise(scales[of_part]) for part, of_part in zip(parts, places, strict=True)]
        found = {name: by_sample(columns[name] for columns, _ in settled) for name in settled[0][0]}
        sizes = np.zeros(len(task.sample_ids))
        for of_part, (_, of_rank_sizes) in zip(places, settled, strict=True):
            sizes[of_part] = of_rank_sizes
        sums = replace(sums, advantages=sizes)
    return algorithm.assign(groups, Estimates(sums=sums)), found, algorithm


@pytest.mark.parametrize("name", CONFIGS)
@given(seed=st.integers(0, 1 << 16), owners=st.lists(st.integers(0, 3), min_size=12, max_size=12))
@settings(max_examples=25, deadline=None)
def test_credit_does_not_depend_on_where_its_numbers_are(name: str, seed: int, owners: list[int]) -> None:
    config = CONFIGS[name]
    groups, columns = a_step(seed)
    expected, whole_step = in_one_place(config, groups, columns)
    samples, found, algorithm = in_parts(config, groups, columns, owners)
    coef = whole_step.kl_coef
    assert algorithm.kl_coef == (None if coef is None else pytest.approx(coef, rel=1e-6))
    assert algorithm.pairs == whole_step.pairs
    assert (algorithm.pairs is not None) == isinstance(config, PairConfig)
    for index, (sample, whole) in enumerate(zip(samples, expected, strict=True)):
        np.testing.assert_array_equal(sample.rollout.loss_mask, whole.rollout.loss_mask)
        advantages = found["advantages"][index] if found else sample.advantages
        np.testing.assert_allclose(advantages, whole.advantages, rtol=1e-5, atol=1e-6)
        if whole.returns is not None:
            np.testing.assert_allclose(found["returns"][index], whole.returns, rtol=1e-6, atol=1e-6)
        if found:  # what is left in the driver says whether there is something to learn
            chosen = whole.advantages[whole.rollout.loss_mask]
            size = np.sqrt(np.square(chosen).mean()) if len(chosen) else 0.0
            np.testing.assert_allclose(sample.advantages, size, rtol=1e-4, atol=1e-6)


def test_the_driver_sends_no_mask_that_has_only_one_value() -> None:
    groups, _ = a_step(0)
    task = PolicyGradient(CONFIGS["gae"], max_response_tokens=16).credit_task(groups)
    assert task is not None
    assert [isinstance(mask, int) for mask in task.masks[:3]] == [True, False, False]


@pytest.mark.parametrize(
    "config",
    [
        GrpoConfig(kind="grpo"),
        GaeConfig(kind="gae", estimator="mine.py:estimate"),
        PrimeConfig(kind="prime", estimator="mine.py:estimate"),
        DpoConfig(kind="dpo", estimator="mine.py:estimate"),
    ],
    ids=lambda config: str(config.kind),
)
def test_ranks_assign_nothing_where_rewards_suffice_or_a_user_compares_all_numbers(config: EstimatorConfig) -> None:
    assert PolicyGradient(config, max_response_tokens=16).credit_task([scored_group(0, [1, 0])]) is None


def test_some_rows_of_samples_are_chosen() -> None:
    numbers = SampleColumn(
        sample_ids=np.array([4, 2, 4], np.int32),
        starts=np.array([0, 2, 3, 5]),
        numbers=np.arange(5, dtype=np.float32),
        firsts=np.array([0, 0, 2], np.int32),
    )
    found = by_sample([numbers.only([4, 7])])
    assert {sample: array.tolist() for sample, array in found.items()} == {4: [0, 1, 3, 4]}
