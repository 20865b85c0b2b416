"""Combinations of an algorithm with the rest of a recipe. What makes no sense is in tests/config/bad as well."""

from __future__ import annotations

import pytest
import yaml

from megarl.config.checks.algorithm import check_algorithm
from megarl.config.recipe import Recipe

RECIPE = """
run: {name: test, steps: 10}
model: {path: model}
data: {train: [train.parquet]}
pools: {gpus: {gpus_per_node: 2}}
roles: {actor: {pool: gpus}, rollout: {pool: gpus}}
train: {prompts_per_step: 8}
sampling: {max_response_tokens: 100}
"""


def problems(algorithm: str, **sections: str) -> list[str]:
    """Of this algorithm, with some sections of the recipe replaced; all in YAML."""
    tree = yaml.safe_load(RECIPE) | {key: yaml.safe_load(text) for key, text in sections.items()}
    recipe = Recipe.model_validate(tree | {"algorithm": yaml.safe_load(algorithm)})
    return [str(problem) for problem in check_algorithm(recipe)]


@pytest.mark.parametrize(
    "algorithm",
    [
        "{kind: grpo, normalize_std: false}",
        "{kind: rloo, loss: {kind: cispo, clip_low: 1.0}}",
        "{kind: opo, loss: {kind: sapo}, aggregation: seq_mean_token_mean}",
        "{kind: gpg, loss: {kind: gpg}}",
        "{kind: grpo_passk, correction: {kind: tis}}",
        "{kind: reinforce_pp, gamma: 0.99, correction: {kind: icepop, level: sequence}}",
        "{kind: reinforce_pp_baseline, correction: {kind: mask, measure: k1, lowest: -1, highest: 1}}",
        "{kind: grpo, loss: {kind: gspo}, aggregation: seq_mean_token_mean}",
        "{kind: grpo, loss: {kind: gmpo}, aggregation: seq_mean_token_mean}",
        "{kind: grpo, aggregation: seq_mean_token_sum_norm, horizon_tokens: 100}",
        "{kind: grpo, filter: {lowest_mean: 0.1, highest_mean: 0.9}, overlong: {buffer_tokens: 20, is_filtered: true}}",
    ],
)
def test_what_makes_sense_is_accepted(algorithm: str) -> None:
    assert problems(algorithm) == []


def test_the_length_penalty_does_not_reach_gdpo() -> None:
    (line,) = problems(
        "{kind: gdpo, weights: {right: 1.0}, overlong: {buffer_tokens: 10}}", reward="{kind: function, path: reward.py}"
    )
    assert line.startswith("algorithm.overlong.buffer_tokens: changes the score, which gdpo does not use")


@pytest.mark.parametrize("kind", ["grpo", "rloo", "opo", "gpg", "reinforce_pp_baseline", "grpo_passk"])
def test_a_group_of_one_is_refused_where_rollouts_are_compared(kind: str) -> None:
    (line,) = problems(f"{{kind: {kind}}}", sampling="{rollouts_per_prompt: 1}")
    assert line == f"sampling.rollouts_per_prompt: 1 leaves nothing to compare in a group; {kind} needs at least 2"


@pytest.mark.parametrize("kind", ["reinforce_pp", "remax"])
def test_some_need_no_group_but_a_filter_does(kind: str) -> None:
    assert problems(f"{{kind: {kind}}}", sampling="{rollouts_per_prompt: 1}") == []
    (line,) = problems(f"{{kind: {kind}, filter: {{}}}}", sampling="{rollouts_per_prompt: 1}")
    assert line.startswith("algorithm.filter: drops every group of one")
