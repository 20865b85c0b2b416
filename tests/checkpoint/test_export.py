from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.checkpoint.export import export_model, split_shards
from megarl.checkpoint.folder import begin, checkpoint_folder, find_model
from megarl.checkpoint.manifest import TensorEntry
from megarl.config.model import read_model_shape
from megarl.errors import CheckpointError
from megarl.weights.layouts.megatron import MegatronParallel
from tests.checkpoint.samples import commit_files
from tests.checkpoint.save_peers import load_and_save
from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "qwen2", tied=True, max_shard_size="200KB")
    (folder / "tokenizer.json").write_text('{"a": 1}')
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits_of(found[name]) == bits_of(tensor), name


def write_run(parent: Path, model: Path, *, step: int = 1, master: dict[str, torch.Tensor] | None = None) -> Path:
    """Write a checkpoint with that model and any master weights."""
    folder = checkpoint_folder(parent / "checkpoints", step)
    partial = begin(folder, num_bytes=1000)
    for source in model.iterdir():
        target = partial / "model" / source.name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(source.read_bytes())
    if master is not None:
        (partial / "optimizer" / "master").mkdir(parents=True)
        save_file(master, partial / "optimizer" / "master" / "model.safetensors")
    commit_files(partial, folder, recipe={})
    return folder


@pytest.mark.patient
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(["llama", "qwen2", "qwen3"]),
    is_tied=st.booleans(),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2]),
    data=st.sampled_from([1, 2]),
    dtype=st.sampled_from([None, "bfloat16", "float32"]),
    max_shard_bytes=st.sampled_from([30_000, 200_000, 10_000_000]),
)
def test_saved_from_any_layout_and_exported_it_is_the_model_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    is_tied: bool,
    tensor: int,
    pipeline: int,
    data: int,
    dtype: str | None,
    max_shard_bytes: int,
) -> None:
    assume(tensor * pipeline * data <= 4)
    folder = tmp_path_factory.mktemp("layout")
    parallel = MegatronParallel(tensor=tensor, pipeline=pipeline, data=data)
    write_tiny_model(folder / "source", family, tied=is_tied)
    load_and_save(parallel, folder / "source", folder / "saved")
    export_model(find_model(folder / "saved"), folder / "out", dtype=dtype, max_shard_bytes=max_shard_bytes)
    expected = weights_of(folder / "source")
    if dtype == "bfloat16":
        expected = {name: tensor.bfloat16() for name, tensor in expected.items()}
    assert_same_bits(weights_of(folder / "out"), expected)
    largest = max(tensor.nbytes for tensor in expected.values())
    for path in (folder / "out").glob("*.safetensors"):
        assert sum(tensor.nbytes for tensor in load_file(path).values()) <= max(max_shard_bytes, largest)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes", [100_000, 10_000_000])
def test_transformers_loads_what_was_exported(
    model: Path, tmp_path: Path, dtype: str | None, max_shard_bytes: int
) -> None:
    exported = export_model(find_model(model), tmp_path / "out", dtype=dtype, max_shard_bytes=max_shard_bytes)
    assert exported.num_files == len(list((tmp_path / "out").glob("*.safetensors")))
    assert (exported.num_files > 1) == (max_shard_bytes == 100_000)
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=dtype or "auto").state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert_same_bits(found, expected)
    assert read_model_shape(tmp_path / "out").dtype == (dtype or "float32")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": 1}'
    assert (tmp_path / "out" / "generation_config.json").exists()


def test_the_newest_whole_checkpoint_of_a_run_is_taken_and_people_are_told(model: Path, tmp_path: Path) -> None:
    write_run(tmp_path, model, step=1)
    newer = write_run(tmp_path, model, step=2)
    assert find_model(tmp_path).folder == newer / "model"
    (newer / "model" / "tokenizer.json").write_text('{"a": 2}')
    found = find_model(tmp_path)
    assert found.folder.parent.name == "step_000001"
    (note,) = found.notes
    assert note.startswith(f"skipped {newer}: {newer / 'model' / 'tokenizer.json'}: damaged")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: damaged"):
        find_model(newer)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: damaged"):
        find_model(newer / "model")


