"""Whether what a recipe passes on to Megatron and SGLang exists there, has the right type, and is not megarl's own."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping

from megarl.config.native.library import JSON, Library, NativeField, NativeLibrary, read_library
from megarl.config.native.owned import owned
from megarl.config.recipe import Recipe, TrainedModelConfig
from megarl.errors import Problem

_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    JSON: (dict, list),
}

_ROLLOUT = "roles.rollout.sglang"


def check_native(recipe: Recipe) -> Iterator[Problem]:
    """Every option of the roles' `megatron` and `sglang` sections that cannot be passed on."""
    rollout, device = recipe.roles.rollout, recipe.run.device
    for role, split in recipe.megatron_roles.items():
        section = f"roles.{role}.megatron"
        yield from _complaints("megatron", section, split.megatron, device)
        yield from _recomputation(split.megatron, section)
        if isinstance(split, TrainedModelConfig):
            yield from _complaints("megatron_optimizer", f"{section}_optimizer", split.megatron_optimizer, device)
            yield from _complaints("megatron_ddp", f"{section}_ddp", split.megatron_ddp, device)
            yield from _buckets(split.megatron_ddp, f"{section}_ddp")
    if rollout is not None:
        yield from _complaints("sglang", _ROLLOUT, rollout.sglang, device)


def _complaints(library: Library, section: str, options: Mapping[str, object], device: str) -> Iterator[Problem]:
    for name, value in options.items():
        message = complain(library, name, value, device=device)
        if message is not None:
            yield Problem(key=f"{section}.{name}", message=message)


def complain(library: Library, name: str, value: object, *, device: str) -> str | None:
    """What is wrong with one option and the way out; None where it can be passed on."""
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
    """Megatron's own rules of the fields that go together, before a rank has to tell them."""
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


def _nearest(library: Library, name: str, known: NativeLibrary, device: str) -> str:
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
