"""The recipe's `model.lora`: which matrices are trained as a product of two thin ones, and the files of an adapter.

An adapter's folder is PEFT's: `adapter_model.safetensors` and `adapter_config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.config.section import Section
from megarl.errors import Problem
from megarl.families import family_of
from megarl.families.shape import ModelShape

LoraModule: TypeAlias = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts"]

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
ATTENTION_MODULES: tuple[LoraModule, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_MODULES: tuple[LoraModule, ...] = (*ATTENTION_MODULES, "gate_proj", "up_proj", "down_proj")
"""The linear layers that each layer of a model has once."""
EXPERTS: LoraModule = "experts"
"""All three matrices of every routed expert."""
_NEEDED: Mapping[LoraModule, frozenset[LoraModule]] = {
    "q_proj": frozenset({"v_proj"}),
    "k_proj": frozenset({"q_proj", "v_proj"}),
    "v_proj": frozenset({"q_proj"}),
    "up_proj": frozenset({"gate_proj"}),
}
"""Modules whose adapters SGLang fuses with those of others: without them it refuses an adapter, or ends at its use."""
SERVED_AS: Mapping[str, str] = {"gate_proj": "q_b_proj", "up_proj": "kv_b_proj", "down_proj": "wo_ud"}
"""Names of a shared expert's modules in engines with adapters. By their own names SGLang would reserve adapters for
every expert; of the names that it takes, these are of one layer each: divided by columns, by columns and by rows."""
SHARED_EXPERT = "shared_expert"
_EXPERT, _OF_EXPERT = "{e}", ".experts."
"""The number of an expert in the names of families, and what comes before it in those of tensors."""
_SCORE = "score"
"""The module of a critic's value head, which is trained as a whole."""
_UNSUPPORTED = {"use_dora": False, "use_rslora": False, "bias": "none", "fan_in_fan_out": False}
"""Fields of an adapter's configuration that change what it computes, with the value that leaves it as it is."""
_MAX_HEADER_BYTES = 100 << 20


class LoraConfig(Section):
    """Train an adapter beside a frozen base, in the actor and the critic; engines serve the base with the adapter."""

    rank: PositiveInt = 32
    """Inner size of the two matrices that are trained in place of each one."""
    alpha: PositiveFloat = 64
    """The product of the two matrices is multiplied by `alpha / rank`."""
    modules: Annotated[tuple[LoraModule, ...], Field(min_length=1)] = ALL_MODULES
    """The linear layers of each block that have an adapter; in a mixture of experts those of the attention and of the
    shared expert. `experts` are the three matrices of every routed expert: engines then get base and adapter as one."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Random values of the first matrix; the second is zero, so that the policy starts as the base."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the adapters' inputs that an update leaves out; only for algorithms that train on answers of data."""
    path: Path | None = None
    """A folder of PEFT with an adapter of this base to start from; null starts from `init`."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def is_merged(self) -> bool:
        """Whether engines get base and adapter as one matrix: SGLang computes adapters of experts on GPUs alone."""
        return EXPERTS in self.modules

    def peft_modules(self, shape: ModelShape) -> tuple[str, ...]:
        """Return the names by which PEFT finds the modules: in a mixture those of the shared expert, or of each."""
        prefix, names = "" if shape.experts is None else f"{SHARED_EXPERT}.", list[str]()
        for module in self.modules:
            if module == EXPERTS:
                names += dict.fromkeys(name.rpartition(".")[2] for name, _ in _matrices(module, shape))
            else:
                names.append(module if module in ATTENTION_MODULES else f"{prefix}{module}")
        return tuple(names)

    def served_modules(self, shape: ModelShape) -> tuple[str, ...]:
        """Return the names that the modules have in engines."""
        has_experts = shape.experts is not None
        return tuple(SERVED_AS.get(module, module) if has_experts else module for module in self.modules)

    def peft_fields(self, *, base: Path, modules: Sequence[str], is_critic: bool = False) -> dict[str, object]:
        """Return the content of the adapter's configuration file, for modules of these names."""
        return {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if is_critic else "CAUSAL_LM",
            "base_model_name_or_path": str(base),
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": list(modules),
            "modules_to_save": [_SCORE] if is_critic else None,
            "inference_mode": True,
            **_UNSUPPORTED,
        }


def read_adapter_config(folder: Path) -> tuple[LoraConfig, Path]:
    """Return the adapter that a folder of PEFT describes, and the path of its base; ValueError names what is wrong."""
    path = folder / ADAPTER_CONFIG_FILE
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if fields.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type is {fields.get('peft_type')}, not LORA")
    for name, plain in _UNSUPPORTED.items():
        if fields.get(name, plain) != plain:
            raise ValueError(f"{path}: {name} {fields[name]} is not supported")
    for name in ("rank_pattern", "alpha_pattern"):
        if fields.get(name):
            raise ValueError(f"{path}: {name} is not supported; all modules have one rank and one alpha")
    modules = _module_names(folder, fields.get("target_modules"))
    if unknown := sorted(modules - {*ALL_MODULES, EXPERTS}):
        raise ValueError(f"{path}: target_modules has {unknown[0]}; supported are {', '.join(ALL_MODULES)}")
    ordered = tuple(module for module in (*ALL_MODULES, EXPERTS) if module in modules)
    lora = LoraConfig(rank=fields["r"], alpha=fields["lora_alpha"], modules=ordered)
    return lora, Path(str(fields.get("base_model_name_or_path")))


