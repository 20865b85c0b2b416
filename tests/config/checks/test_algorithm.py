"""Combinations of an algorithm with the rest of a recipe: what makes no sense is refused with the way out."""

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


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (
            "{kind: grpo, loss: {kind: gspo}}",
            "algorithm.aggregation: token_mean weighs sequences by their length, but gspo weighs them equally; "
            "set seq_mean_token_mean",
        ),
        (
            "{kind: grpo, loss: {kind: sapo}}",
            "algorithm.aggregation: token_mean weighs sequences by their length, but sapo weighs them equally; "
            "set seq_mean_token_mean",
        ),
        (
            "{kind: grpo, loss: {kind: gmpo}, aggregation: token_sum}",
            "algorithm.aggregation: token_sum weighs sequences by their length, but gmpo weighs them equally; "
            "set seq_mean_token_mean",
        ),
        (
            "{kind: grpo, aggregation: seq_mean_token_sum_norm}",
            "algorithm.horizon_tokens: missing; seq_mean_token_sum_norm divides by it, 100 "
            "(sampling.max_response_tokens) is usual",
        ),
        (
            "{kind: grpo, horizon_tokens: 5}",
            "algorithm.horizon_tokens: 5 has no effect with token_mean; remove it or set seq_mean_token_sum_norm",
        ),
        (
            "{kind: grpo, correction: {kind: icepop, min_weight: 2, max_weight: 1}}",
            "algorithm.correction.min_weight: 2.0 is not below max_weight 1.0",
        ),
        (
            "{kind: grpo, correction: {kind: mask, lowest: 1, highest: 1}}",
            "algorithm.correction.lowest: 1.0 is not below highest 1.0",
        ),
        (
            "{kind: grpo, mismatch: {warn_above: 0.02}}",
            "algorithm.mismatch.warn_above: 0.02 is not below act_above 0.01",
        ),
        (
            "{kind: grpo, mismatch: {action: correct}, correction: {kind: tis}}",
            "algorithm.mismatch.action: correct switches a correction on, but tis is on from the start; "
            "choose warn or stop, or remove algorithm.correction",
        ),
        (
            "{kind: grpo, filter: {lowest_mean: 0.9, highest_mean: 0.1}}",
            "algorithm.filter.lowest_mean: 0.9 is not below highest_mean 0.1",
        ),
        (
            "{kind: grpo, overlong: {}}",
            "algorithm.overlong: does nothing; set buffer_tokens or is_filtered, or remove the section",
        ),
        (
            "{kind: grpo, overlong: {buffer_tokens: 100}}",
            "algorithm.overlong.buffer_tokens: 100 penalises every response; "
            "it must be below sampling.max_response_tokens 100",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line_with_the_way_out(algorithm: str, expected: str) -> None:
    assert problems(algorithm) == [expected]


def test_a_loss_without_a_ratio_is_for_one_update_a_step() -> None:
    algorithm = "{kind: gpg, loss: {kind: gpg}}"
    (line,) = problems(algorithm, train="{prompts_per_step: 8, prompts_per_update: 4}")
    assert line == (
        "algorithm.loss.kind: gpg has no ratio to the policy that sampled, but train.prompts_per_update and "
        "train.epochs make 2 updates a step; remove them or choose ppo"
    )


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
