"""The explanation of a call that did not end in time: which ranks are missing, where the others wait, all stacks.

`explain_hang` is pure; `write_report` writes the file that a person reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from megarl.runtime.trainers.stacks import RankStacks, Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A rank that did not report its stacks."""

    reason: str
    """Why, as the end of a sentence."""


Answer: TypeAlias = RankStacks | Silence


@dataclass(frozen=True, slots=True, kw_only=True)
class HangReport:
    missing: Mapping[int, str]
    """By rank: where it is instead of in the call."""
    waiting: Mapping[int, Wait]

    def __str__(self) -> str:
        parts = [f"rank {rank} is missing: {doing}" for rank, doing in self.missing.items()]
        by_wait: dict[str, list[int]] = {}
        for rank, wait in self.waiting.items():
            by_wait.setdefault(str(wait), []).append(rank)
        parts += [f"{_named(ranks)} in {wait}" for wait, ranks in by_wait.items()]
        return "; ".join(parts)


def explain_hang(answers: Sequence[Answer], *, method: str, late: Sequence[int]) -> HangReport:
    """Divide the late ranks into those that wait for others and those that the others wait for."""
    missing: dict[int, str] = {}
    waiting: dict[int, Wait] = {}
    for rank in late:
        answer = answers[rank]
        if isinstance(answer, Silence):
            missing[rank] = answer.reason
            continue
        wait = answer.wait_in(method)
        if wait is not None:
            waiting[rank] = wait
            continue
        thread = answer.running(method)
        missing[rank] = f"it is in {thread.place}" if thread else f"it has not begun with {method}"
    return HangReport(missing=missing, waiting=waiting)


def write_report(folder: Path, *, role: str, method: str, headline: str, answers: Sequence[Answer]) -> Path:
    now = datetime.now(UTC)
    path = folder / f"hang_{now:%Y%m%dT%H%M%S}_{role}_{method}.txt"
    lines = [headline, f"written {now:%Y-%m-%d %H:%M:%S} UTC", ""]
    for rank, answer in enumerate(answers):
        lines += [f"==== {role} rank {rank} ====", *_describe(answer, method), ""]
    path.write_text("\n".join(lines))
    return path


def _describe(answer: Answer, method: str) -> list[str]:
    if isinstance(answer, Silence):
        return [f"no answer: {answer.reason}"]
    lines = []
    # The method's own thread comes first.
    for thread in sorted(answer.threads, key=lambda thread: (thread.method != method, not thread.method)):
        state = f"waits in {thread.wait}" if thread.wait else f"is in {thread.place}"
        lines += [f"-- thread {thread.name}{f' ({thread.method})' if thread.method else ''} {state}"]
        lines += "".join(thread.lines).splitlines()
    return lines


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} wait"
