"""Adapters inside Megatron's parallel linear layers: a frozen matrix W becomes W + scale * B @ A.

    columns (qkv, fc1)   W and B have rows on each rank, A is whole on every rank
    rows (proj, fc2)     W and A have columns on each rank, B is whole on every rank

Ranks exchange the thin activation between A and B, never one of full width. Which rows of a fused B go with which A of
the stack follows from the weights' layout.

Where several ranks share a routed expert, Megatron's dispatcher hands each rank all tokens, and adds up what they
return: outputs forward, gradients of inputs backward. So each returns its part of both.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megarl.config.lora import LoraConfig
from megarl.weights.algebra.slices import Holding, Index, Layout, TensorSpec
from megarl.weights.executors.derived import DerivedMemory
from megarl.weights.executors.tensors import box_of, device_of, specs_of, torch_dtype
from megarl.weights.layouts.lora import LOCAL_A, LOCAL_B, LoraShape, stacked_rows

_MAX_INT = (1 << 31) - 1
_COLUMN_STEP = 0x9E3779B1 - (1 << 32)
"""Odd, so that different columns have different numbers."""


class _Adapted(torch.nn.Module):
    """A linear layer that may have an adapter."""

    weight: torch.nn.Parameter
    lora_a: torch.nn.Parameter
    lora_b: torch.nn.Parameter
    lora_mask: Tensor | None
    sequence_parallel: bool
    is_expert = False
    tp_group: torch.distributed.ProcessGroup | None
    """The ranks that share the layer."""
    lora_scale = 0.0
    """0 where there is no adapter, or while it is off."""
    lora_dropout = 0.0
    lora_salt = 0
    """Another number for each matrix of the model."""
    lora_keys: Tensor | None = None
    """A number for each token of the whole pack that the layer sees now; None while nothing is dropped."""

    def adapt(self, a: TensorSpec, b: TensorSpec, mask: Tensor | None, *, device: torch.device) -> None:
        """Add the two parameters; `mask` [rows of B, matrices of the stack] is None where all rows go with one A."""
        for name, spec in (("lora_a", a), ("lora_b", b)):
            values = torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
            self.register_parameter(name, torch.nn.Parameter(values))
            if self.is_expert:
                getattr(self, name).allreduce = self.weight.allreduce  # type: ignore[attr-defined]  # Megatron's
        self.register_buffer("lora_mask", mask, persistent=False)

    def _mark(self, cut: torch.nn.Parameter, whole: torch.nn.Parameter, axis: int) -> None:
        """Tell Megatron which parameter each rank has a part of along an axis, and which one is whole on every rank."""
        set_tensor_model_parallel_attributes(tensor=cut, is_parallel=True, dim=axis, stride=1)
        if self.is_expert:
            # Neighbours may have other experts: a rank counts both in the norm, but for what another one has as well.
            set_tensor_model_parallel_attributes(tensor=whole, is_parallel=True, dim=1 - axis, stride=1)
            whole.shared = torch.distributed.get_rank(self.tp_group) > 0  # type: ignore[attr-defined]
        else:
            # Each rank sees its part of the sequence; Megatron sums the gradients of marked parameters.
            whole.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def _wide(self) -> Tensor:
        """Return B for the thin activations of the whole stack: each row meets its own A, and zeros elsewhere."""
        if self.lora_mask is None:
            return self.lora_b
        return (self.lora_b[:, None] * self.lora_mask[:, :, None]).flatten(1)

    def merged(self) -> Tensor:
        """Return this rank's part of W + scale * B @ A, in float32; ranks have all of what they need."""
        change = self._wide().float() @ self.lora_a.float()
        return torch.add(self.weight.float(), change, alpha=self.lora_scale)

    def _thin(self, input_: Tensor, *, has_columns: bool) -> Tensor:
        """Return the product of the input, of which some is left out in an update, with A.

        With `has_columns` the input has some columns of all tokens; else it has some tokens, or all.
        """
        if self.lora_keys is None:
            return F.linear(input_, self.lora_a)
        num, width = input_.shape[0], input_.shape[-1]
        part = torch.distributed.get_rank(self.tp_group) if self.tp_group is not None else 0
        keys = self.lora_keys if len(self.lora_keys) == num else self.lora_keys[part * num : (part + 1) * num]
        first = part * width if has_columns else 0
        columns = torch.arange(first, first + width, device=input_.device, dtype=torch.int32) * _COLUMN_STEP
        drawn = _mix(keys[:, None, None] ^ (columns + self.lora_salt)) & _MAX_INT
        is_used = drawn >= int(self.lora_dropout * _MAX_INT)
        return F.linear(torch.where(is_used, input_, 0), self.lora_a) / (1 - self.lora_dropout)


