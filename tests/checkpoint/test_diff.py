from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.checkpoint.diff import CheckpointDiff, ClassDiff, ValueDiff, compare, open_side
from megarl.checkpoint.folder import begin, checkpoint_folder
from megarl.checkpoint.manifest import read_manifest, write_manifest
from megarl.errors import CheckpointError
from tests.checkpoint.samples import commit_files


def tensors(*, shift: float = 0.0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    names = [f"model.layers.{index}.q_proj.weight" for index in range(3)] + ["model.norm.weight"]
    found = {name: torch.full((2, 2), 2.0, dtype=dtype) for name in names}
    found["model.layers.1.q_proj.weight"][0, 1] += shift
    return found


def write(
    parent: Path,
    step: int,
    model: dict[str, torch.Tensor],
    *,
    learning_rate: float = 1e-6,
    tied: bool = False,
    moments: dict[str, torch.Tensor] | None = None,
) -> Path:
    folder = checkpoint_folder(parent, step)
    partial = begin(folder, num_bytes=1000)
    (partial / "model").mkdir()
    save_file(model, partial / "model" / "model.safetensors")
    (partial / "model" / "config.json").write_text(json.dumps({"tie": tied, "sizes": [1, 2]}))
    if moments is not None:
        (partial / "optimizer" / "exp_avg").mkdir(parents=True)
        save_file(moments, partial / "optimizer" / "exp_avg" / "model.safetensors")
    (partial / "state.json").write_text(json.dumps({"trainer": {"num_steps": step}}))
    commit_files(partial, folder, recipe={"train": {"learning_rate": learning_rate}})
    return folder


def diff(first: Path, second: Path) -> CheckpointDiff:
    return compare(open_side(first), open_side(second))


def by_name(found: CheckpointDiff) -> dict[str, ClassDiff]:
    return {item.name: item for item in found.classes}


def test_a_checkpoint_is_equal_to_itself(tmp_path: Path) -> None:
    folder = write(tmp_path, 1, tensors(), moments=tensors())
    found = diff(folder, folder)
    assert found.is_equal
    assert [(item.folder, item.num_tensors, item.num_equal) for item in found.classes] == [
        ("model", 3, 3),
        ("model", 1, 1),
        ("optimizer/exp_avg", 3, 3),
        ("optimizer/exp_avg", 1, 1),
    ]


def test_tensors_are_compared_by_class_and_values_by_key(tmp_path: Path) -> None:
    first = write(tmp_path, 1, tensors())
    second = write(tmp_path, 2, tensors(shift=0.5), learning_rate=3e-6, tied=True)
    found = diff(first, second)
    assert not found.is_equal
    classes = by_name(found)
    assert classes["model.norm.weight"].is_equal
    layers = classes["model.layers.*.q_proj.weight"]
    assert (layers.num_tensors, layers.num_equal, layers.max_abs_diff) == (3, 2, 0.5)
    assert layers.relative_norm == pytest.approx(0.5 / 4.0)
    assert found.values == [
        ValueDiff(document="recipe", key="train.learning_rate", first=1e-6, second=3e-6),
        ValueDiff(document="model/config.json", key="tie", first=False, second=True),
        ValueDiff(document="state.json", key="trainer.num_steps", first=1, second=2),
    ]
    assert found.others == []


def test_a_model_alone_is_compared_with_the_model_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 1, tensors(), moments=tensors())
    assert diff(checkpoint, checkpoint / "model").is_equal
    assert diff(tmp_path / "latest" / "model", checkpoint).is_equal


def test_another_dtype_is_said_and_its_values_are_compared(tmp_path: Path) -> None:
    first = write(tmp_path, 1, tensors(shift=0.001))
    second = write(tmp_path, 2, tensors(dtype=torch.bfloat16))
    found = diff(first, second)
    assert found.others == ["model: dtypes F32 and BF16"]
    layers = by_name(found)["model.layers.*.q_proj.weight"]
    assert layers.num_equal == 2
    assert layers.max_abs_diff == pytest.approx(0.001, rel=1e-3)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    one, other = tensors(), tensors()
    del one["model.norm.weight"]
    other["model.layers.0.q_proj.weight"] = torch.ones(4)
    first, second = write(tmp_path, 1, one), write(tmp_path, 2, other, moments=other)
    assert diff(first, second).others == [
        "model: model.layers.0.q_proj.weight: shapes [2, 2] and [4]",
        f"model: model.norm.weight: only in {second}",
        f"optimizer/exp_avg: only in {second}",
    ]


def test_what_is_not_a_number_is_a_difference(tmp_path: Path) -> None:
    first, second = write(tmp_path, 1, tensors()), write(tmp_path, 2, tensors(shift=float("nan")))
    layers = by_name(diff(first, second))["model.layers.*.q_proj.weight"]
    assert layers.num_equal == 2
    assert math.isnan(layers.max_abs_diff)
    assert math.isnan(layers.relative_norm)


def test_equal_digests_need_no_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, 1, tensors())

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("megarl.checkpoint.diff.read_chunks", refuse)
    assert diff(folder, folder).is_equal


def test_a_manifest_that_names_files_outside_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, 1, tensors())
    manifest = read_manifest(folder)
    files = {"../state.json": next(iter(manifest.files.values()))}
    write_manifest(folder, replace(manifest, files=files))
    with pytest.raises(CheckpointError, match="is outside the checkpoint"):
        open_side(folder)


def test_a_path_to_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_side(tmp_path / "none")
    with pytest.raises(CheckpointError, match="there is no checkpoint here"):
        open_side(tmp_path)
