"""A run copies its checkpoints beside its steps and fetches them before it resumes, whatever the store does."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from megarl.checkpoint.folder import CHECKPOINTS_FOLDER, list_checkpoints
from megarl.checkpoint.manifest import MANIFEST_FILE, verify
from megarl.checkpoint.mirror import MirroredRun, Mirroring, Transfer, mirror_url, refuse_occupied
from megarl.config.recipe import MirrorConfig, Recipe
from megarl.errors import CheckpointError, PreemptedError
from megarl.observe.events import Noted, Warned
from megarl.observe.observer import Observer
from tests.checkpoint.object_store import ObjectStore, object_store
from tests.checkpoint.samples import make_recipe, write_checkpoint
from tests.observe.samples import ListSink
from tests.small_disk import filled, small_disk

_WAIT_S = 300.0


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


def test_an_unreachable_store_is_told_once_and_has_everything_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.checkpoint.mirror._FIRST_PAUSE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    absent = ObjectStore(port=port)
    for name, value in absent.environment.items():
        monkeypatch.setenv(name, value)
    recipe, sink = _recipe(tmp_path, absent.url), ListSink()
    write_checkpoint(_parent(recipe), 1, recipe=recipe)

    async def run() -> None:
        observer = Observer([sink])
        async with Mirroring(recipe.checkpoint, recipe.run_folder, observer) as mirror:
            await _until(sink, Warned, "are not copied to s3://bucket/checkpoints/run: ")
            write_checkpoint(_parent(recipe), 2, recipe=recipe)
            mirror.saved()
            stack.enter_context(object_store(port))
            await _until(sink, Noted, "works again, after ")

    with ExitStack() as stack:
        asyncio.run(run())
        assert len(_texts(sink, Warned)) == 1
        copied = [text.split(" to ")[0] for text in _texts(sink, Noted) if text.startswith("copied")]
        assert sorted(copied) == ["copied step 1", "copied step 2"]
        shutil.rmtree(recipe.run_folder)
        fetched = _mirrored(recipe).fetch_newest(notify=lambda _text: None)
        assert fetched.notes == ()
        verify(_parent(recipe) / "step_000002")


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
            async with Mirroring(recipe.checkpoint, recipe.run_folder, Observer([sink])):
                with filled(disk, leaving=4096):
                    await _until(sink, Warned, "No space left on device")
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


def test_a_run_that_is_done_does_not_wait_for_a_store_that_fails(tmp_path: Path) -> None:
    (tmp_path / "mirror").write_text("a file, not a folder")
    recipe, sink = _recipe(tmp_path, f"file://{tmp_path}/mirror", finish_s=100_000), ListSink()
    write_checkpoint(_parent(recipe), 1, recipe=recipe)

    async def run() -> None:
        async with Mirroring(recipe.checkpoint, recipe.run_folder, Observer([sink])):
            pass

    asyncio.run(run())
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


def test_steps_that_the_run_took_again_are_not_fetched(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, f"file://{tmp_path}/mirror")
    parent = _parent(recipe)
    for step in (1, 5):
        write_checkpoint(parent, step, recipe=recipe)
    _upload(recipe)
    write_checkpoint(parent, 3, recipe=recipe)  # sets step 5 aside
    assert _mirrored(recipe).fetch_newest(notify=lambda _text: None).replaced == frozenset()


def test_a_mirror_that_cannot_be_read_stops_only_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "mirror").write_text("a file, not a folder")
    recipe = _recipe(tmp_path, f"file://{tmp_path}/mirror")
    with pytest.raises(CheckpointError, match=r"cannot be read, and there is no checkpoint in .*; make it reachable"):
        _mirrored(recipe).fetch_newest(notify=lambda _text: None)
    write_checkpoint(_parent(recipe), 1, recipe=recipe)
    (note,) = _mirrored(recipe).fetch_newest(notify=lambda _text: None).notes
    assert "cannot be read; the run resumes from its own disk" in note


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
