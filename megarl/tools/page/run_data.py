"""What the page knows of a run, read from its folder: a few numbers, the curves, the timeline, the rollouts kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import itemgetter
from pathlib import Path
from typing import Any

from megarl.data.rollout_files import list_rollouts, read_list, read_rollout
from megarl.errors import DataError
from megarl.observe.events import EVENTS_FILE, EventTail, Record, RunFinished, RunStarted, Warned
from megarl.observe.history import fold_history
from megarl.tools.page.charts import draw_charts
from megarl.tools.page.timeline import ROLES, fold_spans
from megarl.types import JsonValue

_MAX_SPANS = 4000
"""The newest: more do not fit on a screen."""
_MAX_WARNINGS = 50
MAX_ROWS = 200
"""Of one answer."""

SORT_KEYS = ("step", "score", "num_tokens", "largest_gap")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutQuery:
    """Which rollouts are listed, and in which order."""

    step: int | None = None
    source: str | None = None
    text: str = ""
    """Somewhere in the prompt's name or the beginning of the response."""
    sort: str = "step"
    is_descending: bool = False
    offset: int = 0
    limit: int = MAX_ROWS


class RunFolder:
    """A run's files, read as they grow. Not for several threads at once."""

    def __init__(self, folder: Path) -> None:
        if not (folder / EVENTS_FILE).is_file():
            raise DataError(f"{folder}: is not the folder of a run: it has no {EVENTS_FILE}")
        self.folder = folder
        self._tail = EventTail(folder / EVENTS_FILE)
        self._records: list[Record] = []
        self._lists: dict[Path, tuple[int, list[dict[str, Any]]]] = {}

    @property
    def stamp(self) -> str:
        """Another one when there is something new to read."""
        files = list_rollouts(self.folder)
        newest = max(files, default=0)
        return f"{(self.folder / EVENTS_FILE).stat().st_size}-{len(files)}-{newest}"

    def overview(self) -> dict[str, JsonValue]:
        """Everything but the rollouts."""
        self._records += self._tail.read()
        records = self._records
        started = [record for record in records if isinstance(record.event, RunStarted)]
        if not started:
            raise DataError(f"{self.folder / EVENTS_FILE}: no run has started yet; try again in a moment")
        event = started[-1].event
        assert isinstance(event, RunStarted)
        history = fold_history(records)
        last = records[-1].event
        status, reason = (last.status.value, last.reason) if isinstance(last, RunFinished) else ("running", "")
        return {
            "name": event.name,
            "folder": str(self.folder),
            "algorithm": event.algorithm,
            "version": event.megarl_version,
            "status": status,
            "reason": reason,
            "step": history.summaries[-1].step if history.summaries else event.resumed_step,
            "steps": event.steps,
            "num_lives": len(started),
            "began": started[0].time.timestamp(),
            "updated": records[-1].time.timestamp(),
            "charts": [
                {
                    "section": chart.section,
                    "title": chart.title,
                    "series": [
                        {"name": name, "steps": list(one.steps), "values": [_finite(v) for v in one.values]}
                        for name, one in chart.series.items()
                    ],
                }
                for chart in draw_charts(history)
            ],
            "spans": _spans(records),
            "warnings": _warnings(records),
            "recipe": dict(event.recipe),
        }

    def rollouts(self, query: RolloutQuery) -> dict[str, JsonValue]:
        """One page of the list, with how many there are in all and what can be asked for."""
        files = list_rollouts(self.folder)
        rows = [
            {**row, "step": step, "row": place}
            for step, path in files.items()
            if query.step in (None, step)
            for place, row in enumerate(self._list(path))
        ]
        sources = sorted({str(row["data_source"]) for row in rows})
        found = [row for row in rows if _is_asked_for(row, query)]
        key: Callable[[Mapping[str, Any]], Any] = itemgetter(query.sort)
        found.sort(key=key, reverse=query.is_descending)
        last = query.offset + min(query.limit, MAX_ROWS)
        page: list[JsonValue] = [
            {**row, "largest_gap": _finite(row["largest_gap"])} for row in found[query.offset : last]
        ]
        return {"total": len(found), "rows": page, "steps": list(files), "sources": list(sources)}

    def rollout(self, step: int, row: int) -> dict[str, JsonValue]:
        """Every token of one."""
        files = list_rollouts(self.folder)
        if step not in files:
            raise DataError(f"{self.folder}: no rollouts of step {step} are kept")
        return {
            "step": step,
            "row": row,
            **{key: _strict(value) for key, value in read_rollout(files[step], row).items()},
        }

    def _list(self, path: Path) -> list[dict[str, Any]]:
        """Read once, and again when a resumed run has written the step anew."""
        changed = path.stat().st_mtime_ns
        known = self._lists.get(path)
        if known is None or known[0] != changed:
            self._lists[path] = known = (changed, read_list(path))
        return known[1]


def _is_asked_for(row: Mapping[str, Any], query: RolloutQuery) -> bool:
    if query.source not in (None, row["data_source"]):
        return False
    text = query.text.casefold()
    return not text or text in str(row["line"]).casefold() or text in str(row["prompt_uid"]).casefold()


def _spans(records: Sequence[Record]) -> list[JsonValue]:
    return [
        {
            "phase": span.phase,
            "roles": list(ROLES[span.phase]),
            "step": span.step,
            "began": span.began.timestamp(),
            "seconds": span.seconds,
            "is_open": span.is_open,
        }
        for span in fold_spans(records)[-_MAX_SPANS:]
    ]


def _warnings(records: Sequence[Record]) -> list[JsonValue]:
    found = [(record.time, record.event) for record in records]
    texts: list[JsonValue] = [
        {"time": time.timestamp(), "text": event.text} for time, event in found if isinstance(event, Warned)
    ]
    return texts[-_MAX_WARNINGS:]


def _finite(value: float) -> float | None:
    """JSON has no NaN; a gap in the curve says the same."""
    return value if isfinite(value) else None


def _strict(value: Any) -> JsonValue:
    match value:
        case float():
            return _finite(value)
        case list():
            return [_strict(item) for item in value]
        case dict():
            return {str(key): _strict(item) for key, item in value.items()}
        case _:
            kept: JsonValue = value
            return kept
