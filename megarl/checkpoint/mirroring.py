"""The driver's side of `checkpoint.mirror`: uploads beside the steps, and what a run fetches before it resumes.

The work is done by a process (`checkpoint.mirror`), so that a store can neither slow the loop down nor stop it.
"""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from pydantic import JsonValue

from megarl.checkpoint.folder import ABANDONED, CHECKPOINTS_FOLDER, checkpoint_folder, list_checkpoints, step_of
from megarl.checkpoint.manifest import Manifest, check_sizes, read_manifest
from megarl.checkpoint.mirror import FETCHED, MOVED, NEWEST, UPLOADED
from megarl.checkpoint.resume import obstacle
from megarl.config.recipe import CheckpointConfig, MirrorConfig
from megarl.env import current_environment
from megarl.errors import CheckpointError, PreemptedError
from megarl.observe.observer import Observer
from megarl.system.guard import start_guarded, stop_guarded

_POLL_S = 0.2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 15.0, 600.0
_TELL_EVERY_S = 10.0
_OWN_WORDS = (MOVED, UPLOADED, NEWEST, FETCHED)


def mirror_url(config: MirrorConfig, run_name: str) -> str:
    return f"{config.url.rstrip('/')}/{run_name}"


@dataclass(kw_only=True)
class Transfer:
    """One process of `checkpoint.mirror`, its lines, and how it ended."""

    words: tuple[str, ...]
    stall_s: float
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
        process = start_guarded(command, environment=current_environment(), output=subprocess.PIPE)
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
        if words and words[0] in _OWN_WORDS:
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
        transfer = Transfer(words=words, stall_s=mirror.stall_s, on_line=self._note, is_stopped=self._stop)
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
            found, problem = self._peek(without)
            if problem and local is None:
                raise CheckpointError(
                    f"checkpoint.mirror {url} cannot be read, and there is no checkpoint in {parent}: {problem}; "
                    "make it reachable, or remove checkpoint.mirror to start anew"
                )
            if problem:
                notes.append(f"checkpoint.mirror {url} cannot be read; the run resumes from its own disk: {problem}")
            if found is None or (local is not None and local >= found.step):
                return Fetched(notes=tuple(notes))
            step = found.step
            transfer = _fetch(url, self.mirror, parent, found, notify)
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
        with tempfile.TemporaryDirectory() as folder:
            step, problem = _ask(self._url, self.mirror, folder, without)
            if step is None:
                return None, problem
            manifest = read_manifest(Path(folder))
        found = obstacle(manifest, f"{self._url}, step {step}", recipe=self.recipe, num_steps=self.num_steps)
        if found is not None:
            raise found
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
    transfer = Transfer(words=words, stall_s=mirror.stall_s, on_line=lambda line: steps.append(int(line[1])))
    transfer.run()
    return (steps[0] if steps and not transfer.problem else None), transfer.problem


def _fetch(url: str, mirror: MirrorConfig, parent: Path, manifest: Manifest, notify: Callable[[str], None]) -> Transfer:
    what, total = f"step {manifest.step} from {url}", f"{manifest.num_bytes / 1e9:.3f} GB"
    began = last = time.monotonic()

    def tell(words: list[str]) -> None:
        nonlocal last
        if words[0] == MOVED and time.monotonic() - last >= _TELL_EVERY_S:
            last = time.monotonic()
            notify(f"fetching {what}: {int(words[1]) / 1e9:.3f} of {total}")

    notify(f"fetching {what}: {total}")
    words = ("fetch", url, str(parent), "--step", str(manifest.step))
    transfer = Transfer(words=words, stall_s=mirror.stall_s, on_line=tell)
    transfer.run()
    if not transfer.problem:
        notify(f"fetched {what}: {total} in {time.monotonic() - began:.0f} s; every digest is right")
    return transfer
