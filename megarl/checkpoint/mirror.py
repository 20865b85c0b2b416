"""The copy of a run's checkpoints in an object store or on another disk: uploads beside the steps, and fetches.

The work is done by a process of its own (`python -m` this module), so that a store can neither slow the loop down nor
stop it. Errors of a store have no common class: the driver reads the exit code and the last line. The process prints
`moved BYTES` as it works, then `uploaded STEP BYTES`, `newest STEP` or `fetched STEP BYTES`.

The store has the files of a checkpoint under their names. `manifest.json` is written last and removed first: with it a
checkpoint is complete. Until then `uploading.json` has the same text, so that an interrupted upload is continued.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import IO, TYPE_CHECKING

import fsspec
import xxhash
from pydantic import JsonValue

from megarl.checkpoint.folder import (
    ABANDONED,
    BEST,
    CHECKPOINTS_FOLDER,
    begin,
    checkpoint_folder,
    commit,
    list_checkpoints,
    marked,
    step_of,
)
from megarl.checkpoint.manifest import MANIFEST_FILE, FileDigest, Manifest, check_sizes, inside, read_manifest, sync
from megarl.env import current_environment
from megarl.errors import CheckpointError, DamagedError, MegarlError, PreemptedError
from megarl.system.guard import start_guarded, stop_guarded

if TYPE_CHECKING:
    from megarl.config.recipe import CheckpointConfig, MirrorConfig
    from megarl.observe.observer import Observer

UPLOADING_FILE = "uploading.json"
UPLOADED, NEWEST, FETCHED, MOVED = "uploaded", "newest", "fetched", "moved"
NUM_STREAMS = 8
"""Files under way at once: one connection to a store does not fill a network."""
_CHUNK_BYTES = 16 << 20
_PRINT_EVERY_S = 1.0
"""Between two lines of the process."""
_REPORT_EVERY_S = 10.0
"""Between two lines of the driver."""
_POLL_S = 0.2
_KEY_VARIABLES = ("AWS_SHARED_CREDENTIALS_FILE", "GOOGLE_APPLICATION_CREDENTIALS")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 15.0, 600.0


def mirror_url(config: MirrorConfig, run_name: str) -> str:
    return f"{config.url.rstrip('/')}/{run_name}"


@dataclass(kw_only=True)
class Transfer:
    """One process of `checkpoint.mirror`, its lines, and how it ended."""

    words: tuple[str, ...]
    stall_s: float
    api_key_file: Path | None = None
    on_line: Callable[[list[str]], None] = lambda _words: None
    is_stopped: threading.Event = field(default_factory=threading.Event)
    code: int | None = None
    """The exit code, once it has ended."""
    problem: str = ""
    """Why it failed; empty where it did not."""
    _last: str = ""

    def run(self) -> None:
        """Return when the process has ended; one in which nothing moves, or that is stopped, is ended."""
        command = [sys.executable, "-m", "megarl.checkpoint.mirror", *self.words]
        # The libraries of stores read files that variables name, and only theirs.
        keys = {} if self.api_key_file is None else dict.fromkeys(_KEY_VARIABLES, str(self.api_key_file.absolute()))
        process = start_guarded(command, environment={**current_environment(), **keys}, output=subprocess.PIPE)
        try:
            self._follow(process)
            self.code = process.wait() if not self.problem else -1
        finally:
            stop_guarded(process, grace_s=0.0)
            assert process.stdout is not None
            process.stdout.close()
        if self.code and not self.problem:
            self.problem = self._last or f"exit code {self.code}"

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        descriptor, rest, moved = process.stdout.fileno(), b"", time.monotonic()
        while True:
            if not select.select([descriptor], [], [], _POLL_S)[0]:
                if self.is_stopped.is_set():
                    self.problem = "stopped"
                elif time.monotonic() - moved > self.stall_s:
                    self.problem = f"nothing moved for {self.stall_s:g} s"
                else:
                    continue
                return
            read = os.read(descriptor, 1 << 16)
            if not read:
                return
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                moved = time.monotonic()
                self._take(line.decode(errors="replace").strip())

    def _take(self, line: str) -> None:
        words = line.split()
        if words and words[0] in (MOVED, UPLOADED, NEWEST, FETCHED):
            self.on_line(words)
        elif line:
            self._last = line


class Mirroring:
    """Copies every saved checkpoint, beside the steps. A store that fails is reported once and asked again later."""

    def __init__(self, config: CheckpointConfig, run_folder: Path, observer: Observer) -> None:
        self._config, self._mirror = config, config.mirror
        self._parent, self._run_name = run_folder.absolute() / CHECKPOINTS_FOLDER, run_folder.name
        self._observer = observer
        self._wanted = asyncio.Event()
        self._idle = asyncio.Event()
        self._stop = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_newer = False
        """Whether a checkpoint was saved after the upload under way began."""
        self._num_failures = 0
        self._uploaded: list[tuple[int, int]] = []

    def saved(self) -> None:
        """Ask for a copy of what the disk has now."""
        self._is_newer = True
        self._idle.clear()
        self._wanted.set()

    async def __aenter__(self) -> Mirroring:
        if self._mirror is not None:
            self.saved()  # an earlier process may not have finished
            self._task = asyncio.create_task(self._work(self._mirror))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is None or self._mirror is None:
            return
        try:
            if error is None or isinstance(error, PreemptedError):
                await self._finish(self._mirror.finish_s)
        except asyncio.CancelledError:
            # Asked to end at once; every step is saved, so that the run ends as it would have without a mirror.
            self._observer.noted(f"the copy in {self._mirror.url} goes on when the run is started again")
        finally:
            self._stop.set()
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _finish(self, timeout_s: float) -> None:
        """Wait for the last copy; a store that fails is asked once more at once, and then no longer waited for."""
        failed_before = self._num_failures
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._idle.is_set() and self._num_failures <= failed_before + 1:
                    self._wanted.set()
                    await asyncio.sleep(_POLL_S)
        if not self._idle.is_set():
            self._observer.warned(
                f"the mirror lacks the last checkpoint, which is whole in {self._parent}; the same command, started "
                "again, copies it"
            )

    async def _work(self, mirror: MirrorConfig) -> None:
        url = mirror_url(mirror, self._run_name)
        pause_s: float | None = None
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), timeout=pause_s)
            self._wanted.clear()
            self._is_newer = False
            began = time.monotonic()
            problem = await self._upload(url, mirror)
            seconds = time.monotonic() - began
            pause_s = self._after(url, problem, seconds)
            if not problem and not self._is_newer:
                self._idle.set()

    async def _upload(self, url: str, mirror: MirrorConfig) -> str:
        self._uploaded = []
        words = ("upload", url, str(self._parent), "--keep-last", str(self._config.keep_last))
        transfer = Transfer(
            words=words,
            stall_s=mirror.stall_s,
            api_key_file=mirror.api_key_file,
            on_line=self._note,
            is_stopped=self._stop,
        )
        running = asyncio.ensure_future(asyncio.to_thread(transfer.run))
        try:
            await asyncio.shield(running)
        finally:
            if not running.done():
                self._stop.set()
            await asyncio.wait([running])
        return transfer.problem

    def _note(self, words: list[str]) -> None:
        if words[0] == UPLOADED:
            self._uploaded.append((int(words[1]), int(words[2])))

    def _after(self, url: str, problem: str, seconds: float) -> float | None:
        """Report an upload; return the seconds until the next attempt, None where nothing is left to do."""
        for step, num_bytes in self._uploaded:
            self._observer.checkpoint_mirrored(step, url, num_bytes=num_bytes, seconds=seconds)
        if not problem:
            if self._num_failures:
                self._observer.noted(f"{url} works again, after {self._num_failures} failure(s)")
            self._num_failures = 0
            return None
        self._num_failures += 1
        self._observer.mirror_failed(url, problem, is_first=self._num_failures == 1)
        pause_s: float = _FIRST_PAUSE_S * 2 ** (self._num_failures - 1)
        return min(pause_s, _LONGEST_PAUSE_S)


@dataclass(frozen=True, kw_only=True)
class Fetched:
    notes: tuple[str, ...] = ()
    """Sentences for the user."""
    replaced: frozenset[Path] = frozenset()
    """Folders that now have a checkpoint of the mirror."""


@dataclass(frozen=True, kw_only=True)
class MirroredRun:
    """A run that may resume from its mirror."""

    mirror: MirrorConfig
    run_folder: Path
    recipe: Mapping[str, JsonValue]
    num_steps: int

    @property
    def _url(self) -> str:
        return mirror_url(self.mirror, self.run_folder.name)

    def fetch_newest(self, *, damaged: Collection[Path] = (), notify: Callable[[str], None]) -> Fetched:
        """Fetch the mirror's newest checkpoint if the local disk has none of its step or later that is complete.

        A checkpoint that is damaged in the mirror is passed over. A mirror that does not answer is noted where the
        local disk has a checkpoint; without one a CheckpointError leaves the decision to the user.
        """
        parent, url = self.run_folder.absolute() / CHECKPOINTS_FOLDER, self._url
        local, notes = _newest_local(parent, damaged), list[str]()
        without = _abandoned(parent)
        while True:
            newest_there, problem = self._peek(without)
            if problem and local is None:
                raise CheckpointError(
                    f"checkpoint.mirror {url} cannot be read, and there is no checkpoint in {parent}: {problem}; "
                    "make it reachable, or remove checkpoint.mirror to start anew"
                )
            if problem:
                notes.append(f"checkpoint.mirror {url} cannot be read; the run resumes from its own disk: {problem}")
            if newest_there is None or (local is not None and local >= newest_there.step):
                return Fetched(notes=tuple(notes))
            step = newest_there.step
            transfer = _fetch(url, self.mirror, parent, newest_there, notify)
            if not transfer.problem:
                return Fetched(notes=tuple(notes), replaced=frozenset({checkpoint_folder(parent, step)}))
            if transfer.code != CheckpointError.exit_code:
                raise CheckpointError(
                    f"step {step} was not fetched from {url}: {transfer.problem}; run the same command again"
                )
            notes.append(f"skipped {url}, step {step}: {transfer.problem}")
            without.add(step)

    def _peek(self, without: Collection[int]) -> tuple[Manifest | None, str]:
        """Return the mirror's newest manifest and why there is none; raise if the run cannot continue from it."""
        from megarl.checkpoint.resume import obstacle  # noqa: PLC0415 - the process of a mirror reads no recipe

        with tempfile.TemporaryDirectory() as folder:
            step, problem = _ask(self._url, self.mirror, folder, without)
            if step is None:
                return None, problem
            manifest = read_manifest(Path(folder))
        reason = obstacle(manifest, f"{self._url}, step {step}", recipe=self.recipe, num_steps=self.num_steps)
        if reason is not None:
            raise reason
        return manifest, ""


