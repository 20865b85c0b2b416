"""A run that something happens to every few steps, for as long as you like: `make soak`.

A two-engine run on arithmetic. Its processes are killed and frozen at random from outside, the driver among them, which
is followed by another one or, if its command is killed or asked to leave, is started again as a person or a scheduler
would. Its disk is filled and its mirror cut off for some seconds. At the end all steps are taken, the checkpoint
verifies on the disk and in the mirror, and nothing is left; how much of the time counted and how much memory grew is
printed. A long soak may be taken in pieces: `--seconds` ends one, `--folder` continues it; its disk is not filled then.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import TypeAlias

import psutil

from megarl.checkpoint.manifest import verify
from megarl.observe.event_file import EVENTS_FILE, EventTail
from megarl.observe.events import Noted, RunStarted, StepFinished
from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.faults.leftovers import Footprint, nothing_left
from tests.run.runs import Driver, driver_of, started
from tests.small_disk import filled, small_disk

_STALL_S = 1200.0
"""Without a step the run has failed to recover."""
_POLL_S = 0.2
_LONGEST_S = 12.0
"""Accidents that pass by themselves last this long."""
_DISK_BYTES = 512 << 20
DISK = "disk full for a while"


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    steps: int
    seconds: float
    faults: Mapping[str, int]
    num_drivers: int
    num_steps_again: int
    effective_time_ratio: float
    """Time of steps that were not lost, over all time from the first step of a piece to its last."""
    undisturbed_ratio: float
    """The same if every step took the median: also counts what accidents add to a step, and slow spells."""
    memory_growth: float
    """Of everything the run holds, from the steps behind its first tenth to its last fifth; 0.05 is 5 %."""
    step_s: float
    """Median."""
    next_step_s: Mapping[str, float]
    """From a fault to the next step that is done, by kind; medians."""


def _overrides(
    num_steps: int, *, num_engines: int, num_prompts: int, num_tokens: int, lease_s: float, mirror: Path
) -> tuple[str, ...]:
    return (
        f"run.steps={num_steps}",
        "pools.train.gpus_per_node=1",
        "roles.actor={pool: train, tensor: 1}",
        f"pools.rollout.gpus_per_node={num_engines}",
        f"sampling.max_response_tokens={num_tokens}",
        f"train.prompts_per_step={num_prompts}",
        "train.tokens_per_micro_batch=2048",
        # One that learns to be brief has less and less to do.
        "train.optimizer.learning_rate=1e-6",
        "train.operation_timeout_s=20",
        "train.max_restarts=10",
        "roles.rollout.max_restarts=1000",
        "roles.rollout.silence_timeout_s=10",
        "checkpoint.save_every_steps=1",
        f"checkpoint.mirror.url=file://{mirror}",
        f"cluster.lease_s={lease_s}",
        "evaluation=null",
        "data.eval=[]",
    )


class _Victims:
    """The processes of a run, by what they do, its disk and its mirror; and what is to be put right again."""

    def __init__(self, footprint: Footprint, run_folder: Path, mirror: Path) -> None:
        self.footprint = footprint
        self._run_folder = run_folder
        self.disk, self.mirror = run_folder.parent, mirror
        self._later: list[tuple[float, Callable[[], object]]] = []

    def later(self, seconds: float, restore: Callable[[], object]) -> None:
        """Call `restore` after so long."""
        self._later.append((time.monotonic() + seconds, restore))

    def restore(self, *, is_over: bool = False) -> None:
        """Put right what is due, or everything."""
        now = time.monotonic()
        due = [restore for moment, restore in self._later if is_over or moment <= now]
        self._later = [(moment, restore) for moment, restore in self._later if not is_over and moment > now]
        for restore in due:
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                restore()

    def drivers(self) -> list[psutil.Process]:
        """The process that holds the run's lock; not that of the command."""
        return [driver_of(self._run_folder)]

    def engines(self) -> list[psutil.Process]:
        return self._having(lambda _, words: "megarl.engine.cpu" in words)

    def ranks(self) -> list[psutil.Process]:
        return self._having(lambda name, _: name.startswith("ray::ActorRank"))

    def reward_workers(self) -> list[psutil.Process]:
        return self._having(lambda _, words: "megarl.reward.worker" in words)

    def rollout_workers(self) -> list[psutil.Process]:
        return self._having(lambda name, _: name.startswith("ray::RolloutHost"))

    def memory(self) -> int:
        """Resident bytes of everything that runs."""
        total = 0
        for process in self.footprint.processes():
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
        return total

    def _having(self, fits: Callable[[str, list[str]], bool]) -> list[psutil.Process]:
        found = []
        for process in self.footprint.processes():
            try:
                words = process.cmdline()
                if fits(" ".join(words[:1]), words):
                    found.append(process)
            except psutil.Error:
                continue
        return found


