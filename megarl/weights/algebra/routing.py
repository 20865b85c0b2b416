"""Boxes that some ranks hold and others need, cut where any holder's part ends, and who gives each box to whom. Pure.

A model repeats itself: the layers of a stage have the same holders, so have the experts of a set, and data-parallel
ranks and engines are copies. Replicas are therefore looked at once, and so are tensors with equal holders: the work
grows with what differs, not with layers times ranks.

A target takes a box from the nearest source: in its own process, on its own device, on its own node; equally near
sources take equal parts. A box enters a node without a source once: one of the targets there that need it takes it
over the network and forwards it to the others; they take turns from tensor to tensor. With a relay a box leaves the
sources once: nodes without a source forward it from one to the next, each box starting at another node, so that every
node receives and sends each byte once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from megarl.errors import WeightSyncError
from megarl.weights.algebra.slices import (
    ITEM_BYTES,
    Gpu,
    Holding,
    Index,
    Layout,
    Link,
    Locations,
    Slice,
    intersect,
    subtract,
)

Box: TypeAlias = tuple[Index, Index]
"""Offsets and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A box of several canonical tensors that have the same holders on both sides."""

    names: tuple[str, ...]
    offsets: Index
    shape: Index
    dtype: str
    """The targets' dtype."""
    copy: int
    """Number of the copy, where a target has the same box in several of its tensors; else 0."""
    sources: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def box_bytes(self) -> int:
        """Bytes of the box in one tensor."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def slice(self, index: int) -> Slice:
        return Slice(name=self.names[index], offsets=self.offsets, shape=self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replicas:
    """Ranks that share one table of pieces."""

    ranks: tuple[int, ...]
    example: Holding


def bundles(source: Layout, target: Layout) -> Iterator[Bundle]:
    """Yield disjoint boxes that cover every target piece once per copy, each with all its holders."""
    source_replicas, target_replicas = _replicas(source), _replicas(target)
    needed, held = _entries(target_replicas), _entries(source_replicas)
    alike: defaultdict[tuple[_Signature, _Signature], list[str]] = defaultdict(list)
    for name in target.canonical:
        if name in needed:
            _refuse_different(name, source, target)
            alike[tuple(needed[name]), tuple(held.get(name, ()))].append(name)
    for name in needed.keys() - target.canonical.keys():
        _refuse_different(name, source, target)
    for (wanted, offered), names in alike.items():
        yield from _cut(tuple(names), wanted, offered, source_replicas, target_replicas)


_Entry: TypeAlias = tuple[int, Index, Index, str]
"""Number of a set of replicas, offsets, shape, dtype."""
_Signature: TypeAlias = tuple[_Entry, ...]


def _replicas(layout: Layout) -> tuple[_Replicas, ...]:
    """Return the sets of replicas in the order of their first ranks."""
    by_table: defaultdict[int, list[Holding]] = defaultdict(list)
    for holding in sorted(layout.holdings, key=lambda holding: holding.rank):
        by_table[id(holding.pieces)].append(holding)
    return tuple(_Replicas(ranks=tuple(each.rank for each in same), example=same[0]) for same in by_table.values())


def _entries(replicas: Sequence[_Replicas]) -> dict[str, list[_Entry]]:
    """Return by canonical name the boxes that each set of replicas has."""
    entries: defaultdict[str, list[_Entry]] = defaultdict(list)
    for number, same in enumerate(replicas):
        tensors = same.example.tensors
        for piece in same.example.pieces:
            box = piece.slice
            entries[box.name].append((number, box.offsets, box.shape, tensors[piece.local_name].dtype))
    return dict(entries)


def _refuse_different(name: str, source: Layout, target: Layout) -> None:
    specs = source.canonical.get(name), target.canonical.get(name)
    here, there = (None if spec is None else spec.shape for spec in specs)
    if here != there:
        raise WeightSyncError(f"{name} is {here} at the source and {there} at the target")


def _cut(
    names: tuple[str, ...],
    wanted: _Signature,
    offered: _Signature,
    source_replicas: Sequence[_Replicas],
    target_replicas: Sequence[_Replicas],
) -> Iterator[Bundle]:
    holders: defaultdict[Box, set[int]] = defaultdict(set)
    for number, offsets, shape, _ in offered:
        holders[offsets, shape].add(number)
    for (dtype, copy), takers in sorted(_copies(wanted).items()):
        for (offsets, shape), around in atoms([*holders, *takers]):
            targets = [rank for box in around for each in takers.get(box, ()) for rank in target_replicas[each].ranks]
            if not targets:
                continue
            sources = {rank for box in around for each in holders.get(box, ()) for rank in source_replicas[each].ranks}
            if not sources:
                lacking = Slice(name=names[0], offsets=offsets, shape=shape)
                raise WeightSyncError(f"no source holds {lacking}, which target rank {min(targets)} needs")
            yield Bundle(
                names=names,
                offsets=offsets,
                shape=shape,
                dtype=dtype,
                copy=copy,
                sources=tuple(sorted(sources)),
                targets=tuple(sorted(targets)),
            )


def _copies(wanted: _Signature) -> dict[tuple[str, int], dict[Box, set[int]]]:
    """Return by dtype and number of the copy which replicas want which boxes."""
    takers: defaultdict[tuple[str, int], defaultdict[Box, set[int]]] = defaultdict(lambda: defaultdict(set))
    seen: defaultdict[int, list[tuple[Index, Index, int]]] = defaultdict(list)
    for number, offsets, shape, dtype in wanted:
        before = [copy for at, size, copy in seen[number] if intersect(at, size, offsets, shape)]
        copy = max(before, default=-1) + 1
        seen[number].append((offsets, shape, copy))
        takers[dtype, copy][offsets, shape].add(number)
    return {key: dict(boxes) for key, boxes in takers.items()}


def atoms(boxes: Iterable[Box]) -> list[tuple[Box, tuple[Box, ...]]]:
    """Return disjoint boxes that no given box cuts, sorted by offsets, each with the given boxes around it."""
    distinct = sorted(set(boxes))
    if not distinct:
        return []
    axes = [axis for axis in range(len(distinct[0][0])) if len({(at[axis], size[axis]) for at, size in distinct}) > 1]
    return sorted(_intervals(distinct, axes[0]) if len(axes) == 1 else _split(distinct))


def _intervals(boxes: Sequence[Box], axis: int) -> list[tuple[Box, tuple[Box, ...]]]:
    """Return the atoms of boxes that differ along one axis only."""
    edges = sorted({edge for at, size in boxes for edge in (at[axis], at[axis] + size[axis])})
    position = {edge: index for index, edge in enumerate(edges)}
    around: list[list[Box]] = [[] for _ in edges]
    for at, size in boxes:
        for index in range(position[at[axis]], position[at[axis] + size[axis]]):
            around[index].append((at, size))
    at, size = boxes[0]

    def interval(start: int, end: int) -> Box:
        return (*at[:axis], start, *at[axis + 1 :]), (*size[:axis], end - start, *size[axis + 1 :])

    return [(interval(edges[index], edges[index + 1]), tuple(inside)) for index, inside in enumerate(around) if inside]


def _split(boxes: Sequence[Box]) -> list[tuple[Box, tuple[Box, ...]]]:
    """Return the atoms of any boxes: each box in turn cuts the atoms so far, and its remainder becomes new ones."""
    atoms_so_far: list[tuple[Box, tuple[Box, ...]]] = []
    for box in boxes:
        rest, parts = [box], []
        for atom, around in atoms_so_far:
            shared = intersect(*atom, *box)
            if shared is None:
                parts.append((atom, around))
                continue
            parts.append((shared, (*around, box)))
            parts += [(outer, around) for outer in subtract(*atom, *shared)]
            rest = [part for left in rest for part in _without(left, shared)]
        atoms_so_far = [*parts, *((left, (box,)) for left in rest)]
    return atoms_so_far


def _without(box: Box, hole: Box) -> Iterator[Box]:
    shared = intersect(*box, *hole)
    if shared is None:
        yield box
    else:
        yield from subtract(*box, *shared)


Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedBundle:
    """A bundle, and per name and target the rank that gives the box; arrays are [names, targets]."""

    bundle: Bundle
    givers: Numbers
    """A source rank, or `forwarder(t)` for a target rank t."""
    origins: Numbers
    """The source rank that the box comes from in the end."""
    hops: Numbers
    """0 from a source; else one more than the giver's."""


