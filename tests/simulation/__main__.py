"""`python -m tests.simulation`: histories for a while on every core, or one seed with all that happened in it."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import TextIO

from tests.simulation.campaign import WORLDS, Failure, histories, show

_SUMMARY_EVERY_S = 20.0
_REPORT_EVERY_S = 1.0
_Report = tuple[Counter[str], list[Failure]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--world", choices=WORLDS, action="append", help="only this one; by default all")
    parser.add_argument("--seed", type=int, help="show this history of the first world")
    parser.add_argument("--shrink", action="store_true", help="with --seed: fewer accidents, as long as it fails")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes; by default one per core")
    parser.add_argument("--out", type=Path, help="write the summaries to this file too")
    options = parser.parse_args()
    names = tuple(options.world or WORLDS)
    if options.seed is not None:
        holds, text = show(names[0], options.seed, shrinks=options.shrink)
        sys.stdout.write(f"{text}\n")
        return not holds
    signal.signal(signal.SIGTERM, _stop)
    with ExitStack() as stack:
        files = [sys.stdout] + ([stack.enter_context(options.out.open("w"))] if options.out else [])
        campaign = Campaign(first=options.first, files=files)
        campaign.run(names, seconds=options.seconds, num_jobs=options.jobs)
        return bool(campaign.failures)


@dataclass
class Campaign:
    """Histories of several processes. What was found is written every few seconds, so that it may be cut off."""

    first: int
    files: Sequence[TextIO]
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def run(self, names: Sequence[str], *, seconds: float, num_jobs: int) -> None:
        context = multiprocessing.get_context("fork")
        reports: Queue[_Report] = context.Queue()
        jobs = [
            context.Process(target=_work, args=(names, self.first + index, num_jobs, seconds, reports), daemon=True)
            for index in range(num_jobs)
        ]
        for job in jobs:
            job.start()
        try:
            self._collect(jobs, reports)
        except KeyboardInterrupt:
            self._write("stopped")
        finally:
            for job in jobs:
                job.kill()
            self._summarise()
            self._explain()

    def _collect(self, jobs: Sequence[BaseProcess], reports: Queue[_Report]) -> None:
        due = self.began + _SUMMARY_EVERY_S
        while any(job.is_alive() for job in jobs) or not reports.empty():
            try:
                counts, failures = reports.get(timeout=_REPORT_EVERY_S)
            except queue.Empty:
                continue
            self.counts += counts
            self.failures += failures
            for failure in failures:
                self._write(f"FAILED --world {failure.world} --seed {failure.seed}: {failure.broken[0][:300]}")
            if time.monotonic() > due:
                due += _SUMMARY_EVERY_S
                self._summarise()
        for job in jobs:
            if job.exitcode:
                self._write(f"a process ended with {job.exitcode}: its last histories are not counted")

    def _summarise(self) -> None:
        seconds, total = time.monotonic() - self.began, self.counts.total()
        worlds = ", ".join(f"{name} {number}" for name, number in sorted(self.counts.items()))
        self._write(
            f"{seconds:.0f} s: {total} histories ({worlds}) from seed {self.first} on, {total / seconds:.1f} per "
            f"second, {len(self.failures)} failures"
        )

    def _explain(self) -> None:
        """Write the failures of one cause together."""
        alike: dict[str, list[Failure]] = {}
        for failure in sorted(self.failures, key=lambda each: each.seed):
            alike.setdefault(failure.signature, []).append(failure)
        for text, found in sorted(alike.items(), key=lambda item: -len(item[1])):
            place = f"--world {found[0].world} --seed {found[0].seed}"
            self._write(f"{len(found)} times: {text[:300]}\n    python -m tests.simulation {place} --shrink")

    def _write(self, text: str) -> None:
        for file in self.files:
            file.write(f"{text}\n")
            file.flush()


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


def _work(names: Sequence[str], first: int, stride: int, seconds: float, reports: Queue[_Report]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    now = time.monotonic()
    deadline, due = now + seconds, now + _REPORT_EVERY_S
    counts: Counter[str] = Counter()
    failures: list[Failure] = []
    without = set(names)  # a world without a history has one, however slow the machine is
    for name, failure in histories(names, first, stride):
        counts[name] += 1
        without.discard(name)
        failures += [failure] if failure is not None else []
        now = time.monotonic()
        ends = now > deadline and not without
        if now > due or ends:
            reports.put((counts, failures))
            counts, failures, due = Counter(), [], now + _REPORT_EVERY_S
        if ends:
            return


if __name__ == "__main__":
    sys.exit(main())
