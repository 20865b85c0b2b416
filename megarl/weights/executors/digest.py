"""64-bit digests of canonical boxes; those of a tensor's boxes are summed modulo 2^64. They are not cryptographic.

`digest_tensor` (in `tensor_digest`) does not depend on how a tensor is cut. `digest_bytes` is xxh3 of a box's bytes,
seeded with its place: in host memory it is many times faster, and both sides must cut a tensor into the same boxes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
import xxhash

from megarl.errors import WeightSyncError, first_few
from megarl.weights.algebra.buckets import split_box
from megarl.weights.algebra.plan import Move, Plan, SourceBox
from megarl.weights.algebra.slices import Index, Slice, shift
from megarl.weights.executors.tensor_digest import (
    MATRIX_DIMENSIONS,
    MODULUS,
    BoxDigest,
    bits_of_matrix,
    box_keys,
    digest_tensor,
)
from megarl.weights.executors.tensors import box_of, bytes_of, device_of, source_view, torch_dtype

if TYPE_CHECKING:
    from megarl.weights.executors.kernels import MatrixSums


Key = TypeVar("Key", bound=Hashable)


def fastest_digest(*, is_on_host: bool) -> BoxDigest:
    """Return the digest for boxes that both sides cut alike; `is_on_host` must be the same on both."""
    return digest_bytes if is_on_host else digest_tensor


def digest_bytes(values: torch.Tensor, box: Slice, canonical_shape: Index) -> torch.Tensor:  # noqa: ARG001 - a BoxDigest
    assert tuple(values.shape) == box.shape, f"{box} has {tuple(values.shape)} values"
    raw = xxhash.xxh3_64_digest(bytes_of(values.detach().cpu().contiguous()), seed=_place_seed(box))
    return torch.tensor(int.from_bytes(raw, "big", signed=True))


@lru_cache(maxsize=65536)
def _place_seed(box: Slice) -> int:
    return xxhash.xxh3_64_intdigest(str(box).encode())


def to_ints(sums: Mapping[Key, torch.Tensor]) -> dict[Key, int]:
    """Read sums of digests off their device, all at once."""
    if not sums:
        return {}
    return {key: value % MODULUS for key, value in zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)}


def check_digests(sent: Iterable[Mapping[tuple[int, str], int]], arrived: Mapping[int, Mapping[str, int]]) -> None:
    """Compare the senders' partial digests per (target rank, tensor) with every target's own digests per tensor.

    A WeightSyncError names the first tensors that differ, are missing, or arrived without a sender.
    """
    expected: defaultdict[tuple[int, str], int] = defaultdict(int)
    for part in sent:
        for key, value in part.items():
            expected[key] = (expected[key] + value) % MODULUS
    actual = {(rank, name): value for rank, names in arrived.items() for name, value in names.items()}
    wrong = [
        f"target rank {rank}: {name} has digest {_text(actual.get((rank, name)))},"
        f" the senders' is {_text(expected.get((rank, name)))}"
        for rank, name in sorted(expected.keys() | actual.keys())
        if expected.get((rank, name)) != actual.get((rank, name))
    ]
    if wrong:
        raise WeightSyncError(first_few(wrong))


def _text(value: int | None) -> str:
    return "missing" if value is None else f"{value:#018x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summand(Generic[Key]):
    """A box whose digest, as `dtype`, belongs to the sum `key`."""

    key: Key
    dtype: torch.dtype
    box: Slice
    canonical_shape: Index

    @classmethod
    def of_moves(cls, plan: Plan, moves: Iterable[Move]) -> list[Summand[str]]:
        """Return the boxes of a target's moves, summed by target tensor."""
        return [
            Summand(
                key=move.target_name,
                dtype=torch_dtype(move.dtype),
                box=move.slice,
                canonical_shape=plan.target.canonical[move.slice.name].shape,
            )
            for move in moves
        ]


