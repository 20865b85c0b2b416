"""Commands on checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, Qwen2Config

from megarl.cli import checkpoint as command
from megarl.cli.main import run
from tests.checkpoint.samples import write_checkpoint
from tests.tiny_models import load_adapted, write_random_adapter, write_tiny_model


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    for step in (2, 4):
        write_checkpoint(tmp_path / "checkpoints", step)
    return tmp_path


def test_ls_lists_the_newest_first_with_marks(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "checkpoints" / "best").symlink_to("step_000002")
    assert run(["checkpoint", "ls", str(run_folder)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["checkpoint", "step", "GB", "age", "contents", "state"]
    assert [line[:2] + line[4:] for line in lines[1:]] == [
        ["step_000004", "4", "everything", "ok", "latest"],
        ["step_000002", "2", "everything", "ok", "best"],
    ]


def test_ls_shows_what_is_damaged_and_what_is_no_checkpoint_yet(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = run_folder / "checkpoints"
    (parent / "step_000002" / "state.json").unlink()
    (parent / "step_000006.tmp").mkdir()
    (parent / "step_000009.abandoned").mkdir()
    assert run(["checkpoint", "ls", str(run_folder)]) == 0
    out = capsys.readouterr().out
    states = {words[0]: words[-1] for line in out.splitlines() if (words := line.split())}
    assert states["step_000004"] == "latest"
    assert states["step_000002"] == "damaged"
    assert states["step_000006.tmp"] == "temp"
    assert states["step_000009.abandoned"] == "damaged"
    assert f"{parent / 'step_000002' / 'state.json'}: cannot be read: No such file" in out


@pytest.mark.parametrize("path", [".", "checkpoints", "checkpoints/step_000004", "checkpoints/latest"])
def test_verify_says_what_is_whole(run_folder: Path, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "verify", str(run_folder / path)]) == 0
    assert "ok: 8 files" in capsys.readouterr().out


def test_verify_names_every_damaged_checkpoint_and_exits_with_4(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 4):
        (run_folder / "checkpoints" / f"step_{step:06d}" / "model" / "config.json").write_text("{}")
    assert run(["checkpoint", "verify", str(run_folder)]) == 4
    complaint = capsys.readouterr().err
    assert "step_000002/model/config.json" in complaint
    assert "step_000004/model/config.json" in complaint


def test_verify_refuses_a_newer_format_and_a_foreign_pickle(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = run_folder / "checkpoints"
    manifest = parent / "step_000002" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 9'))
    (parent / "step_000004" / "model" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert run(["checkpoint", "verify", str(run_folder)]) == 4
    (complaint,) = capsys.readouterr().err.splitlines()
    assert "format 9 is newer than 1; use the megarl that wrote it" in complaint
    assert "pytorch_model.bin: a pickle that megarl did not write; remove it" in complaint


def test_diff_prints_what_differs_and_exits_with_1(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (run_folder / "checkpoints" / name for name in ("step_000002", "step_000004"))
    assert run(["checkpoint", "diff", str(first), str(first)]) == 0
    assert "no difference" in capsys.readouterr().out
    shutil.rmtree(second / "model")
    shutil.rmtree(second / "optimizer")
    shutil.rmtree(second / "critic")
    for name in ("model", "optimizer", "critic"):
        shutil.copytree(first / name, second / name)
    assert run(["checkpoint", "diff", str(first), str(second)]) == 1
    out = capsys.readouterr().out
    assert "state.json: trainer.num_steps: 2 -> 4" in out
    assert any(line.split()[:4] == ["critic/model", "a.bias", "1", "1"] for line in out.splitlines())


def test_prune_says_what_would_go_and_then_removes_it(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["checkpoint", "prune", str(run_folder), "--keep-last", "1"]
    older = run_folder / "checkpoints" / "step_000002"
    assert run([*arguments, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"would remove {older}", "would keep step_000004"]
    assert older.exists()
    assert run(arguments) == 0
    assert capsys.readouterr().out.splitlines() == [f"removed {older}", "kept step_000004"]
    assert not older.exists()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "qwen3", tied=True, layers=1)
    return folder


def test_an_exported_model_is_compared_with_its_source_by_loading_both(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", str(model), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    out = capsys.readouterr().out
    assert "13 tensors, 0.000 GB in 1 file(s), 13 cast to bfloat16" in out
    assert "log-probabilities differ from the source's by 0 at most over 64 tokens in bfloat16" in out
    assert run(["export", str(tmp_path / "out"), str(tmp_path / "again"), "--dtype", "fp32"]) == 0
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "float32"


def test_without_the_check_that_is_said(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(model), str(tmp_path / "out"), "--no-load-check"]) == 0
    assert "not compared in transformers" in capsys.readouterr().out


def test_a_model_that_loads_as_another_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage what stands beside the bytes of the tensors."""
    compute = command.logprobs
    monkeypatch.setattr(
        command,
        "logprobs",
        lambda folder, dtype, adapter=None: compute(folder, dtype=dtype) + (0.0 if folder == model else 1e-3),
    )
    assert run(["export", str(model), str(tmp_path / "out")]) == 4
    assert "its log-probabilities in transformers differ" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.patient
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_merged_adapter_is_what_peft_makes_of_it(
    dtype: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random_adapter(tmp_path / "adapter", model, ["q_proj", "down_proj"])
    command = ["export", str(tmp_path / "adapter"), str(tmp_path / "out"), "--merge", "--dtype", dtype]
    assert run(command) == 0
    assert "log-probabilities differ from the source's by" in capsys.readouterr().out
    peft = load_adapted(model, tmp_path / "adapter").merge_and_unload()  # type: ignore[operator]
    expected = {name: tensor for name, tensor in peft.state_dict().items() if name != "lm_head.weight"}
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].float(), tensor, rtol=0 if dtype == "fp32" else 1e-2, atol=1e-6)


