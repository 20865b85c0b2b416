"""`megarl view` and `megarl report`: a run in a browser, served or as one file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from megarl.cli.trace import RunArgument, write_text
from megarl.tools.page.document import MAX_INLINED, report_page
from megarl.tools.page.run_data import RunFolder
from megarl.tools.page.server import serve


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
    write_text(path, report_page(RunFolder(run)))
    print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB, at most {MAX_INLINED} rollouts)")
