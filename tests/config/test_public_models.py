"""The shapes of public models have exactly the parameters that were published."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.hub import PUBLIC_MODELS, public_model_name
from megarl.weights.layouts.canonical import num_active_parameters, num_parameters

PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-32b-128k": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
}


def test_every_entry_is_counted() -> None:
    assert set(PARAMETERS) == set(PUBLIC_MODELS)


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    assert num_parameters(PUBLIC_MODELS[name]) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "active"),
    # Published as 3.3B, 22B and 2.7B; a token meets all of a dense model.
    [
        ("qwen3-30b-a3b", 3_353_032_704),
        ("qwen3-235b-a22b", 22_190_763_520),
        ("qwen1.5-moe-a2.7b", 2_689_173_504),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_a_token_meets_as_many_parameters_as_was_published(name: str, active: int) -> None:
    assert num_active_parameters(PUBLIC_MODELS[name]) == active


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("models/Qwen2.5-72B", "qwen2.5-72b"),
        ("Qwen3-8B-Base", "qwen3-8b"),
        ("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-405B", "llama-3.1-405b"),
        ("Qwen/Qwen2.5-Math-7B", None),
        ("models/mine", None),
    ],
)
def test_folders_and_hub_names_are_recognised(path: str, name: str | None) -> None:
    assert public_model_name(Path(path)) == name
