"""The inputs of a run: how many steps its epochs are, with rows that are dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config.algorithm import FunctionLossConfig, GrpoConfig
from megarl.config.document import Tree
from megarl.config.recipe import Recipe
from megarl.config.reward import FunctionRewardConfig
from megarl.run.inputs import check_weights, digest_code, read_inputs
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from tests import tiny_models

NUM_ROWS = 10


@pytest.fixture
def make_recipe(tmp_path: Path) -> Callable[..., Recipe]:
    rows = [{"prompt": f"{number}+1=", "response": "2"} for number in range(NUM_ROWS - 1)]
    rows.append({"prompt": "1+" * 30, "response": "2"})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    write_tiny_model(tmp_path / "model", TinyShape(), seed=1)

    def make(*, run: dict[str, Tree], data: dict[str, Tree]) -> Recipe:
        return Recipe.model_validate(
            {
                "run": {"name": "test", "device": "cpu", **run},
                "model": {"path": tmp_path / "model"},
                "data": {"train": [tmp_path / "train.parquet"], **data},
                "pools": {"train": {"gpus_per_node": 1}},
                "roles": {"actor": {"pool": "train"}},
                "algorithm": {"kind": "sft"},
                "train": {"prompts_per_step": 4},
            }
        )

    return make


@pytest.mark.parametrize(
    ("run", "data", "steps"),
    [
        ({"epochs": 1}, {}, 3),  # 10 rows in steps of 4
        ({"epochs": 2}, {}, 5),
        ({"epochs": 2, "steps": 4}, {}, 4),
        ({"epochs": 2, "steps": 40}, {}, 5),
        ({"steps": 7}, {}, 7),
        ({"epochs": 4}, {"max_prompt_tokens": 20, "overlong_prompts": "drop"}, 9),  # 9 rows are left
    ],
)
def test_epochs_are_as_many_steps_as_show_every_prompt_so_often(
    make_recipe: Callable[..., Recipe], run: dict[str, Tree], data: dict[str, Tree], steps: int
) -> None:
    recipe = make_recipe(run=run, data=data)
    num_prompts = len(read_inputs(recipe).train.prompts)
    assert recipe.with_steps(num_prompts).run.total_steps == steps
    assert recipe.with_steps(num_prompts).with_steps(num_prompts) == recipe.with_steps(num_prompts)


def test_an_edit_of_the_users_code_changes_what_kept_answers_and_adopted_ranks_are_known_by(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """Files that the recipe names and what they import; others of the same folder do not count."""
    code = tmp_path / "code"
    files = ("loss.py", "reward.py", "helper.py", "package/__init__.py", "package/inner.py", "unused.py")
    (code / "package").mkdir(parents=True)
    for name in files:
        (code / name).write_text("x = 1\n")
    (code / "reward.py").write_text("import json, helper\n\ndef compute_score(*args): return 1.0\n")
    (code / "helper.py").write_text("from package import inner\n")
    (code / "package/inner.py").write_text("from . import inner  # a circle\n")
    recipe = make_recipe(run={"steps": 1}, data={})
    recipe = recipe.model_copy(
        update={
            "reward": FunctionRewardConfig(kind="function", path=code / "reward.py"),
            "algorithm": GrpoConfig(
                kind="grpo", loss=FunctionLossConfig(kind="function", code=f"{code / 'loss.py'}:loss")
            ),
        }
    )
    before = digest_code(recipe)
    for name in files:
        text = (code / name).read_text()
        (code / name).write_text(f"{text}# edited\n")
        assert (digest_code(recipe) == before) == (name == "unused.py"), name
        (code / name).write_text(text)
    assert digest_code(recipe) == before
    inputs = read_inputs(make_recipe(run={"steps": 1}, data={}))
    edited = replace(inputs, code=before)
    assert inputs.answers_digest("recipe") != edited.answers_digest("recipe")


def test_what_sees_images_is_not_read_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = tiny_models.write_tiny_model(tmp_path, "qwen3_5_moe", layers=2)
    with caplog.at_level(logging.INFO):
        check_weights(tmp_path, shape)
    (message,) = (record.getMessage() for record in caplog.records if "not read" in record.getMessage())
    assert "tensors=21 such_as=model.visual." in message
