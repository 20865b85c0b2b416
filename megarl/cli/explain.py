"""`megarl validate --explain`: every value of a recipe and where it was written."""

from __future__ import annotations

from pathlib import Path

from megarl.config.load import explain, read_recipe


def print_explanation(recipe: Path, overrides: list[str]) -> None:
    """Three columns, never cut: a shortened path or value would not explain anything."""
    rows = [
        (item.key, item.value, "default" if item.origin is None else str(item.origin))
        for item in explain(read_recipe(recipe, overrides))
    ]
    key_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for key, value, origin in rows:
        print(f"{key:<{key_width}}  {value:<{value_width}}  {origin}")
