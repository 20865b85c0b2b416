"""Figures of a GPU as a table, and as JSON in the last line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from megarl.env import NO_COLOR
from megarl.observe.figures import Figure

_WIDTH = 140


def print_figures(figures: Sequence[Figure], machine: Mapping[str, object]) -> None:
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    table = Table(title=about, title_justify="left", box=box.SIMPLE_HEAD)
    for title in ("figure", "value", "", "against", "ratio", ""):
        table.add_column(title, justify="right" if title in ("value", "ratio") else "left")
    for figure in figures:
        table.add_row(
            figure.name,
            f"{figure.value:.4g}",
            figure.unit,
            figure.against,
            f"{figure.ratio:.3f}",
            f"fallen from {figure.record:g}" if figure.has_fallen else "",
        )
    Console(width=_WIDTH, no_color=bool(NO_COLOR.read()), highlight=False).print(table)
    print(json.dumps({"machine": machine, "figures": [asdict(figure) for figure in figures]}))
