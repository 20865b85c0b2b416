"""Two questions about promises kept: has a holder the tensors its layout says, and did what was sent arrive? Pure.

The first is asked once at start-up, before any byte moves; the second at every publish, before a version is committed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from megarl.errors import WeightSyncError
from megarl.weights.algebra.slices import Holding, TensorSpec

_MAX_NAMED = 5
_MODULUS = 1 << 64


def check_holding(holding: Holding, actual: Mapping[str, TensorSpec], *, holder: str) -> None:
    """Raise a WeightSyncError that names the first tensors of `holder` that differ from its layout."""
    differences = list(_differences(holding.tensors, actual))
    if differences:
        raise WeightSyncError(f"{holder} does not match its layout: {_few(differences)}")


def check_delivery(sent: Iterable[Mapping[tuple[int, str], int]], arrived: Mapping[int, Mapping[str, int]]) -> None:
    """Compare the senders' partial digests per (target rank, tensor) with every target's own digests per tensor.

    A WeightSyncError names the first tensors that differ, are missing, or arrived though nobody sent them.
    """
    expected: defaultdict[tuple[int, str], int] = defaultdict(int)
    for part in sent:
        for key, value in part.items():
            expected[key] = (expected[key] + value) % _MODULUS
    found = {(rank, name): value for rank, names in arrived.items() for name, value in names.items()}
    wrong = [
        f"target rank {rank}: {name} has digest {_text(found.get((rank, name)))},"
        f" the senders' is {_text(expected.get((rank, name)))}"
        for rank, name in sorted(expected.keys() | found.keys())
        if expected.get((rank, name)) != found.get((rank, name))
    ]
    if wrong:
        raise WeightSyncError(_few(wrong))


def _text(digest: int | None) -> str:
    return "missing" if digest is None else f"{digest:#018x}"


def _few(sentences: list[str]) -> str:
    more = [f"and {len(sentences) - _MAX_NAMED} more"] if len(sentences) > _MAX_NAMED else []
    return "; ".join(sentences[:_MAX_NAMED] + more)


def _differences(expected: Mapping[str, TensorSpec], actual: Mapping[str, TensorSpec]) -> Iterator[str]:
    for name, spec in expected.items():
        found = actual.get(name)
        if found is None:
            yield f"{name} is missing"
        elif found.shape != spec.shape:
            yield f"{name} has shape {list(found.shape)}, expected {list(spec.shape)}"
        elif found.dtype != spec.dtype:
            yield f"{name} is {found.dtype}, expected {spec.dtype}"
    for name in actual:
        if name not in expected:
            yield f"{name} is unexpected"
