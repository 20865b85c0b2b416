"""Checkpoints are copied to a store that speaks S3 and to another disk, by real processes that are really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import fsspec
import pytest

from megarl.checkpoint.folder import checkpoint_folder, list_checkpoints, mark_best, remove, step_of
from megarl.checkpoint.manifest import MANIFEST_FILE, verify
from megarl.checkpoint.mirror import main
from megarl.env import current_environment
from megarl.errors import CheckpointError
from tests.checkpoint.object_store import GS, ObjectStore, object_store
from tests.checkpoint.samples import write_checkpoint


@pytest.fixture(scope="module", params=["s3", "file", GS])
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore | None]:
    if request.param == "file":
        yield None
        return
    with object_store(protocol=request.param) as serving:
        yield serving


@pytest.fixture
def url(store: ObjectStore | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if store is None:
        return f"file://{tmp_path}/mirror/run"
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    return f"{store.url}/{tmp_path.name}"


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def _run(*words: object, expected: int = 0) -> str:
    """Return the output of one call, in this process; `_command` starts another one."""
    told, complained = StringIO(), StringIO()
    with redirect_stdout(told), redirect_stderr(complained):
        code = main([str(word) for word in words])
    assert code == expected, complained.getvalue()
    return told.getvalue() if expected == 0 else complained.getvalue()


def _command(*words: object) -> list[str]:
    return [sys.executable, "-m", "megarl.checkpoint.mirror", *map(str, words)]


def _names(url: str) -> set[str]:
    files, root = fsspec.url_to_fs(url, use_listings_cache=False)
    return {name.removeprefix(f"{root}/") for name in files.find(root)}


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_that_was_copied_and_fetched_has_the_same_bytes(url: str, parent: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(parent, 2)
    assert "uploaded 2 " in _run("upload", url, parent, "--keep-last", 2)
    assert _names(url) == {f"{folder.name}/{name}" for name in _contents(folder)}
    assert _run("upload", url, parent, "--keep-last", 2) == ""  # the store has it
    other = tmp_path / "other" / "checkpoints"
    assert "fetched 2 " in _run("fetch", url, other, "--step", 2)
    assert _contents(other / folder.name) == _contents(folder)
    verify(other / "latest")


def test_the_store_keeps_what_the_disk_keeps(url: str, parent: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(parent, step)
        if step == 1:
            mark_best(checkpoint_folder(parent, 1))
        _run("upload", url, parent, "--keep-last", 1)
    assert {name.split("/")[0] for name in _names(url)} == {"step_000001", "step_000003"}
    # The run resumed from step 1 and took step 2 again: step 3 is not part of it.
    remove(checkpoint_folder(parent, 3))
    remove(checkpoint_folder(parent, 2))
    write_checkpoint(parent, 2)
    _run("upload", url, parent, "--keep-last", 1)
    assert {name.split("/")[0] for name in _names(url)} == {"step_000001", "step_000002"}


def test_a_file_that_is_damaged_on_the_disk_is_not_copied(url: str, parent: Path) -> None:
    whole, damaged = write_checkpoint(parent, 1), write_checkpoint(parent, 2)
    path = damaged / "optimizer/exp_avg/model-00001-of-00001.safetensors"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    for _ in range(2):
        line = _run("upload", url, parent, "--keep-last", 2, expected=CheckpointError.exit_code)
        assert f"{path}: tensor a.weight: damaged" in line
    names = _names(url)
    assert f"{whole.name}/{MANIFEST_FILE}" in names
    assert f"{damaged.name}/{MANIFEST_FILE}" not in names


def test_a_file_that_is_damaged_in_the_store_is_not_fetched(url: str, parent: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(parent, 1)
    _run("upload", url, parent)
    files, root = fsspec.url_to_fs(url, use_listings_cache=False)
    name = f"{root}/{folder.name}/model/model-00001-of-00001.safetensors"
    contents = bytearray(files.cat_file(name))
    contents[-1] ^= 1
    files.pipe_file(name, bytes(contents))
    other = tmp_path / "other" / "checkpoints"
    line = _run("fetch", url, other, "--step", 1, expected=CheckpointError.exit_code)
    assert "tensor a.weight: damaged" in line
    assert list_checkpoints(other) == []


def test_the_newest_is_the_newest_with_a_manifest(url: str, parent: Path, tmp_path: Path) -> None:
    assert _run("newest", url, tmp_path) == ""
    for step in (1, 2):
        write_checkpoint(parent, step)
    _run("upload", url, parent, "--keep-last", 2)
    assert _run("newest", url, tmp_path) == "newest 2\n"
    assert (tmp_path / MANIFEST_FILE).read_bytes() == (parent / "step_000002" / MANIFEST_FILE).read_bytes()
    assert _run("newest", url, tmp_path, "--without", 2) == "newest 1\n"
    files, root = fsspec.url_to_fs(url, use_listings_cache=False)
    files.rm_file(f"{root}/step_000002/{MANIFEST_FILE}")
    assert _run("newest", url, tmp_path) == "newest 1\n"


def test_an_upload_that_is_killed_is_continued(url: str, parent: Path) -> None:
    folder = write_checkpoint(parent, 3)
    reader = folder / "model/model-00001-of-00001.safetensors"
    contents = reader.read_bytes()
    # The upload waits for the bytes of this file for ever, after the others are sent.
    reader.unlink()
    os.mkfifo(reader)
    process = subprocess.Popen(_command("upload", url, parent), env=dict(current_environment()))
    with reader.open("wb"):
        others = {path for path in folder.rglob("*") if path.is_file() and path not in (reader, folder / MANIFEST_FILE)}
        while not {(_in(folder, path), path.stat().st_size) for path in others} <= _sizes(url):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert f"{folder.name}/{MANIFEST_FILE}" not in _names(url)
    reader.unlink()
    reader.write_bytes(contents)
    # Only the file that is missing is sent.
    assert _run("upload", url, parent) == f"uploaded {step_of(folder)} {len(contents)}\n"
    assert _names(url) == {f"{folder.name}/{name}" for name in _contents(folder)}


def _sizes(url: str) -> set[tuple[str, int]]:
    files, root = fsspec.url_to_fs(url, use_listings_cache=False)
    return {(name.removeprefix(f"{root}/"), entry["size"]) for name, entry in files.find(root, detail=True).items()}


def _in(folder: Path, path: Path) -> str:
    return f"{folder.name}/{path.relative_to(folder).as_posix()}"
