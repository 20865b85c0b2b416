"""`megarl doctor` as people call it: words, exit codes, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.cli import main as cli
from megarl.config.load import load_recipe
from megarl.env import RAY_ADDRESS, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH
from megarl.tools.doctor import Check, CheckStatus, machine
from tests.repository import ROOT
from tests.tools.doctor.runs import RECIPE, Step, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    equal = Step(reward=1.0, reward_max=1.0, reward_min=1.0, zero_signal=8)
    write_run(tmp_path / "run", load_recipe(path, checks=()), [equal] * 8)
    return tmp_path / "run"


def test_a_run_is_diagnosed_without_looking_at_the_machine(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", str(run)]) == 5
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[:6] == [
        "run sample: step 8 of 40, done",
        "error: all rewards equal",
        "  evidence   all rewards of a step are equal in 8 of the last 8 steps; in the last one they are 1",
        "  cause      the reward is broken or gives everything the same score, or the prompts are far too hard or too "
        "easy",
        "  change     sampling.rollouts_per_prompt: 16",
        "  change     algorithm.filter: {}",
    ]
    assert lines[6].startswith(f"  advice     `megarl samples {run} --wrong`")


def test_a_healthy_run_is_called_that(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "fine", load_recipe(tmp_path / "recipe.yaml", checks=()), [Step()] * 8)
    assert cli.run(["doctor", str(tmp_path / "fine")]) == 0
    assert capsys.readouterr().out == "run sample: step 8 of 40, done\nno problem found\n"


def test_json_has_everything(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", str(run), "--json"]) == 5
    found = json.loads(capsys.readouterr().out)
    (finding,) = found["run"]["findings"]
    assert (finding["rule"], finding["severity"]) == ("all rewards equal", "error")
    assert finding["changes"][0] == {"key": "sampling.rollouts_per_prompt", "value": "16"}
    assert found["checks"] == []


def test_a_machine_with_an_error_ends_with_5(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Check(area="machine", name="cpus", found="1", status=CheckStatus.ERROR, remedy="--cpus-per-task 32")
    monkeypatch.setattr(machine, "check_machine", lambda: iter([wrong]))
    assert cli.run(["doctor"]) == 5
    out = capsys.readouterr().out
    assert "--cpus-per-task 32" in out
    assert out.rstrip().endswith("1 error")


def test_problems_of_a_recipe_are_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    assert cli.run(["doctor", str(path), "--json"]) == 5
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["model.path"]["status"] == "error"
    assert {"python", "torch", "sandbox", "cpus"} <= set(found)


def test_a_recipe_for_a_cluster_is_looked_at_before_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (RAY_ADDRESS, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH):
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    large = ROOT / "recipes" / "dapo_32b.yaml"
    assert cli.run(["doctor", str(large), "--json"]) == 5
    found = {check["name"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert {"python", "cpus", "data.train"} <= found
    assert cli.run(["doctor", str(large), "--ray-address", "127.0.0.1:1"]) == 5
    assert "no token for the Ray cluster" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--ray-address", "x:1"], 2, "--set, --ray-address, --all-reduce and --cluster need a RECIPE"),
        (["a.yaml", "b.yaml"], 2, "takes one recipe, not several: a.yaml, b.yaml"),
        (["not_there.yaml"], 2, "not_there.yaml"),
        (["FOLDER"], 3, "no events.jsonl here; name the folder of a run"),
    ],
)
def test_mistakes_are_a_sentence(
    arguments: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word.replace("FOLDER", str(tmp_path)) for word in arguments]
    assert cli.run(["doctor", *given]) == code
    assert words in capsys.readouterr().err
