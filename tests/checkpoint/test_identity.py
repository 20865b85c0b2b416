from __future__ import annotations

from pathlib import Path

import pytest

from megarl.checkpoint.identity import digest_of
from megarl.config.recipe import Recipe


def make_recipe(**sections: object) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "sample", "steps": 2},
            "model": {"path": "model"},
            "data": {"train": ["train.parquet"]},
            "pools": {"train": {"gpus_per_node": 1}},
            "roles": {"actor": {"pool": "train"}},
            "algorithm": {"kind": "sft"},
            "train": {"prompts_per_step": 8},
            **sections,
        }
    )


@pytest.mark.parametrize(
    "sections",
    [
        {"run": {"name": "other", "steps": 9, "device": "cpu", "folder": Path("elsewhere")}},
        {"pools": {"gpus": {"gpus_per_node": 8}}, "roles": {"actor": {"pool": "gpus", "tensor": 4, "pipeline": 2}}},
        {"train": {"prompts_per_step": 8, "tokens_per_micro_batch": 100, "operation_timeout_s": 5}},
        {"checkpoint": {"keep_last": 7}},
        {"data": {"train": ["moved/train.parquet"]}},
    ],
)
def test_layout_length_and_places_may_change(sections: dict[str, object]) -> None:
    assert digest_of(make_recipe(**sections)) == digest_of(make_recipe())


@pytest.mark.parametrize(
    "sections",
    [
        {"run": {"name": "sample", "steps": 2, "seed": 5}},
        {"train": {"prompts_per_step": 16}},
        {"train": {"prompts_per_step": 8, "optimizer": {"learning_rate": 1e-3}}},
        {"algorithm": {"kind": "grpo"}},
        {"sampling": {"temperature": 0.5}},
        {"data": {"train": ["train.parquet"], "is_shuffled": False}},
    ],
)
def test_what_is_trained_on_and_how_may_not(sections: dict[str, object]) -> None:
    assert digest_of(make_recipe(**sections)) != digest_of(make_recipe())