def refuse_occupied(mirror: MirrorConfig, run_name: str) -> None:
    """Raise if the mirror has checkpoints of an earlier run, which a new one of its name would mix with its own."""
    url = mirror_url(mirror, run_name)
    with tempfile.TemporaryDirectory() as folder:
        step, problem = _ask(url, mirror, folder, ())
    if problem:
        raise CheckpointError(f"checkpoint.mirror {url} cannot be read: {problem}")
    if step is not None:
        raise CheckpointError(
            f"{url} has checkpoints of an earlier run, the newest of step {step}; give the new run another run.name or "
            "checkpoint.mirror, or remove them there"
        )


def _newest_local(parent: Path, damaged: Collection[Path]) -> int | None:
    for folder in list_checkpoints(parent):
        if folder not in damaged:
            try:
                return check_sizes(folder).step
            except CheckpointError:
                continue
    return None


def _abandoned(parent: Path) -> set[int]:
    """Return the steps that the run has taken again after it resumed from an earlier one."""
    aside = parent.glob(f"step_*{ABANDONED}") if parent.is_dir() else ()
    folders = [folder.with_name(folder.name.removesuffix(ABANDONED)) for folder in aside]
    return {step for folder in folders if not folder.exists() and (step := step_of(folder)) is not None}


def _ask(url: str, mirror: MirrorConfig, folder: str, without: Collection[int]) -> tuple[int | None, str]:
    steps: list[int] = []
    words = ("newest", url, folder, "--without", *map(str, without))
    transfer = Transfer(
        words=words,
        stall_s=mirror.stall_s,
        api_key_file=mirror.api_key_file,
        on_line=lambda line: steps.append(int(line[1])),
    )
    transfer.run()
    return (steps[0] if steps and not transfer.problem else None), transfer.problem


