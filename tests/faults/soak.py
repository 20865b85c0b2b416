"""A run that something happens to every few steps, for as long as you like: `make soak`.

A two-engine run on arithmetic. Its processes are killed and frozen at random from outside, the driver among them, which
is then started again as a person or a scheduler would. At the end all steps are taken, the checkpoint verifies and
nothing is left; how much of the time counted and how much memory grew is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import TypeAlias

import psutil

from megarl.checkpoint.manifest import verify
from megarl.observe.events import EVENTS_FILE, EventTail, Record, RunStarted, StepFinished
from megarl.observe.history import RunTotals
from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.faults.leftovers import Footprint, nothing_left
from tests.runtime.runs import Driver, started

_STALL_S = 1200.0
"""Without a step the run has failed to recover."""
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    steps: int
    seconds: float
    faults: Mapping[str, int]
    num_starts: int
    """Of the driver."""
    num_steps_again: int
    effective_time_ratio: float
    memory_growth: float
    """Of everything the run holds, from the steps behind its first tenth to its last fifth; 0.05 is 5 %."""
    step_s: float
    """Median."""
    next_step_s: Mapping[str, float]
    """From a fault to the next step that is done, by kind; medians."""


def _overrides(
    num_steps: int, *, num_engines: int, num_prompts: int, num_tokens: int, lease_s: float
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
        f"cluster.lease_s={lease_s}",
        "evaluation=null",
        "data.eval=[]",
    )


class _Victims:
    """The processes of a run, by what they do."""

    def __init__(self, footprint: Footprint) -> None:
        self._footprint = footprint

    def engines(self) -> list[psutil.Process]:
        return self._having(lambda _, words: "megarl.rollout.cpu" in words)

    def ranks(self) -> list[psutil.Process]:
        return self._having(lambda name, _: name.startswith("ray::ActorRank"))

    def reward_workers(self) -> list[psutil.Process]:
        return self._having(lambda _, words: "megarl.reward.worker" in words)

    def memory(self) -> int:
        """Resident bytes of everything that runs."""
        total = 0
        for process in self._footprint.processes():
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
        return total

    def _having(self, fits: Callable[[str, list[str]], bool]) -> list[psutil.Process]:
        found = []
        for process in self._footprint.processes():
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
    totals: RunTotals = field(default_factory=RunTotals)
    tail: EventTail | None = None
    step: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of each step that was done, those that were done again among them."""
    records: list[Record] = field(default_factory=list)

    def look(self) -> None:
        if self.tail is None:
            if not self.path.exists():
                return
            self.tail = EventTail(self.path)
        for record in self.tail.read():
            self.totals.record(record)
            self.records.append(record)
            match record.event:
                case RunStarted(resumed_step=resumed_step):
                    self.step = resumed_step
                case StepFinished(summary=summary):
                    self.step = summary.step
                    self.seconds.append(summary.seconds)


