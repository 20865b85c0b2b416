"""Every way out of a command: its exit code and its exact words."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl import __version__
from megarl.cli import main as cli
from megarl.cli import recipe as recipe_commands
from megarl.config.load import CheckedRecipe
from megarl.errors import ConfigError, EngineError, MegarlError, NumericsError, PreemptedError, Problem
from megarl.run import preflight

RECIPE = """\
run: {name: sample, steps: 2, device: cpu, folder: FOLDER/runs}
model: {path: FOLDER/arithmetic/model}
data: {train: [FOLDER/arithmetic/train.parquet], max_prompt_tokens: 16}
pools: {train: {gpus_per_node: 2}, rollout: {gpus_per_node: 1}}
roles:
  actor: {pool: train, tensor: 2}
  rollout: {pool: rollout}
algorithm: {kind: grpo}
sampling: {max_response_tokens: 5}
train: {prompts_per_step: 8, tokens_per_micro_batch: 256}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good recipe on the data and the model that `megarl data make` writes."""
    folder = tmp_path_factory.mktemp("cli")
    assert cli.run(["data", "make", "arithmetic", "--out", str(folder / "arithmetic")]) == 0
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("FOLDER", str(folder)))
    return path


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr() == (f"megarl {__version__}\n", "")


def test_help_lists_every_command_once_in_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert "..." not in text.partition("\n")[2]
    listed = [name for names in cli.GROUPS.values() for name in names]
    commands = [command.name or getattr(command.callback, "__name__", "") for command in cli.app.registered_commands]
    groups = [str(group.name) for group in cli.app.registered_groups]
    assert sorted(listed) == sorted([*commands, *groups])
    assert [name for name in listed if not re.search(rf"^  {name}  +[A-Z]", text, flags=re.MULTILINE)] == []


def test_a_good_recipe_is_one_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["validate", str(recipe), "--quick", "--set", "run.steps=5"]) == 0
    assert capsys.readouterr() == (f"{recipe}: ok: grpo, 5 steps, runs in {recipe.parent}/runs/sample\n", "")


def test_all_problems_of_a_recipe_are_reported_at_once(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["validate", str(recipe), "--set", "algorithm.los=0.3", "--set", "run.steps=many"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        f"{recipe}: 2 problem(s)",
        "  run.steps: 'many': input should be a valid integer, unable to parse string as an integer",
        "  algorithm.los: unknown key; did you mean loss?",
    ]


def test_a_port_in_use_ends_train_before_anything_starts(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.run(["train", str(recipe), "--set", f"observe.metrics_port={port}"]) == 5
    out, err = capsys.readouterr()
    assert out == f"{recipe}: checking model, data and reward\n"
    assert err == (
        f"megarl: observe.metrics_port: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose another port, 0 for any free one, or null for none\n"
    )
    assert not (recipe.parent / "runs").exists()


def on_gpus(*changes: str) -> list[str]:
    """Options that make the recipe one for four H100."""
    return [part for change in ("run.device=cuda", "cluster.gpu=h100", *changes) for part in ("--set", change)]


def test_a_recipe_for_gpus_is_validated_where_there_is_none(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["validate", str(recipe), *on_gpus("observe.metrics_port=9", "pools.train.nodes=2")]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "not checked here: 5 GPUs of a Ray cluster",
        "not checked here: observe.metrics_port: whether 9 is free",
        f"{recipe}: ok: grpo, 2 steps, 4096 prompts, runs in {recipe.parent}/runs/sample",
    ]


def test_limits_that_no_gpu_keeps_are_found_without_a_named_one(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = on_gpus("cluster.gpu=null", "checkpoint.save_every_steps=null", "run.steps=100000")
    assert cli.run(["validate", str(recipe), *long]) == 2
    title, problem = capsys.readouterr().err.splitlines()
    assert title == f"{recipe}: 1 problem(s)"
    assert problem.startswith("  checkpoint.save_every_steps: null saves only the last step, about ")


@pytest.mark.patient
def test_a_check_loads_no_torch(recipe: Path) -> None:
    """transformers would, with its compiler, in two thirds of the time that a check takes."""
    code = (
        "import sys; from megarl.cli.main import run; code = run(sys.argv[1:]); "
        "print(code, 'transformers' in sys.modules, 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", code, "validate", str(recipe)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "0 True False", done.stdout
    assert done.stderr == ""


@pytest.mark.patient
def test_here_checks_this_machine(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "_GPU_DEVICES", (tmp_path / "nvidia0",))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cli.run(["validate", "--here", str(recipe), *on_gpus()]) == 5
    assert "this machine has no GPU" in capsys.readouterr().err
    assert cli.run(["validate", "--here", str(recipe), *on_gpus("pools.train.nodes=2", "roles.actor.kernels=te")]) == 2
    title, *problems = capsys.readouterr().err.splitlines()
    assert title == f"{recipe}: 3 problem(s)"
    assert [problem.split(":")[0].strip() for problem in problems] == [
        "pools.train.nodes",
        "run.device",
        "roles.actor.kernels",
    ]


@pytest.mark.patient
def test_problems_of_recipe_rows_reward_code_and_memory_are_reported_together(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = pq.read_table(recipe.parent / "arithmetic" / "train.parquet").slice(0, 3).to_pylist()
    rows[2]["prompt"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "null.parquet")
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth):\n    return 1 / 0\n")
    (tmp_path / "file").touch()
    changes = (
        f"run.folder={tmp_path}/file/runs",
        f"data.train=[{tmp_path}/null.parquet]",
        f"reward={{kind: function, path: {reward}, workers: 1}}",
        f"sampling.generator={tmp_path}/none.py:sample",
        "train.tokens_per_micro_batch=100000000",
    )
    assert cli.run(["validate", str(recipe), *on_gpus(*changes)]) == 2
    title, *problems = capsys.readouterr().err.splitlines()
    assert title == f"{recipe}: 5 problem(s)"
    for problem, words in zip(
        problems,
        (
            "run.folder: ",
            "does not fit h100: ",
            "sampling.generator: ",
            "null.parquet row 2, column prompt: is null",
            "raised ZeroDivisionError",
        ),
        strict=True,
    ):
        assert words in problem


@pytest.mark.patient
def test_rows_and_reward_are_checked_without_the_model(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth):\n    return 1 / 0\n")
    elsewhere = on_gpus("model.path=Qwen/Qwen2.5-7B")
    assert cli.run(["validate", str(recipe), *elsewhere]) == 0
    out = capsys.readouterr().out
    assert out.startswith("not checked here: model.path: Qwen/Qwen2.5-7B is neither a folder nor in the local cache")
    raising = ["--set", f"reward={{kind: function, path: {reward}, workers: 1}}"]
    assert cli.run(["validate", str(recipe), *elsewhere, *raising]) == 3
    assert "raised ZeroDivisionError" in capsys.readouterr().err
    (tmp_path / "empty.parquet").touch()
    assert cli.run(["validate", str(recipe), *elsewhere, "--set", f"data.train=[{tmp_path}/empty.parquet]"]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train"], "Error: Missing argument 'RECIPE'."),
        (["trian", "x.yaml"], "Error: No such command 'trian'."),
        (["train", "x.yaml", "--steps", "3"], "Error: No such option: --steps"),
        (["data", "make", "arithmetic", "--out", "x", "--seed", "-1"], "Error: Invalid value for '--seed'"),
        (
            ["data", "make", "arithmetic", "--out", "x", "--like", "gpt"],
            "--like: gpt is not known; name one of qwen2.5",
        ),
    ],
)
def test_a_wrong_command_line_is_explained(
    arguments: Sequence[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    assert complaint in capsys.readouterr().err


def failing(error: BaseException) -> object:
    def inspect_recipe(path: Path, overrides: Sequence[str], *, checks: object, downloads: bool) -> CheckedRecipe:
        raise error

    return inspect_recipe


@pytest.mark.parametrize(
    ("error", "exit_code", "words"),
    [
        (ConfigError("a.yaml", (Problem(key="run", message="missing"),)), 2, "a.yaml: 1 problem(s)\n  run: missing\n"),
        (PreemptedError("stopped by SIGTERM"), 75, "megarl: stopped by SIGTERM\n"),
        (EngineError("engine 0 died"), 76, "megarl: engine 0 died\n"),
        (NumericsError("loss is nan"), 77, "megarl: loss is nan\n"),
        (KeyboardInterrupt(), 130, "megarl: interrupted\n"),
    ],
)
def test_every_error_has_its_exit_code_and_one_sentence(
    error: MegarlError,
    exit_code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(recipe_commands, "inspect_recipe", failing(error))
    assert cli.run(["validate", "a.yaml"]) == exit_code
    assert capsys.readouterr().err == words


def test_a_bug_keeps_its_traceback_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(recipe_commands, "inspect_recipe", failing(ZeroDivisionError("of ours")))
    assert cli.run(["validate", "a.yaml"]) == 70
    (line,) = capsys.readouterr().err.splitlines()
    found = re.fullmatch(r"megarl: bug: ZeroDivisionError; the traceback is in (\S+)", line)
    assert found is not None, line
    kept = Path(found[1]).read_text()
    assert kept.startswith("Traceback")
    assert "ZeroDivisionError: of ours" in kept


def test_data_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "data"
    assert cli.run(["data", "make", "arithmetic", "--out", str(out)]) == 5
    assert capsys.readouterr().err == f"megarl: --out {out}: cannot be written: Not a directory\n"


def test_the_data_of_another_seed_are_other_ones(recipe: Path, tmp_path: Path) -> None:
    assert cli.run(["data", "make", "arithmetic", "--out", str(tmp_path), "--seed", "2"]) == 0
    first, second = (pq.read_table(folder / "train.parquet") for folder in (recipe.parent / "arithmetic", tmp_path))
    assert not first.equals(second)


@pytest.mark.patient
def test_a_shell_completes_commands() -> None:
    """By the installed console script, as a user runs it."""
    done = subprocess.run(
        # The shell is found among the parents of the process.
        ["bash", "-c", f"{Path(sys.executable).with_name('megarl')} --show-completion; exit $?"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "_MEGARL_COMPLETE=complete_bash" in done.stdout
