"""The files that a run left in its folder, as tables and paths, for Python."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import JsonValue, ValidationError
from pydantic_core import to_jsonable_python

from megarl.checkpoint.folder import CHECKPOINTS_FOLDER, list_checkpoints
from megarl.config.recipe import Recipe
from megarl.data.evaluation_files import Generation, list_generations, read_generations
from megarl.data.rollout_files import list_rollouts
from megarl.errors import DataError
from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import Record, RunFinished, RunStarted
from megarl.observe.history import History, fold_history
from megarl.results import EvalResult


class Result:
    """One run. A run that goes on is read as far as it is; make a new one to see more."""

    def __init__(self, path: Path) -> None:
        if not (path / EVENTS_FILE).is_file():
            raise DataError(f"{path}: not the folder of a run: it has no {EVENTS_FILE}")
        self.path = path

    def __repr__(self) -> str:
        steps = len(self.history.summaries)
        return f"Result({str(self.path)!r}, status={self.status!r}, steps={steps})"

    @cached_property
    def records(self) -> tuple[Record, ...]:
        """All events, of all processes of the run."""
        return tuple(read_events(self.path / EVENTS_FILE))

    @cached_property
    def history(self) -> History:
        """Summaries and evaluations by step, without those that a resume repeated."""
        return fold_history(self.records)

    @property
    def status(self) -> str:
        """`done`, `failed`, `interrupted`, `preempted`, or `running`."""
        last = self.records[-1].event if self.records else None
        return last.status.value if isinstance(last, RunFinished) else "running"

    @property
    def recipe(self) -> Recipe:
        """The recipe of the last start, with overrides and defaults."""
        try:
            return Recipe.model_validate(self.recipe_values)
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors()[0]["loc"])
            message = f"{self.path}: its recipe is of another version of megarl: {where}: {error.errors()[0]['msg']}"
            raise DataError(message) from None

    @property
    def recipe_values(self) -> Mapping[str, JsonValue]:
        """The recipe of the last start as it was recorded, also by another version of megarl."""
        started = [record.event for record in self.records if isinstance(record.event, RunStarted)]
        if not started:
            raise DataError(f"{self.path / EVENTS_FILE}: no run has started yet")
        return started[-1].recipe

    @property
    def evaluations(self) -> dict[int, EvalResult]:
        """By the step after which they ran; 0 is before the first."""
        return dict(self.history.evaluations)

    @property
    def checkpoints(self) -> list[Path]:
        """Newest first."""
        return list_checkpoints(self.path / CHECKPOINTS_FOLDER)

    @property
    def model(self) -> Path | None:
        """The newest checkpoint's model, in Hugging Face format; None without a checkpoint."""
        return self.checkpoints[0] / "model" if self.checkpoints else None

    def metrics(self) -> pa.Table:
        """Return one row per step and one column per number, such as `update.loss` and `rollouts.reward_mean`."""
        rows = [dict(_numbers(asdict(summary), "")) for summary in self.history.summaries]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        return pa.table({name: [row.get(name) for row in rows] for name in columns})

    def events(self) -> pa.Table:
        """Return one row per event: sequence, time, kind, and the event itself as JSON."""
        return pa.table(
            {
                "sequence": [record.sequence for record in self.records],
                "time": [record.time for record in self.records],
                "kind": [record.event.kind for record in self.records],
                "event": [json.dumps(to_jsonable_python(record.event)) for record in self.records],
            }
        )

    def rollouts(self, step: int | None = None) -> pa.Table:
        """Return the kept rollouts of a step, or of all steps: one row each, with its tokens."""
        files = list_rollouts(self.path)
        if step is not None and step not in files:
            raise DataError(f"{self.path}: no rollouts of step {step} were kept, only of {', '.join(map(str, files))}")
        chosen = files if step is None else {step: files[step]}
        tables = [
            pq.read_table(path).append_column("step", pa.array([number] * pq.read_metadata(path).num_rows, pa.int64()))
            for number, path in chosen.items()
        ]
        return pa.concat_tables(tables, promote_options="default") if tables else pa.table({})

    def generations(self, step: int | None = None) -> list[Generation]:
        """Return the answers of one evaluation, the last one if `step` is not given."""
        files = list_generations(self.path)
        if not files or (step is not None and step not in files):
            raise DataError(f"{self.path}: no evaluation after step {step}; there are {', '.join(map(str, files))}")
        return list(read_generations(files[max(files) if step is None else step]))


def _numbers(value: Mapping[str, object], prefix: str) -> Iterator[tuple[str, float]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _numbers(item, f"{prefix}{key}.")
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield f"{prefix}{key}", float(item)
