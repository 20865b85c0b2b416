"""Every rule on one run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from megarl.errors import DataError
from megarl.observe.events import EVENTS_FILE, read_events
from megarl.tools.doctor.findings import Finding
from megarl.tools.doctor.rules import RULES
from megarl.tools.doctor.run_history import Story, tell


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDiagnosis:
    run: str
    num_steps: int
    last_step: int
    status: str
    reason: str
    findings: tuple[Finding, ...]


def diagnose_run(folder: Path, *, now: datetime) -> RunDiagnosis:
    """What the events of a run tell; nothing else of it is opened."""
    path = folder / EVENTS_FILE
    if not path.is_file():
        raise DataError(f"{folder}: no {EVENTS_FILE} here; name the folder of a run, as in runs/quickstart")
    try:
        story = tell(read_events(path), now=now)
    except DataError as error:
        raise DataError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from None
    return RunDiagnosis(
        run=story.recipe.run.name,
        num_steps=story.recipe.run.steps,
        last_step=story.last_step,
        status="has not ended" if story.end is None else story.end.status.value,
        reason="" if story.end is None else story.end.reason,
        findings=find(story),
    )


def find(story: Story) -> tuple[Finding, ...]:
    """Errors first: the table is in that order."""
    found = []
    for rule in RULES:
        evidence = rule.sign(story)
        if evidence is not None:
            found.append(
                Finding(
                    rule=rule.name,
                    severity=rule.severity,
                    evidence=evidence,
                    cause=rule.cause,
                    changes=tuple(rule.changes(story)),
                    advice=rule.advice,
                )
            )
    return tuple(found)
