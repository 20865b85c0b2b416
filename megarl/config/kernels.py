"""The choice between Megatron's own linear layers and those of Transformer Engine, and what each of them needs.

Parameters have the same shapes with both, and the same names in `weights.layouts`: nothing but a rank depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from megarl.config.model import ModelShape
from megarl.config.roles import ModelParallelConfig, RolesConfig
from megarl.config.section import Device, GpuName
from megarl.errors import Problem

_PACKAGES = {"te": "transformer_engine", "deepep": "deep_ep"}
_FP8_COLUMNS = 16
"""The widths of a matrix in FP8 are multiples of this."""
_FP8_BLOCK = 128
"""Parts of a sequence are gathered in FP8 with blockwise scaling if their width is a multiple of this."""
_WITHOUT_FP8: tuple[GpuName, ...] = ("a100", "a100-40g")
_BF16_LAYERS = 2
"""The first and the last."""
ENGINE_ONLY = {
    "moe_permute_fusion": "needs the kernels of Transformer Engine; set kernels to te, or remove it",
    "disable_parameter_transpose_cache": "is for layers of Transformer Engine; set kernels to te, or remove it",
}


def is_te_installed() -> bool:
    return find_spec(_PACKAGES["te"]) is not None


def uses_te(split: ModelParallelConfig, *, has_experts: bool, device: Device) -> bool:
    """Whether a model has the linear layers of Transformer Engine, on a machine like this one."""
    if split.kernels != "auto":
        return split.kernels == "te"
    return device != "cpu" and (split.precision == "fp8" or (has_experts and is_te_installed()))


def check_kernels(
    roles: RolesConfig, *, is_adapted: bool, device: Device, gpu: GpuName | None = None
) -> Iterator[Problem]:
    """Yield kernels and precisions that contradict one another, the device or `model.lora`."""
    for role, split in roles.megatron_roles.items():
        prefix = f"roles.{role}."
        wanted = {"kernels": split.kernels == "te", "precision": split.precision == "fp8"}
        for name in (name for name, is_wanted in wanted.items() if is_wanted):
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
        yield from _exchange(split, prefix, device)
        yield from _options(split, prefix)


def _exchange(split: ModelParallelConfig, prefix: str, device: Device) -> Iterator[Problem]:
    """Yield an exchange that nothing is exchanged by."""
    if split.context_exchange == "gather":
        return
    reasons = {"context is 1": split.context == 1, "run.device is cpu": device == "cpu"}
    for reason in (reason for reason, holds in reasons.items() if holds):
        message = f"{split.context_exchange} is for GPUs that share sequences, and {reason}; remove it"
        yield Problem(key=f"{prefix}context_exchange", message=message)


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


def check_packages(roles: RolesConfig, *, device: Device) -> Iterator[Problem]:
    """Yield choices whose package is not installed here; on a CPU there is none that could be."""
    if device == "cpu":
        return
    for role, split in roles.megatron_roles.items():
        wanted = {
            "kernels": "te" if split.kernels == "te" else None,
            "precision": "te" if split.precision == "fp8" else None,
            "dispatcher": "deepep" if split.dispatcher == "deepep" else None,
            "context_exchange": "te" if split.context_exchange != "gather" else None,
        }
        for name, package in wanted.items():
            if package is not None and find_spec(_PACKAGES[package]) is None:
                message = (
                    f"{getattr(split, name)} needs the package {_PACKAGES[package]}, which is not installed here; "
                    "install it (the image of the Dockerfile has Transformer Engine), or remove the key"
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
    key = f"{prefix}precision"
    if split.fp8_scaling != "delayed" and shape.num_layers <= _BF16_LAYERS:
        message = f"fp8 leaves the first and last layer in bf16, and the model has {shape.num_layers}; use bf16"
        yield Problem(key=key, message=message)
    ranks = split.tensor if shape.experts is None else split.ranks_per_expert
    heads = shape.num_heads + 2 * shape.num_kv_heads
    widths = {
        "hidden size": shape.hidden,
        "intermediate size on a rank": shape.ffn_hidden // ranks,
        "projections on a rank": heads * shape.head_dim // split.tensor,
        "attention's output on a rank": shape.num_heads * shape.head_dim // split.tensor,
    }
    for name, width in widths.items():
        if width % _FP8_COLUMNS:
            message = f"fp8 needs widths that are multiples of {_FP8_COLUMNS}, and the {name} is {width}; use bf16"
            yield Problem(key=key, message=message)
    if split.fp8_scaling == "blockwise" and split.is_sequence_parallel and shape.hidden % _FP8_BLOCK:
        message = (
            f"blockwise needs a hidden size that is a multiple of {_FP8_BLOCK} with is_sequence_parallel, "
            f"and it is {shape.hidden}; use tensorwise"
        )
        yield Problem(key=f"{prefix}fp8_scaling", message=message)
