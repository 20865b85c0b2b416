"""Check that a publish delivers the right weights, once with real processes and once in memory.

With processes: Megatron ranks load one folder and publish it to SGLang engines that serve another one. Afterwards the
engines' tensors are compared with those that SGLang's own loading of the first folder leaves there. In memory: the
recipe's own layouts, with a tiny shape. Import this module inside `private_ray`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from megarl.config.recipe import Recipe
from megarl.engine import admin
from megarl.engine.fleet import Fleet
from megarl.engine.tool_commands import ToolControl, dump_file
from megarl.errors import WeightSyncError
from megarl.families import family_of
from megarl.families.shape import ModelShape
from megarl.serving.connect import Roles, started_roles
from megarl.serving.serving import ManagedServing
from megarl.serving.specs import transfer_spec
from megarl.tools.small_recipe import SmallRecipe, tiny_for_layouts
from megarl.types import PolicyVersion
from megarl.weights.algebra.buckets import DEFAULT_BUCKET_BYTES, buckets_to
from megarl.weights.algebra.plan import Plan
from megarl.weights.algebra.slices import Holding, Index, Piece
from megarl.weights.executors.codecs import as_files
from megarl.weights.executors.tensors import box_of, torch_dtype
from megarl.weights.layouts.canonical import HEAD, VALUE_HEAD, canonical_tensors
from megarl.weights.layouts.transfer_spec import TransferSpec

_STD = 0.05
"""Neighbouring elements differ, also in norms and biases, so that a misplaced one is seen."""
_SEED = 1
_OTHER_SEED = 2
_LOAD_TIMEOUT_S = 600
PADDING = "padding"
"""The class of the elements that are outside all boxes of a holding."""
_Bits: TypeAlias = npt.NDArray[np.signedinteger[npt.NBitBase]]
"""The elements as integers: numpy cuts boxes many times faster than torch, and has no bfloat16."""
_SOURCE_PADDING = float("nan")
"""Shows in the target where padding is moved by mistake."""
_TARGET_PADDING = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCheck:
    """The outcome of one of the two checks."""

    verdicts: tuple[ClassVerdict, ...]
    num_sources: int
    num_targets: int
    moved_bytes: int
    shape: ModelShape
    dtype: str

    @property
    def is_equal(self) -> bool:
        return all(verdict.is_equal for verdict in self.verdicts)


def rehearse_layouts(recipe: Recipe, shape: ModelShape) -> SyncCheck:
    """Check the recipe's own layouts with a tiny shape, in this process."""
    roles, tiny = tiny_for_layouts(recipe.roles, shape)
    assert roles.rollout is not None, "a rehearsal without engines"
    recipe = recipe.model_copy(update={"roles": roles})
    transfer = transfer_spec(recipe, roles.rollout, tiny, num_engines=recipe.num_engines)
    return _sync_check(transfer, rehearse(transfer.plan(), random_tensors(tiny, seed=_SEED)))


def check_processes(small: SmallRecipe, shape: ModelShape, *, ray_address: str | None) -> SyncCheck:
    """Start the roles of `small`, publish a random model of `shape`, and compare what the engines hold then."""
    folder = small.recipe.model.path
    write_random_model(folder, shape, seed=_SEED)
    other = folder.with_name("other")
    write_random_model(other, shape, seed=_OTHER_SEED)
    return asyncio.run(_check(small, shape, other, ray_address))


async def _check(small: SmallRecipe, shape: ModelShape, other: Path, ray_address: str | None) -> SyncCheck:
    recipe, rollout = small.recipe, small.recipe.roles.rollout
    assert rollout is not None, "a check without engines"
    async with started_roles(recipe, shape, ray_address=ray_address) as roles:
        serving = roles.serving
        assert isinstance(serving, ManagedServing), "a check without engines"
        fleet = serving.fleet
        transfer = transfer_spec(recipe, rollout, shape, num_engines=len(fleet.engines))
        control = ToolControl(fleet, timeout_s=rollout.publish_timeout_s, host=serving.host)
        run_folder = recipe.run_folder.absolute()
        verdicts = await _publish_and_compare(roles, fleet, control, transfer, recipe.model.path, other, run_folder)
        return _sync_check(transfer, sum_by_class(verdicts))


async def _publish_and_compare(
    roles: Roles,
    fleet: Fleet,
    control: ToolControl,
    transfer: TransferSpec,
    model: Path,
    other: Path,
    run_folder: Path,
) -> list[ClassVerdict]:
    loaded, before, published = (run_folder / name for name in ("loaded", "before", "published"))
    await _load(fleet, model)
    await control.dump(loaded)
    await _load(fleet, other)
    await control.dump(before)
    await roles.publisher.publish(PolicyVersion(0))
    await control.dump(published)
    _refuse_unmoved(transfer, before, loaded)
    return list(_compare(transfer, published, loaded))


