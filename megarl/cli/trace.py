"""When each role did what, as a trace for Perfetto: `megarl timeline`, and `--timeline` of `megarl train`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from megarl.errors import DataError, MachineError
from megarl.observe.events import EVENTS_FILE, read_events
from megarl.tools.page.timeline import fold_spans, to_trace
from megarl.types import JsonValue

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", show_default=False)]


def timeline(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Without it, timeline.json in the run's folder.")
    ] = None,
) -> None:
    """Write when each role did what as a trace for Perfetto; the run may still be going on."""
    path = out or run / "timeline.json"
    num_phases = write_trace(run, path)
    print(f"wrote {path} ({num_phases} phases); open it in Perfetto")


@contextmanager
def traced(run: Path, out: Path | None) -> Iterator[Path | None]:
    """Where a run should leave what Ray knows of its tasks; with `out`, both together are there in the end."""
    if out is None:
        yield None
        return
    write_text(out, "")  # better now than after the run
    with tempfile.TemporaryDirectory(prefix="megarl-timeline-") as folder:
        tasks = Path(folder) / "ray.json"
        try:
            yield tasks
        finally:
            write_trace(run, out, others=json.loads(tasks.read_text()) if tasks.exists() else ())


def write_trace(run: Path, path: Path, *, others: Sequence[Mapping[str, JsonValue]] = ()) -> int:
    """Returns how many phases it has."""
    spans = fold_spans(read_events(run / EVENTS_FILE))
    if not spans:
        raise DataError(f"{run / EVENTS_FILE}: no phase has begun")
    write_text(path, json.dumps(to_trace(spans, run=run.name, others=others)))
    return len(spans)


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(f"{path}: cannot be written: {error.strerror}") from error