@dataclass(slots=True, kw_only=True)
class _Watch:
    """A run's events as they come."""

    path: Path
    tail: EventTail | None = None
    step: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of each step that was done, those that were done again among them."""
    kept: dict[int, float] = field(default_factory=dict)
    """Seconds of each step that was not lost."""
    continued: set[int] = field(default_factory=set)
    """Steps that began with answers from before an accident: their own seconds are too few."""
    _continues: bool = False
    num_drivers: int = 0
    piece: tuple[float, float] | None = None
    """When the first step since `begin_piece` began, and when the last one ended."""

    def look(self) -> None:
        if self.tail is None:
            if not self.path.exists():
                return
            self.tail = EventTail(self.path)
        for record in self.tail.read():
            match record.event:
                case RunStarted(resumed_step=resumed_step):
                    self.num_drivers += 1
                    self.step = resumed_step
                    self.kept = {step: seconds for step, seconds in self.kept.items() if step <= resumed_step}
                case Noted(text=text):
                    self._continues |= "groups of the step are kept" in text
                case StepFinished(summary=summary):
                    self.step = summary.step
                    if self._continues:
                        self.continued.add(summary.step)
                        self._continues = False
                    self.seconds.append(summary.seconds)
                    self.kept[summary.step] = summary.seconds
                    ended = record.time.timestamp()
                    self.piece = (ended - summary.seconds if self.piece is None else self.piece[0], ended)

    @property
    def effective_s(self) -> float:
        """Seconds of steps that were not lost; one that was continued counts with those of a usual step at least."""
        usual = statistics.median(self.seconds)
        return sum(max(took, usual) if step in self.continued else took for step, took in self.kept.items())

    def begin_piece(self) -> None:
        """Read what happened before."""
        self.look()
        self.piece = None


@dataclass(slots=True, kw_only=True)
class _Pieces:
    """What is known of a soak beside its events, in a file of its folder."""

    faults: dict[str, int] = field(default_factory=dict)
    delays: dict[str, list[float]] = field(default_factory=dict)
    memory: list[tuple[int, int]] = field(default_factory=list)
    """Step and resident bytes."""
    seconds: float = 0.0
    stepping_s: float = 0.0
    """From the first step of each piece to its last."""


@dataclass(slots=True, kw_only=True)
class _Accidents:
    """One about every few steps, somewhere in a step; and how long each kept the run from its next one."""

    every: int
    last_step: int
    """None after it: the run has to be seen to end."""
    kinds: tuple[str, ...]
    chance: Random
    pieces: _Pieces
    next_step: int
    _due: float | None = None
    _unanswered: list[tuple[str, float]] = field(default_factory=list)

    def step_done(self) -> None:
        for kind, happened in self._unanswered:
            self.pieces.delays.setdefault(kind, []).append(time.monotonic() - happened)
        self._unanswered.clear()

    def happen(self, watch: _Watch, victims: _Victims, command: Driver) -> str | None:
        """What happened just now."""
        now = time.monotonic()
        if self._due is None:
            if watch.seconds and self.next_step <= watch.step <= self.last_step:
                self._due = now + self.chance.uniform(0, watch.seconds[-1])
            return None
        if now < self._due:
            return None
        kind = self.chance.choice(self.kinds)
        if not _FAULTS[kind](victims, command, self.chance):
            return None
        self.pieces.faults[kind] = self.pieces.faults.get(kind, 0) + 1
        self._unanswered.append((kind, now))
        self.next_step = watch.step + max(1, round(self.chance.uniform(0.6, 1.4) * self.every))
        self._due = None
        return kind


def soak(
    folder: Path,
    *,
    num_steps: int,
    every: int,
    seed: int,
    num_engines: int = 2,
    num_prompts: int = 16,
    num_tokens: int = 32,
    lease_s: float = 90,
    kinds: tuple[str, ...] = (),
    piece_s: float = math.inf,
    tell: Callable[[str], None],
) -> Soaked | None:
    """Raises AssertionError where a promise is broken. After `piece_s` the run is asked to leave: None is returned."""
    has_disk = piece_s == math.inf and os.geteuid() == 0
    kinds = kinds or tuple(kind for kind in _FAULTS if has_disk or kind != DISK)
    mirror = folder / "mirror"
    tell(f"seed {seed}: {num_steps} steps, a fault about every {every} of them; in {folder}")
    if not (folder / "arithmetic").exists():
        make_arithmetic(folder / "arithmetic", num_train=num_prompts * num_steps // 4, num_sft=16, num_eval=16)
    watch, path = _Watch(path=folder / "runs" / "soak" / EVENTS_FILE), folder / "soak.json"
    watch.begin_piece()
    pieces = _Pieces(**json.loads(path.read_text())) if path.exists() else _Pieces()
    accidents = _Accidents(
        every=every,
        last_step=num_steps - 2,
        kinds=kinds,
        chance=Random(seed + watch.step),
        pieces=pieces,
        next_step=watch.step + every,
    )
    overrides = _overrides(
        num_steps,
        num_engines=num_engines,
        num_prompts=num_prompts,
        num_tokens=num_tokens,
        lease_s=lease_s,
        mirror=mirror,
    )
    began = time.monotonic()
    with ExitStack() as stack:
        if DISK in kinds:
            stack.enter_context(small_disk(folder / "runs", num_bytes=_DISK_BYTES))
        footprint = stack.enter_context(nothing_left())
        victims = _Victims(footprint, folder / "runs" / "soak", mirror)
        stack.callback(partial(victims.restore, is_over=True))
        _take_piece(folder, overrides, watch, accidents, victims, piece_s=piece_s, tell=tell)
        _check_end(folder / "runs" / "soak", mirror, watch.step)
    pieces.seconds += time.monotonic() - began
    pieces.stepping_s += watch.piece[1] - watch.piece[0] if watch.piece else 0.0
    path.write_text(json.dumps(asdict(pieces)))
    if watch.step < num_steps:
        return None
    return Soaked(
        steps=num_steps,
        seconds=pieces.seconds,
        faults=pieces.faults,
        num_drivers=watch.num_drivers,
        num_steps_again=len(watch.seconds) - num_steps,
        undisturbed_ratio=min(1.0, num_steps * statistics.median(watch.seconds) / pieces.stepping_s),
        effective_time_ratio=min(1.0, watch.effective_s / pieces.stepping_s),
        memory_growth=_growth(pieces.memory, num_steps),
        step_s=statistics.median(watch.seconds),
        next_step_s={kind: round(statistics.median(delays), 1) for kind, delays in pieces.delays.items()},
    )


def _take_piece(
    folder: Path,
    overrides: tuple[str, ...],
    watch: _Watch,
    accidents: _Accidents,
    victims: _Victims,
    *,
    piece_s: float,
    tell: Callable[[str], None],
) -> None:
    began, has_to_leave = time.monotonic(), False
    while True:
        with started(folder, "soak", *overrides, footprint=victims.footprint) as command:
            num_done, last_change = len(watch.seconds), time.monotonic()
            while command.poll() is None:
                time.sleep(_POLL_S)
                victims.restore()
                watch.look()
                if len(watch.seconds) > num_done:
                    num_done, last_change = len(watch.seconds), time.monotonic()
                    accidents.pieces.memory.append((watch.step, victims.memory()))
                    accidents.step_done()
                assert time.monotonic() - last_change < _STALL_S, f"no step for {_STALL_S:.0f} s; see {folder}"
                if not has_to_leave and time.monotonic() - began > piece_s and num_done:
                    has_to_leave = True
                    command.terminate()
                elif not has_to_leave and (kind := accidents.happen(watch, victims, command)):
                    tell(f"{time.monotonic() - began:.0f} s, step {watch.step}: {kind}")
        watch.look()
        assert command.returncode in (0, -signal.SIGKILL, 75), f"exit code {command.returncode}; see {folder}/soak.out"
        if command.returncode == 0 or has_to_leave:
            return


def _check_end(run_folder: Path, mirror: Path, step: int) -> None:
    latest = (run_folder / "checkpoints" / "latest").resolve()
    for checkpoint in (latest, mirror / run_folder.name / latest.name):
        assert verify(checkpoint).step == step, checkpoint


def _growth(memory: list[tuple[int, int]], num_steps: int) -> float:
    first = [held for step, held in memory if num_steps / 10 <= step <= num_steps * 3 / 10]
    last = [held for step, held in memory if step >= num_steps * 8 / 10]
    return statistics.median(last) / statistics.median(first) - 1.0 if first and last else 0.0


Accident: TypeAlias = Callable[[_Victims, Driver, Random], bool]
"""Whether it could be had."""


def _signal_one(
    number: signal.Signals, find: Callable[[_Victims], list[psutil.Process]], *, is_group: bool = False
) -> Accident:
    def happen(victims: _Victims, _: Driver, chance: Random) -> bool:
        try:
            found = find(victims)
            if not found:
                return False
            victim = chance.choice(found)
            os.killpg(os.getpgid(victim.pid), number) if is_group else victim.send_signal(number)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False
        return True

    return happen


def _freeze_one(find: Callable[[_Victims], list[psutil.Process]]) -> Accident:
    """Stop a process for some seconds: it wakes up and has to notice what it missed."""

    def happen(victims: _Victims, _: Driver, chance: Random) -> bool:
        try:
            victim = chance.choice(find(victims))
            victim.suspend()
        except (IndexError, ProcessLookupError, psutil.NoSuchProcess):
            return False
        victims.later(chance.uniform(2, _LONGEST_S), victim.resume)
        return True

    return happen


def _fill_disk(victims: _Victims, _: Driver, chance: Random) -> bool:
    full = ExitStack()
    full.enter_context(filled(victims.disk))
    victims.later(chance.uniform(2, _LONGEST_S), full.close)
    return True


def _cut_mirror(victims: _Victims, _: Driver, chance: Random) -> bool:
    """Put a file in the place of its folder: nothing can be read or written there."""
    away = victims.mirror.with_name("mirror_away")
    if not victims.mirror.is_dir():
        return False
    victims.mirror.rename(away)
    victims.mirror.write_text("")

    def restore() -> None:
        victims.mirror.unlink()
        away.rename(victims.mirror)

    victims.later(chance.uniform(2, _LONGEST_S), restore)
    return True


def _signal_command(number: signal.Signals) -> Accident:
    def happen(_: _Victims, command: Driver, __: Random) -> bool:
        command.send_signal(number)
        return True

    return happen


_FAULTS: Mapping[str, Accident] = {
    "engine killed": _signal_one(signal.SIGKILL, _Victims.engines, is_group=True),
    "engine frozen": _signal_one(signal.SIGSTOP, _Victims.engines, is_group=True),
    "trainer rank killed": _signal_one(signal.SIGKILL, _Victims.ranks),
    "trainer rank frozen": _signal_one(signal.SIGSTOP, _Victims.ranks),
    "trainer rank frozen for a while": _freeze_one(_Victims.ranks),
    "reward worker killed": _signal_one(signal.SIGKILL, _Victims.reward_workers),
    # One that stays frozen is a reward that gives no score within its deadline, and ends the run.
    "reward worker frozen for a while": _freeze_one(_Victims.reward_workers),
    "rollout worker killed": _signal_one(signal.SIGKILL, _Victims.rollout_workers),
    "rollout worker frozen": _signal_one(signal.SIGSTOP, _Victims.rollout_workers),
    "driver frozen for a while": _freeze_one(_Victims.drivers),
    DISK: _fill_disk,
    "mirror cut off": _cut_mirror,
    "driver killed": _signal_one(signal.SIGKILL, _Victims.drivers),
    "command killed": _signal_command(signal.SIGKILL),
    "command asked to leave": _signal_command(signal.SIGTERM),
}


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description="A run that something happens to every few steps.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=128, help="of a step")
    parser.add_argument("--tokens", type=int, default=128, help="of a response, at most")
    parser.add_argument("--lease", type=float, default=90, help="cluster.lease_s: drivers adopt; 0: they do not")
    parser.add_argument("--kinds", default="", help=f"of faults, with commas; all: {', '.join(_FAULTS)}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end a piece of the soak after so long")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="megarl-soak-"))
    found = soak(
        folder,
        num_steps=options.steps,
        every=options.every,
        seed=options.seed,
        num_prompts=options.prompts,
        num_tokens=options.tokens,
        lease_s=options.lease,
        kinds=tuple(filter(None, options.kinds.split(","))),
        piece_s=options.seconds,
        tell=_tell,
    )
    if found is None:
        _tell(f"not at its end yet: go on with --folder {folder}")
        return 0
    faults = f"{sum(found.faults.values())} faults, {found.num_drivers} drivers"
    lines = (
        f"{found.steps} steps in {found.seconds:.0f} s, {faults}",
        f"effective time {found.effective_time_ratio:.0%} (goal 90 %), memory {found.memory_growth:+.1%} (goal 2 %)",
        json.dumps({"seed": options.seed, **asdict(found)}),
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
