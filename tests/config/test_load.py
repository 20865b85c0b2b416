"""Every mistake a recipe can contain is one line with the key and the way out, and all are reported at once."""

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


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.prompts_per_stp=3", "train.prompts_per_stp: unknown key; did you mean prompts_per_step?"),
        ("algorithm.loss={kind: ppo, clip_hi: 0.3}", "algorithm.loss.clip_hi: unknown key; did you mean clip_high?"),
        ("trian={}", "trian: unknown key; did you mean train?"),
        ("pools.train.gpu_per_node=2", "pools.train.gpu_per_node: unknown key; did you mean gpus_per_node?"),
        ("algorithm.kind=grppo", "algorithm.kind: unknown 'grppo'; did you mean grpo?"),
        (
            "train.prompts_per_step=many",
            "train.prompts_per_step: 'many': input should be a valid integer, unable to parse string as an integer",
        ),
        ("run.device=tpu", "run.device: 'tpu': input should be 'cpu' or 'cuda'"),
        ("roles.actor.pool=gpus", "roles.actor.pool: no pool named gpus; pools are rollout, train"),
        (
            "roles.actor.tensor=3",
            "roles.actor: tensor 3 * pipeline 1 = 3 does not divide the 2 gpus of pool train",
        ),
        (
            "roles.actor.tensor=3",
            "roles.actor.tensor: 3 does not divide the model's 4 attention heads; choose one of 1, 2, 4",
        ),
        (
            "roles.actor={pool: train, pipeline: 2, virtual_pipeline: 3}",
            "roles.actor.pipeline: pipeline 2 * virtual_pipeline 3 = 6 does not divide the model's 4 layers",
        ),
        ("sampling.rollouts_per_prompt=1", "sampling.rollouts_per_prompt: 1 leaves nothing to compare in a group"),
        ("roles.rollout=null", "roles.rollout: missing; grpo needs engines that generate"),
        ("train.prompts_per_update=3", "train.prompts_per_update: 3 does not divide train.prompts_per_step 8"),
        ("train.tokens_per_micro_batch=20", "train.tokens_per_micro_batch: 20 cannot hold one sequence"),
        ("sampling.max_response_tokens=60", "sampling.max_response_tokens: prompt 16 + response 60 = 76 tokens exceed"),
        ("train.optimizer.warmup_steps=20", "train.optimizer.warmup_steps: 20 is more than run.steps 10"),
        ("data.train=[nowhere.parquet]", "data.train: nowhere.parquet does not exist"),
        ("model.path=nowhere", "model.path: nowhere/config.json does not exist"),
        ("run.name=a/b", "run.name: 'a/b': string should match pattern"),
        ("pools.spare={gpus_per_node: 1}", "pools.spare: no role uses this pool"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(recipe_path: Path, override: str, expected: str) -> None:
    assert any(line.startswith(expected) for line in problems(recipe_path, override)), problems(recipe_path, override)


def test_all_mistakes_are_reported_at_once(recipe_path: Path) -> None:
    lines = problems(recipe_path, "train.a=1", "run.b=2", "algorithm.entropy_coef=-1", "sampling.temperature=0")
    assert len(lines) == 4


def test_cross_checks_are_reported_at_once(recipe_path: Path) -> None:
    lines = problems(recipe_path, "roles.actor.pool=x", "data.eval=[y]", "train.prompts_per_update=3")
    assert len(lines) >= 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: {name: a\n", "not valid YAML"),
        ("run: {name: a}\nrun: {name: b}\n", "key run is given twice"),
        ("a: &x [1]\nb: *x\n", "aliases are not supported"),
        ("a: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
        ("\trun: 1\n", "not valid YAML: line 1"),
        ("- 1\n- 2\n", "not a mapping of sections"),
        ("", "not a mapping of sections"),
        ("a: " + "x" * (1 << 20), "a recipe has at most"),
    ],
)
def test_yaml_traps_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    (line,) = problems(path)
    assert expected in line


def test_a_byte_order_mark_is_harmless(recipe_path: Path) -> None:
    recipe_path.write_bytes(b"\xef\xbb\xbf" + recipe_path.read_bytes())
    assert load_recipe(recipe_path).run.name == "test"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert problems(tmp_path / "none.yaml") == ["no such file"]


@pytest.mark.parametrize("override", ["a", "=1", "a..b=1", "run.name.x=1"])
def test_an_override_that_names_no_key_is_refused(recipe_path: Path, override: str) -> None:
    assert len(problems(recipe_path, override)) == 1


def test_the_words_of_other_trainers_lead_to_keys_that_exist() -> None:
    known = {".".join(key) for key in keys_of(Recipe)}
    assert set(FOREIGN_WORDS.values()) <= known