def test_an_adapter_is_exported_merged_or_not_at_all(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random_adapter(tmp_path / "adapter", model, ["q_proj", "down_proj"])
    adapter, out = str(tmp_path / "adapter"), str(tmp_path / "out")
    assert run(["export", adapter, out]) == 4
    assert "--merge writes the whole model with it" in capsys.readouterr().err
    assert run(["export", str(model), out, "--merge"]) == 4
    assert "there is nothing to merge" in capsys.readouterr().err
    assert run(["export", adapter, out, "--merge", "--base", str(tmp_path)]) == 4
    assert f"its base {tmp_path} is not a Hugging Face folder; name it with --base" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tensor_the_architecture_lacks_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in model.glob("*.json"):
        (source / path.name).write_bytes(path.read_bytes())
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, source / "model.safetensors")
    assert run(["export", str(source), str(tmp_path / "out")]) == 4
    assert "missing_keys: ['model.norm.weight']" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_not_fit_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_available_bytes", lambda: 1000)
    assert run(["export", str(model), str(tmp_path / "out")]) == 5
    assert "0 GB are available; --no-load-check skips the comparison" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        ("checkpoint verify FOLDER", 4, "there is no checkpoint here"),
        ("checkpoint prune FOLDER --keep-last 1", 4, "there is no checkpoint here"),
        ("checkpoint prune FOLDER --keep-last 0", 2, "Invalid value for '--keep-last'"),
        ("export FOLDER/nowhere FOLDER/out", 4, "does not exist"),
        ("export FOLDER FOLDER/out", 4, "neither a run's folder, nor a checkpoint, nor a Hugging Face model"),
        ("export MODEL MODEL", 4, "exists and is not an empty folder; name another"),
    ],
)
def test_a_path_to_something_else_is_told(
    words: str, code: int, complaint: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([word.replace("FOLDER", str(tmp_path)).replace("MODEL", str(model)) for word in words.split()]) == code
    assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_a_critic_is_exported_like_any_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Qwen2Config(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=1,
        pad_token_id=0,
        dtype="float32",
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "critic")
    assert run(["export", str(tmp_path / "critic"), str(tmp_path / "out")]) == 0
    assert "differ from the source's by 0 at most" in capsys.readouterr().out
    assert "score.weight" in load_file(tmp_path / "out" / "model.safetensors")