async def _load(fleet: Fleet, folder: Path) -> None:
    for engine in fleet.engines:
        await admin.load_weights_from_disk(
            engine.client, folder.absolute(), version=PolicyVersion(0), timeout_s=_LOAD_TIMEOUT_S
        )


def _compare(transfer: TransferSpec, actual: Path, expected: Path) -> Iterator[ClassVerdict]:
    for holding in transfer.engine_layout().holdings:
        engine, tp_rank = divmod(holding.rank, transfer.tensor)
        name = dump_file(engine=engine, tp_rank=tp_rank)
        holder = f"engine {engine}, TP rank {tp_rank}"
        yield from compare_holding(holding, load_file(actual / name), load_file(expected / name), holder=holder)


def _refuse_unmoved(transfer: TransferSpec, before: Path, after: Path) -> None:
    """Raise where a tensor had its expected value before the publish: it could not show whether it was published."""
    verdicts = _compare(transfer, before, after)
    differing = {name for verdict in verdicts if not verdict.is_equal for name in verdict.tensors}
    same = sorted(set(transfer.engine_layout().canonical) - differing)
    if same:
        raise WeightSyncError(f"{same[0]} is equal in both models; the check cannot see whether it is published")


def _sync_check(transfer: TransferSpec, verdicts: list[ClassVerdict]) -> SyncCheck:
    plan = transfer.plan()
    return SyncCheck(
        verdicts=tuple(verdicts),
        num_sources=len(plan.source.holdings),
        num_targets=len(plan.target.holdings),
        moved_bytes=sum(plan.traffic.bytes_by_link.values()),
        shape=transfer.shape,
        dtype=transfer.engine_dtype,
    )


def write_random_model(folder: Path, shape: ModelShape, *, seed: int) -> None:
    """Write config.json and model.safetensors; an engine that gets token ids needs no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(family_of(shape).config_json(shape), indent=2) + "\n")
    save_file(as_files(random_tensors(shape, seed=seed)), folder / "model.safetensors", metadata={"format": "pt"})


def random_tensors(shape: ModelShape, *, seed: int) -> dict[str, torch.Tensor]:
    """Return every canonical tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.empty(spec.shape)
        .normal_(1.0 if "norm" in name else 0.0, _STD, generator=generator)
        .to(torch_dtype(spec.dtype))
        for name, spec in canonical_tensors(shape).items()
    }


def tensor_class(name: str) -> str:
    """Return the kind of weight that a canonical tensor is."""
    for part, kind in (
        ("embed_tokens", "embedding"),
        (HEAD, "output"),
        (VALUE_HEAD, "value head"),
        ("norm", "norms"),
        (".gate.", "router"),
        (".router.", "router"),
        (".experts.", "experts"),
        (".shared_expert", "shared expert"),
        ("linear_attn.", "delta nets"),
        ("o_proj", "attention output"),
        ("self_attn.", "qkv"),
        ("mlp.", "feed-forward"),
    ):
        if part in name:
            return kind
    raise AssertionError(f"{name} is of no known class")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassVerdict:
    """The comparison of one class of tensors: every byte compared, and the first element that differs."""

    name: str
    tensors: frozenset[str] = frozenset()
    """Canonical names."""
    num_bytes: int = 0
    num_differing: int = 0
    """Elements."""
    first_difference: str | None = None
    """The holder, the canonical place and both values; None where all are equal."""

    @property
    def is_equal(self) -> bool:
        return self.first_difference is None


def compare_holding(
    holding: Holding, actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, holder: str
) -> list[ClassVerdict]:
    """Return a verdict per piece of a holding, and one per tensor whose padding differs."""
    verdicts = []
    differing = {
        name: _bits(actual[name]) != _bits(expected[name])
        for name in holding.tensors
        if not torch.equal(_bits(actual[name]), _bits(expected[name]))
    }
    for piece in holding.pieces:
        verdict = ClassVerdict(
            name=tensor_class(piece.slice.name),
            tensors=frozenset({piece.slice.name}),
            num_bytes=piece.slice.num_elements * actual[piece.local_name].element_size(),
        )
        if piece.local_name in differing:
            wrong = box_of(differing[piece.local_name], piece.local_offsets, piece.slice.shape)
            if wrong.any():
                verdict = _differing(verdict, piece, wrong, actual, expected, holder)
                # What is left in the end is padding.
                wrong.zero_()
        verdicts.append(verdict)
    for name, wrong in differing.items():
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            first = f"{holder}: {name}{list(place)} outside all boxes is {_values(actual, expected, name, place)}"
            verdicts.append(
                ClassVerdict(name=PADDING, num_bytes=0, num_differing=int(wrong.sum()), first_difference=first)
            )
    return verdicts


