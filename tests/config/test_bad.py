"""Every recipe in bad/ is refused with exactly the lines it announces in its first comments, and exit code 2."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megarl.cli.main import run
from megarl.config.load import load_recipe

HERE = Path(__file__).parent
RECIPES = sorted((HERE / "bad").glob("*.yaml"))
EXPECT = "# expect: "
MAX_CPU_SECONDS = 2.0
MAX_SECONDS_OF_USER_CODE = 100.0
"""A reward is imported in a process of its own, with a deadline in wall time."""


def expected_lines(recipe: Path, scratch: Path) -> list[str]:
    lines = [line.removeprefix(EXPECT) for line in recipe.read_text().splitlines() if line.startswith(EXPECT)]
    places = {"SCRATCH": scratch, "BAD": HERE / "bad", "HERE": HERE}
    for name, folder in places.items():
        lines = [line.replace(f"{name}/", f"{folder}/") for line in lines]
    return lines


def test_there_are_many_of_them() -> None:
    assert len(RECIPES) >= 60


def test_what_they_extend_is_good(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scratch)
    assert load_recipe(HERE / "good.yaml").run.name == "test"


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.stem for recipe in RECIPES])
def test_a_bad_recipe_gives_exactly_these_lines(
    recipe: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(scratch)
    clock = time.monotonic if recipe.stem.startswith("reward_") else time.process_time
    began = clock()
    assert run(["validate", "--quick", str(recipe)]) == 2
    assert clock() - began < (MAX_SECONDS_OF_USER_CODE if clock is time.monotonic else MAX_CPU_SECONDS)
    title, *lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("  ") for line in lines] == expected_lines(recipe, scratch)
    assert title.endswith(f": {len(lines)} problem(s)")
