"""Hidden states that can be compared: the hook points of a decoder, and what the ranks of both sides record there.

A hook point is the output of a module, in canonical names and columns. The output columns of a linear layer are the
rows of its weight, and its input columns are the weight's columns: the pieces of a rank therefore give the canonical
columns that pass through each of its modules, for any parallel layout. The parts of all ranks are put together in
canonical names and columns. Knows neither Megatron nor SGLang.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.families import family_of
from megarl.families.interface import Block
from megarl.families.shape import ModelShape
from megarl.weights.algebra.slices import Holding, Layout, Piece, Slice, TensorSpec
from megarl.weights.executors.digest import to_ints
from megarl.weights.executors.tensor_digest import MODULUS, digest_tensor
from megarl.weights.executors.tensors import box_of
from megarl.weights.layouts.canonical import EMBEDDING, FINAL_NORM, canonical_tensors, head_name, layer_prefix, rooted

LM_HEAD = "lm_head"
"""The log-probabilities computed from the logits."""
LOGPROBS = "logprobs"
"""The log-probabilities as they are reported."""

_WEIGHT = ".weight"
_INPUT_NORM, _POST_NORM = "input_layernorm", "post_attention_layernorm"
_ATTENTION, _ACTIVATION = "self_attn.attention", "mlp.activation"
_ATTENTION_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_BEFORE = {"self_attn.o_proj": _ATTENTION, "mlp.down_proj": _ACTIVATION}
"""The computation without weights that comes before a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookPoint:
    """The output of one module, and the canonical tensors that it depends on beside its input."""

    name: str
    weights: tuple[str, ...]


def hook_points(shape: ModelShape) -> tuple[HookPoint, ...]:
    """Return all hook points of a model, in the order of its forward pass."""
    owned: defaultdict[str, list[str]] = defaultdict(list)
    for tensor in canonical_tensors(shape):
        owned[tensor.rpartition(".")[0]].append(tensor)

    def point(name: str, *modules: str) -> HookPoint:
        return HookPoint(name=name, weights=tuple(tensor for module in modules for tensor in owned[module]))

    embedding, final = _module(rooted(EMBEDDING, shape)), _module(rooted(FINAL_NORM, shape))
    points = [point(embedding, embedding)]
    family = family_of(shape)
    modules = {kind: layer_modules(block) for kind, block in family.blocks(shape).items()}
    for index, kind in enumerate(family.kinds(shape)):
        prefix = rooted(layer_prefix(index), shape)
        for module in modules[kind]:
            name = f"{prefix}{module}"
            # Queries and keys are normalised between their projections and the attention.
            owners = [f"{prefix}{norm}" for norm in _ATTENTION_NORMS]
            points.append(point(name, *(owners if module == _ATTENTION else [name])))
    points.append(point(final, final))
    return (*points, HookPoint(name=LM_HEAD, weights=(head_name(shape),)), HookPoint(name=LOGPROBS, weights=()))


