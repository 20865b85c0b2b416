"""`megarl view`, `megarl report` and `megarl timeline`: a run in a browser, in one file, and as a trace."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from megarl.errors import DataError, MachineError
from megarl.observe.events import EVENTS_FILE, read_events
from megarl.page.document import MAX_INLINED, report_page
from megarl.page.run_data import RunFolder
from megarl.page.server import serve
from megarl.page.timeline import fold_spans, to_trace

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", show_default=False)]


def view(
    run: RunArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="On loopback; 0 picks a free one.")] = 0,
) -> None:
    """Serve a run's curves, timeline and rollouts to a browser on this machine, also while it goes on."""
    asyncio.run(serve(run, port=port, on_start=lambda url: print(f"{run} is at {url}; Ctrl-C ends this", flush=True)))


def report(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Without it, report.html in the run's folder.")
    ] = None,
) -> None:
    """Write the same as one HTML file that needs nothing else."""
    path = out or run / "report.html"
    _write(path, report_page(RunFolder(run)))
    print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB, at most {MAX_INLINED} rollouts)")


def timeline(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Without it, timeline.json in the run's folder.")
    ] = None,
) -> None:
    """Write when each role did what as a trace for Perfetto; the run may still be going on."""
    path = out or run / "timeline.json"
    spans = fold_spans(read_events(run / EVENTS_FILE))
    if not spans:
        raise DataError(f"{run / EVENTS_FILE}: no phase has begun")
    _write(path, json.dumps(to_trace(spans, run=run.name)))
    print(f"wrote {path} ({len(spans)} phases); open it in Perfetto")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(f"--out {path}: cannot be written: {error.strerror}") from error
