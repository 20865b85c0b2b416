from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, Qwen2Config

from megarl.cli import export
from megarl.cli.main import run
from tests.tiny_models import load_adapted, write_random_adapter, write_tiny_model


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
    """As if something beside the bytes of the tensors had been lost on the way."""
    compute = export.logprobs
    monkeypatch.setattr(
        export,
        "logprobs",
        lambda folder, dtype, adapter=None: compute(folder, dtype=dtype) + (0.0 if folder == model else 1e-3),
    )
    assert run(["export", str(model), str(tmp_path / "out")]) == 4
    assert "its log-probabilities in transformers differ" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


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
    monkeypatch.setattr(export, "_available_bytes", lambda: 1000)
    assert run(["export", str(model), str(tmp_path / "out")]) == 5
    assert "0 GB are available; --no-load-check skips the comparison" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [("nowhere", "does not exist"), (".", "neither a run's folder, nor a checkpoint, nor a Hugging Face model")],
)
def test_a_path_to_no_model_is_one_line(
    tmp_path: Path, source: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", str(tmp_path / source), str(tmp_path / "out")]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_an_occupied_folder_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(model), str(model)]) == 4
    assert "exists and is not an empty folder; name another" in capsys.readouterr().err


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