class _AdaptedColumns(_Adapted):
    def adapt(self, a: TensorSpec, b: TensorSpec, mask: Tensor | None, *, device: torch.device) -> None:
        super().adapt(a, b, mask, device=device)
        self._mark(self.lora_b, self.lora_a, 0)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        if not self.lora_scale:
            return output, bias
        if self.is_expert:
            input_ = _share(input_, forward=1.0, backward=1 / _size(self.tp_group))
        thin = self._thin(input_, has_columns=False)
        if self.sequence_parallel and not self.is_expert:
            thin = gather_from_sequence_parallel_region(thin, group=self.tp_group)
        else:
            thin = copy_to_tensor_model_parallel_region(thin, group=self.tp_group)
        return torch.add(output, F.linear(thin, self._wide()), alpha=self.lora_scale), bias


class _AdaptedRows(_Adapted):
    def adapt(self, a: TensorSpec, b: TensorSpec, mask: Tensor | None, *, device: torch.device) -> None:
        super().adapt(a, b, mask, device=device)
        self._mark(self.lora_a, self.lora_b, 1)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        if not self.lora_scale:
            return output, bias
        thin = self._thin(input_, has_columns=True)
        if self.sequence_parallel and not self.is_expert:
            thin = reduce_scatter_to_sequence_parallel_region(thin, group=self.tp_group)
        else:
            thin = reduce_from_tensor_model_parallel_region(thin, group=self.tp_group)
        wide = F.linear(thin, self.lora_b)
        if self.is_expert:
            wide = _share(wide, forward=1 / _size(self.tp_group), backward=1.0)
        return torch.add(output, wide, alpha=self.lora_scale), bias


