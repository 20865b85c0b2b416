"""`validate --explain` names the place of every value."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megarl.cli import main as cli
from megarl.cli.recipe import print_explanation, telling_rows
from tests.repository import ROOT

GOOD = ROOT / "tests" / "config" / "good.yaml"


def test_every_value_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "heir.yaml"
    recipe.write_text(f"extends: {GOOD}\nsampling: {{temperature: 0.7}}\n")
    print_explanation(recipe, ["run.seed=5"])
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines["sampling.temperature"] == ["0.7", f"{recipe}:2"]
    assert lines["run.name"] == ["test", f"{GOOD}:2"]
    assert lines["run.seed"] == ["5", "--set"]
    assert lines["sampling.top_k"] == ["null", "default"]
    assert lines["data.train"] == ["[train.parquet]", f"{GOOD}:4"]


RECIPE = """\
run: {name: sums, steps: 2, device: cpu, folder: FOLDER/runs}
model: {path: FOLDER/model}
data: {train: [FOLDER/train.parquet], max_prompt_tokens: 64}
pools: {train: {gpus_per_node: 1}, rollout: {gpus_per_node: 1}}
roles: {actor: {pool: train}, rollout: {pool: rollout}}
algorithm: {kind: grpo}
sampling: {max_response_tokens: 96}
environment: {kind: class, path: CALCULATOR, max_turns: 3, max_result_tokens: 32}
train: {prompts_per_step: 8, tokens_per_micro_batch: 256}
"""


@pytest.fixture(scope="module")
def tool_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    assert cli.run(["data", "make", "calculator", "--out", str(folder)]) == 0
    path = folder / "recipe.yaml"
    text = RECIPE.replace("FOLDER", str(folder)).replace("CALCULATOR", str(ROOT / "examples" / "calculator.py"))
    path.write_text(text)
    return path


@pytest.mark.patient
def test_validate_rehearses_the_turns_of_a_recipe_with_tools(
    tool_recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["validate", str(tool_recipe)]) == 0
    out = capsys.readouterr().out
    assert "5 synthetic turns: history is append-only" in out
    assert f"{tool_recipe}: ok: grpo" in out


@pytest.mark.patient
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("environment.path=BROKEN", "environment.path: no class in"),
        ("environment.max_turns=60", "environment.max_turns: 60 turns have at least"),
        ("environment={kind: mcp, servers: {a: 'http://127.0.0.1:9/mcp'}, call_deadline_s: 5}", "does not answer"),
    ],
)
def test_an_environment_that_cannot_run_is_refused_at_validation(
    change: str, told: str, tool_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("class Sums:\n    pass\n")
    assert cli.run(["validate", str(tool_recipe), "--set", change.replace("BROKEN", str(broken))]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("1 problem(s)")
    assert told in lines[1]
    assert len(lines) == 2


def test_a_long_read_is_told_by_rows_and_not_for_every_chunk() -> None:
    told: list[str] = []
    logger = logging.getLogger("megarl.data.prompts")
    for every_s, expected in ((0.0, ["read 4,096 of 1,000,000 rows", "read 8,192 of 1,000,000 rows"]), (60.0, [])):
        told.clear()
        with telling_rows(told.append, every_s=every_s):
            for num_rows in (4096, 8192):
                logger.info("tokenised num_rows=%d of=%d", num_rows, 1_000_000)
        logger.info("tokenised num_rows=%d of=%d", 1, 1)
        assert told == expected
