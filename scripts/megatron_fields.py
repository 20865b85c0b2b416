"""Write the fields of Megatron's configurations, which recipes are checked against.

Run `python -m scripts.megatron_fields` after a change of Megatron's release.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Literal, Union, get_args, get_origin, get_type_hints

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.native import Library, NativeField, NativeLibrary
from scripts.native_fields import sorted_choices, write_library

_SIMPLE = (bool, int, float, str)


CONFIGS: Mapping[Library, type] = {
    "megatron": TransformerConfig,
    "megatron_optimizer": OptimizerConfig,
    "megatron_ddp": DistributedDataParallelConfig,
}


def megatron_fields(library: Library) -> NativeLibrary:
    config = CONFIGS[library]
    hints = get_type_hints(config)
    names = [field.name for field in dataclasses.fields(config) if not field.name.startswith("_")]
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
    """Return nothing for types that a recipe cannot hold."""
    if kind in _SIMPLE:
        assert isinstance(kind, type)
        yield kind.__name__
    elif get_origin(kind) is Literal:
        yield from (type(value).__name__ for value in get_args(kind))
    elif get_origin(kind) is list:
        yield from (f"list[{name}]" for item in get_args(kind) for name in _type_names(item))


if __name__ == "__main__":
    for library in CONFIGS:
        write_library(library, megatron_fields(library))
