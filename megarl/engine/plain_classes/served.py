"""The class that the config.json of the command line's model names, from the module that its family declares."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from megarl.families import FAMILIES


def served_classes(arguments: Sequence[str]) -> Iterator[type]:
    """Yield the class that an engine with these arguments serves; nothing where no family has it."""
    config = Path(arguments[arguments.index("--model-path") + 1]) / "config.json"
    architectures = json.loads(config.read_text())["architectures"]
    for family in FAMILIES:
        if family.architecture in architectures:
            yield getattr(import_module(f"sglang.srt.models.{family.engine.module}"), family.architecture)


EntryClass = list(served_classes(sys.argv)) if "--model-path" in sys.argv else []