def test_where_no_checkpoint_is_whole_it_says_why(model: Path, tmp_path: Path) -> None:
    folder = write_run(tmp_path, model)
    (folder / "model" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint of this run verifies: .*config\.json"):
        find_model(tmp_path)


def test_full_precision_comes_from_the_master_weights(model: Path, tmp_path: Path) -> None:
    export_model(find_model(model), tmp_path / "half", dtype="bfloat16")
    master = weights_of(model)
    checkpoint = write_run(tmp_path, tmp_path / "half", master=master)
    source = find_model(checkpoint, wants_master=True)
    assert source.tensor_folder == checkpoint / "optimizer" / "master"
    assert "float32 master weights" in source.notes[0]
    export_model(source, tmp_path / "out", dtype="float32")
    assert_same_bits(weights_of(tmp_path / "out"), master)
    assert read_model_shape(tmp_path / "out").dtype == "float32"
    assert find_model(checkpoint).tensor_folder == checkpoint / "model"


def test_a_checkpoint_that_changes_while_it_is_read_is_not_exported(model: Path, tmp_path: Path) -> None:
    checkpoint = write_run(tmp_path, model)
    source = find_model(checkpoint)
    path = next((checkpoint / "model").glob("*.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"damaged: tensor .* does not have the digest of the manifest"):
        export_model(source, tmp_path / "out")
    assert {entry.name for entry in tmp_path.iterdir()} == {"checkpoints"}


def test_other_dtypes_are_left_alone(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    save_file({"a": torch.ones(3), "b": torch.arange(3)}, folder / "model.safetensors")
    assert export_model(find_model(folder), tmp_path / "out", dtype="bfloat16").num_cast == 1
    assert_same_bits(weights_of(tmp_path / "out"), {"a": torch.ones(3).bfloat16(), "b": torch.arange(3)})
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"torch_dtype": "bfloat16"}


def test_rounding_is_that_of_torch_and_keeps_what_is_not_a_number(tmp_path: Path) -> None:
    values = torch.tensor([1.00390625, 1.01171875, float("nan"), float("inf"), -0.0, 1e-45, 3.4e38])
    tmp_path.joinpath("source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    save_file({"a": values}, tmp_path / "source" / "model.safetensors")
    export_model(find_model(tmp_path / "source"), tmp_path / "out", dtype="bfloat16")
    assert_same_bits(weights_of(tmp_path / "out"), {"a": values.bfloat16()})


def test_nothing_that_exists_is_overwritten(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_model(find_model(model), out)
    for occupied in (out, model / "config.json"):
        with pytest.raises(CheckpointError, match="exists and is not an empty folder; name another"):
            export_model(find_model(model), occupied)
    (tmp_path / "other.tmp").mkdir()
    with pytest.raises(CheckpointError, match=r"other\.tmp: exists; unless another export is running, one was killed"):
        export_model(find_model(model), tmp_path / "other")


def test_a_folder_that_is_refused_never_appears(model: Path, tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        assert (folder / "config.json").exists()
        assert not (tmp_path / "out").exists()
        raise CheckpointError("refused")

    with pytest.raises(CheckpointError, match="refused"):
        export_model(find_model(model), tmp_path / "out", check=refuse)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(CheckpointError, match=r"needs 0\.1 GB and 0\.0 GB are free"):
        export_model(find_model(model), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_is_one_line(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(CheckpointError, match=r"out was not written: .*No space left on device"):
        export_model(find_model(model), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_layers_stay_in_order_and_files_in_bounds() -> None:
    wanted = {
        f"model.layers.{index}.weight": TensorEntry(name="", dtype="U8", shape=(30,), start=0) for index in (10, 9, 2)
    } | {"lm_head.weight": TensorEntry(name="", dtype="U8", shape=(200,), start=0)}
    shards = split_shards(wanted, max_shard_bytes=70)
    assert [list(shard) for shard in shards] == [
        ["lm_head.weight"],
        ["model.layers.2.weight", "model.layers.9.weight"],
        ["model.layers.10.weight"],
    ]


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, r"neither a run's folder, nor a checkpoint, nor a Hugging Face model"),
        ({"config.json": b"{}"}, "there is no safetensors file"),
        ({"config.json": b"{}", "pytorch_model.bin": b"\x80\x04"}, "there is no safetensors file"),
        ({"config.json": b"{}", "model.safetensors": b"\x80\x04pickled"}, "not a safetensors file"),
        ({"config.json": b"{}", "model.safetensors.index.json": b"[]"}, "not an index of safetensors files"),
        (
            {"config.json": b"{}", "model.safetensors.index.json": b'{"weight_map": {"a": "b.safetensors"}}'},
            r"b\.safetensors: cannot be read: No such file",
        ),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path, files: dict[str, bytes], complaint: str) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        export_model(find_model(folder), tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "m.safetensors", "b": "m.safetensors"}}'
    )
    with pytest.raises(CheckpointError, match=r"tensor b should be in m\.safetensors, it is in none"):
        export_model(find_model(tmp_path), tmp_path / "out")