def _module_names(folder: Path, modules: object) -> set[str]:
    """Return the recipe's names of the modules that a folder of PEFT names; what is no list is one name."""
    if not isinstance(modules, list):
        return {str(modules)}
    names = {str(module) for module in modules}
    others = names.difference(ATTENTION_MODULES)
    if others and any(_OF_EXPERT in name for name in _header_shapes(folder / ADAPTER_FILE)):
        # By their matrices, of which all are adapted.
        names = {EXPERTS, *(name for name in names if name not in others or "." in name)}
    return {name.removeprefix(f"{SHARED_EXPERT}.") for name in names}


def served_name(name: str) -> str:
    """Return the name that a tensor of a model or of an adapter has in engines with adapters."""
    block, shared, rest = name.partition(f".{SHARED_EXPERT}.")
    module, dot, end = rest.partition(".")
    return f"{block}{shared}{SERVED_AS[module]}{dot}{end}" if shared else name


def check_lora(lora: LoraConfig, shape: ModelShape) -> Iterator[Problem]:
    """Yield what keeps a model of this shape from having the adapter."""
    twice = [module for index, module in enumerate(lora.modules) if module in lora.modules[:index]]
    if twice:
        yield Problem(key="model.lora.modules", message=f"{twice[0]} is given twice; name it once")
    family = family_of(shape)
    if (reason := family.refuses.get("lora")) is not None:
        yield Problem(key="model.lora", message=reason)
    yield from _check_blocks(lora, shape)
    largest = min(shape.hidden, shape.num_kv_heads * shape.head_dim)
    if lora.is_merged:
        largest = min(largest, shape.ffn_hidden)
    if lora.rank > largest:
        yield Problem(
            key="model.lora.rank",
            message=f"{lora.rank} is more than the {largest} rows of the smallest matrix; choose at most {largest}",
        )


def _check_blocks(lora: LoraConfig, shape: ModelShape) -> Iterator[Problem]:
    """Yield modules behind the attention that a model of this shape lacks, or that cannot be adapted in it."""
    key, experts = "model.lora.modules", shape.experts
    dense = [module for module in lora.modules if module in ALL_MODULES and module not in ATTENTION_MODULES]
    has_experts_alone = experts is not None and experts.is_alone
    if experts is not None and dense and not (experts.shared and family_of(shape).engine.adapts_shared_expert):
        rest = ", ".join((*ATTENTION_MODULES, *((EXPERTS,) if has_experts_alone else ())))
        yield Problem(key=key, message=f"{dense[0]} is part of each expert; choose among {rest}")
    if lora.is_merged and not has_experts_alone:
        reason = "the model has none" if experts is None else "PEFT has no name for them beside shared or dense ones"
        yield Problem(key=key, message=f"experts: {reason}; remove it")
    if lora.is_merged and lora.dropout:
        message = "inputs of routed experts are never left out; set it to 0, or remove experts from modules"
        yield Problem(key="model.lora.dropout", message=message)


def check_served_modules(lora: LoraConfig) -> Iterator[Problem]:
    """Yield which modules engines lack to serve the adapter: they fuse some, and take all adapters of a fusion."""
    modules = set(lora.modules)
    for part, needed in _NEEDED.items():
        missing = sorted(needed - modules)
        if part in modules and missing:
            yield Problem(
                key="model.lora.modules",
                message=f"engines do not serve an adapter of {part} without {missing[0]}; add {missing[0]}",
            )


def check_adapter_file(lora: LoraConfig | None, shape: ModelShape) -> Iterator[Problem]:
    """Yield why training cannot start from the adapter that the recipe names."""
    if lora is not None and lora.path is not None:
        problem = adapter_problem(lora, lora.path, shape)
        if problem is not None:
            yield Problem(key="model.lora.path", message=problem)


def adapter_problem(lora: LoraConfig, folder: Path, shape: ModelShape) -> str | None:
    """Return why training cannot start from an adapter; None if it can."""
    try:
        adapter, _ = read_adapter_config(folder)
        shapes = _header_shapes(folder / ADAPTER_FILE)
    except ValueError as error:
        return str(error)
    for key, own, its in (
        ("rank", lora.rank, adapter.rank),
        ("alpha", lora.alpha, adapter.alpha),
        ("modules", sorted(lora.modules), sorted(adapter.modules)),
    ):
        if own != its:
            return f"{folder} has {key} {its}, the recipe {own}; set model.lora.{key} to that of the adapter"
    matrices = [matrix for module in lora.modules for matrix in _matrices(module, shape)]
    for layer in range(shape.num_layers):
        for matrix, (rows, columns) in matrices:
            for part, expected in (("A", (lora.rank, columns)), ("B", (rows, lora.rank))):
                name = f"base_model.model.model.layers.{layer}.{matrix}.lora_{part}.weight"
                if shapes.get(name) != expected:
                    seen = f"has shape {list(shapes[name])}" if name in shapes else "is missing"
                    return f"{folder} is an adapter of another base: {name} {seen}, model.path needs {list(expected)}"
    return None


def _matrices(module: LoraModule, shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name within a layer and the shape of each matrix that a module of the recipe stands for."""
    weights = {weight.name: weight for block in family_of(shape).blocks(shape).values() for weight in block.weights}
    if module == EXPERTS:
        for number in range(shape.experts.num if shape.experts else 0):
            for name, weight in weights.items():
                if _EXPERT in name:
                    yield name.replace(_EXPERT, str(number)).removesuffix(".weight"), weight.shape
        return
    feed_forward = "mlp" if shape.experts is None else f"mlp.{SHARED_EXPERT}"
    block = "self_attn" if module in ATTENTION_MODULES else feed_forward
    yield f"{block}.{module}", weights[f"{block}.{module}.weight"].shape


def _header_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a safetensors file; a ValueError says why it has none."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"{path} is not a safetensors file")
            header = json.loads(file.read(size))
        return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError, KeyError):
        raise ValueError(f"{path} is not a safetensors file") from None