def _fetch(url: str, mirror: MirrorConfig, parent: Path, manifest: Manifest, notify: Callable[[str], None]) -> Transfer:
    what, total = f"step {manifest.step} from {url}", f"{manifest.num_bytes / 1e9:.3f} GB"
    began = last = time.monotonic()

    def report(words: list[str]) -> None:
        nonlocal last
        if words[0] == MOVED and time.monotonic() - last >= _REPORT_EVERY_S:
            last = time.monotonic()
            notify(f"fetching {what}: {int(words[1]) / 1e9:.3f} of {total}")

    notify(f"fetching {what}: {total}")
    words = ("fetch", url, str(parent), "--step", str(manifest.step))
    transfer = Transfer(words=words, stall_s=mirror.stall_s, api_key_file=mirror.api_key_file, on_line=report)
    transfer.run()
    if not transfer.problem:
        notify(f"fetched {what}: {total} in {time.monotonic() - began:.0f} s; every digest is right")
    return transfer


class Store:
    """One run's checkpoints below a URL that fsspec knows."""

    def __init__(self, url: str) -> None:
        # Its own listing would be out of date: other processes write here too.
        options: dict[str, object] = {"use_listings_cache": False}
        if url.startswith("file:"):
            options["auto_mkdir"] = True
        self._files, self._root = fsspec.url_to_fs(url, **options)

    def steps(self) -> dict[int, str]:
        """Return the folder of every step, complete or not."""
        try:
            listed = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return {}
        folders = {name.rstrip("/"): step_of(Path(name.rstrip("/"))) for name in listed}
        return {step: name for name, step in folders.items() if step is not None}

    def folder(self, step: int) -> str:
        return f"{self._root}/{checkpoint_folder(Path(), step).name}"

    def read(self, path: str) -> bytes | None:
        """Return the contents of a small file, None without one."""
        try:
            contents: bytes = self._files.cat_file(path)
        except FileNotFoundError:
            return None
        return contents

    def write(self, path: str, contents: bytes) -> None:
        with self._files.open(path, "wb") as file:
            file.write(contents)
            _sync(file)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size of every file of a folder by its path inside."""
        entries = self._files.find(folder, detail=True)
        return {name.removeprefix(f"{folder}/"): entry["size"] for name, entry in entries.items()}

    def remove(self, folder: str) -> None:
        for name in (MANIFEST_FILE, UPLOADING_FILE):
            with suppress(FileNotFoundError):
                self._files.rm_file(f"{folder}/{name}")
        with suppress(FileNotFoundError):
            self._files.rm(folder, recursive=True)

    def finish(self, folder: str, text: bytes) -> None:
        self.write(f"{folder}/{MANIFEST_FILE}", text)
        self._files.rm_file(f"{folder}/{UPLOADING_FILE}")

    def send(self, path: str, source: Path, expected: FileDigest, moved: Moved) -> None:
        """Copy a file into the store; one that does not have its digests raises a DamagedError."""
        opened = self._files.open(path, "wb", block_size=_CHUNK_BYTES)
        try:
            with source.open("rb", buffering=0) as local, opened as file:
                _copy(local, file, expected, str(source), moved)
                _sync(file)
        except DamagedError:
            # Leaving the block has made it a file of the right size.
            self._files.rm_file(path)
            raise

    def receive(self, path: str, target: Path, expected: FileDigest, moved: Moved) -> None:
        """Copy a file from the store and compare its digests."""
        target.parent.mkdir(parents=True, exist_ok=True)
        opened = self._files.open(path, "rb", block_size=_CHUNK_BYTES, cache_type="none")
        with opened as file, target.open("xb", buffering=0) as local:
            _copy(file, local, expected, path, moved)
        sync(target)


class Moved:
    """Counts bytes from several threads, and prints their sum now and then."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._lock = Lock()
        self._printed = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            if time.monotonic() - self._printed >= _PRINT_EVERY_S:
                self._printed = time.monotonic()
                _print_line(MOVED, self.num_bytes)