def _share(values: Tensor, *, forward: float, backward: float) -> Tensor:
    """Multiply by one number, and gradients by another."""
    return _Share.apply(values, forward, backward)  # type: ignore[no-any-return, no-untyped-call]


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Factor, values: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_factor = backward
        return values * forward

    @staticmethod
    def backward(ctx: _Factor, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.backward_factor, None, None


class _Factor(FunctionCtx):
    backward_factor: float


def _size(group: torch.distributed.ProcessGroup | None) -> int:
    return 1 if group is None else torch.distributed.get_world_size(group)


@cache
def with_adapter(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return a parallel linear layer, of Megatron or of Transformer Engine, that may have an adapter.

    A and B are no part of the layer's own product: that of the base may be in FP8.
    """
    adapted = _AdaptedColumns if "Column" in kind.__name__ else _AdaptedRows
    return type(f"Adapted{kind.__name__}", (adapted, kind), {})


def attach_adapters(
    chunks: Sequence[torch.nn.Module], holding: Holding, lora: LoraConfig, *, device: torch.device
) -> None:
    """Add the adapters that a rank holds, all zero; freeze everything else but what `holding` has beside them."""
    for chunk in chunks:
        chunk.requires_grad_(False)
    rows = stacked_rows(holding, LoraShape.of(lora))
    parameters = {
        f"chunk{index}.{name}": parameter
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    for name, spec in holding.tensors.items():
        if name.endswith(LOCAL_A):
            number, _, path = name.removesuffix(LOCAL_A).partition(".")
            module = chunks[int(number.removeprefix("chunk"))].get_submodule(path)
            assert isinstance(module, _Adapted), f"{path} is a {type(module).__name__}"
            local_b = name.removesuffix(LOCAL_A) + LOCAL_B
            mask = _mask(rows[local_b], holding.tensors[local_b], spec.shape[0] // lora.rank, device)
            module.adapt(spec, holding.tensors[local_b], mask, device=device)
            module.lora_scale = lora.scale
        elif not name.endswith(LOCAL_B):
            parameters[name].requires_grad_(True)
    if lora.dropout:
        for layer in (each for chunk in chunks for each in chunk.modules() if isinstance(each, TransformerLayer)):
            layer.register_forward_pre_hook(_hand_keys, with_kwargs=True)
            for path, module in layer.named_modules():
                if isinstance(module, _Adapted):
                    module.lora_dropout, module.lora_salt = lora.dropout, _number(f"{layer.layer_number}/{path}")


def _hand_keys(layer: torch.nn.Module, _: object, named: dict[str, object]) -> None:
    """Let the linear layers of a layer know which tokens they get, also when the layer is recomputed."""
    keys = getattr(named["packed_seq_params"], "dropout_keys", None)
    for module in layer.modules():
        if isinstance(module, _Adapted):
            module.lora_keys = keys


def dropout_keys(token_ids: Tensor, positions: Tensor, *, seed: int, update: int) -> Tensor:
    """Return a number for each token, from which it follows what is left out of the input of each matrix. [N], int32

    It depends on the token, its position and the update, and not on how the model and the batch are divided.
    """
    return _mix(_mix(token_ids.int() ^ _number(f"{seed}/{update}")) ^ positions.int())


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") & _MAX_INT


def _mix(numbers: Tensor) -> Tensor:
    """Return a permutation of the numbers of 32 bits in which every bit depends on all: `lowbias32` of hash-prospector.

    Products overflow on purpose. A shift copies the sign, which is masked.
    """
    numbers = numbers ^ ((numbers >> 16) & 0xFFFF)
    numbers = numbers * 0x7FEB352D
    numbers = numbers ^ ((numbers >> 15) & 0x1FFFF)
    numbers = numbers * (0x846CA68B - (1 << 32))
    return numbers ^ ((numbers >> 16) & 0xFFFF)


def _mask(rows: Sequence[tuple[int, range]], spec: TensorSpec, num: int, device: torch.device) -> Tensor | None:
    if num == 1 and sum(len(its) for _, its in rows) == spec.shape[0]:
        return None
    mask = torch.zeros(spec.shape[0], num, dtype=torch_dtype(spec.dtype), device=device)
    for place, its in rows:
        mask[its.start : its.stop, place] = 1
    return mask


@torch.no_grad()
def initialize_adapters(
    tensors: Mapping[str, Tensor], layout: Layout, lora: LoraConfig, *, rank: int, seed: int
) -> None:
    """Fill A with random numbers that depend on its name and `seed` alone, whatever the split, and B with zeros."""
    for name, tensor in tensors.items():
        if name.endswith((LOCAL_A, LOCAL_B)):
            tensor.zero_()
    for piece in layout.by_rank[rank].pieces:
        if piece.local_name.endswith(LOCAL_A):
            box = piece.slice
            values = _first_values(box.name, layout.canonical[box.name].shape, lora, seed)
            target = box_of(tensors[piece.local_name], piece.local_offsets, box.shape)
            target.copy_(box_of(values, box.offsets, box.shape))


def _first_values(name: str, shape: Index, lora: LoraConfig, seed: int) -> Tensor:
    """Return PEFT's choice of random values, in float32 on the host."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    values = torch.empty(shape, dtype=torch.float32)
    if lora.init == "gaussian":
        return values.normal_(std=1 / lora.rank, generator=generator)
    bound = 1 / math.sqrt(shape[1])
    return values.uniform_(-bound, bound, generator=generator)


class MergedTensors:
    """Weights with their adapters in them: what a rank sends to engines that do not compute the adapters."""

    def __init__(self, chunks: Sequence[torch.nn.Module], weights: Mapping[str, Tensor]) -> None:
        """`weights` are those of the base, by their names in the layout."""
        self._weights = weights
        self._adapted = {
            f"chunk{index}.{path}.weight": module
            for index, chunk in enumerate(chunks)
            for path, module in chunk.named_modules()
            if isinstance(module, _Adapted) and module.lora_scale
        }
        specs = specs_of((name, weights[name]) for name in self._adapted)
        self._memory = DerivedMemory(specs, device_of(weights))

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self._weights, **self._memory.tensors}

    @torch.no_grad()
    def fill(self) -> None:
        self._memory.take()
        for name, module in self._adapted.items():
            self._memory.tensors[name].copy_(module.merged())

    def free(self) -> None:
        self._memory.free()


@contextmanager
def adapters_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Compute with the base alone inside the block."""
    adapted = [module for chunk in chunks for module in chunk.modules() if isinstance(module, _Adapted)]
    scales = [module.lora_scale for module in adapted]
    for module in adapted:
        module.lora_scale = 0.0
    try:
        yield
    finally:
        for module, scale in zip(adapted, scales, strict=True):
            module.lora_scale = scale
