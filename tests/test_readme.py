"""What the README shows is accepted by the program it describes."""

from __future__ import annotations

import re

import yaml

from bench.figures import RECORDED, readme_table
from megarl import errors
from megarl.config.recipe import Recipe
from tests.repository import ROOT

README = (ROOT / "README.md").read_text()


def test_the_recipe_of_the_readme_is_the_quickstart() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    shown = Recipe.model_validate(yaml.safe_load(block))
    shipped = Recipe.model_validate(yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text()))
    assert shown == shipped


def test_every_exit_code_is_explained() -> None:
    explained = {int(code) for code in re.findall(r"\| (\d+) \|", README)}
    raised = {
        error.exit_code
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.MegarlError)
    }
    assert raised <= explained


def test_every_figure_says_where_when_and_how_it_was_measured() -> None:
    machines, figures = RECORDED["machines"], RECORDED["figures"]
    for name, figure in figures.items():
        assert {"value", "unit", "by", "machine", "date", "commit"} <= set(figure), name
        assert figure["machine"] in machines, name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", figure["date"]), name


def test_the_table_of_figures_is_the_recorded_one() -> None:
    table = "\n".join(readme_table())
    assert table in README, "write it with make docs"
