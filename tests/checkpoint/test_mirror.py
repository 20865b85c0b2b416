"""Checkpoints are copied to a store that speaks S3 and to another disk, by real processes that are really killed.

A run copies them beside its steps and fetches them before it resumes, whatever the store does.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import fsspec
import pytest

from megarl.checkpoint import mirror
from megarl.checkpoint.folder import CHECKPOINTS_FOLDER, checkpoint_folder, list_checkpoints, mark_best, remove, step_of
from megarl.checkpoint.manifest import MANIFEST_FILE, verify
from megarl.checkpoint.mirror import (
    MirroredRun,
    Mirroring,
    Transfer,
    claim_mirror,
    main,
    mirror_url,
    refuse_occupied,
)
from megarl.checkpoint.mirror_owner import check_owner, claim, current_owner
from megarl.checkpoint.store import Store
from megarl.config.recipe import MirrorConfig, Recipe
from megarl.env import current_environment
from megarl.errors import CheckpointError, MachineError, PreemptedError
from megarl.observe.events import Noted, Warned
from megarl.observe.observer import Observer
from megarl.system.run_lock import run_lock
from tests.checkpoint.object_store import GS, ObjectStore, object_store, slow_network
from tests.checkpoint.samples import make_recipe, write_checkpoint
from tests.observe.samples import ListSink
from tests.small_disk import filled, small_disk


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


def test_the_file_with_keys_is_named_to_the_store_and_to_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []

    def start(command: list[str], *, environment: dict[str, str], **_options: object) -> None:
        assert str(tmp_path) not in " ".join(command)
        started.append(environment)
        raise InterruptedError

    monkeypatch.setattr(mirror, "start_guarded", start)
    for keys in (tmp_path / "keys", None):
        with pytest.raises(InterruptedError):
            Transfer(words=("newest", "s3://bucket"), stall_s=1.0, api_key_file=keys).run()
    named, plain = ({name: each.get(name) for name in mirror._KEY_VARIABLES} for each in started)
    assert set(named.values()) == {str(tmp_path / "keys")}
    assert plain == {name: current_environment().get(name) for name in mirror._KEY_VARIABLES}


@pytest.mark.patient
def test_a_checkpoint_that_was_copied_and_fetched_has_the_same_bytes(url: str, parent: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(parent, 2)
    assert "uploaded 2 " in _run("upload", url, parent, "--keep-last", 2)
    assert _names(url) == {f"{folder.name}/{name}" for name in _contents(folder)}
    assert _run("upload", url, parent, "--keep-last", 2) == ""  # the store has it
    other = tmp_path / "other" / "checkpoints"
    assert "fetched 2 " in _run("fetch", url, other, "--step", 2)
    assert _contents(other / folder.name) == _contents(folder)
    verify(other / "latest")


@pytest.mark.patient
def test_the_store_keeps_what_the_disk_keeps(url: str, parent: Path) -> None:
    _claim(url, "disk", 1)
    for step in (1, 2, 3):
        write_checkpoint(parent, step)
        if step == 1:
            mark_best(checkpoint_folder(parent, 1))
        # Each upload is of another driver of this disk.
        _run("upload", url, parent, "--keep-last", 1, "--claim", _claim(url, "disk", 1 + step))
    assert _steps(url) == {1, 3}
    # The run resumed from step 1 and took step 2 again: step 3 is not part of it.
    remove(checkpoint_folder(parent, 3))
    remove(checkpoint_folder(parent, 2))
    write_checkpoint(parent, 2)
    _run("upload", url, parent, "--keep-last", 1, "--claim", _claim(url, "disk", 9))
    assert _steps(url) == {1, 2}


def _claim(url: str, run_id: str, token: int) -> str:
    return _run("claim", url, "unused", "--run-id", run_id, "--token", token).split()[1]


def _steps(url: str) -> set[int]:
    return {int(name.split("/")[0].removeprefix("step_")) for name in _names(url) if name.startswith("step_")}


@pytest.mark.patient
@pytest.mark.fault("a driver wakes up after another one has gone on from its mirror", "it ends; the mirror stays")
def test_a_driver_that_wakes_up_changes_nothing_in_the_mirror_of_its_successor(
    url: str, parent: Path, tmp_path: Path
) -> None:
    early = _claim(url, "disk", 1)
    write_checkpoint(parent, 10)
    _run("upload", url, parent, "--claim", early)
    other = tmp_path / "other" / "checkpoints"
    late = _claim(url, "another disk", 1)
    for step in (30, 40):
        write_checkpoint(other, step)
        _run("upload", url, other, "--keep-last", 2, "--claim", late)
    before = _names(url)
    assert _steps(url) == {30, 40}
    write_checkpoint(parent, 11)
    for words in ((), ("--claim", early)):
        line = _run("upload", url, parent, *words, expected=MachineError.exit_code)
        assert "another driver of this run has taken its mirror" in line
    assert _names(url) == before


def test_steps_of_others_are_not_removed_because_a_run_has_not_come_that_far(
    url: str, parent: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other" / "checkpoints"
    write_checkpoint(other, 40)
    _run("upload", url, other, "--claim", _claim(url, "another disk", 1))
    write_checkpoint(parent, 10)
    _run("upload", url, parent, "--claim", _claim(url, "disk", 1))
    assert _steps(url) == {10, 40}


def test_a_mirror_is_claimed_by_one_driver_after_the_other(url: str) -> None:
    first = _claim(url, "disk", 3)
    assert first.startswith("1-")
    second = _claim(url, "disk", 4)
    assert second.startswith("2-")
    assert _names(url) == {"owner_000002.json"}
    refused = ("claim", url, "unused", "--run-id", "disk", "--token", 3)
    assert "has taken its mirror (owner 2, run disk)" in _run(*refused, expected=MachineError.exit_code)
    # The run began while the store could not be reached, and another disk has it.
    late = ("claim", url, "unused", "--token", 1, "--late", "--run-id")
    assert "has taken its mirror" in _run(*late, "another disk", expected=MachineError.exit_code)
    assert _claim(url, "another disk", 1).startswith("3-")


def test_of_two_drivers_that_claim_at_once_one_is_refused(url: str) -> None:
    """The second has read the owners before the first has written."""
    store, beaten = Store(url), list[str]()

    class Late(Store):
        def names(self) -> list[str]:
            found = super().names()
            if not beaten:
                beaten.append(claim(store, run_id="first", token=1).claim)
            return found

    owner = claim(Late(url), run_id="second", token=1)
    assert owner.number == 2
    with pytest.raises(MachineError, match="owner 2, run second"):
        check_owner(store, beaten[0])


def test_an_owner_that_cannot_be_read_is_another_owner(url: str) -> None:
    mine = _claim(url, "disk", 1)
    Store(url).write_named("owner_000007.json", b"{")
    with pytest.raises(MachineError, match="owner 7, run unknown"):
        check_owner(Store(url), mine)
    assert _claim(url, "disk", 2).startswith("8-")


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


@pytest.mark.patient
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


_WAIT_S = 300.0


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transfers run here, for tests that are about their order: each process takes seconds to start."""

    def run(transfer: Transfer) -> None:
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # a process has a client of its own
        output = StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            try:
                transfer.code = main(transfer.words)
            except Exception:  # noqa: BLE001 - so ends a process
                traceback.print_exc()
                transfer.code = 1
        for line in output.getvalue().splitlines():
            transfer._take(line)
        transfer.problem = transfer._last if transfer.code else ""

    monkeypatch.setattr(Transfer, "run", run)


