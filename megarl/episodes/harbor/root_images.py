"""Root file systems for boxes without a container engine: unpacked once per node, built by Dockerfiles, bounded.

Below the cache: `bases/KEY` are unpacked images, `layers/KEY` what the Dockerfile of a task made on top of one, each
beside a JSON file with its facts; `scratch/` has the boxes that are open. A lock per entry is held by those who use it;
when the cache is full, the entries that were not used for the longest time are removed.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import shlex
import shutil
import tarfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from megarl.episodes.harbor.boxes import Box, BoxBrokenError
from megarl.episodes.harbor.bubblewrap import (
    BubblewrapBox,
    RootImage,
    check_programs,
    give_to_boxes,
    held,
    locked,
    remove_abandoned,
    remove_folder,
    used_bytes,
)
from megarl.episodes.harbor.dockerfile import CopyStep, Dockerfile, MakeFolder, RunStep, read_dockerfile
from megarl.episodes.harbor.tasks import BoxLimits, HarborTask
from megarl.errors import ConfigError, DataError, EnvironmentLostError, Problem
from megarl.reward.sandbox import ControlGroups, SandboxError
from megarl.system.foreign import one_line

logger = logging.getLogger(__name__)

HOST = "host"
"""Stands for an image: the machine's own /usr, which is not written, and nothing else of it."""
ANY_IMAGE = "*"
_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_HOST_FOLDERS = ("etc", "home", "opt", "proc", "dev", "root", "run", "srv", "usr", "var/tmp", "var/log", "tmp", "app")
_HOST_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost box\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_STICKY = ("tmp", "var/tmp")
_COPY_TIMEOUT_S = 120.0


