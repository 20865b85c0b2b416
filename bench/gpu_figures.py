"""Prints the figures of `python -m bench gpu` as a table, and as JSON in the last line."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from bench.figures import Figure
from bench.gpu_pieces import Results
from megarl.env import NO_COLOR

_WIDTH = 140


def print_results(results: Results) -> None:
    about = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    table = Table(title=about, title_justify="left", box=box.SIMPLE_HEAD)
    for title in ("figure", "value", "", "against", "ratio", ""):
        table.add_column(title, justify="right" if title in ("value", "ratio") else "left")
    for figure in results.figures:
        table.add_row(
            figure.name,
            f"{figure.value:.4g}",
            figure.unit,
            figure.against,
            f"{figure.ratio:.3f}",
            f"fallen from {figure.record:g}" if figure.has_fallen else "",
        )
    for failure in results.failures:
        table.add_row(failure.part, "", "", failure.reason, "", "no figure")
    Console(width=_WIDTH, no_color=bool(NO_COLOR.read()), highlight=False).print(table)
    print(
        json.dumps(
            {
                "machine": results.machine,
                "figures": [_with_record(figure) for figure in results.figures],
                "failures": [asdict(failure) for failure in results.failures],
            }
        )
    )


def _with_record(figure: Figure) -> dict[str, object]:
    return {**asdict(figure), "record": figure.record}
