"""The precision of linear layers: the choice between Megatron's own and those of Transformer Engine, FP8 in engines.

A trainer's parameters have the same shapes with both, and the same names in `weights.layouts`: nothing but a rank
depends on it. An engine's parameters differ: `weights.layouts.fp8`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

from megarl.config.roles import ModelParallelConfig, RolesConfig, RolloutRoleConfig
from megarl.config.section import Device, GpuName
from megarl.errors import Problem
from megarl.families import family_of, uniform_shapes
from megarl.families.interface import Block
from megarl.families.shape import ModelShape

_PACKAGES = {"te": "transformer_engine", "deepep": "deep_ep"}
_FP8_COLUMNS = 16
"""The widths of a matrix in FP8 are multiples of this."""
FP8_BLOCK = 128
"""Rows and columns of a block with one scale. Parts of a sequence are gathered in FP8 with blockwise scaling if their
width is a multiple of this."""
_WITHOUT_FP8: tuple[GpuName, ...] = ("a100", "a100-40g")
_HOPPER: tuple[GpuName, ...] = ("h100", "h200", "h20")
_LAYERS = "model.layers."
_EXPERTS = ".experts."
_MATRIX = "_proj.weight"
_BF16_LAYERS = 2
"""The first and the last."""
ENGINE_ONLY = {
    "moe_permute_fusion": "needs the kernels of Transformer Engine; set kernels to te, or remove it",
    "disable_parameter_transpose_cache": "is for layers of Transformer Engine; set kernels to te, or remove it",
}


def is_te_installed() -> bool:
    return find_spec(_PACKAGES["te"]) is not None


def adds_gradients_in_products() -> bool:
    """Whether Megatron's own layers add the gradient of a weight to its buffer inside the product: Apex's kernel does.

    It is a module of its own, which only an Apex with its CUDA extensions has.
    """
    return find_spec("fused_weight_gradient_mlp_cuda") is not None


def uses_te(split: ModelParallelConfig, *, has_experts: bool, device: Device, adapts_experts: bool = False) -> bool:
    """Whether a model has the linear layers of Transformer Engine, on a machine like this one.

    Its experts are one layer, in which none has an adapter of its own.
    """
    if split.kernels != "auto":
        return split.kernels == "te"
    has_grouped = has_experts and not adapts_experts and is_te_installed()
    return device != "cpu" and (split.precision == "fp8" or has_grouped)


def check_kernels(
    roles: RolesConfig,
    *,
    is_adapted: bool,
    device: Device,
    gpu: GpuName | None = None,
    adapts_experts: bool = False,
) -> Iterator[Problem]:
    """Yield kernels and precisions that contradict one another, the device or `model.lora`."""
    for role, split in roles.megatron_roles.items():
        prefix = f"roles.{role}."
        needs_te = {"kernels": split.kernels == "te", "precision": split.precision == "fp8"}
        for name in (name for name, is_wanted in needs_te.items() if is_wanted):
            key, value = f"{prefix}{name}", getattr(split, name)
            if device == "cpu":
                message = f"{value} needs Transformer Engine, which runs on GPUs only, and run.device is cpu; remove it"
                yield Problem(key=key, message=message)
        if split.precision == "fp8" and gpu in _WITHOUT_FP8:
            yield Problem(key=f"{prefix}precision", message=f"cluster.gpu {gpu} has no FP8; use bf16")
        if split.precision == "fp32" and (role != "critic" or is_adapted):
            message = (
                "fp32 is for a critic without model.lora: the policy is published in bf16, and its master weights are "
                "float32 in any case; remove it"
            )
            yield Problem(key=f"{prefix}precision", message=message)
        if split.precision == "fp8" and split.kernels in ("local", "torch"):
            message = f"{split.kernels} has no FP8; use auto or te with precision fp8"
            yield Problem(key=f"{prefix}kernels", message=message)
        if split.precision != "fp8" and split.fp8_scaling != type(split).model_fields["fp8_scaling"].default:
            message = f"{split.fp8_scaling} has no effect with precision {split.precision}; remove it"
            yield Problem(key=f"{prefix}fp8_scaling", message=message)
        if split.dispatcher == "deepep" and device == "cpu":
            message = "deepep runs on GPUs only, and run.device is cpu; use alltoall"
            yield Problem(key=f"{prefix}dispatcher", message=message)
        if adapts_experts and role in ("actor", "critic"):
            yield from _one_layer(split, prefix)
        yield from _exchange(split, prefix, device)
        yield from _options(split, prefix)


def _one_layer(split: ModelParallelConfig, prefix: str) -> Iterator[Problem]:
    """Yield what would compute the experts of a rank as one layer, in which none has an adapter."""
    for name, is_wanted in (("kernels", split.kernels == "te"), ("precision", split.precision == "fp8")):
        if is_wanted:
            message = f"{getattr(split, name)} computes experts as one layer, in which none has an adapter; remove it"
            yield Problem(key=f"{prefix}{name}", message=message)


def _exchange(split: ModelParallelConfig, prefix: str, device: Device) -> Iterator[Problem]:
    """Yield an exchange that nothing is exchanged by."""
    if split.context_exchange == "gather":
        return
    reasons = {"context is 1": split.context == 1, "run.device is cpu": device == "cpu"}
    for reason in (reason for reason, holds in reasons.items() if holds):
        message = f"{split.context_exchange} is for GPUs that share sequences, and {reason}; remove it"
        yield Problem(key=f"{prefix}context_exchange", message=message)


def check_engine_precision(
    rollout: RolloutRoleConfig, *, is_adapted: bool, device: Device, gpu: GpuName | None
) -> Iterator[Problem]:
    """Yield what keeps engines from FP8 weights, whatever the model."""
    key = "roles.rollout.precision"
    if rollout.precision == "bf16":
        if rollout.keep_bf16:
            yield Problem(key="roles.rollout.keep_bf16", message="has no effect with precision bf16; remove it")
        return
    if device == "cpu":
        message = "fp8 needs Hopper GPUs, and run.device is cpu, where SGLang has no FP8 kernels without AMX; use bf16"
        yield Problem(key=key, message=message)
    elif gpu in _WITHOUT_FP8:
        yield Problem(key=key, message=f"cluster.gpu {gpu} has no FP8; use bf16")
    elif gpu is not None and gpu not in _HOPPER:
        message = (
            f"fp8 is for Hopper GPUs, and cluster.gpu is {gpu}, where SGLang can repack FP8 weights when it starts "
            "and then takes no new ones; use bf16"
        )
        yield Problem(key=key, message=message)
    if is_adapted:
        message = "fp8 is for weights that are published, and with model.lora the base stays as loaded; use bf16"
        yield Problem(key=key, message=message)


def check_blocks(shape: ModelShape, actor: ModelParallelConfig, rollout: RolloutRoleConfig) -> Iterator[Problem]:
    """Yield what keeps a model of this shape from being published in FP8: cuts through blocks, unknown modules."""
    if rollout.fp8_keep is None:
        return
    if (reason := family_of(shape).refuses.get("fp8")) is not None:
        yield Problem(key="roles.rollout.precision", message=reason)
        return
    if shape.hidden % FP8_BLOCK:
        message = f"fp8 needs a hidden size that is a multiple of {FP8_BLOCK}, and it is {shape.hidden}; use bf16"
        yield Problem(key="roles.rollout.precision", message=message)
    for each, _ in uniform_shapes(shape):
        yield from _cut_blocks(each, actor, rollout)
    yield from _kept(shape, rollout.fp8_keep)
    cache = rollout.sglang.get("kv_cache_dtype")
    if rollout.has_fp8_cache and family_of(shape).engine.has_cache_scales:
        message = (
            f"{cache} with FP8 weights: SGLang starts {shape.family} models with random scales of the cache then; "
            "remove it, or set roles.rollout.precision: bf16"
        )
        yield Problem(key="roles.rollout.sglang.kv_cache_dtype", message=message)


def _cut_blocks(shape: ModelShape, actor: ModelParallelConfig, rollout: RolloutRoleConfig) -> Iterator[Problem]:
    """Yield splits that cut through blocks, in a model whose layers are of one kind."""
    is_mixture = shape.experts is not None
    parts = {
        "actor": (actor.tensor, actor.ranks_per_expert if is_mixture else actor.tensor),
        "rollout": (rollout.tensor, max(1, rollout.tensor // rollout.expert)),
    }
    for role, (tensor, ffn_ranks) in parts.items():
        rows = {
            "queries": shape.num_heads * shape.head_dim // tensor,
            "keys": max(1, shape.num_kv_heads // tensor) * shape.head_dim,
            "each feed-forward block": shape.ffn_hidden // ffn_ranks,
            "the shared expert": shape.experts.shared // tensor if shape.experts else 0,
        }
        for name, count in rows.items():
            if count % FP8_BLOCK:
                name_of_split = "split" if shape.experts is None else "split, such as a larger expert"
                message = (
                    f"{tensor} gives a rank {count} rows of {name}, and FP8 weights are cut at multiples of "
                    f"{FP8_BLOCK}; choose another {name_of_split}, or set roles.rollout.precision: bf16"
                )
                yield Problem(key=f"roles.{role}.tensor", message=message)


def _kept(shape: ModelShape, keep: Sequence[str]) -> Iterator[Problem]:
    key = "roles.rollout.keep_bf16"
    for pattern in keep:
        if not kept_modules(shape, [pattern]):
            some = ", ".join(name for name in _modules(shape) if name.startswith(f"{_LAYERS}0."))
            message = f"{pattern} matches no module in FP8; they are such as {some}"
            yield Problem(key=key, message=message)
    in_bf16, family = set(kept_modules(shape, keep)), family_of(shape)
    fused = {kind: _fused(block) for kind, block in family.blocks(shape).items()}
    for index, kind in enumerate(family.kinds(shape)):
        for names in fused[kind]:
            apart = {f"{_LAYERS}{index}.{name}" in in_bf16 for name in names}
            if len(apart) > 1:
                parts = ", ".join(name.rpartition(".")[2] for name in names)
                message = (
                    f"keeps a part of {parts} in layer {index}, which engines stack in one parameter; "
                    "keep all of them or none"
                )
                yield Problem(key=key, message=message)
                return


def is_in_fp8(name: str, keep: Sequence[str]) -> bool:
    """Whether engines with FP8 weights have a tensor of a checkpoint in FP8: all but norms, router and vocabulary.

    The experts of a layer are one module, `mlp.experts`, to the patterns of `keep`.
    """
    if not (name.startswith(_LAYERS) and name.endswith(_MATRIX)):
        return False
    return not any(fnmatchcase(_module(name), pattern) for pattern in keep)


def kept_modules(shape: ModelShape, keep: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that would be in FP8, and stay in bfloat16 by a pattern of `keep`."""
    return tuple(name for name in _modules(shape) if any(fnmatchcase(name, pattern) for pattern in keep))