def _recipe(tmp_path: Path, url: str, **mirror: object) -> Recipe:
    return make_recipe(
        run={"name": "run", "steps": 9, "folder": str(tmp_path)}, checkpoint={"mirror": {"url": url, **mirror}}
    )


def _parent(recipe: Recipe) -> Path:
    return recipe.run_folder / CHECKPOINTS_FOLDER


def _texts(sink: ListSink, kind: type[Noted] | type[Warned]) -> list[str]:
    return [record.event.text for record in sink.records if isinstance(record.event, kind)]


async def _until(sink: ListSink, kind: type[Noted] | type[Warned], text: str) -> None:
    async with asyncio.timeout(_WAIT_S):
        while not any(text in each for each in _texts(sink, kind)):
            await asyncio.sleep(0.05)


async def _until_failed_again(mirroring: Mirroring) -> None:
    async with asyncio.timeout(_WAIT_S):
        while mirroring._num_failures < 2:
            await asyncio.sleep(0.05)


@pytest.mark.patient
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_an_unreachable_store_is_told_once_and_has_everything_when_it_is_back(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.checkpoint.mirror._FIRST_PAUSE_S", 0.1)
    reserved = socket.socket()  # nobody listens there, and nobody else may
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    absent = ObjectStore(port=reserved.getsockname()[1])
    for name, value in absent.environment.items():
        monkeypatch.setenv(name, value)
    recipe, sink = _recipe(tmp_path, absent.url), ListSink()
    write_checkpoint(_parent(recipe), 1, recipe=recipe)

    async def run() -> None:
        observer = Observer([sink])
        async with Mirroring(recipe.checkpoint, recipe.run_folder, observer) as mirror:
            await _until(sink, Warned, "are not copied to s3://bucket/checkpoints/run: ")
            await _until_failed_again(mirror)
            write_checkpoint(_parent(recipe), 2, recipe=recipe)
            mirror.saved()
            stack.enter_context(slow_network(store, bytes_per_s=math.inf, port=absent.port))
            await _until(sink, Noted, "works again, after ")

    with reserved, ExitStack() as stack:
        asyncio.run(run())
        assert len(_texts(sink, Warned)) == 1
        copied = [text.split(" to ")[0] for text in _texts(sink, Noted) if text.startswith("copied")]
        assert sorted(copied) == ["copied step 1", "copied step 2"]
        shutil.rmtree(recipe.run_folder)
        fetched = _mirrored(recipe).fetch_newest(notify=lambda _text: None)
        assert fetched.notes == ()
        verify(_parent(recipe) / "step_000002")


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.needs("root")
def test_a_full_disk_of_the_mirror_is_told_once_and_the_upload_finishes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.checkpoint.mirror._FIRST_PAUSE_S", 0.1)
    sink = ListSink()
    with small_disk(tmp_path / "disk", num_bytes=1 << 20) as disk:
        recipe = _recipe(tmp_path, f"file://{disk}")
        write_checkpoint(_parent(recipe), 1, recipe=recipe)

        async def run() -> None:
            async with Mirroring(recipe.checkpoint, recipe.run_folder, Observer([sink])) as mirroring:
                with filled(disk, leaving=4096):
                    await _until(sink, Warned, "No space left on device")
                    await _until_failed_again(mirroring)
                await _until(sink, Noted, "works again, after ")

        asyncio.run(run())
        assert len(_texts(sink, Warned)) == 1
        verify(disk / "run" / "step_000001")


def test_a_preempted_run_finishes_its_copy_and_one_that_failed_does_not_wait(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, f"file://{tmp_path}/mirror")
    write_checkpoint(_parent(recipe), 1, recipe=recipe)

    async def run(error: Exception) -> None:
        async with Mirroring(recipe.checkpoint, recipe.run_folder, Observer([])):
            raise error

    copy = tmp_path / "mirror" / "run" / "step_000001" / MANIFEST_FILE
    with pytest.raises(CheckpointError):
        asyncio.run(run(CheckpointError("lost")))
    assert not copy.exists()
    with pytest.raises(PreemptedError):
        asyncio.run(run(PreemptedError("asked")))
    assert copy.exists()


@pytest.mark.usefixtures("in_this_process")
async def test_a_run_that_is_done_does_not_wait_for_a_store_that_fails(tmp_path: Path) -> None:
    (tmp_path / "mirror").write_text("a file, not a folder")
    recipe, sink = _recipe(tmp_path, f"file://{tmp_path}/mirror", finish_s=100_000), ListSink()
    write_checkpoint(_parent(recipe), 1, recipe=recipe)

    async with Mirroring(recipe.checkpoint, recipe.run_folder, Observer([sink])):
        pass
    told = _texts(sink, Warned)
    assert "are not copied to" in told[0]
    assert told[1].startswith(f"the mirror lacks the last checkpoint, which is whole in {_parent(recipe)}")
    assert len(told) == 2


def test_a_store_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_store = ObjectStore(port=silent.getsockname()[1])
        for name, value in silent_store.environment.items():
            monkeypatch.setenv(name, value)
        transfer = Transfer(words=("newest", silent_store.url, str(tmp_path)), stall_s=1.0)
        transfer.run()
        assert transfer.problem == "nothing moved for 1 s"
        stopped = threading.Event()
        stopped.set()
        transfer = Transfer(words=transfer.words, stall_s=_WAIT_S, is_stopped=stopped)
        transfer.run()
        assert transfer.problem == "stopped"


@pytest.mark.usefixtures("in_this_process")
def test_the_newest_of_disk_and_store_is_resumed_and_the_disk_is_preferred(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, f"file://{tmp_path}/mirror")
    parent, told = _parent(recipe), list[str]()
    assert _mirrored(recipe).fetch_newest(notify=told.append).replaced == frozenset()  # both are empty
    older, newer = (write_checkpoint(parent, step, recipe=recipe) for step in (1, 2))
    _upload(recipe)
    assert _mirrored(recipe).fetch_newest(notify=told.append).replaced == frozenset()
    assert told == []
    # Ranks found the newer one damaged: the mirror replaces it.
    (newer / "state.json").write_text("damaged")
    assert _mirrored(recipe).fetch_newest(damaged=[newer], notify=told.append).replaced == {newer}
    verify(newer)
    # The disk is lost.
    shutil.rmtree(parent)
    assert _mirrored(recipe).fetch_newest(notify=told.append).replaced == {newer}
    assert [folder.name for folder in list_checkpoints(parent)] == [newer.name]
    assert told[0] == f"fetching step 2 from file://{tmp_path}/mirror/run: 0.000 GB"
    assert told[-1].startswith(f"fetched step 2 from file://{tmp_path}/mirror/run: 0.000 GB in ")
    # Damaged in the mirror as well: the one before it.
    shutil.rmtree(parent)
    (tmp_path / "mirror" / "run" / newer.name / "state.json").write_text("damaged")
    fetched = _mirrored(recipe).fetch_newest(notify=told.append)
    assert fetched.replaced == {older}
    assert "step 2: " in fetched.notes[0]


@pytest.mark.fault("a manifest that is damaged in the mirror", "skipped with a note; an earlier step is resumed")
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("damage", [b"", b'{"format": 1', b'{"format": 999}'])
def test_a_manifest_that_is_damaged_in_the_mirror_is_skipped_with_a_note(tmp_path: Path, damage: bytes) -> None:
    recipe = _recipe(tmp_path, f"file://{tmp_path}/mirror")
    older, newer = (write_checkpoint(_parent(recipe), step, recipe=recipe) for step in (1, 2))
    _upload(recipe)
    (tmp_path / "mirror" / "run" / newer.name / MANIFEST_FILE).write_bytes(damage)
    shutil.rmtree(newer)
    fetched = _mirrored(recipe).fetch_newest(notify=lambda _text: None)
    assert fetched.replaced == frozenset(), "the disk has the step before"
    (note,) = fetched.notes
    assert note.startswith(f"skipped file://{tmp_path}/mirror/run, step 2: {newer.name}/manifest.json")
    shutil.rmtree(older)
    assert _mirrored(recipe).fetch_newest(notify=lambda _text: None).replaced == {older}


@pytest.mark.usefixtures("in_this_process")
async def test_a_driver_whose_mirror_another_one_has_taken_ends(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, f"file://{tmp_path}/mirror")
    write_checkpoint(_parent(recipe), 1, recipe=recipe)
    url, is_copied = mirror_url(_mirror(recipe), recipe.run.name), asyncio.Event()

    async def drive(claimed: str | None) -> None:
        async with Mirroring(recipe.checkpoint, recipe.run_folder, Observer([]), claim=claimed) as mirroring:
            async with asyncio.timeout(_WAIT_S):
                while not mirroring._idle.is_set():
                    await asyncio.sleep(0.01)
            is_copied.set()
            claim(Store(url), run_id="another disk", token=1)
            write_checkpoint(_parent(recipe), 2, recipe=recipe)
            mirroring.saved()
            await asyncio.sleep(_WAIT_S)
            raise AssertionError("it takes further steps")

    with run_lock(recipe.run_folder):
        mine, problem = claim_mirror(_mirror(recipe), recipe.run_folder)
        assert (problem, mine is not None) == ("", True)
        with pytest.raises(MachineError, match="another driver of this run has taken its mirror"):
            await drive(mine)
    assert is_copied.is_set()
    assert _steps(url) == {1}


@pytest.mark.usefixtures("in_this_process")
async def test_a_mirror_that_could_not_be_reached_is_claimed_later(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, f"file://{tmp_path}/mirror")
    write_checkpoint(_parent(recipe), 1, recipe=recipe)
    with run_lock(recipe.run_folder) as holder:
        async with Mirroring(recipe.checkpoint, recipe.run_folder, Observer([])):
            pass
        owner = current_owner(Store(mirror_url(_mirror(recipe), recipe.run.name)))
    assert owner is not None
    assert (owner.run_id, owner.token, owner.steps) == (holder.run_id, holder.token, (1,))


@pytest.mark.usefixtures("in_this_process")
def test_steps_that_the_run_took_again_are_not_fetched(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, f"file://{tmp_path}/mirror")
    parent = _parent(recipe)
    for step in (1, 5):
        write_checkpoint(parent, step, recipe=recipe)
    _upload(recipe)
    write_checkpoint(parent, 3, recipe=recipe)  # sets step 5 aside
    assert _mirrored(recipe).fetch_newest(notify=lambda _text: None).replaced == frozenset()


@pytest.mark.usefixtures("in_this_process")
def test_a_mirror_that_cannot_be_read_stops_only_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "mirror").write_text("a file, not a folder")
    recipe = _recipe(tmp_path, f"file://{tmp_path}/mirror")
    with pytest.raises(CheckpointError, match=r"cannot be read, and there is no checkpoint in .*; make it reachable"):
        _mirrored(recipe).fetch_newest(notify=lambda _text: None)
    write_checkpoint(_parent(recipe), 1, recipe=recipe)
    (note,) = _mirrored(recipe).fetch_newest(notify=lambda _text: None).notes
    assert "cannot be read; the run resumes from its own disk" in note