class BubblewrapBoxes:
    """`Boxes` of bubblewrap; `images` are root file systems by the name of an image."""

    def __init__(self, images: Mapping[str, Path], cache: Path, *, max_cache_bytes: int) -> None:
        self._images = images
        self._cache = cache
        self._max_cache_bytes = max_cache_bytes
        self._groups = ControlGroups.find()
        self._building: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._used: dict[str, int] = {}
        """Locks of the entries that this worker uses, until it ends."""

    async def check(self, limits: BoxLimits) -> None:
        """Open a box and run a command in it."""
        box = None
        try:
            check_programs()
            await asyncio.to_thread(remove_abandoned, self._cache / "scratch")
            key = await self._base(HOST, Path(HOST))
            image = RootImage(lowers=(f"bases/{key}",), is_host=True, workdir="/", variables={})
            box = BubblewrapBox(self._cache, image, limits, self._groups)
            await box.start()
            if (await box.run("echo 42", variables={}, timeout_s=60)).output.strip() != "42":
                raise SandboxError("a box runs no command")
        except (SandboxError, EnvironmentLostError, OSError) as error:
            message = f"bubblewrap cannot be used here: {error}; see docs/episodes.md, or use docker or podman"
            raise ConfigError("recipe", (Problem(key="environment.sandbox", message=message),)) from None
        finally:
            if box is not None:
                await box.close()

    async def open(self, task: HarborTask) -> Box:
        image = await self._image(task)
        box = BubblewrapBox(self._cache, image, task.limits, self._groups)
        try:
            await box.start()
        except BaseException:
            await box.close()
            raise
        return box

    async def close(self) -> None:
        for descriptor in self._used.values():
            os.close(descriptor)
        self._used.clear()

    async def _image(self, task: HarborTask) -> RootImage:
        described = None if task.dockerfile is None or task.image is not None else read_dockerfile(task.dockerfile)
        name = task.image or (described.base if described is not None else "")
        place = self._images.get(name, self._images.get(ANY_IMAGE))
        if place is None:
            raise DataError(
                f"task {task.name} has the image {name}; name its root file system in environment.images, "
                f"or one for all with {ANY_IMAGE!r}"
            )
        base = await self._base(name, place)
        lowers: tuple[str, ...] = (f"bases/{base}",)
        variables = dict(task.variables)
        workdir = task.workdir or "/"
        if described is not None:
            layer = await self._layer(task, described, base, is_host=str(place) == HOST)
            lowers = (f"layers/{layer}", *lowers)
            variables = {**described.variables, **variables}
            workdir = task.workdir or described.workdir
        return RootImage(lowers=lowers, is_host=str(place) == HOST, workdir=workdir, variables=variables)

    async def _base(self, name: str, place: Path) -> str:
        """Return the key of an unpacked image."""
        if str(place) == HOST:
            facts: list[object] = [HOST, *sorted(_HOST_FILES.items()), *_HOST_FOLDERS]
        else:
            try:
                status = place.stat()
            except OSError as error:
                raise DataError(f"environment.images.{name}: {place}: {error.strerror}") from None
            facts = [str(place.resolve()), status.st_mtime_ns, status.st_size]
        key = _digest(json.dumps(facts).encode())
        async with self._building[key]:
            if await self._use("bases", key):
                return key

            def unpack() -> None:
                target = self._cache / "bases" / f".{key}-{uuid4().hex}"
                target.mkdir(parents=True)
                try:
                    _fill(place, target)
                except (OSError, tarfile.TarError, shutil.Error) as error:
                    remove_folder(target)
                    raise DataError(f"environment.images.{name}: {place} cannot be unpacked: {error}") from None
                self._enter(target, "bases", key)

            await self._build("bases", key, unpack)
        return key

    async def _layer(self, task: HarborTask, described: Dockerfile, base: str, *, is_host: bool) -> str:
        """Return the key of what the task's Dockerfile made of its base."""
        key = await asyncio.to_thread(_context_digest, task.context, base)
        async with self._building[key]:
            if await self._use("layers", key):
                return key
            began = time.monotonic()
            image = RootImage(lowers=(f"bases/{base}",), is_host=is_host, workdir="/", variables={})
            box = BubblewrapBox(self._cache, image, task.limits, self._groups)
            try:
                await box.start()
                await self._carry_out(box, task, described)
                await box.end_processes()
                await self._build("layers", key, lambda: self._enter(box.upper, "layers", key))
            finally:
                await box.close()
            logger.info("built the image of task=%s seconds=%.1f", task.name, time.monotonic() - began)
        return key

    async def _carry_out(self, box: BubblewrapBox, task: HarborTask, described: Dockerfile) -> None:
        deadline = time.monotonic() + task.build_s
        has_context = False
        variables: dict[str, str] = {}
        for step in described.steps:
            match step:
                case MakeFolder(path=path):
                    command, folder, variables = f"mkdir -p {shlex.quote(path)}", "/", {}
                case CopyStep():
                    if not has_context:
                        await box.put(task.context, "/.context")
                        has_context = True
                    command, folder, variables = _copy_command(step), "/.context", {}
                case RunStep(command=command, workdir=folder):
                    variables = dict(step.variables)
            left = max(deadline - time.monotonic(), 0.0)
            try:
                result = await box.run_in(folder, command, variables=variables, timeout_s=left)
            except BoxBrokenError as error:
                raise DataError(f"task {task.name}: its Dockerfile: {error}") from None
            if result.code != 0:
                why = result.stopped or one_line(result.output[-400:].strip()) or f"exit status {result.code}"
                raise DataError(
                    f"task {task.name}: its Dockerfile fails at {one_line(command, max_characters=80)}: {why} "
                    "(boxes of bubblewrap have no network)"
                )
        if has_context:
            await box.run_in("/", "rm -rf /.context", variables={}, timeout_s=_COPY_TIMEOUT_S)

    async def _use(self, kind: str, key: str) -> bool:
        """Hold an entry until this worker ends; return whether there is one."""
        if key in self._used:
            with suppress(OSError):
                os.utime(self._facts(kind, key))
            return True

        def hold() -> int | None:
            descriptor = locked(self._lock(key), fcntl.LOCK_SH)
            if descriptor is not None and not self._facts(kind, key).exists():
                os.close(descriptor)
                return None
            return descriptor

        descriptor = await asyncio.to_thread(hold)
        if descriptor is None:
            return False
        self._used[key] = descriptor
        with suppress(OSError):
            os.utime(self._facts(kind, key))
        return True

    async def _build(self, kind: str, key: str, build: Callable[[], None]) -> None:
        """Make an entry, unless another worker of this node was faster, and hold it."""

        def make() -> None:
            with held(self._lock(key), fcntl.LOCK_EX):
                if not self._facts(kind, key).exists():
                    build()

        await asyncio.to_thread(make)
        if not await self._use(kind, key):
            raise EnvironmentLostError(f"{self._cache}: the image {key} is gone again; the cache is too small")
        await asyncio.to_thread(self._shrink)

    def _enter(self, folder: Path, kind: str, key: str) -> None:
        target = self._cache / kind / key
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():  # of a worker that died before it wrote the facts
            remove_folder(target)
        num_bytes = used_bytes(folder)
        folder.rename(target)
        self._facts(kind, key).write_text(json.dumps({"bytes": num_bytes}))

    def _shrink(self) -> None:
        """Remove entries that nobody uses, the oldest first, until the cache is within its bound."""
        entries: list[tuple[float, int, Path]] = []
        for facts in (*self._cache.glob("bases/*.json"), *self._cache.glob("layers/*.json")):
            with suppress(OSError, ValueError, KeyError):
                entries.append((facts.stat().st_mtime, int(json.loads(facts.read_text())["bytes"]), facts))
        total = sum(num_bytes for _, num_bytes, _ in entries)
        for _, num_bytes, facts in sorted(entries):
            if total <= self._max_cache_bytes:
                return
            with held(self._lock(facts.stem), fcntl.LOCK_EX | fcntl.LOCK_NB) as is_mine:
                if is_mine:
                    facts.unlink(missing_ok=True)
                    remove_folder(facts.with_suffix(""))
                    total -= num_bytes
                    logger.info("removed an image from the cache path=%s bytes=%d", facts.with_suffix(""), num_bytes)

    def _facts(self, kind: str, key: str) -> Path:
        return self._cache / kind / f"{key}.json"

    def _lock(self, key: str) -> Path:
        return self._cache / "locks" / key


