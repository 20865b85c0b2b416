"""The shapes of public models have exactly the parameters that were published."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from megarl.config.catalogue import CATALOGUE, catalogue_name
from megarl.weights.canonical import canonical_tensors

PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
}


def test_every_entry_is_counted() -> None:
    assert set(PARAMETERS) == set(CATALOGUE)


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    assert sum(prod(spec.shape) for spec in canonical_tensors(CATALOGUE[name]).values()) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("models/Qwen2.5-72B", "qwen2.5-72b"),
        ("Qwen3-8B-Base", "qwen3-8b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-405B", "llama-3.1-405b"),
        ("Qwen/Qwen2.5-Math-7B", None),
        ("models/mine", None),
    ],
)
def test_folders_and_hub_names_are_recognised(path: str, name: str | None) -> None:
    assert catalogue_name(Path(path)) == name
