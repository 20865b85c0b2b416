"""The copy of a run's checkpoints in an object store or on another disk: uploads beside the steps, and fetches.

The work is done by a process of its own (`python -m` this module), so that a store can neither slow the loop down nor
stop it. Errors of a store have no common class: the driver reads the exit code and the last line. The process prints
`moved BYTES` as it works, then `claimed CLAIM`, `uploaded STEP BYTES`, `newest STEP` or `fetched STEP BYTES`.

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
from types import TracebackType
from typing import TYPE_CHECKING

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
from megarl.checkpoint.manifest import MANIFEST_FILE, FileDigest, Manifest, check_sizes, inside, read_manifest
from megarl.checkpoint.mirror_owner import Owner, check_owner, claim, note_steps
from megarl.checkpoint.store import MOVED, UPLOADING_FILE, Moved, Store, print_line
from megarl.env import current_environment
from megarl.errors import CheckpointError, DamagedError, MachineError, MegarlError, PreemptedError
from megarl.system.guard import start_guarded, stop_guarded
from megarl.system.run_lock import held_by_this_process, held_token

if TYPE_CHECKING:
    from megarl.config.recipe import CheckpointConfig, MirrorConfig
    from megarl.observe.observer import Observer

CLAIMED, UPLOADED, NEWEST, FETCHED = "claimed", "uploaded", "newest", "fetched"
NUM_STREAMS = 8
"""Files under way at once: one connection to a store does not fill a network."""
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
        if words and words[0] in (MOVED, CLAIMED, UPLOADED, NEWEST, FETCHED):
            self.on_line(words)
        elif line:
            self._last = line


class Mirroring:
    """Copies every saved checkpoint, beside the steps. A store that fails is reported once and asked again later.

    A driver that finds its mirror with another owner is cancelled, and ends with a MachineError.
    """

    def __init__(
        self, config: CheckpointConfig, run_folder: Path, observer: Observer, *, claim: str | None = None
    ) -> None:
        """`claim` is what `claim_mirror` returned; without one it is claimed when the store can be reached."""
        self._claim = claim
        self._loss = ""
        """Why the mirror is no longer this driver's."""
        self._driving: asyncio.Task[object] | None = None
        self._run_folder = run_folder
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
            self._driving = asyncio.current_task()
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
        if self._loss:
            raise MachineError(f"{mirror_url(self._mirror, self._run_name)}: {self._loss}")

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
            if self._loss:
                return
            seconds = time.monotonic() - began
            pause_s = self._after(url, problem, seconds)
            if not problem and not self._is_newer:
                self._idle.set()

    async def _upload(self, url: str, mirror: MirrorConfig) -> str:
        """Copy what the disk has; return why that failed."""
        self._uploaded = []
        if self._claim is None:
            words = _claiming(url, self._run_folder, is_late=True)
            problem = await self._transfer(words, mirror) if words else ""
            if problem:
                return problem
        words = ("upload", url, str(self._parent), "--keep-last", str(self._config.keep_last))
        return await self._transfer((*words, "--claim", self._claim) if self._claim else words, mirror)

    async def _transfer(self, words: Sequence[str], mirror: MirrorConfig) -> str:
        transfer = Transfer(
            words=tuple(words),
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
        if transfer.code == MachineError.exit_code and self._driving is not None and not self._loss:
            self._loss = transfer.problem
            self._driving.cancel()
        return transfer.problem

    def _note(self, words: list[str]) -> None:
        if words[0] == CLAIMED:
            self._claim = words[1]
        elif words[0] == UPLOADED:
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
            newest_there, problem = self._peek(without, notes)
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
            token = held_token(self.run_folder)
            transfer = _fetch(url, self.mirror, parent, newest_there, notify, token=token)
            if not transfer.problem:
                return Fetched(notes=tuple(notes), replaced=frozenset({checkpoint_folder(parent, step)}))
            if transfer.code != CheckpointError.exit_code:
                raise CheckpointError(
                    f"step {step} was not fetched from {url}: {transfer.problem}; run the same command again"
                )
            notes.append(f"skipped {url}, step {step}: {transfer.problem}")
            without.add(step)

    def _peek(self, without: set[int], notes: list[str]) -> tuple[Manifest | None, str]:
        """Return the mirror's newest manifest and why there is none; raise if the run cannot continue from it.

        A step whose manifest is damaged joins `without`, with a note.
        """
        from megarl.checkpoint.resume import obstacle  # noqa: PLC0415 - the process of a mirror reads no recipe

        while True:
            with tempfile.TemporaryDirectory() as folder:
                step, problem = _ask(self._url, self.mirror, folder, without)
                if step is None:
                    return None, problem
                try:
                    manifest = read_manifest(Path(folder))
                    break
                except CheckpointError as error:
                    reason_there = str(error).replace(folder, checkpoint_folder(Path(), step).name)
                    notes.append(f"skipped {self._url}, step {step}: {reason_there}")
                    without.add(step)
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


def claim_mirror(mirror: MirrorConfig, run_folder: Path) -> tuple[str | None, str]:
    """Make this driver the owner of the run's mirror; return its claim, and why there is none.

    Raise MachineError if a later driver owns it. The caller holds the run's lock.
    """
    claims: list[str] = []
    words = _claiming(mirror_url(mirror, run_folder.name), run_folder, is_late=False)
    assert words, "the lock comes first"
    transfer = Transfer(
        words=words,
        stall_s=mirror.stall_s,
        api_key_file=mirror.api_key_file,
        on_line=lambda line: claims.append(line[1]),
    )
    transfer.run()
    if transfer.code == MachineError.exit_code:
        raise MachineError(transfer.problem)
    return (claims[0] if claims and not transfer.problem else None), transfer.problem


def _claiming(url: str, run_folder: Path, *, is_late: bool) -> tuple[str, ...]:
    """Return the words of the process that claims a mirror; none where this process does not hold the run's lock."""
    holder = held_by_this_process(run_folder)
    if holder is None:
        return ()
    words = ("claim", url, str(run_folder), "--run-id", holder.run_id, "--token", str(holder.token))
    return (*words, "--late") if is_late else words


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


def _fetch(
    url: str, mirror: MirrorConfig, parent: Path, manifest: Manifest, notify: Callable[[str], None], *, token: int
) -> Transfer:
    what, total = f"step {manifest.step} from {url}", f"{manifest.num_bytes / 1e9:.3f} GB"
    began = last = time.monotonic()

    def report(words: list[str]) -> None:
        nonlocal last
        if words[0] == MOVED and time.monotonic() - last >= _REPORT_EVERY_S:
            last = time.monotonic()
            notify(f"fetching {what}: {int(words[1]) / 1e9:.3f} of {total}")

    notify(f"fetching {what}: {total}")
    words = ("fetch", url, str(parent), "--step", str(manifest.step), "--token", str(token))
    transfer = Transfer(words=words, stall_s=mirror.stall_s, api_key_file=mirror.api_key_file, on_line=report)
    transfer.run()
    if not transfer.problem:
        notify(f"fetched {what}: {total} in {time.monotonic() - began:.0f} s; every digest is right")
    return transfer


def upload(parent: Path, store: Store, *, keep_last: int, claimed: str | None) -> None:
    """Copy the checkpoints that the store lacks, the newest first, and remove from it what is not to be kept.

    One that is removed meanwhile is passed over; a damaged one is reported after the others are copied. Raise
    MachineError if the store has another owner than the one that `claimed` it.
    """
    owner = check_owner(store, claimed)
    best = marked(parent, BEST)
    local = list_checkpoints(parent)
    complaints, copied = [], []
    for folder in [*local[:keep_last], *(folder for folder in local[keep_last:] if folder == best)]:
        try:
            copied.append(_upload_one(folder, store, claimed))
        except (DamagedError, FileNotFoundError, CheckpointError) as error:
            if folder.exists():
                complaints.append(str(error))
    if complaints:
        raise CheckpointError("; ".join(complaints))
    if owner is not None:
        owner = note_steps(store, owner, copied)
    kept = [step for folder in (*local, best) if folder is not None and (step := step_of(folder)) is not None]
    if kept:
        check_owner(store, claimed)
        of_best = None if best is None else step_of(best)
        _prune(store, newest=max(kept), best=of_best, keep_last=keep_last, owner=owner)


def _upload_one(folder: Path, store: Store, claimed: str | None) -> int:
    """Copy a checkpoint unless the store has it; return its step."""
    manifest, text, moved = read_manifest(folder), (folder / MANIFEST_FILE).read_bytes(), Moved()
    target = store.folder(manifest.step)
    if store.read(f"{target}/{MANIFEST_FILE}") == text:
        return manifest.step
    is_continued = store.read(f"{target}/{UPLOADING_FILE}") == text
    if not is_continued:
        if store.sizes(target):
            check_owner(store, claimed)
            store.remove(target)
        store.write(f"{target}/{UPLOADING_FILE}", text)
    present = store.sizes(target) if is_continued else {}
    missing = [name for name, file in manifest.files.items() if present.get(name) != file.num_bytes]

    def send(name: str) -> None:
        check_owner(store, claimed)  # asked often: a driver that was frozen in here may have a successor
        store.send(f"{target}/{name}", inside(folder, name), manifest.files[name], moved)

    _in_parallel(send, missing, manifest.files)
    check_owner(store, claimed)  # sending took long
    store.finish(target, text)
    print_line(UPLOADED, manifest.step, moved.num_bytes)
    return manifest.step


def _prune(store: Store, *, newest: int, best: int | None, keep_last: int, owner: Owner | None) -> None:
    """Keep the newest `keep_last` complete checkpoints and the best.

    Later ones than `newest`, the newest on the local disk, are steps that the run has taken again if it copied them
    itself. Others are not its own, and stay.
    """
    own = () if owner is None else owner.steps
    steps = {step: folder for step, folder in store.steps().items() if step <= newest or step in own}
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
            print_line(NEWEST, step)
            return


def fetch(store: Store, parent: Path, step: int, *, token: int) -> None:
    """Copy a checkpoint of the store to the local disk, where it takes its name when every digest was compared."""
    folder, source, moved = checkpoint_folder(parent, step), store.folder(step), Moved()
    text = store.read(f"{source}/{MANIFEST_FILE}")
    if text is None:
        raise CheckpointError(f"{source}: has no {MANIFEST_FILE} any more")
    manifest = _parsed(text)

    def receive(name: str) -> None:
        store.receive(f"{source}/{name}", inside(partial, name), manifest.files[name], moved)

    partial = begin(folder, num_bytes=manifest.num_bytes, token=token)
    _in_parallel(receive, manifest.files, manifest.files)
    commit(partial, folder, manifest)
    print_line(FETCHED, step, moved.num_bytes)


def _parsed(text: bytes) -> Manifest:
    """Return the manifest after it is checked like one on disk."""
    with tempfile.TemporaryDirectory() as copy:
        (Path(copy) / MANIFEST_FILE).write_bytes(text)
        return read_manifest(Path(copy))


def _in_parallel(move: Callable[[str], None], names: Iterable[str], files: Mapping[str, FileDigest]) -> None:
    """Move files at once, the largest first; the first error ends the others after their file."""
    pool = ThreadPoolExecutor(NUM_STREAMS)
    try:
        for _ in pool.map(move, sorted(names, key=lambda name: -files[name].num_bytes)):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="megarl.checkpoint.mirror")
    parser.add_argument("action", choices=("claim", "upload", "newest", "fetch"))
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep-last", type=int, default=1)
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--without", type=int, nargs="*", default=())
    parser.add_argument("--claim")
    parser.add_argument("--run-id")
    parser.add_argument("--token", type=int, default=0)
    parser.add_argument("--late", action="store_true")
    options = parser.parse_args(words)
    store = Store(options.url)
    try:
        match options.action:
            case "claim":
                owner = claim(store, run_id=options.run_id, token=options.token, is_late=options.late)
                print_line(CLAIMED, owner.claim)
            case "upload":
                upload(options.folder, store, keep_last=options.keep_last, claimed=options.claim)
            case "newest":
                newest(store, options.folder, without=options.without)
            case _:
                fetch(store, options.folder, options.step, token=options.token)
    except MegarlError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
