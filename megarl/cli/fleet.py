"""`megarl fleet`: the engines of a run that is under way, and a say in which of them it has."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from megarl.cli.display import make_console
from megarl.runtime.engines.operator import OperatorRequest, ask


class Action(StrEnum):
    LIST = "list"
    RETIRE = "retire"
    ADD = "add"


def fleet(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.", show_default=False)],
    action: Annotated[Action, typer.Argument(help="What to do.")] = Action.LIST,
    engine: Annotated[int | None, typer.Argument(metavar="N", min=0, help="Which engine.")] = None,
) -> None:
    """Show the engines of a run; take one out (retire N), or start one again that is retired or given up (add N)."""
    table = Table(box=None, header_style="bold")
    for title in ("engine", "state", "version", "requests", "restarts", "address", "because"):
        table.add_column(title)
    for report in ask(run, OperatorRequest(action=action.value, engine=engine)):
        cells = (report.index, report.state, report.version, report.num_outstanding, report.num_restarts)
        table.add_row(*map(str, cells), report.address, report.reason)
    make_console().print(table)
