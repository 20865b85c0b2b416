"""What Megatron's TransformerConfig takes, as the data file that recipes are checked against.

`python -m megarl.train.native_fields > megarl/config/native/megatron.json`, after a change of Megatron's release.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator
from importlib.metadata import version
from typing import Literal, Union, get_args, get_origin, get_type_hints

from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.native.library import NativeField, NativeLibrary, sorted_choices

_SIMPLE = (bool, int, float, str)


def megatron_fields() -> NativeLibrary:
    hints = get_type_hints(TransformerConfig)
    names = [field.name for field in dataclasses.fields(TransformerConfig) if not field.name.startswith("_")]
    return NativeLibrary(
        name="megatron",
        version=version("megatron-core"),
        fields={name: _field(hints[name]) for name in names},
    )


def _field(hint: object) -> NativeField:
    alternatives = list(_alternatives(hint))
    choices = [value for kind in alternatives if get_origin(kind) is Literal for value in get_args(kind)]
    names = dict.fromkeys(name for kind in alternatives for name in _type_names(kind))
    return NativeField(types=tuple(names), choices=sorted_choices(choices))


def _alternatives(hint: object) -> Iterator[object]:
    if get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from _alternatives(part)
    else:
        yield hint


def _type_names(kind: object) -> Iterator[str]:
    """Nothing for what a recipe cannot hold."""
    if kind in _SIMPLE:
        assert isinstance(kind, type)
        yield kind.__name__
    elif get_origin(kind) is Literal:
        yield from (type(value).__name__ for value in get_args(kind))
    elif get_origin(kind) is list:
        yield from (f"list[{name}]" for item in get_args(kind) for name in _type_names(item))


if __name__ == "__main__":
    sys.stdout.write(megatron_fields().to_json())