class DigestSums(Generic[Key]):
    """Digests of the same boxes again and again: on a GPU in one launch that the first call prepares."""

    def __init__(self, summands: Sequence[Summand[Key]], digest: BoxDigest = digest_tensor) -> None:
        self._summands = summands
        self._digest = digest
        self._keys = list(dict.fromkeys(summand.key for summand in summands))
        self._dtypes = [summand.dtype for summand in summands]
        self._kernel: MatrixSums | None = None
        self._matrices: _Matrices | None = None

    def compute(self, values: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None = None) -> dict[Key, int]:
        """Return the sums by key; `values` are those of the summands, and are copied to `into` on the way.

        The same sequences again cost no preparation; their storages may have moved.
        """
        if (matrices := self._as_matrices(values, into)) is not None:
            sums = self._prepared(values).compute(matrices.sources, matrices.targets).tolist()
            return {key: value % MODULUS for key, value in zip(self._keys, sums, strict=True)}
        if into:
            torch._foreach_copy_(list(into), list(values))
        totals: dict[Key, torch.Tensor] = {}
        for each, tensor in zip(self._summands, into or values, strict=True):
            add(totals, each.key, self._digest(tensor.to(each.dtype), each.box, each.canonical_shape))
        return to_ints(totals)

    def forget(self) -> None:
        """Let go of the tensors of the last call."""
        self._matrices = None

    def _as_matrices(self, values: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None) -> _Matrices | None:
        """Return the bits for the kernel; None where it does not suit."""
        if self._matrices is None or self._matrices.values is not values or self._matrices.into is not into:
            self._matrices = None
            if self._digest is digest_tensor and all(_suit_kernel(each, self._dtypes) for each in (values, into or ())):
                self._matrices = _Matrices.of(values, into, [each.canonical_shape for each in self._summands])
        return self._matrices

    def _prepared(self, values: Sequence[torch.Tensor]) -> MatrixSums:
        if self._kernel is None:
            from megarl.weights.executors.kernels import (  # noqa: PLC0415 - triton is only on GPU machines
                MatrixKeys,
                MatrixSums,
            )

            matrices, indices = [], {key: index for index, key in enumerate(self._keys)}
            for each, tensor in zip(self._summands, values, strict=True):
                rows, columns = box_keys(each.box, each.canonical_shape, tensor)
                matrices.append(MatrixKeys(rows=rows, columns=columns, sum_index=indices[each.key]))
            self._kernel = MatrixSums(matrices, num_sums=len(self._keys))
        return self._kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrices:
    """Tensors as the kernel takes them. Hundreds of views a call are milliseconds that a publish need not take."""

    values: Sequence[torch.Tensor]
    into: Sequence[torch.Tensor] | None
    sources: list[torch.Tensor]
    targets: list[torch.Tensor] | None

    @classmethod
    def of(
        cls, values: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None, shapes: Sequence[Index]
    ) -> _Matrices:
        """`shapes` are those of the canonical tensors."""

        def bits_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [bits_of_matrix(tensor, shape) for tensor, shape in zip(tensors, shapes, strict=True)]

        return cls(values=values, into=into, sources=bits_of(values), targets=None if into is None else bits_of(into))


def _suit_kernel(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> bool:
    return bool(dtypes) and all(
        tensor.is_cuda and tensor.dtype == dtype and tensor.stride(-1) == 1 and tensor.dim() <= MATRIX_DIMENSIONS
        for tensor, dtype in zip(tensors, dtypes, strict=False)
    )


def add(sums: dict[Key, torch.Tensor], key: Key, value: torch.Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A part of a source's box that is digested at a time: what travels in one bucket."""

    box: SourceBox
    part: Slice
    offsets: Index
    """The place of the part in the box."""
    canonical_shape: Index


class SourceDigests:
    """Digests of a source's boxes: on a GPU in one launch, else part by part while buckets travel."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        digest: BoxDigest,
        *,
        own_target: int | None = None,
        bucket_bytes: int,
    ) -> None:
        """Boxes for `own_target`, a target in this process, are left out."""
        self._tensors = tensors
        self._digest = digest
        self._boxes = [
            replace(box, targets=targets)
            for box in plan.boxes_from(rank)
            if (targets := tuple(key for key in box.targets if key[0] != own_target))
        ]
        self._at_once: DigestSums[int] | None = None
        if device_of(tensors).type == "cuda" and digest is digest_tensor:
            self._at_once = DigestSums(
                [
                    Summand(
                        key=number,
                        dtype=torch_dtype(box.dtype),
                        box=box.slice,
                        canonical_shape=plan.target.canonical[box.slice.name].shape,
                    )
                    for number, box in enumerate(self._boxes)
                ]
            )
            self._views = [source_view(tensors, box) for box in self._boxes]
        self._cuts = [] if self._at_once is not None else list(self._cut(plan, bucket_bytes))
        self.begin()

    def _cut(self, plan: Plan, bucket_bytes: int) -> Iterator[_Cut]:
        for box in self._boxes:
            for part in split_box(box, bucket_bytes=bucket_bytes):
                offsets = shift(part.offsets, box.slice.offsets, (0,) * len(part.offsets))
                shape = plan.target.canonical[box.slice.name].shape
                yield _Cut(box=box, part=part, offsets=offsets, canonical_shape=shape)

    def begin(self) -> None:
        self._sums: dict[tuple[int, str], torch.Tensor] = {}
        self._parts = iter(()) if self._at_once is not None else self._digest_parts()
        self._behind_bytes = 0

    def advance(self, num_bytes: int) -> None:
        """Digest about as many bytes as were sent since the last call."""
        self._behind_bytes += num_bytes
        while self._behind_bytes > 0 and (digested_bytes := next(self._parts, None)) is not None:
            self._behind_bytes -= digested_bytes

    def finish(self) -> dict[tuple[int, str], int]:
        """Return the digest per (target rank, target tensor)."""
        if self._at_once is None:
            for _ in self._parts:
                pass
            return to_ints(self._sums)
        totals: dict[tuple[int, str], int] = {}
        for number, value in self._at_once.compute(self._views).items():
            for key in self._boxes[number].targets:
                totals[key] = (totals.get(key, 0) + value) % MODULUS
        return totals

    def _digest_parts(self) -> Iterator[int]:
        """Digest each box once, whatever the number of its targets; yield the bytes of each part."""
        for cut in self._cuts:
            view = source_view(self._tensors, cut.box)
            values = box_of(view, cut.offsets, cut.part.shape).to(torch_dtype(cut.box.dtype))
            digest = self._digest(values, cut.part, cut.canonical_shape)
            for key in cut.box.targets:
                add(self._sums, key, digest)
            yield values.numel() * values.element_size()