@dataclass(slots=True, kw_only=True)
class _Accidents:
    """One about every few steps, somewhere in a step; and how long each kept the run from its next one."""

    every: int
    last_step: int
    """None after it: the run has to be seen to end."""
    kinds: tuple[str, ...]
    chance: Random
    counts: Counter[str] = field(default_factory=Counter)
    delays: dict[str, list[float]] = field(default_factory=dict)
    _next_step: int = 0
    _due: float | None = None
    _unanswered: list[tuple[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._next_step = self.every

    def step_done(self) -> None:
        for kind, happened in self._unanswered:
            self.delays.setdefault(kind, []).append(time.monotonic() - happened)
        self._unanswered.clear()

    def happen(self, watch: _Watch, victims: _Victims, driver: Driver) -> str | None:
        """What happened just now."""
        now = time.monotonic()
        if self._due is None:
            if watch.seconds and self._next_step <= watch.step <= self.last_step:
                self._due = now + self.chance.uniform(0, watch.seconds[-1])
            return None
        if now < self._due:
            return None
        kind = self.chance.choice(self.kinds)
        if not _FAULTS[kind](victims, driver, self.chance):
            return None
        self.counts[kind] += 1
        self._unanswered.append((kind, now))
        self._next_step = watch.step + max(1, round(self.chance.uniform(0.6, 1.4) * self.every))
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
    lease_s: float = 0,
    kinds: tuple[str, ...] = (),
    tell: Callable[[str], None],
) -> Soaked:
    """Raises AssertionError where a promise is broken. With a lease the next driver adopts what a killed one leaves."""
    tell(f"seed {seed}: {num_steps} steps, a fault about every {every} of them; in {folder}")
    make_arithmetic(folder / "arithmetic", num_train=num_prompts * num_steps // 4, num_sft=16, num_eval=16)
    watch = _Watch(path=folder / "runs" / "soak" / EVENTS_FILE)
    accidents = _Accidents(every=every, last_step=num_steps - 2, kinds=kinds or tuple(_FAULTS), chance=Random(seed))
    overrides = _overrides(
        num_steps, num_engines=num_engines, num_prompts=num_prompts, num_tokens=num_tokens, lease_s=lease_s
    )
    memory: list[tuple[int, int]] = []
    began, num_starts = time.monotonic(), 0
    with nothing_left() as footprint:
        victims = _Victims(footprint)
        while True:
            num_starts += 1
            with started(folder, "soak", *overrides, footprint=footprint) as driver:
                num_done, last_change = len(watch.seconds), time.monotonic()
                while driver.poll() is None:
                    time.sleep(_POLL_S)
                    watch.look()
                    if len(watch.seconds) > num_done:
                        num_done, last_change = len(watch.seconds), time.monotonic()
                        memory.append((watch.step, victims.memory()))
                        accidents.step_done()
                    assert time.monotonic() - last_change < _STALL_S, f"no step for {_STALL_S:.0f} s; see {folder}"
                    if kind := accidents.happen(watch, victims, driver):
                        tell(f"{time.monotonic() - began:.0f} s, step {watch.step}: {kind}")
            watch.look()
            if driver.returncode == 0:
                break
            assert driver.returncode in (-signal.SIGKILL, 75), f"exit code {driver.returncode}; see {folder}/soak.out"
    seconds = time.monotonic() - began
    assert watch.step == num_steps
    assert verify((folder / "runs" / "soak" / "checkpoints" / "latest").resolve()).step == num_steps
    return Soaked(
        steps=num_steps,
        seconds=seconds,
        faults=dict(accidents.counts),
        num_starts=num_starts,
        num_steps_again=len(watch.seconds) - num_steps,
        effective_time_ratio=watch.totals.effective_time_ratio(watch.records[-1].time) or 0.0,
        memory_growth=_growth(memory, num_steps),
        step_s=statistics.median(watch.seconds),
        next_step_s={kind: round(statistics.median(delays), 1) for kind, delays in accidents.delays.items()},
    )


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
        found = find(victims)
        if not found:
            return False
        victim = chance.choice(found)
        try:
            os.killpg(os.getpgid(victim.pid), number) if is_group else victim.send_signal(number)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False
        return True

    return happen


def _signal_driver(number: signal.Signals) -> Accident:
    def happen(_: _Victims, driver: Driver, __: Random) -> bool:
        driver.send_signal(number)
        return True

    return happen


_FAULTS: Mapping[str, Accident] = {
    "engine killed": _signal_one(signal.SIGKILL, _Victims.engines, is_group=True),
    "engine frozen": _signal_one(signal.SIGSTOP, _Victims.engines, is_group=True),
    "trainer rank killed": _signal_one(signal.SIGKILL, _Victims.ranks),
    "reward worker killed": _signal_one(signal.SIGKILL, _Victims.reward_workers),
    "driver killed": _signal_driver(signal.SIGKILL),
    "driver asked to leave": _signal_driver(signal.SIGTERM),
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
    parser.add_argument("--lease", type=float, default=60, help="cluster.lease_s: drivers adopt; 0: they do not")
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
        tell=_tell,
    )
    lines = (
        f"{found.steps} steps in {found.seconds:.0f} s, {sum(found.faults.values())} faults, {found.num_starts} starts",
        f"effective time {found.effective_time_ratio:.0%} (goal 80 %), memory {found.memory_growth:+.1%} (goal 5 %)",
        json.dumps({"seed": options.seed, **asdict(found)}),
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