def _modules(shape: ModelShape) -> list[str]:
    """Return the modules of all layers that are in FP8."""
    family = family_of(shape)
    names = {
        kind: [*dict.fromkeys(_module(weight.name) for weight in block.weights if weight.name.endswith(_MATRIX))]
        for kind, block in family.blocks(shape).items()
    }
    return [f"{_LAYERS}{index}.{name}" for index, kind in enumerate(family.kinds(shape)) for name in names[kind]]


def _module(name: str) -> str:
    """Return the module of a matrix; the experts of a layer are one."""
    block, experts, _ = name.partition(_EXPERTS)
    return block + _EXPERTS[:-1] if experts else name.removesuffix(".weight")


def _fused(block: Block) -> list[tuple[str, ...]]:
    """Return the modules, within their layer, that engines stack in one parameter, which has one precision."""
    return [
        tuple(_module(part.name) for part in param.parts)
        for param in block.sglang
        if len(param.parts) > 1 and not param.is_expert and param.parts[0].name.endswith(_MATRIX)
    ]


def _options(split: ModelParallelConfig, prefix: str) -> Iterator[Problem]:
    """Yield options of Megatron that the layers do not have."""
    options: Mapping[str, object] = split.megatron
    is_te = split.kernels == "te" or split.precision == "fp8"
    for name, message in ENGINE_ONLY.items():
        if options.get(name) and not is_te:
            yield Problem(key=f"{prefix}megatron.{name}", message=message)
    modules = options.get("recompute_modules")
    refused = {"layernorm", "moe_act"}.intersection(modules if isinstance(modules, list) else ())
    if refused and split.precision == "fp8" and split.fp8_scaling == "delayed":
        message = f"{', '.join(sorted(refused))} cannot be recomputed with fp8_scaling delayed; use tensorwise"
        yield Problem(key=f"{prefix}megatron.recompute_modules", message=message)


