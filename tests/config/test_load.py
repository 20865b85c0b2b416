"""Files and overrides as they are read; `test_bad` has the mistakes that a recipe can contain."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.algorithm import GrpoConfig, PpoLossConfig
from megarl.config.load import FOREIGN_WORDS, keys_of, load_recipe
from megarl.config.recipe import Recipe
from megarl.errors import ConfigError
from tests.config.conftest import write_model

RECIPE = """
run: {name: test, steps: 10, device: cpu, folder: FOLDER/runs}
model: {path: FOLDER/model}
data: {train: [FOLDER/train.parquet], eval: [FOLDER/train.parquet], max_prompt_tokens: 16}
pools: {train: {gpus_per_node: 2}, rollout: {gpus_per_node: 1}}
roles:
  actor: {pool: train, tensor: 2}
  rollout: {pool: rollout}
algorithm: {kind: grpo}
sampling: {max_response_tokens: 8}
train: {prompts_per_step: 8, tokens_per_micro_batch: 64}
evaluation: {}
"""


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    (tmp_path / "train.parquet").touch()
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("FOLDER", str(tmp_path)))
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return [str(problem) for problem in caught.value.problems]


def test_a_good_recipe_loads_and_is_frozen(recipe_path: Path) -> None:
    recipe = load_recipe(
        recipe_path, ["algorithm.loss={kind: ppo, clip_high: 0.28}", "train.optimizer.learning_rate=1e-6"]
    )
    assert isinstance(recipe.algorithm, GrpoConfig)
    assert recipe.algorithm.loss == PpoLossConfig(kind="ppo", clip_high=0.28)
    assert recipe.train.optimizer.learning_rate == 1e-6
    assert recipe.data_parallel == 1
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.prompts_per_step = 3  # type: ignore[misc]


def test_a_byte_order_mark_is_harmless(recipe_path: Path) -> None:
    recipe_path.write_bytes(b"\xef\xbb\xbf" + recipe_path.read_bytes())
    assert load_recipe(recipe_path).run.name == "test"


def test_a_file_that_is_missing_empty_or_far_too_large_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    for text, expected in (("", "not a mapping of sections"), ("a: " + "x" * (1 << 20), "a recipe has at most")):
        path.write_text(text)
        (line,) = problems(path)
        assert expected in line
    assert problems(tmp_path / "none.yaml") == ["no such file"]


@pytest.mark.parametrize("override", ["a", "=1", "a..b=1", "run.name.x=1"])
def test_an_override_that_names_no_key_is_refused(recipe_path: Path, override: str) -> None:
    assert len(problems(recipe_path, override)) == 1


def test_the_words_of_other_trainers_lead_to_keys_that_exist() -> None:
    known = {".".join(key) for key in keys_of(Recipe)}
    assert set(FOREIGN_WORDS.values()) <= known