def upload(parent: Path, store: Store, *, keep_last: int) -> None:
    """Copy the checkpoints that the store lacks, the newest first, and remove from it what is not to be kept.

    One that is removed meanwhile is passed over; a damaged one is reported after the others are copied.
    """
    best = marked(parent, BEST)
    local = list_checkpoints(parent)
    complaints = []
    for folder in [*local[:keep_last], *(folder for folder in local[keep_last:] if folder == best)]:
        try:
            _upload_one(folder, store)
        except (DamagedError, FileNotFoundError, CheckpointError) as error:
            if folder.exists():
                complaints.append(str(error))
    if complaints:
        raise CheckpointError("; ".join(complaints))
    kept = [step for folder in (*local, best) if folder is not None and (step := step_of(folder)) is not None]
    if kept:
        _prune(store, newest=max(kept), best=None if best is None else step_of(best), keep_last=keep_last)


def _upload_one(folder: Path, store: Store) -> None:
    manifest, text, moved = read_manifest(folder), (folder / MANIFEST_FILE).read_bytes(), Moved()
    target = store.folder(manifest.step)
    if store.read(f"{target}/{MANIFEST_FILE}") == text:
        return
    if store.read(f"{target}/{UPLOADING_FILE}") != text:
        store.remove(target)
        store.write(f"{target}/{UPLOADING_FILE}", text)
    present = store.sizes(target)
    missing = [name for name, file in manifest.files.items() if present.get(name) != file.num_bytes]

    def send(name: str) -> None:
        store.send(f"{target}/{name}", inside(folder, name), manifest.files[name], moved)

    _in_parallel(send, missing, manifest.files)
    store.finish(target, text)
    _print_line(UPLOADED, manifest.step, moved.num_bytes)


