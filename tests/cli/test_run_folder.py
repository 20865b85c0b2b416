"""Commands on the folders of runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.browser import open_browser
from megarl.cli.main import run
from megarl.cli.run_folder import metrics_page, traced
from megarl.config.recipe import Recipe
from megarl.data.evaluation_files import as_line, generations_file, write_generations
from megarl.errors import MachineError
from megarl.observe.catalogue import METRICS
from megarl.observe.metrics import Targets
from megarl.observe.observing import observing
from megarl.tools.page.run_data import RunFolder, compare_overviews
from scripts.dashboards.monitoring import monitoring_files
from tests.observe.samples import ListSink, evaluated, generation, make_recipe, step_summary
from tests.repository import ROOT
from tests.tools.page.runs import make_run, make_seen


def test_a_runs_phases_become_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    assert run(["timeline", str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder}/timeline.json (13 phases); open it in Perfetto\n"
    assert json.loads((folder / "timeline.json").read_text())["traceEvents"]


def test_the_address_of_the_page_stands_between_blanks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal that opens addresses takes punctuation beside one for a part of it."""

    async def serve(_folder: Path, *, port: int, on_start: Callable[[str], None]) -> None:
        on_start(f"http://127.0.0.1:{port}/")

    monkeypatch.setattr("megarl.tools.page.web_page.serve", serve)
    assert run(["view", str(make_run(tmp_path / "run")), "--port", "8800"]) == 0
    assert "http://127.0.0.1:8800/" in capsys.readouterr().out.split()


