"""Options of SGLang that a recipe passes on, as words of its server's command line. They have been checked."""

from __future__ import annotations

import json
from collections.abc import Mapping

from megarl.config.native.options import JSON, read_library


def native_words(options: Mapping[str, object]) -> list[str]:
    """In the recipe's order."""
    fields = read_library("sglang").fields
    words: list[str] = []
    for name, value in options.items():
        field = fields[name]
        flag = field.flag or f"--{name.replace('_', '-')}"
        match value:
            case True:
                words.append(flag)
            case False:
                words += [field.negation] if field.negation else []
            case list() if JSON not in field.types:
                words += [flag, *(str(item) for item in value)]
            case list() | dict():
                words += [flag, json.dumps(value)]
            case _:
                words += [flag, str(value)]
    return words