def finds_deepep(megatron: Path, deepep: Path) -> bool:
    """Whether the Megatron of one folder looks for DeepEP's events where the DeepEP of the other has them.

    Megatron 0.16.1 asks `deep_ep.utils`, as DeepEP 1 has it, and SGLang installs DeepEP 2. Importing them takes
    seconds, and a GPU.
    """
    asking = megatron / "core" / "transformer" / "moe" / "fused_a2a.py"
    utils = deepep / "utils" / "__init__.py"
    if not asking.exists() or not utils.exists():
        return True  # other releases, of which nothing is known
    asks = "from deep_ep.utils import EventHandle, EventOverlap"
    return asks not in asking.read_text() or "EventOverlap" in utils.read_text()


def is_deepep_found() -> bool:
    """Whether DeepEP is installed, and the installed Megatron can use it."""
    specs = [find_spec(name) for name in ("megatron", "deep_ep")]
    folders = [Path(spec.submodule_search_locations[0]) for spec in specs if spec and spec.submodule_search_locations]
    return len(folders) == len(specs) and finds_deepep(*folders)


def check_packages(roles: RolesConfig, *, device: Device) -> Iterator[Problem]:
    """Yield choices whose package is not installed here; on a CPU there is none that could be."""
    if device == "cpu":
        return
    for role, split in roles.megatron_roles.items():
        packages = {
            "kernels": "te" if split.kernels == "te" else None,
            "precision": "te" if split.precision == "fp8" else None,
            "dispatcher": "deepep" if split.dispatcher == "deepep" else None,
            "context_exchange": "te" if split.context_exchange != "gather" else None,
        }
        for name, package in packages.items():
            if package is not None and find_spec(_PACKAGES[package]) is None:
                message = (
                    f"{getattr(split, name)} needs the package {_PACKAGES[package]}, which is not installed here; "
                    "install it (the image of the Dockerfile has Transformer Engine), or remove the key"
                )
                yield Problem(key=f"roles.{role}.{name}", message=message)
            elif package == "deepep" and not is_deepep_found():
                message = (
                    "Megatron does not find the installed release of DeepEP; apply the patches (`make patches`, see "
                    "patches/README.md), or use alltoall"
                )
                yield Problem(key=f"roles.{role}.{name}", message=message)


