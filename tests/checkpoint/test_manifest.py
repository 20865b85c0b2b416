"""Manifests, the headers of tensor files, and the comparison of files with their manifest."""

from __future__ import annotations

import json
import pickle
import random
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from megarl.checkpoint.manifest import (
    MANIFEST_FILE,
    TensorDigest,
    check_sizes,
    make_header,
    read_header,
    read_manifest,
    verify,
    verify_tensors,
    write_manifest,
)
from megarl.checkpoint.resume import read_state
from megarl.errors import CheckpointError, DamagedError
from tests.checkpoint.samples import run_state, write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, 3)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_was_written_verifies_and_is_read_back(checkpoint: Path) -> None:
    manifest = verify(checkpoint)
    assert manifest.step == 3
    assert {checkpoint / name for name in manifest.files} == {*files_of(checkpoint)} - {checkpoint / MANIFEST_FILE}
    assert read_state(checkpoint) == run_state(3)


def test_every_flipped_bit_is_found(checkpoint: Path) -> None:
    """Flip random bits of manifest, state, configuration, and of headers, padding and tensors of safetensors."""
    source = random.Random(0)
    files = files_of(checkpoint)
    for index in range(250):
        path = files[index % len(files)]
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[source.randrange(len(whole))] ^= 1 << source.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="step_000003"):
            verify(checkpoint)
        path.write_bytes(whole)
    verify(checkpoint)


def test_a_damaged_tensor_is_named_and_so_is_a_damaged_header(checkpoint: Path) -> None:
    path = checkpoint / "model" / "model-00001-of-00001.safetensors"
    header = read_header(path)
    whole = path.read_bytes()
    for entry in header.entries:
        path.write_bytes(whole[: entry.start] + bytes([whole[entry.start] ^ 1]) + whole[entry.start + 1 :])
        with pytest.raises(CheckpointError, match=f"damaged: tensor {entry.name} does not have the digest"):
            verify(checkpoint)
    path.write_bytes(whole[: header.num_bytes - 1] + b"\t" + whole[header.num_bytes :])
    with pytest.raises(CheckpointError, match="damaged: the header does not have the digest"):
        verify(checkpoint)


def test_a_manifest_has_size_and_digest_of_every_tensor(checkpoint: Path) -> None:
    for name, file in read_manifest(checkpoint).files.items():
        path = checkpoint / name
        if path.suffix != ".safetensors":
            assert file.tensors == ()
            continue
        whole = path.read_bytes()
        for entry, tensor in zip(read_header(path).entries, file.tensors, strict=True):
            values = whole[entry.start : entry.start + entry.num_bytes]
            assert tensor == TensorDigest(
                name=entry.name, num_bytes=len(values), xxh3_128=xxhash.xxh3_128_hexdigest(values)
            )


def test_an_inner_folder_can_be_verified_alone(checkpoint: Path) -> None:
    (checkpoint / "optimizer" / "exp_avg" / "model-00001-of-00001.safetensors").unlink()
    verify(checkpoint, below="model")
    with pytest.raises(CheckpointError, match="exp_avg"):
        verify(checkpoint, below="optimizer")


def test_without_weights_everything_but_the_bytes_of_weights_is_compared(checkpoint: Path) -> None:
    for path in files_of(checkpoint):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        if path.suffix == ".safetensors":
            verify(checkpoint, wants_weights=False)
            path.write_bytes(whole[:-1])
        with pytest.raises(CheckpointError, match=path.name):
            verify(checkpoint, wants_weights=False)
        path.write_bytes(whole)


def test_ranks_verify_each_tensor_once_and_the_one_that_has_it_finds_the_damage(checkpoint: Path) -> None:
    inner = ("model", "optimizer/exp_avg")
    shares = ({"a.weight"}, {"a.bias", "b"}, {"of another folder"})
    for name in shares:
        verify_tensors(checkpoint, inner, name)
    path = checkpoint / "optimizer" / "exp_avg" / "model-00001-of-00001.safetensors"
    whole = path.read_bytes()
    for entry in read_header(path).entries:
        path.write_bytes(whole[: entry.start] + bytes([whole[entry.start] ^ 1]) + whole[entry.start + 1 :])
        for names in shares:
            if entry.name in names:
                with pytest.raises(DamagedError, match=f"exp_avg.*damaged: tensor {entry.name} does not"):
                    verify_tensors(checkpoint, inner, names)
            else:
                verify_tensors(checkpoint, inner, names)
        # Nobody reads it: nobody complains.
        verify_tensors(checkpoint, ("model",), {"a.weight", "a.bias", "b"})


