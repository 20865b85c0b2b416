"""`megarl compare`: two or more runs side by side, their results, their recipes and, in one HTML file, their curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from pydantic import JsonValue
from rich.table import Table
from rich.text import Text

from megarl.cli.display import make_console
from megarl.cli.run_folder import write_text
from megarl.cli.train import format_number
from megarl.config.document import leaves
from megarl.errors import ConfigError, Problem
from megarl.run_result import Result


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of runs.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the curves of all runs into one HTML file.")
    ] = None,
) -> None:
    """Show runs side by side: last and best numbers, and every key in which their recipes differ."""
    if len(runs) < 2:
        raise ConfigError("megarl compare", (Problem(key="", message="name at least two folders of runs"),))
    results = [Result(run) for run in runs]
    names = run_names(results)
    tables = [table for table in (_results(results, names), _recipes(results, names)) if table.rows]
    console = make_console()
    for table in tables:
        console.print(table.to_terminal())
    if len(tables) == 1:
        console.print("the recipes are the same")
    if out is not None:
        from megarl.tools.page.run_data import RunFolder
        from megarl.tools.page.web_page import comparison_page

        folders = {name: RunFolder(run) for name, run in zip(names, runs, strict=True)}
        write_text(out, comparison_page(folders, [table.to_page() for table in tables]))
        print(f"wrote {out}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTable:
    """A table for the terminal and for the page: a name and a cell for each run."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def to_terminal(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for place, name in enumerate(self.header):
            # Keys stay whole on a narrow terminal, and no value loses its end.
            table.add_column(Text(name, overflow="fold"), overflow="fold", no_wrap=place == 0)
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_page(self) -> JsonValue:
        return {"title": self.title, "header": list(self.header), "rows": [list(row) for row in self.rows]}


def run_names(results: Sequence[Result]) -> list[str]:
    """Return the names of the folders, or their paths where names repeat."""
    names = [result.path.name for result in results]
    return names if len(set(names)) == len(names) else [str(result.path) for result in results]


def _results(results: Sequence[Result], names: Sequence[str]) -> ComparedTable:
    from megarl.observe.report import tabulate

    table = [("status", *(result.status for result in results))]
    table.append(("steps", *(str(len(result.history.summaries)) for result in results)))
    rows = [{row.name: row for row in tabulate(result.history)} for result in results]
    for name in dict.fromkeys(name for each in rows for name in each):
        cells = []
        for each in rows:
            row = each.get(name)
            best = "" if row is None or row.best is None else f" ({format_number(row.best)} at {row.best_step})"
            cells.append("" if row is None else f"{format_number(row.last)}{best}")
        table.append((name, *cells))
    return ComparedTable(title="last (best at step)", header=("", *names), rows=table)


def _recipes(results: Sequence[Result], names: Sequence[str]) -> ComparedTable:
    """Return every key in which the recipes differ; no row where they are the same."""
    values = [{".".join(key): value for key, value in leaves(result.recipe_values)} for result in results]
    keys = list(dict.fromkeys(key for each in values for key in each))
    different = [key for key in keys if len({str(each.get(key)) for each in values}) > 1 and key != "run.name"]
    rows = [(key, *("not set" if each.get(key) is None else str(each[key]) for each in values)) for key in different]
    return ComparedTable(title="recipes differ in", header=("key", *names), rows=rows)
