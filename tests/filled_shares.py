"""The filled shares of a step, as its ranks have them. For the tests of several packages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from megarl.data.packing import Packing
from megarl.data.shares import make_shares
from megarl.types import TrainBatch, TrainSample


def pack(
    samples: Sequence[TrainSample],
    packing: Packing,
    *,
    temperature: float,
    has_versions: bool = False,
    has_routes: bool = False,
    shares_prefixes: bool = False,
    without: Collection[str] = (),
) -> Iterator[TrainBatch]:
    """Yield the filled shares of a step; the arguments are those of `make_shares`."""
    shares = make_shares(
        samples,
        packing,
        temperature=temperature,
        has_versions=has_versions,
        has_routes=has_routes,
        shares_prefixes=shares_prefixes,
        without=without,
    )
    return (share.fill() for share in shares)