def test_a_folder_without_a_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["timeline", str(tmp_path)]) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_what_ray_knows_is_in_it_even_when_the_run_fails(tmp_path: Path) -> None:
    folder, out = make_run(tmp_path / "run"), tmp_path / "trace.json"
    task = {"ph": "X", "name": "update", "pid": "node", "tid": "worker", "ts": 1.0, "dur": 2.0}

    def interrupted() -> None:
        with traced(folder, out) as tasks:
            assert tasks is not None
            tasks.write_text(json.dumps([task]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert task in json.loads(out.read_text())["traceEvents"]


def test_a_file_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot be written"), traced(tmp_path, tmp_path / "no" / "trace.json"):
        raise AssertionError("the run began")


def test_report_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    assert run(["report", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {folder}/report.html (")
    text = (folder / "report.html").read_text()
    assert "Content-Security-Policy" in text
    assert "<link" not in text
    assert "src=" not in text.replace("src=x", "")


@pytest.fixture
def evaluated_run(tmp_path: Path) -> Path:
    write_generations(generations_file(tmp_path, 0), map(as_line, [generation(response="early")]))
    kept = [
        generation(response="good"),
        generation(is_right=False, response="bad", data_source="code"),
        generation(is_right=False, response="worse\x1b[2J", is_greedy=False, index=1),
    ]
    write_generations(generations_file(tmp_path, 8), map(as_line, kept))
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["samples", *arguments]) == 0
    return capsys.readouterr().out


def test_the_last_evaluation_is_shown(evaluated_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, str(evaluated_run))
    assert "eval.parquet:3" in text
    assert "what is 3 + 4?" in text
    assert "right: score 1  greedy  2 tokens, stop  format 0.5  truth 7  prediction 7" in text
    assert "sampled 1" in text
    assert "early" not in text
    assert "3 shown of" in text
    assert max(map(len, text.splitlines()[:-1])) <= 100


@pytest.mark.parametrize(
    ("arguments", "responses"),
    [
        (["--step", "0"], ["early"]),
        (["--wrong"], ["bad", "worse"]),
        (["--wrong", "--limit", "1"], ["bad"]),
        (["--source", "code"], ["bad"]),
    ],
)
def test_answers_can_be_chosen(
    evaluated_run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], responses: list[str]
) -> None:
    text = shown(capsys, str(evaluated_run), *arguments)
    assert [word for word in ("early", "good", "bad", "worse") if word in text] == responses


def test_escape_codes_of_a_model_do_not_reach_the_terminal(
    evaluated_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, str(evaluated_run), "--wrong")
    assert "worse\\x1b[2J" in text
    assert "\x1b[2J" not in text


def test_the_files_of_images_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    digests = tuple(path.stem for path in sorted(make_seen(Path("run")).glob("images/*.png")))
    write_generations(generations_file(Path("run"), 1), [as_line(generation(images=digests))])
    text = shown(capsys, "run")
    for digest in digests:
        assert f"image run/images/{digest}.png" in text
    text = shown(capsys, "run", "--episode", "1/train.parquet:1/0")
    assert text.count("image run/images/") == 2
    saved = json.loads(shown(capsys, "run", "--episode", "1/train.parquet:0/0", "--format", "json"))
    assert (saved["prompt"], sorted(saved["images"])) == ("1#+#=", list(digests))
    assert len(saved["prompt_ids"]) == 9
    saved = json.loads(shown(capsys, "run", "--episode", "1/train.parquet:0/0", "--format", "atif"))
    assert sorted(saved["extra"]["images"]) == list(digests)


def test_long_texts_are_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # in other widths a line may end within a word
    kept = [generation(response="plan" + "x" * 5000 + "result", prompt="system" + "y" * 5000 + "question")]
    write_generations(generations_file(tmp_path, 1), map(as_line, kept))
    text = shown(capsys, str(tmp_path), "--max-chars", "100")
    assert "[4910 characters]" in text
    assert all(word in text for word in ("plan", "result", "question"))
    assert "system" not in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--step", "3"], "no evaluation after step 3; choose one of 0, 8"),
        (["--source", "none"], "no answer matches; leave out --wrong or --source"),
    ],
)
def test_what_is_not_there_is_one_line(
    evaluated_run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert run(["samples", str(evaluated_run), *arguments]) == 3
    assert line in capsys.readouterr().err


def test_a_folder_without_evaluations_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["samples", str(tmp_path)]) == 3
    assert capsys.readouterr().err == (
        f"megarl: {tmp_path}: no evaluation here; name the folder of a run with one, as in runs/quickstart\n"
    )


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
        observer.emit(evaluated(2, reward))
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


@pytest.mark.patient
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
async def test_the_page_has_a_curve_of_each_run(runs: list[str], tmp_path: Path) -> None:
    path = tmp_path / "compared.html"
    assert run(["compare", *runs, "--out", str(path)]) == 0

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


def test_top_prints_where_a_run_stands(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", runs[0]]) == 0
    assert capsys.readouterr().out.startswith("step 2/")
    assert run(["top", "nowhere"]) == 3


DOCS = ROOT / "docs"


def test_the_table_in_the_docs_is_that_of_the_code() -> None:
    assert (DOCS / "metrics.md").read_text() == metrics_page()


def test_the_list_has_every_metric(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["metrics", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [metric.full_name for metric in METRICS]


def test_targets_of_several_runs_are_gathered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first", "second"):
        Targets(tmp_path / name, run=name, exporter=f"{name}:9464")
    out = tmp_path / "targets.json"
    assert run(["metrics", "targets", str(tmp_path / "first"), str(tmp_path / "second"), "--out", str(out)]) == 0
    assert [entry["targets"] for entry in json.loads(out.read_text())] == [["first:9464"], ["second:9464"]]
    assert capsys.readouterr().out == f"wrote {out}: 2 targets\n"


def test_a_recipe_stands_for_its_run(tmp_path: Path) -> None:
    recipe = tmp_path / "sample.yaml"
    recipe.write_text(
        f"run: {{name: sample, steps: 1, device: cpu, folder: {tmp_path}/runs}}\n"
        "model: {path: model}\ndata: {train: [train.parquet]}\npools: {train: {gpus_per_node: 1}}\n"
        "roles: {actor: {pool: train}}\nalgorithm: {kind: sft}\ntrain: {prompts_per_step: 8}\n"
    )
    Targets(tmp_path / "runs" / "sample", run="sample", exporter="127.0.0.1:9464")
    out = tmp_path / "targets.json"
    assert run(["metrics", "targets", str(recipe), "--out", str(out)]) == 0
    assert json.loads(out.read_text())[0]["targets"] == ["127.0.0.1:9464"]


def test_something_else_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["metrics", "targets", str(tmp_path / "x"), "--out", str(tmp_path / "out.json")]) == 3
    assert capsys.readouterr().err == f"megarl: {tmp_path / 'x'}: neither the folder of a run nor a recipe\n"


def test_dashboards_and_alerts_are_written(tmp_path: Path) -> None:
    assert run(["dashboards", "--out", str(tmp_path / "new")]) == 0
    assert {path.name: path.read_text() for path in (tmp_path / "new").iterdir()} == monitoring_files()