def sum_by_class(verdicts: Iterable[ClassVerdict]) -> list[ClassVerdict]:
    """Return one verdict per class, in the order in which the classes appear."""
    by_class: dict[str, list[ClassVerdict]] = {}
    for verdict in verdicts:
        by_class.setdefault(verdict.name, []).append(verdict)
    return [
        ClassVerdict(
            name=name,
            tensors=frozenset().union(*(part.tensors for part in parts)),
            num_bytes=sum(part.num_bytes for part in parts),
            num_differing=sum(part.num_differing for part in parts),
            first_difference=next((part.first_difference for part in parts if not part.is_equal), None),
        )
        for name, parts in by_class.items()
    ]


def _differing(
    verdict: ClassVerdict,
    piece: Piece,
    wrong: torch.Tensor,
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    holder: str,
) -> ClassVerdict:
    place = tuple(wrong.nonzero()[0].tolist())
    canonical = [start + index for start, index in zip(piece.slice.offsets, place, strict=True)]
    lead = len(piece.local_offsets) - len(place)
    inner = (start + index for start, index in zip(piece.local_offsets[lead:], place, strict=True))
    values = _values(actual, expected, piece.local_name, (*piece.local_offsets[:lead], *inner))
    return replace(
        verdict,
        num_differing=int(wrong.sum()),
        first_difference=f"{holder}: {piece.slice.name}{canonical} is {values}",
    )


def _values(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], name: str, place: tuple[int, ...]
) -> str:
    return f"{actual[name][place].item():.9g}, expected {expected[name][place].item():.9g}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view({4: torch.int32, 2: torch.int16}[tensor.element_size()])


def rehearse(plan: Plan, model: Mapping[str, torch.Tensor]) -> list[ClassVerdict]:
    """Return a verdict per class over all target ranks; `model` has all canonical tensors, both sides one dtype."""
    sources = _Replicas(model, _SOURCE_PADDING)
    targets = _Replicas(model, _TARGET_PADDING)
    by_rank = {holding.rank: sources.bits(holding) for holding in plan.source.holdings}
    received = {holding.rank: _empty(holding, _TARGET_PADDING) for holding in plan.target.holdings}
    received_bits = {
        rank: {name: _integers(tensor) for name, tensor in held.items()} for rank, held in received.items()
    }
    buckets = [
        bucket
        for holding in plan.target.holdings
        for bucket in buckets_to(plan, holding.rank, bucket_bytes=DEFAULT_BUCKET_BYTES)
    ]
    for bucket in sorted(buckets, key=lambda bucket: bucket.hop):
        senders = received_bits if bucket.is_forwarded else by_rank
        for move in bucket.moves:
            source = senders[move.source_rank][move.source_name]
            values = source[_indices(move.source_offsets, move.slice.shape)]
            received_bits[move.target_rank][move.target_name][_indices(move.target_offsets, move.slice.shape)] = values
    verdicts = [
        verdict
        for holding in plan.target.holdings
        for verdict in compare_holding(
            holding, received[holding.rank], targets.tensors(holding), holder=f"target rank {holding.rank}"
        )
    ]
    return sum_by_class(verdicts)


class _Replicas:
    """The tensors that holders should have; holders with the same pieces share them."""

    def __init__(self, model: Mapping[str, torch.Tensor], padding: float) -> None:
        self._model = model
        self._padding = padding
        self._by_pieces: dict[int, dict[str, torch.Tensor]] = {}

    def tensors(self, holding: Holding) -> dict[str, torch.Tensor]:
        key = id(holding.pieces)
        if key not in self._by_pieces:
            self._by_pieces[key] = hold(holding, self._model, padding=self._padding)
        return self._by_pieces[key]

    def bits(self, holding: Holding) -> dict[str, _Bits]:
        return {name: _integers(tensor) for name, tensor in self.tensors(holding).items()}


def hold(holding: Holding, model: Mapping[str, torch.Tensor], *, padding: float) -> dict[str, torch.Tensor]:
    """Return the tensors of a holder, filled from `model` as its layout describes."""
    tensors = _empty(holding, padding)
    for piece in holding.pieces:
        values = box_of(model[piece.slice.name], piece.slice.offsets, piece.slice.shape)
        box_of(tensors[piece.local_name], piece.local_offsets, piece.slice.shape).copy_(values)
    return tensors


def _empty(holding: Holding, padding: float) -> dict[str, torch.Tensor]:
    return {
        name: torch.full(spec.shape, padding, dtype=torch_dtype(spec.dtype)) for name, spec in holding.tensors.items()
    }


def _integers(tensor: torch.Tensor) -> _Bits:
    """Return a view as integers."""
    bits: _Bits = tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()]).numpy()
    return bits


def _indices(offsets: Index, shape: Index) -> tuple[int | slice, ...]:
    """Return the index of a box in an array; dimensions that the box lacks come first, as integers."""
    lead = len(offsets) - len(shape)
    inner = (slice(start, start + size) for start, size in zip(offsets[lead:], shape, strict=True))
    return (*offsets[:lead], *inner)
