"""The table at the end of a run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megarl.observe.report import ReportRow, RunReport


def print_report(report: RunReport, console: Console) -> None:
    table = Table("", "first", "last", "best", "best at step")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in report.rows:
        table.add_row(row.name, _number(row.first), _number(row.last), *_best(row))
    console.print(table)
    console.print(f"curves: {report.curves}")


def _best(row: ReportRow) -> tuple[str, str]:
    if row.best is None:
        return "", ""
    return _number(row.best), str(row.best_step)


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if value == 0 or abs(value) >= 0.001:
        return f"{value:.3f}"
    return f"{value:.1e}"