def _prune(store: Store, *, newest: int, best: int | None, keep_last: int) -> None:
    """Keep the newest `keep_last` complete checkpoints and the best.

    Later ones than `newest`, the newest on the local disk, belong to steps that the run has taken again.
    """
    steps = store.steps()
    complete = [
        step
        for step in sorted(steps, reverse=True)
        if step <= newest and store.read(f"{steps[step]}/{MANIFEST_FILE}") is not None
    ]
    for step, folder in steps.items():
        if step not in (*complete[:keep_last], best):
            store.remove(folder)


def newest(store: Store, copy: Path, *, without: Iterable[int]) -> None:
    """Print the newest complete step that is not in `without`, and copy its manifest to the folder `copy`."""
    skipped = set(without)
    for step, folder in sorted(store.steps().items(), reverse=True):
        text = None if step in skipped else store.read(f"{folder}/{MANIFEST_FILE}")
        if text is not None:
            (copy / MANIFEST_FILE).write_bytes(text)
            _print_line(NEWEST, step)
            return


def fetch(store: Store, parent: Path, step: int) -> None:
    """Copy a checkpoint of the store to the local disk, where it takes its name when every digest was compared."""
    folder, source, moved = checkpoint_folder(parent, step), store.folder(step), Moved()
    text = store.read(f"{source}/{MANIFEST_FILE}")
    if text is None:
        raise CheckpointError(f"{source}: has no {MANIFEST_FILE} any more")
    manifest = _parsed(text, folder)

    def receive(name: str) -> None:
        store.receive(f"{source}/{name}", inside(partial, name), manifest.files[name], moved)

    partial = begin(folder, num_bytes=manifest.num_bytes)
    _in_parallel(receive, manifest.files, manifest.files)
    commit(partial, folder, manifest)
    _print_line(FETCHED, step, moved.num_bytes)


def _parsed(text: bytes, folder: Path) -> Manifest:
    """Return the manifest after it is checked like one on disk."""
    copy = folder.with_name(f"{folder.name}.manifest.tmp")
    copy.mkdir(parents=True, exist_ok=True)
    try:
        (copy / MANIFEST_FILE).write_bytes(text)
        return read_manifest(copy)
    finally:
        (copy / MANIFEST_FILE).unlink(missing_ok=True)
        copy.rmdir()


def _in_parallel(move: Callable[[str], None], names: Iterable[str], files: Mapping[str, FileDigest]) -> None:
    """Move files at once, the largest first; the first error ends the others after their file."""
    pool = ThreadPoolExecutor(NUM_STREAMS)
    try:
        for _ in pool.map(move, sorted(names, key=lambda name: -files[name].num_bytes)):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def _copy(source: IO[bytes], target: IO[bytes], expected: FileDigest, name: str, moved: Moved) -> None:
    """Copy a file of these digests: of its header and its tensors, or of the whole."""
    own_bytes = expected.num_bytes - sum(tensor.num_bytes for tensor in expected.tensors)
    parts = [("", own_bytes, expected.xxh3_128)]
    parts += [(f": tensor {tensor.name}", tensor.num_bytes, tensor.xxh3_128) for tensor in expected.tensors]
    for what, num_bytes, wanted in parts:
        digest, left = xxhash.xxh3_128(), num_bytes
        while left and (chunk := source.read(min(_CHUNK_BYTES, left))):
            digest.update(chunk)
            part = memoryview(chunk)
            while part:
                part = part[target.write(part) :]
            left -= len(chunk)
            moved(len(chunk))
        if left or digest.hexdigest() != wanted:
            raise DamagedError(f"{name}{what}: damaged: it does not have the digest of the manifest")


def _sync(file: IO[bytes]) -> None:
    # A store keeps what it confirmed; a disk keeps what is synced.
    with suppress(OSError, AttributeError):
        os.fsync(file.fileno())


def _print_line(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="megarl.checkpoint.mirror")
    parser.add_argument("action", choices=("upload", "newest", "fetch"))
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep-last", type=int, default=1)
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--without", type=int, nargs="*", default=())
    options = parser.parse_args(words)
    store = Store(options.url)
    try:
        match options.action:
            case "upload":
                upload(options.folder, store, keep_last=options.keep_last)
            case "newest":
                newest(store, options.folder, without=options.without)
            case _:
                fetch(store, options.folder, options.step)
    except MegarlError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
