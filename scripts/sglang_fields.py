"""Write the options of SGLang's server, which recipes are checked against.

Run `python -m scripts.sglang_fields` after a change of SGLang's release.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib.metadata import version

from megarl.config.native import JSON, NativeField, NativeLibrary
from scripts.native_fields import sorted_choices, write_library

_TYPE_NAMES: Mapping[str, str] = {
    "int": "int",
    "human_readable_int": "int",
    "float": "float",
    "str": "str",
    "nullable_str": "str",
    "loads": JSON,
    "json_list_type": JSON,
    "parse_cuda_graph_config_arg": JSON,
}
"""By the name of the function that parses a value in SGLang."""

_NOT_OPTIONS = ("help", "config")


def sglang_fields() -> NativeLibrary:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    # The parser, not the dataclass: it has the flags and the way a value is written.
    actions = [action for action in parser._actions if action.dest not in _NOT_OPTIONS]
    return NativeLibrary(
        name="sglang", version=version("sglang"), fields={action.dest: _field(action) for action in actions}
    )


def _field(action: argparse.Action) -> NativeField:
    plain = f"--{action.dest.replace('_', '-')}"
    flags = action.option_strings
    return NativeField(
        types=(_type(action),),
        choices=sorted_choices(action.choices or ()),
        flag=None if plain in flags else flags[0],
        negation=next((flag for flag in flags if flag == f"--no-{plain[2:]}"), None),
    )


def _type(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "bool"
    name = getattr(action.type, "__name__", "str")
    assert name in _TYPE_NAMES, f"{action.dest}: SGLang reads it with {name}, which is not in the table"
    is_list = action.nargs in ("+", "*")
    return f"list[{_TYPE_NAMES[name]}]" if is_list else _TYPE_NAMES[name]


if __name__ == "__main__":
    write_library("sglang", sglang_fields())
