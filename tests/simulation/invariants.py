"""Invariants of every history, whatever happened in it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.checkpoint.folder import step_of
from megarl.checkpoint.manifest import MANIFEST_FILE
from megarl.checkpoint.resume import STATE_FILE
from tests.simulation.sample_run import PROMPTS_PER_STEP, undisturbed

if TYPE_CHECKING:
    from tests.simulation.histories import History

_OURS = re.compile(r"\b(Assertion|Type|Value|Key|Index|Attribute|Runtime|Overflow)Error\b")
"""Errors that only a mistake in the code raises; those of ranks are in the text of a WorkerError."""


def broken(history: History) -> list[str]:
    """Return one sentence per invariant that does not hold."""
    return [
        *_rising_tokens(history),
        *_one_lineage(history),
        *_newest_kept(history),
        *_no_foreign_ends(history),
        *_no_bugs(history),
        *_progress(history),
        *_nothing_left(history),
    ]


@cache
def _states(num_steps: int, drops: bool) -> list[str]:
    return undisturbed(num_steps, drops=drops)


def _rising_tokens(history: History) -> Iterator[str]:
    """A rank executes calls of rising tokens only: who has lost the lock changes nothing any more."""
    for cluster in dict.fromkeys(history.clusters.values()):
        newest: dict[str, int] = {}
        for process, method, token in cluster.executed:
            if token < newest.get(process, 0):
                yield f"rising tokens: {process} executed {method} of token {token} after one of {newest[process]}"
            newest[process] = max(token, newest.get(process, 0))
        for (_, token), drivers in cluster.drivers.items():
            if len(drivers) > 1:
                yield f"rising tokens: {', '.join(sorted(drivers))} all have token {token}"


def _one_lineage(history: History) -> Iterator[str]:
    """Every whole checkpoint, on disks and in the store, has the weights of the undisturbed run."""
    states = _states(history.plan.steps, history.plan.drops)
    for where, name, files in (*_on_disks(history), *_in_store(history)):
        if _is_whole(files):
            yield from _of_lineage(where, name, files, states)


def _on_disks(history: History) -> Iterator[tuple[str, str, dict[str, bytes]]]:
    for disk in dict.fromkeys(history.disks.values()):
        for folder in sorted(disk.folder.glob("runs/*/checkpoints/step_*")):
            if folder.is_dir() and step_of(folder) is not None:
                yield f"{disk.name}/{folder.name}", folder.name, dict(_files(folder))


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for root, _, names in os.walk(folder):
        for path in map(Path(root).joinpath, names):
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def _in_store(history: History) -> Iterator[tuple[str, str, dict[str, bytes]]]:
    store = history.store.objects
    for name in sorted(store):
        if name.endswith(f"/{MANIFEST_FILE}"):
            folder = name.removesuffix(MANIFEST_FILE)
            files = {path.removeprefix(folder): content for path, content in store.items() if path.startswith(folder)}
            yield name, Path(folder).name, files


def _is_whole(files: dict[str, bytes]) -> bool:
    """Whether all files of the manifest are there; a damaged one is nobody's checkpoint."""
    try:
        named = json.loads(files[MANIFEST_FILE])["files"]
    except (KeyError, ValueError):
        return False
    return all(len(files.get(name, b"")) == digest["num_bytes"] for name, digest in named.items())


def _of_lineage(where: str, name: str, files: dict[str, bytes], states: list[str]) -> Iterator[str]:
    step = step_of(Path(name))
    assert step is not None
    for file, content in sorted(files.items()):
        weights = content.decode(errors="replace")
        if file.startswith("model/rank_") and weights != states[step]:
            yield f"one lineage: {where}/{file} has {weights}, the undisturbed run {states[step]}"
    num_trained = json.loads(files[STATE_FILE])["ledger"]["num_trained"]
    if num_trained != PROMPTS_PER_STEP * step:
        yield f"each prompt once: {where} has trained {num_trained} prompts in {step} steps"


def _newest_kept(history: History) -> Iterator[str]:
    """A run resumes from the newest checkpoint that was acknowledged."""
    for run in history.runs:
        for name, acknowledged, resumed in run.resumed:
            if resumed < acknowledged:
                yield f"newest kept: {name} began from step {resumed}, step {acknowledged} was saved before"
    yield from (f"newest kept: the store lost {loss}" for loss in history.losses[:1])


def _no_foreign_ends(history: History) -> Iterator[str]:
    """No run ends what another run has started, and no driver what its successor has adopted."""
    for cluster in dict.fromkeys(history.clusters.values()):
        yield from cluster.foreign[:1]


def _no_bugs(history: History) -> Iterator[str]:
    for run in history.runs:
        for driver in run.drivers:
            error = driver.error
            if driver.outcome == "bug" or (error is not None and _OURS.search(str(error))):
                yield f"no exit 70: {driver.process.name} ended by {type(error).__name__}: {error}"


def _progress(history: History) -> Iterator[str]:
    for run in history.runs:
        if not run.is_finished:
            ends = ", ".join(driver.outcome for driver in run.drivers)
            yield f"progress: {run.name} is not finished after {len(run.drivers)} drivers: {ends}"


def _nothing_left(history: History) -> Iterator[str]:
    left = [process.name for process in history.world.left]
    if left:
        yield f"nothing is left: {', '.join(left)} still runs"
    # A driver that was killed leaves its record for the next one; one that ended in order leaves none.
    if len(set(history.disks.values())) == 1 and all(run.drivers[-1].outcome == "finished" for run in history.runs):
        for disk in dict.fromkeys(history.disks.values()):
            for path in sorted(disk.folder.glob("runs/.locks/*.lease.json")):
                yield f"nothing is left: {path.name}"
