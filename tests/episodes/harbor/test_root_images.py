"""The cache of root file systems: unpacked once, bounded, and never written by a box."""

from __future__ import annotations

import asyncio
import tarfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from megarl.episodes.harbor.root_images import BubblewrapBoxes
from megarl.episodes.harbor.tasks import BoxLimits, HarborTask, read_task
from megarl.errors import DataError
from tests.episodes.harbor.small_tasks import write_tasks

pytestmark = pytest.mark.needs("bubblewrap")

LIMITS = BoxLimits(memory_bytes=1 << 29, disk_bytes=1 << 26, cpus=1, max_processes=64)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks")


def boxes_of(tmp_path: Path, image: Path | None = None, *, max_cache_bytes: int = 1 << 30) -> BubblewrapBoxes:
    return BubblewrapBoxes({"*": image or Path("host")}, tmp_path / "cache", max_cache_bytes=max_cache_bytes)


async def said_in(boxes: BubblewrapBoxes, task: HarborTask, command: str) -> str:
    """Return what a command prints in a fresh box of a task."""
    box = await boxes.open(task)
    try:
        return (await box.run(command, variables={}, timeout_s=60)).output
    finally:
        await box.close()


def test_a_task_is_built_once_and_again_when_its_files_change(tasks: Path, tmp_path: Path) -> None:
    async def read() -> list[str]:
        found = []
        for number in ("3", "3", "5"):
            boxes = boxes_of(tmp_path)  # of another worker
            (tasks / "sum" / "environment" / "numbers.txt").write_text(number)
            found.append(await said_in(boxes, read_task(tasks, "sum", LIMITS), "cat numbers.txt; echo 9 > numbers.txt"))
            await boxes.close()
        return found

    assert asyncio.run(read()) == ["3", "3", "5"]
    assert len(list((tmp_path / "cache" / "layers").glob("*.json"))) == 2


def test_a_full_cache_loses_what_was_not_used_for_the_longest_time(tasks: Path, tmp_path: Path) -> None:
    async def fill() -> None:
        for name in ("sum", "hello", "json"):
            boxes = boxes_of(tmp_path, max_cache_bytes=1)
            await said_in(boxes, read_task(tasks, name, LIMITS), "true")
            await boxes.close()

    asyncio.run(fill())
    # The last worker held its own layer and its base when it looked; all others were removed.
    assert len(list((tmp_path / "cache" / "layers").glob("*.json"))) == 1
    assert len(list((tmp_path / "cache" / "bases").glob("*.json"))) == 1


def test_a_dockerfile_that_fails_is_the_tasks_fault(tasks: Path, tmp_path: Path) -> None:
    path = tasks / "hello" / "environment" / "Dockerfile"
    path.write_text("FROM a\nRUN echo before && echo broken >&2 && exit 3\n")
    with pytest.raises(DataError, match=r"task hello: its Dockerfile fails at echo before.*: before broken \(boxes"):
        asyncio.run(said_in(boxes_of(tmp_path), read_task(tasks, "hello", LIMITS), "true"))
    assert list((tmp_path / "cache" / "scratch").iterdir()) == []


def archive_of(path: Path, members: dict[str, str | tuple[bytes, str]]) -> Path:
    """Write an archive of files by name; a pair is the kind of a link and its target."""
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.size = len(content)
                archive.addfile(member, BytesIO(content.encode()))
            else:
                member.type, member.linkname = content
                archive.addfile(member)
    return path


def test_an_archive_that_reaches_outside_is_refused(tasks: Path, tmp_path: Path) -> None:
    task = replace(read_task(tasks, "hello", LIMITS), image="small")
    outside = tmp_path / "outside"
    outside.write_text("secret")
    reaching: tuple[dict[str, str | tuple[bytes, str]], ...] = (
        {"../../../evil": "x"},
        {"etc": (tarfile.SYMTYPE, str(tmp_path)), "etc/evil": "x"},
        {"link": (tarfile.LNKTYPE, "../../../outside")},
    )
    for members in reaching:
        image = archive_of(tmp_path / "image.tar", members)
        with pytest.raises(DataError, match=r"environment\.images\.small: .*image\.tar cannot be unpacked"):
            asyncio.run(said_in(boxes_of(tmp_path, image), task, "true"))
    assert not (tmp_path / "evil").exists()


def test_an_image_that_nobody_named_is_refused(tasks: Path, tmp_path: Path) -> None:
    boxes = BubblewrapBoxes({"other": Path("host")}, tmp_path / "cache", max_cache_bytes=1)
    with pytest.raises(DataError, match=r"task hello has the image python:3\.12-slim; name its root file system in"):
        asyncio.run(boxes.open(read_task(tasks, "hello", LIMITS)))


def test_an_unpacked_root_is_the_box_and_is_not_changed(tasks: Path, tmp_path: Path) -> None:
    """The root is a copy of the machine's shell with its libraries: nothing else is inside."""
    root = tmp_path / "root"
    for folder in ("bin", "lib", "lib64", "etc"):
        (root / folder).mkdir(parents=True)
    for program in ("sh", "cat", "rm", "ls"):
        copy_with_libraries(Path("/bin", program), root)
    (root / "etc" / "release").write_text("small 1\n")
    task = replace(read_task(tasks, "hello", LIMITS), image="small", workdir="/etc")

    async def looked() -> tuple[str, str]:
        boxes = boxes_of(tmp_path, root)
        try:
            return (
                await said_in(boxes, task, "cat release; rm release; ls /etc /usr"),
                await said_in(boxes, task, "cat release"),
            )
        finally:
            await boxes.close()

    first, second = asyncio.run(looked())
    assert first.startswith("small 1\n")
    assert "release" not in first.partition("/etc:")[2]
    assert "No such file" in first  # /usr
    assert second == "small 1\n"


def copy_with_libraries(program: Path, root: Path) -> None:
    import re
    import shutil
    import subprocess

    shutil.copy(program, root / "bin" / program.name)
    needed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for path in map(Path, re.findall(r"(/\S+)", needed)):
        target = root / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path.resolve(), target)
