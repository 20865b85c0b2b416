from __future__ import annotations

import pytest

from megarl.config.checks.splits import (
    check_engine_experts,
    check_engine_split,
    check_expert_ranks,
    check_megatron_split,
    check_stages,
)
from megarl.config.roles import ModelParallelConfig
from megarl.errors import ConfigError
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from tests.weights.reference import make_shape


def test_a_recipe_and_a_layout_are_refused_in_the_same_words() -> None:
    shape, layout = make_shape(layers=3), MegatronParallel(tensor=3, pipeline=2, virtual_pipeline=2)
    role = ModelParallelConfig(tensor=3, pipeline=2, virtual_pipeline=2)
    problems = list(check_megatron_split(shape, role, prefix="roles.actor."))
    assert [problem.key for problem in problems] == ["roles.actor.tensor", "roles.actor.tensor", "roles.actor.pipeline"]
    with pytest.raises(ConfigError) as caught:
        megatron_layout(shape, layout, dtype="float32")
    assert [problem.message for problem in caught.value.problems] == [problem.message for problem in problems]


def test_a_split_that_divides_has_no_problems() -> None:
    shape, split = make_shape("qwen3_moe"), MegatronParallel(tensor=2, pipeline=2, data=2, expert=2)
    assert list(check_stages(split)) == []
    assert list(check_expert_ranks(split, stage_ranks=4)) == []
    assert list(check_megatron_split(shape, split)) == []
    assert list(check_engine_experts(tensor=2, expert=2)) == []
    assert list(check_engine_split(shape, tensor=2, expert=2, pads_vocabulary=False)) == []


def test_only_an_engine_that_does_not_pad_refuses_a_vocabulary() -> None:
    shape = make_shape(heads=6, kv_heads=6, ffn=96)
    (problem,) = check_engine_split(shape, tensor=3, expert=1, pads_vocabulary=False)
    assert str(problem) == f"tensor: 3 does not divide the model's vocabulary of {shape.vocab}, padded to 128"
    assert list(check_engine_split(shape, tensor=3, expert=1, pads_vocabulary=True)) == []
