"""`megarl schema`: what a recipe may contain, for editors and for people."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from megarl.config.schema import json_schema, reference


def schema(
    is_docs: Annotated[bool, typer.Option("--docs", help="Print the reference in Markdown instead.")] = False,
) -> None:
    """Print the JSON Schema of a recipe."""
    print(reference() if is_docs else json.dumps(json_schema(), indent=2) + "\n", end="")
