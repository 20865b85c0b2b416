from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.checkpoint.manifest import MANIFEST_FILE, read_manifest, verify, write_manifest
from megarl.checkpoint.state import read_state
from megarl.errors import CheckpointError
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
    source = random.Random(0)
    files = files_of(checkpoint)
    for _ in range(1000):
        path = source.choice(files)
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[source.randrange(len(whole))] ^= 1 << source.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="step_000003"):
            verify(checkpoint)
        path.write_bytes(whole)
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


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "1"}', "null", "\x80\x04pickled"])
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