def check_widths(shape: ModelShape, split: ModelParallelConfig, *, prefix: str) -> Iterator[Problem]:
    """Yield what keeps a model of this shape from being computed as the role says."""
    if shape.experts is not None and split.dispatcher == "deepep" and split.expert == 1:
        message = "deepep moves tokens between ranks, and expert is 1; use alltoall, or raise expert"
        yield Problem(key=f"{prefix}dispatcher", message=message)
    if split.context_exchange == "all_to_all" and (shape.num_kv_heads // split.tensor) % split.context:
        message = (
            f"all_to_all gives each of the {split.context} ranks of context as many key heads, and a rank of tensor "
            f"has {shape.num_kv_heads // split.tensor}; use ring or gather"
        )
        yield Problem(key=f"{prefix}context_exchange", message=message)
    if split.precision != "fp8":
        return
    if shape.delta is not None:
        yield Problem(key=f"{prefix}precision", message="fp8 was not tried with gated delta nets; use bf16")
    for each, _ in uniform_shapes(shape):
        yield from _fp8_widths(each, split, prefix=prefix)


def _fp8_widths(shape: ModelShape, split: ModelParallelConfig, *, prefix: str) -> Iterator[Problem]:
    """Yield what keeps a model whose layers are of one kind from being computed in FP8."""
    key = f"{prefix}precision"
    if split.fp8_scaling != "delayed" and shape.num_layers <= _BF16_LAYERS:
        message = f"fp8 leaves the first and last layer in bf16, and the model has {shape.num_layers}; use bf16"
        yield Problem(key=key, message=message)
    ranks = split.tensor if shape.experts is None else split.ranks_per_expert
    heads = shape.num_heads + 2 * shape.num_kv_heads
    widths = {
        "hidden size": shape.hidden,
        "intermediate size on a rank": shape.ffn_hidden // ranks,
        "shared expert's size on a rank": shape.experts.shared // split.tensor if shape.experts else 0,
        "projections on a rank": heads * shape.head_dim // split.tensor,
        "attention's output on a rank": shape.num_heads * shape.head_dim // split.tensor,
    }
    for name, width in widths.items():
        if width % _FP8_COLUMNS:
            message = f"fp8 needs widths that are multiples of {_FP8_COLUMNS}, and the {name} is {width}; use bf16"
            yield Problem(key=key, message=message)
    if split.fp8_scaling == "blockwise" and split.is_sequence_parallel and shape.hidden % FP8_BLOCK:
        message = (
            f"blockwise needs a hidden size that is a multiple of {FP8_BLOCK} with is_sequence_parallel, "
            f"and it is {shape.hidden}; use tensorwise"
        )
        yield Problem(key=f"{prefix}fp8_scaling", message=message)