def test_progress_adds_up_to_every_byte(checkpoint: Path) -> None:
    counts: list[int] = []
    manifest = verify(checkpoint, on_bytes=counts.append)
    assert sum(counts) == manifest.num_bytes


def test_sizes_alone_show_what_is_missing(checkpoint: Path) -> None:
    check_sizes(checkpoint)
    (checkpoint / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"state\.json: damaged: 2 bytes"):
        check_sizes(checkpoint)


@pytest.mark.parametrize("name", ["model/pytorch_model.bin", "optimizer/rank0.pt", "notes.pkl"])
def test_a_foreign_pickle_is_refused_and_a_note_is_not(checkpoint: Path, name: str) -> None:
    (checkpoint / "README.md").write_text("a note")
    verify(checkpoint)
    (checkpoint / name).write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match=f"{name}: a pickle that megarl did not write; remove it"):
        verify(checkpoint)


@pytest.mark.parametrize("damage", ["cut", "emptied", "longer", "missing", "a folder"])
def test_a_file_that_is_not_whole_is_found_and_named(checkpoint: Path, damage: str) -> None:
    for path in files_of(checkpoint):
        whole = path.read_bytes()
        path.unlink()
        match damage:
            case "cut":
                path.write_bytes(whole[: len(whole) // 2])
            case "emptied":
                path.touch()
            case "longer":
                path.write_bytes(whole + b"\0")
            case "a folder":
                path.mkdir()
        with pytest.raises(CheckpointError, match=path.name):
            verify(checkpoint)
        if path.is_dir():
            path.rmdir()
        path.write_bytes(whole)
    verify(checkpoint)


def test_a_newer_format_is_refused_with_the_way_out(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(CheckpointError, match="format 2 is newer than 1; use the megarl that wrote it"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "1"}', "null", "\x80\x04pickled", "[" * 100_000])
def test_something_else_is_not_a_manifest(checkpoint: Path, text: str) -> None:
    (checkpoint / MANIFEST_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="damaged: not a manifest"):
        read_manifest(checkpoint)


def test_a_link_out_of_the_checkpoint_is_refused_though_its_bytes_are_right(checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / "model" / "config.json"
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match="is outside the checkpoint"):
        verify(checkpoint)


@pytest.mark.parametrize("name", ["../step_000003/state.json", "/etc/passwd"])
def test_a_manifest_that_names_files_outside_is_refused(checkpoint: Path, name: str) -> None:
    manifest = read_manifest(checkpoint)
    write_manifest(checkpoint, replace(manifest, files={name: manifest.files["state.json"]}))
    with pytest.raises(CheckpointError, match="is outside the checkpoint"):
        verify(checkpoint)


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    tensors = {
        "wide": torch.arange(6.0).reshape(2, 3),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "none": torch.zeros(0, 4),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    whole = path.read_bytes()
    header = read_header(path)
    assert {entry.name: (entry.dtype, entry.shape) for entry in header.entries} == {
        "wide": ("F32", (2, 3)),
        "half": ("BF16", (5,)),
        "scalar": ("I64", ()),
        "none": ("F32", (0, 4)),
    }
    for entry in header.entries:
        found = whole[entry.start : entry.start + entry.num_bytes]
        assert found == tensors[entry.name].reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_tensor_is_aligned_to_its_items() -> None:
    header, text = make_header({"a": ("U8", (3,)), "b": ("BF16", (5,)), "c": ("F32", (1,)), "long name": ("I64", ())})
    assert len(text) == header.num_bytes
    sizes = {"U8": 1, "BF16": 2, "F32": 4, "I64": 8}
    assert [entry.start % sizes[entry.dtype] for entry in header.entries] == [0, 0, 0, 0]


def raw(fields: object, *, data: bytes = b"") -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "no header"),
        (b"\x80\x04pickled bytes", "no header"),
        (raw([]), "its header cannot be parsed"),
        (raw({"a": {"dtype": "F32", "shape": [1]}}), "its header cannot be parsed"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "its header cannot be parsed"),
        (raw({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}, data=b"1234"), "dtype F4"),
        (raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, data=bytes(8)), "do not match its dtype"),
        (raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, data=bytes(4)), "do not match its dtype"),
        (raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, data=bytes(3)), "is it complete"),
        (raw({}, data=b"more"), "is it complete"),
    ],
)
def test_what_is_not_tensors_to_its_end_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint):
        read_header(path)