def layer_modules(block: Block) -> tuple[str, ...]:
    """Return the modules of a layer with an output that is compared, in the order of the forward pass."""
    names: list[str] = []
    for module in dict.fromkeys(weight.name.rpartition(".")[0] for weight in block.weights):
        if module not in _ATTENTION_NORMS:
            names += [_BEFORE[module], module] if module in _BEFORE else [module]
    return tuple(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Some columns of a hook point, and their place in the input or output of a rank's module."""

    hook_point: str
    first: int
    local_first: int
    size: int | None
    """None: every rank has the whole width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleHook:
    """One module of a rank, by its local name, and the columns of hook points that pass through it."""

    module: str
    inputs: tuple[Columns, ...]
    outputs: tuple[Columns, ...]


def module_hooks(holding: Holding) -> tuple[ModuleHook, ...]:
    """Return the modules of one rank that together see the columns of all its hook points."""
    by_module: dict[str, list[Piece]] = {}
    for piece in holding.pieces:
        if piece.local_name.endswith(_WEIGHT):
            by_module.setdefault(_module(piece.local_name), []).append(piece)
    return tuple(hook for module, pieces in by_module.items() for hook in _module_hook(module, pieces))


def _module_hook(module: str, pieces: list[Piece]) -> Iterator[ModuleHook]:
    name = _module(pieces[0].slice.name)
    prefix, _, leaf = name.rpartition(".")
    if leaf in ("embed_tokens", "norm"):
        yield ModuleHook(module=module, inputs=(), outputs=(_whole(name),))
    elif leaf in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        layer, _, block = prefix.rpartition(".")
        before = _INPUT_NORM if block == "self_attn" else _POST_NORM
        outputs = tuple(_columns(piece, _module(piece.slice.name), axis=0) for piece in pieces)
        # The input of the projections is the norm's output; some engines run the norm inside another kernel.
        yield ModuleHook(module=module, inputs=(_whole(f"{layer}.{before}"),), outputs=outputs)
    elif leaf in ("o_proj", "down_proj"):
        before = "attention" if leaf == "o_proj" else "activation"
        inputs = tuple(_columns(piece, f"{prefix}.{before}", axis=1) for piece in pieces)
        yield ModuleHook(module=module, inputs=inputs, outputs=(_whole(name),))


def _columns(piece: Piece, hook_point: str, *, axis: int) -> Columns:
    first, local_first, size = piece.slice.offsets[axis], piece.local_offsets[axis], piece.slice.shape[axis]
    return Columns(hook_point=hook_point, first=first, local_first=local_first, size=size)


def _whole(hook_point: str) -> Columns:
    return Columns(hook_point=hook_point, first=0, local_first=0, size=None)


def _module(tensor: str) -> str:
    return tensor.removesuffix(_WEIGHT)


_PLACES = "places"
_SAME = 1e-2
"""Largest relative difference of two copies of a sum, which differ by rounding; parts of a sum differ by far more."""

WeightDigests: TypeAlias = Mapping[str, int]
"""The digest of every canonical box that a rank holds, by the text of the box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchPlace:
    """The corner of a patch in the output of its hook point."""

    hook_point: str
    token: int
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPatch:
    place: PatchPlace
    values: Tensor  # [tokens, columns], float32, on the host


class Recorder:
    """Records the inputs and outputs of modules from its construction until `close`."""

    def __init__(
        self, modules: Mapping[str, torch.nn.Module], hooks: Iterable[ModuleHook], *, max_calls: int | None = None
    ) -> None:
        """Calls of a module follow each other in the order of the tokens; the first `max_calls` are recorded."""
        self._max_calls = max_calls
        self._recorded: defaultdict[Columns, list[Tensor]] = defaultdict(list)
        wanted = list(hooks)
        missing = [hook.module for hook in wanted if hook.module not in modules]
        if missing:
            raise WeightSyncError(f"there is no module {missing[0]} to record ({len(missing)} are missing)")
        self._handles = [handle for hook in wanted for handle in self._attach(modules[hook.module], hook)]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def patches(self, *, part: int = 0) -> Iterator[ActivationPatch]:
        """Yield what was recorded. Where tokens of whole-width outputs are split over ranks, `part` is this rank's."""
        for columns, calls in self._recorded.items():
            values = torch.cat(calls)
            token = part * len(values) if columns.size is None else 0
            place = PatchPlace(hook_point=columns.hook_point, token=token, column=columns.first)
            yield ActivationPatch(place=place, values=values)

    def _attach(self, module: torch.nn.Module, hook: ModuleHook) -> list[torch.utils.hooks.RemovableHandle]:
        def before(_: torch.nn.Module, arguments: tuple[object, ...], named: Mapping[str, object]) -> None:
            self._record(hook.inputs, next(item for item in (*arguments, *named.values()) if isinstance(item, Tensor)))

        def after(_: torch.nn.Module, __: object, output: object) -> None:
            self._record(hook.outputs, output[0] if isinstance(output, tuple) else output)

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    def _record(self, wanted: Sequence[Columns], tensor: object) -> None:
        assert isinstance(tensor, Tensor), f"the input or output of a module is a {type(tensor).__name__}"
        rows = tensor.detach().reshape(-1, tensor.shape[-1])
        for columns in wanted:
            calls = self._recorded[columns]
            if self._max_calls is None or len(calls) < self._max_calls:
                cut = rows if columns.size is None else rows.narrow(1, columns.local_first, columns.size)
                # A copy: later modules may work in place.
                calls.append(cut.to(device="cpu", dtype=torch.float32, copy=True))


def write_patches(path: Path, patches: Iterable[ActivationPatch]) -> None:
    tensors, places = {}, {}
    for index, patch in enumerate(patches):
        tensors[str(index)] = patch.values.contiguous()
        places[str(index)] = asdict(patch.place)
    save_file(tensors, path, metadata={_PLACES: json.dumps(places)})


class Recording:
    """The files that all ranks of one side wrote about the same tokens."""

    def __init__(self, files: Iterable[Path], *, num_tokens: int) -> None:
        """Only the first `num_tokens` rows count: later ones are padding, or were computed ahead of time."""
        self._num_tokens = num_tokens
        self._by_point: defaultdict[str, list[tuple[PatchPlace, Path, str]]] = defaultdict(list)
        for path in files:
            with safe_open(path, framework="pt") as file:
                for key, fields in json.loads(file.metadata()[_PLACES]).items():
                    place = PatchPlace(**fields)
                    self._by_point[place.hook_point].append((place, path, key))

    def __contains__(self, hook_point: str) -> bool:
        return hook_point in self._by_point

    def patches(self, hook_point: str) -> list[ActivationPatch]:
        entries = self._by_point[hook_point]
        return [ActivationPatch(place=place, values=_read(path, key)) for place, path, key in entries]

    def whole(self, hook_point: str) -> Tensor:
        """Return [tokens, columns] of a hook point, from the parts of all ranks."""
        by_place: defaultdict[PatchPlace, list[Tensor]] = defaultdict(list)
        for patch in self.patches(hook_point):
            by_place[patch.place].append(patch.values)
        assert by_place, f"no rank recorded {hook_point}"
        width = max(place.column + values[0].shape[1] for place, values in by_place.items())
        whole = torch.full((self._num_tokens, width), torch.nan)
        for place, copies in by_place.items():
            values = _merged(copies)
            into = whole[place.token : place.token + len(values), place.column : place.column + values.shape[1]]
            into.copy_(values[: len(into)])
        return whole


def _merged(copies: Sequence[Tensor]) -> Tensor:
    """Return one of equal copies, else their sum: an engine may leave the reduction of an output to a later kernel."""
    first = copies[0]
    scale = first.norm()
    if all((copy - first).norm() <= _SAME * scale for copy in copies[1:]):
        return first
    return torch.stack(list(copies)).sum(dim=0)


def _read(path: Path, key: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(key)
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestedModel:
    """One copy of a model, and the weight digests of its ranks in the order of the layout's holdings."""

    layout: Layout
    digests: Sequence[WeightDigests]


def weight_digests(
    holding: Holding, canonical: Mapping[str, TensorSpec], tensors: Mapping[str, torch.Tensor]
) -> WeightDigests:
    """Return the digests of one rank's tensors."""
    sums = {}
    for piece in holding.pieces:
        values = box_of(tensors[piece.local_name], piece.local_offsets, piece.slice.shape)
        sums[str(piece.slice)] = digest_tensor(values, piece.slice, canonical[piece.slice.name].shape)
    return to_ints(sums)


def differing_tensors(one: DigestedModel, other: DigestedModel) -> tuple[str, ...]:
    """Return the canonical tensors whose bits differ between the models, or between copies within one of them."""
    mine, theirs = _totals(one), _totals(other)
    return tuple(name for name in one.layout.canonical if mine[name] is None or mine[name] != theirs[name])


def _totals(model: DigestedModel) -> dict[str, int | None]:
    """Return the digest of each whole tensor, the sum over its parts; None where copies of a part differ."""
    by_box: defaultdict[Slice, set[int]] = defaultdict(set)
    for holding, digests in zip(model.layout.holdings, model.digests, strict=True):
        for piece in holding.pieces:
            by_box[piece.slice].add(digests[str(piece.slice)])
    parts: defaultdict[str, list[Slice]] = defaultdict(list)
    for box in by_box:
        parts[box.name].append(box)
    totals: dict[str, int | None] = {}
    for name, spec in model.layout.canonical.items():
        covered = sum(box.num_elements for box in parts[name])
        assert covered == prod(spec.shape), f"{covered} of the {prod(spec.shape)} elements of {name} are held"
        is_consistent = all(len(by_box[box]) == 1 for box in parts[name])
        totals[name] = sum(min(by_box[box]) for box in parts[name]) % MODULUS if is_consistent else None
    return totals
