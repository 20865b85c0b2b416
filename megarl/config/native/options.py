"""The options that the pinned Megatron and SGLang take, and whether those that a recipe passes on can be passed on.

An option must exist in the library, have the right type, and not be one that megarl sets itself (`owned`).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from megarl.config.native.owned import Library, owned
from megarl.config.roles import RolesConfig, TrainedModelConfig
from megarl.config.section import Device
from megarl.errors import Problem

JSON = "json"
"""The type of an option that is a mapping or a list and is passed on as text."""
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    JSON: (dict, list),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeField:
    types: tuple[str, ...]
    """bool, int, float, str, `list[...]` of one of them, json; empty for an option that YAML cannot express."""
    choices: tuple[str | int | float, ...] = ()
    """Allowed values, or allowed items of a list; empty allows all."""
    flag: str | None = None
    """The flag, unless it is `--` and the name."""
    negation: str | None = None
    """The flag for false; None where false is the library's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLibrary:
    name: str
    version: str
    fields: Mapping[str, NativeField]


@cache
def read_library(library: Library) -> NativeLibrary:
    raw = json.loads((files("megarl.config.native") / f"{library}.json").read_text(encoding="utf-8"))
    return NativeLibrary(
        name=raw["name"],
        version=raw["version"],
        fields={name: _read(field) for name, field in raw["fields"].items()},
    )


def _read(raw: Mapping[str, object]) -> NativeField:
    types, choices = raw["types"], raw.get("choices", [])
    flag, negation = raw.get("flag"), raw.get("negation")
    assert isinstance(types, list), raw
    assert isinstance(choices, list), raw
    assert isinstance(flag, str | None), raw
    assert isinstance(negation, str | None), raw
    return NativeField(types=tuple(types), choices=tuple(choices), flag=flag, negation=negation)


def check_native(roles: RolesConfig, *, device: Device) -> Iterator[Problem]:
    """Yield every option of the roles' `megatron` and `sglang` sections that cannot be passed on."""
    for role, split in roles.megatron_roles.items():
        section = f"roles.{role}.megatron"
        yield from _refused("megatron", section, split.megatron, device)
        yield from _recomputation(split.megatron, section)
        if isinstance(split, TrainedModelConfig):
            yield from _refused("megatron_optimizer", f"{section}_optimizer", split.megatron_optimizer, device)
            yield from _refused("megatron_ddp", f"{section}_ddp", split.megatron_ddp, device)
            yield from _buckets(split.megatron_ddp, f"{section}_ddp")
    for role, engines in roles.on_engines.items():
        yield from _refused("sglang", f"roles.{role}.sglang", engines.sglang, device)


def _refused(library: Library, section: str, options: Mapping[str, object], device: Device) -> Iterator[Problem]:
    for name, value in options.items():
        message = refusal(library, name, value, device=device)
        if message is not None:
            yield Problem(key=f"{section}.{name}", message=message)


def refusal(library: Library, name: str, value: object, *, device: Device) -> str | None:
    """Return what is wrong with one option and the way out; None for an option that can be passed on."""
    remedy = owned(library, name, device=device)
    if remedy is not None:
        return remedy
    known = read_library(library)
    field = known.fields.get(name)
    if field is None:
        return f"{known.name} {known.version} has no such option{_nearest(library, name, known, device)}"
    if not field.types:
        return "takes an object of Python, which a recipe cannot hold; remove it"
    if not any(_fits(value, kind) for kind in field.types):
        return f"{json.dumps(value)}: {known.name} takes {' or '.join(field.types)} here"
    return _outside_choices(field, value)


def _recomputation(options: Mapping[str, object], section: str) -> Iterator[Problem]:
    """Yield what breaks Megatron's rules for these fields, which a rank would otherwise report after it started."""
    match options.get("recompute_granularity"):
        case "full":
            missing = [name for name in ("recompute_method", "recompute_num_layers") if name not in options]
            message = "missing; recompute_granularity full needs it (method uniform and num_layers 1 save most memory)"
            yield from (Problem(key=f"{section}.{name}", message=message) for name in missing)
        case "selective" if "recompute_num_layers" in options:
            message = "recompute_granularity selective takes recompute_modules, not layers; remove it"
            yield Problem(key=f"{section}.recompute_num_layers", message=message)
        case None:
            details = [
                name for name in ("recompute_method", "recompute_num_layers", "recompute_modules") if name in options
            ]
            message = "does nothing without recompute_granularity; set that to full or selective, or remove this"
            yield from (Problem(key=f"{section}.{name}", message=message) for name in details)


def _buckets(options: Mapping[str, object], section: str) -> Iterator[Problem]:
    if "bucket_size" in options and not options.get("overlap_grad_reduce"):
        message = "does nothing without overlap_grad_reduce; set that to true, or remove this"
        yield Problem(key=f"{section}.bucket_size", message=message)


def _nearest(library: Library, name: str, known: NativeLibrary, device: Device) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), known.fields, n=1, cutoff=0.6)
    if not near:
        return "; remove it"
    remedy = owned(library, near[0], device=device)
    return f"; did you mean {near[0]}?" if remedy is None else f"; {near[0]}: {remedy}"


def _fits(value: object, kind: str) -> bool:
    if kind.startswith("list["):
        item_kind = kind.removeprefix("list[").removesuffix("]")
        return isinstance(value, list) and bool(value) and all(_fits(item, item_kind) for item in value)
    # In Python a truth value is also an int.
    return isinstance(value, _PYTHON_TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))


def _outside_choices(field: NativeField, value: object) -> str | None:
    items = value if isinstance(value, list) else [value]
    wrong = [item for item in items if item not in field.choices]
    if not field.choices or not wrong:
        return None
    return f"{json.dumps(wrong[0])}: one of {', '.join(str(choice) for choice in field.choices)}"
