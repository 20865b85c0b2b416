from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.browser import open_browser
from megarl.cli.main import run
from megarl.config.recipe import Recipe
from megarl.observe.observing import observing
from megarl.tools.page.run_data import RunFolder, compare_overviews
from tests.observe.samples import ListSink, evaluated, make_recipe, step_summary
from tests.tools.page.runs import make_run


def write_run(folder: Path, name: str, *, reward: float, component: str = "format", **sections: object) -> Path:
    fields = make_recipe(folder).model_dump()
    fields["run"]["name"] = name
    recipe = Recipe.model_validate({**fields, **sections})
    with observing(recipe, display=ListSink()) as observer:
        for step in (1, 2):
            summary = step_summary(step, reward=reward * step)
            assert summary.rollouts is not None
            rollouts = replace(summary.rollouts, component_means={component: 0.9})
            observer.step_summarized(replace(summary, rollouts=rollouts))
        observer.evaluated(2, evaluated(2, reward).result)
    return recipe.run_folder


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    first = write_run(tmp_path, "plain", reward=0.25)
    second = write_run(tmp_path, "hot", reward=0.5, sampling={"temperature": 0.7})
    return [str(first), str(second)]


def test_results_and_different_keys_are_side_by_side(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", *runs]) == 0
    lines = [[word for word in line.split() if word not in "┃│|"] for line in capsys.readouterr().out.splitlines()]
    assert ["reward", "0.500", "(0.500", "at", "2)", "1.000", "(1.000", "at", "2)"] in lines
    assert ["sampling.temperature", "1.0", "0.7"] in lines
    assert not any(line and line[0] == "run.name" for line in lines)


def test_no_name_is_cut_on_a_narrow_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"a_run_with_a_long_name_{number}" for number in range(3)]
    folders = [
        write_run(tmp_path, name, reward=0.25, sampling={"max_response_tokens": 10**n})
        for n, name in enumerate(names, 1)
    ]
    assert run(["compare", *map(str, folders)]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    assert "sampling.max_response_tokens" in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_different_components_of_two_runs_keep_their_names(tmp_path: Path) -> None:
    folders = {name: write_run(tmp_path, name, reward=0.5, component=name[::-1]) for name in ("ab", "cd")}
    charts: Any = compare_overviews({name: RunFolder(folder) for name, folder in folders.items()})["charts"]
    names = {chart["title"]: [one["name"] for one in chart["series"]] for chart in charts}
    assert names["Reward by component"] == ["ab: ba", "cd: dc"]
    assert names["Loss"] == ["ab", "cd"]


def test_a_recipe_of_another_version_is_compared_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [make_run(tmp_path / name, num_steps=steps) for name, steps in (("first", 2), ("second", 3))]
    assert run(["compare", *map(str, folders)]) == 0
    assert "run.steps" in capsys.readouterr().out


def test_one_run_has_nothing_to_be_compared_with(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", runs[0]]) == 2
    assert "name at least two folders of runs" in capsys.readouterr().err
    assert run(["compare", runs[0], "nowhere"]) == 3


@pytest.mark.needs("chromium")
def test_the_page_has_a_curve_of_each_run(runs: list[str], tmp_path: Path) -> None:
    path = tmp_path / "compared.html"
    assert run(["compare", *runs, "--out", str(path)]) == 0

    async def main() -> None:
        async with open_browser() as page:
            await page.open(path.as_uri())
            await page.until("document.getElementById('name')?.textContent === 'plain · hot'")
            text = await page.evaluate("document.querySelector('.card').textContent")
            assert "plain" in text
            assert "hot" in text
            tables = await page.evaluate("[...document.querySelectorAll('.compared')].map((t) => t.textContent).join()")
            assert "sampling.temperature1.00.7" in tables
            # A colour is a run, however many curves it has in a card.
            lines = "[...document.querySelectorAll('.card .line')].map((line) => line.getAttribute('class'))"
            colours = await page.evaluate(f"{lines}.flatMap((name) => name.match(/line-\\d/)).join()")
            assert set(colours.split(",")) == {"line-0", "line-1"}
            where = "[...document.querySelectorAll('.compared, .card')].map((one) => one.className)"
            places = (await page.evaluate(f"{where}.join()")).split(",")
            assert (places[0], places[-1]) == ("compared", "compared")
            assert await page.evaluate("document.getElementById('tab-rollouts').textContent") == "Rollouts of plain"
            assert not await page.evaluate("document.getElementById('status').textContent")
            assert not page.complaints

    asyncio.run(main())


def test_top_prints_where_a_run_stands(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", runs[0]]) == 0
    assert capsys.readouterr().out.startswith("step 2/")
    assert run(["top", "nowhere"]) == 3