def _fill(place: Path, target: Path) -> None:
    """Unpack a folder, or an archive such as `docker export` writes, as files of the user of boxes."""
    if str(place) == HOST:
        _fill_host(target)
    elif place.is_dir():
        shutil.copytree(place, target, symlinks=True, dirs_exist_ok=True)
    else:
        with tarfile.open(place) as archive:
            archive.extractall(target, filter=_plain_member)  # noqa: S202 - it refuses what leads outside
    target.chmod(0o755)
    for name in ("proc", "dev", "tmp"):
        (target / name).mkdir(exist_ok=True)
    for parent, folders, files in os.walk(target):
        give_to_boxes(*(Path(parent, name) for name in (*folders, *files)))
    give_to_boxes(target)


def _plain_member(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    """Leave out devices, which a box makes itself; absolute links are of the image, and stay as they are."""
    if member.isdev():
        return None
    root, name = Path(path).resolve(), member.name.lstrip("/")
    named = [Path(root, name).parent, *([Path(root, member.linkname.lstrip("/"))] if member.islnk() else [])]
    if not all(each.resolve().is_relative_to(root) for each in named):
        raise tarfile.OutsideDestinationError(member, path)
    return member.replace(name=name, uid=os.getuid(), gid=os.getgid(), uname="", gname="", deep=False)


def _fill_host(target: Path) -> None:
    for name in _HOST_FOLDERS:
        (target / name).mkdir(parents=True, exist_ok=True)
    for name in _LINKS:
        path = Path("/", name)
        if path.is_symlink():
            (target / name).symlink_to(path.readlink())
    for name, text in _HOST_FILES.items():
        (target / name).write_text(text)
    alternatives = Path("/etc/alternatives")
    if alternatives.is_dir():  # many programs of Debian's /usr/bin are links into it
        shutil.copytree(alternatives, target / "etc" / "alternatives", symlinks=True)
    for name in _STICKY:
        (target / name).chmod(0o1777)


def _copy_command(step: CopyStep) -> str:
    """Return how files are copied from the context: of a folder its contents, as COPY does."""
    target = shlex.quote(step.target)
    lines = [f"mkdir -p {target}" if step.target.endswith("/") else f"mkdir -p $(dirname {target})"]
    for source in step.sources:
        # Unquoted: patterns are the shell's. Words with a space are refused by the shell of the box, not split here.
        found = source if not source.startswith("/") else source.lstrip("/")
        lines.append(
            f'for each in {found or "."}; do if [ -d "$each" ]; then mkdir -p {target} && cp -r "$each/." {target}; '
            f'else cp "$each" {target}; fi || exit 1; done'
        )
    return " && ".join(lines)


def _context_digest(context: Path, base: str) -> str:
    digest = hashlib.sha256(base.encode())
    for path in sorted(context.rglob("*")):
        name = path.relative_to(context).as_posix()
        if path.is_symlink():
            digest.update(f"{name}\0link\0{path.readlink()}\0".encode())
        elif path.is_file():
            mode = path.stat().st_mode & 0o777
            digest.update(f"{name}\0{mode}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