def forwarder(target_rank: int) -> int:
    """Return the code of a target rank as a giver; also the inverse."""
    return -1 - target_rank


class BundleRouter:
    """Routes one bundle after the other, and counts the bytes of each rank to keep the shares equal."""

    def __init__(self, locations: Locations, *, relays: bool) -> None:
        self._locations = locations
        self._relays = relays
        self._proximities: dict[tuple[tuple[int, ...], tuple[int, ...]], _Proximity] = {}
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._fetched: defaultdict[int, int] = defaultdict(int)
        self._num_started = 0

    def route(self, bundle: Bundle) -> RoutedBundle:
        proximity = self._proximity(bundle.sources, bundle.targets)
        num_names, num_targets = len(bundle.names), len(bundle.targets)
        givers = np.empty((num_names, num_targets), dtype=np.int64)
        for column, source in proximity.own:
            givers[:, column] = source
        for columns, sources in proximity.near:
            givers[:, columns] = _share(sources, num_names, len(columns), self._sent, bundle.box_bytes)
        routed = RoutedBundle(bundle=bundle, givers=givers, origins=givers.copy(), hops=np.zeros_like(givers))
        if proximity.far:
            self._route_far(routed, proximity.far)
        return routed

    def _route_far(self, routed: RoutedBundle, far: Sequence[tuple[Numbers, tuple[int, ...]]]) -> None:
        """Fill in the columns of nodes without a source."""
        bundle = routed.bundle
        num_names, num_nodes = len(bundle.names), len(far)
        codes = -1 - np.asarray(bundle.targets, dtype=np.int64)
        numbers = np.arange(num_names)
        entries = np.empty((num_names, num_nodes), dtype=np.int64)  # columns of the targets that boxes enter nodes at
        for node, (columns, ranks) in enumerate(far):
            entries[:, node] = columns.repeat(_parts(ranks, num_names, self._fetched, bundle.box_bytes))
        if self._relays:
            starts = (self._num_started + numbers) % num_nodes
            self._num_started += num_names
            sources = _share(bundle.sources, num_names, 1, self._sent, bundle.box_bytes).repeat(num_nodes, axis=1)
            positions = (np.arange(num_nodes)[None, :] - starts[:, None]) % num_nodes
            before = np.roll(entries, 1, axis=1)
            entry_givers = np.where(positions == 0, sources, codes[before])
        else:
            sources = _share(bundle.sources, num_names, num_nodes, self._sent, bundle.box_bytes)
            positions = np.zeros((num_names, num_nodes), dtype=np.int64)
            entry_givers = sources
        columns = np.concatenate([columns for columns, _ in far])
        node_of = np.arange(num_nodes).repeat([len(ranks) for _, ranks in far])
        routed.givers[:, columns] = codes[entries][:, node_of]
        routed.hops[:, columns] = positions[:, node_of] + 1
        routed.origins[:, columns] = sources[:, node_of]
        routed.givers[numbers[:, None], entries] = entry_givers
        routed.hops[numbers[:, None], entries] = positions

    def _proximity(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> _Proximity:
        key = sources, targets
        if key not in self._proximities:
            self._proximities[key] = _proximity(sources, targets, self._locations)
        return self._proximities[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proximity:
    """The targets of a box, by column, sorted by their distance to its sources."""

    own: tuple[tuple[int, int], ...]
    """(column, source) in one process or on one device."""
    near: tuple[tuple[Numbers, tuple[int, ...]], ...]
    """Per node: other targets, and the sources there."""
    far: tuple[tuple[Numbers, tuple[int, ...]], ...]
    """Per node without a source: its targets, by column and by rank."""


def _proximity(sources: tuple[int, ...], targets: tuple[int, ...], locations: Locations) -> _Proximity:
    on_node: defaultdict[str, list[int]] = defaultdict(list)
    for source in sources:
        on_node[locations.sources[source].node].append(source)
    own: list[tuple[int, int]] = []
    near: defaultdict[str, list[int]] = defaultdict(list)
    far: defaultdict[str, list[int]] = defaultdict(list)
    for column, target in enumerate(targets):
        location = locations.targets[target]
        if location.node not in on_node:
            far[location.node].append(column)
            continue
        link, source = min((location.link(locations.sources[rank]), rank) for rank in on_node[location.node])
        if link <= Link.DEVICE:
            own.append((column, source))
        else:
            near[location.node].append(column)
    return _Proximity(
        own=tuple(own),
        near=tuple((np.asarray(columns), tuple(on_node[node])) for node, columns in near.items()),
        far=tuple((np.asarray(columns), tuple(targets[column] for column in columns)) for columns in far.values()),
    )


def _share(
    ranks: tuple[int, ...], num_names: int, num_columns: int, done: defaultdict[int, int], num_bytes: int
) -> Numbers:
    """Return a rank for each of [names, columns], in equal parts; a remainder goes to the ranks that did least so far.

    A rank's part is a few whole columns, or neighbours in one, so that few pairs of ranks exchange much.
    """
    sizes = _parts(ranks, num_names * num_columns, done, num_bytes)
    shared: Numbers = np.asarray(ranks, dtype=np.int64).repeat(sizes).reshape(num_columns, num_names).T
    return shared


def _parts(ranks: Sequence[int], number: int, done: defaultdict[int, int], num_bytes: int) -> list[int]:
    """Return how many of a number of boxes each rank has."""
    each, more = divmod(number, len(ranks))
    sizes = [each] * len(ranks)
    if more:
        for index in sorted(range(len(ranks)), key=lambda index: (done[ranks[index]], index))[:more]:
            sizes[index] += 1
    for rank, size in zip(ranks, sizes, strict=True):
        done[rank] += size * num_bytes
    return sizes


def nearest_order(source: Layout, engine: Layout, trainer_gpus: Sequence[Gpu], engine_gpus: Sequence[Gpu]) -> list[int]:
    """Return the order in which engine after engine takes `engine_gpus`, as positions in it.

    Each TP rank finds as many of its bytes as possible on its own GPU. The engines of a node are alike, so only the
    order of the node's GPUs is free: it is chosen exactly. `engine` is one engine's layout; `trainer_gpus` has the GPU
    of every source rank. An engine that does not fit on one node, or whose node has no trainer, keeps the given order.
    """
    tensor = len(engine.holdings)
    common_bytes = _common_bytes(source, engine)
    ranks_on: defaultdict[Gpu, list[int]] = defaultdict(list)
    for rank, gpu in enumerate(trainer_gpus):
        ranks_on[gpu].append(rank)

    def bytes_on(gpu: Gpu) -> tuple[int, ...]:
        """Return per TP rank the bytes that a trainer rank on `gpu` holds."""
        return tuple(max((common_bytes[rank][tp] for rank in ranks_on[gpu]), default=0) for tp in range(tensor))

    order: list[int] = []
    for first in range(0, len(engine_gpus), tensor):
        # Engines of one node are assigned together, when its first one is reached.
        node = engine_gpus[first][0]
        places = [place for place in range(first, len(engine_gpus)) if engine_gpus[place][0] == node]
        if len(order) > first:
            continue
        if len(places) % tensor or places != list(range(first, first + len(places))):
            order += range(first, min(first + tensor, len(engine_gpus)))
            continue
        num_engines = len(places) // tensor
        tp_ranks = _best_tp_ranks(tuple(bytes_on(engine_gpus[place]) for place in places), num_engines)
        takers: list[list[int]] = [[] for _ in range(tensor)]
        for place, tp in zip(places, tp_ranks, strict=True):
            takers[tp].append(place)
        order += [takers[tp][index] for index in range(num_engines) for tp in range(tensor)]
    return order


def _common_bytes(source: Layout, engine: Layout) -> list[list[int]]:
    """Return [source rank, TP rank]: the bytes that both hold."""
    table = [[0] * len(engine.holdings) for _ in range(1 + max(holding.rank for holding in source.holdings))]
    for bundle in bundles(source, engine):
        for rank in bundle.sources:
            for tp in bundle.targets:
                table[rank][tp] += len(bundle.names) * bundle.box_bytes
    return table


@lru_cache(maxsize=64)
def _best_tp_ranks(values: tuple[tuple[int, ...], ...], num_engines: int) -> tuple[int, ...]:
    """Return a TP rank for every GPU, each `num_engines` times, so that the sum of their values is largest.

    The assignment problem by shortest augmenting paths: exact, in integers, and cubic in the GPUs of a node.
    """
    size = len(values)
    prices, wins, holders = [0] * size, [0] * size, [-1] * size  # of slots, of GPUs, and the GPU of each slot
    for gpu in range(size):
        gaps: list[float] = [math.inf] * size
        before, seen, slot, taker = [-1] * size, [False] * size, -1, gpu
        while taker >= 0:
            for other in (other for other in range(size) if not seen[other]):
                gap = -values[taker][other // num_engines] - wins[taker] - prices[other]
                if gap < gaps[other]:
                    gaps[other], before[other] = gap, slot
            nearest = min((other for other in range(size) if not seen[other]), key=gaps.__getitem__)
            step = int(gaps[nearest])
            wins[gpu] += step
            for other in range(size):
                if seen[other]:
                    wins[holders[other]] += step
                    prices[other] -= step
                else:
                    gaps[other] -= step
            seen[nearest], slot, taker = True, nearest, holders[nearest]
        while slot >= 0:
            holders[slot] = holders[before[slot]] if before[slot] >= 0 else gpu
            slot = before[slot]
    return tuple(holders.index(gpu) // num_engines for gpu in range(size))