@pytest.mark.usefixtures("in_this_process")
def test_another_recipe_and_a_new_run_of_the_same_name_are_refused_before_a_byte_is_fetched(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, f"file://{tmp_path}/mirror")
    refuse_occupied(_mirror(recipe), recipe.run.name)
    write_checkpoint(_parent(recipe), 1, recipe=make_recipe(run={"name": "run", "steps": 9, "seed": 7}))
    _upload(recipe)
    shutil.rmtree(recipe.run_folder)
    with pytest.raises(CheckpointError, match=r"step 1 was made with another recipe: run\.seed is 1, was 7"):
        _mirrored(recipe).fetch_newest(notify=lambda _text: None)
    assert not recipe.run_folder.exists()
    with pytest.raises(CheckpointError, match=r"has checkpoints of an earlier run, the newest of step 1; give"):
        refuse_occupied(_mirror(recipe), recipe.run.name)


def _mirror(recipe: Recipe) -> MirrorConfig:
    assert recipe.checkpoint.mirror is not None
    return recipe.checkpoint.mirror


def _mirrored(recipe: Recipe) -> MirroredRun:
    dumped = recipe.model_dump(mode="json")
    return MirroredRun(mirror=_mirror(recipe), run_folder=recipe.run_folder, recipe=dumped, num_steps=9)


def _upload(recipe: Recipe) -> None:
    url = mirror_url(_mirror(recipe), recipe.run.name)
    transfer = Transfer(words=("upload", url, str(_parent(recipe)), "--keep-last", "2"), stall_s=_WAIT_S)
    transfer.run()
    assert transfer.problem == ""
