"""The responses of rollout workers in Ray's object store, and how ranks get those of their share.

They stay on the node that made them. A delivery has responses of all shares: the worker cuts out what belongs to each,
for taken whole it would be copied to every node that trains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import ray
from ray.actor import ActorHandle

from megarl.data.evaluation_files import EvaluatedRollout
from megarl.data.group_encoding import ContentArrays
from megarl.data.rollout_files import MAX_TABLE_ROWS, SampledRollout
from megarl.data.shares import Share
from megarl.errors import WorkerError, first_line
from megarl.tokens import Content, ContentHandle, ContentSource
from megarl.types import RolloutGroup


@dataclass(slots=True, eq=False)
class StoredResponses:
    """A reference to the arrays of one delivery; all its responses share it."""

    reference: ray.ObjectRef
    node: str
    """Ray's id of the node that holds them."""
    host: ActorHandle | None = None
    """The worker that made them, known to the driver."""
    arrays: ContentArrays | None = field(default=None, repr=False)
    """Set where `fetch` brought them."""

    def __reduce__(self) -> tuple[type[StoredResponses], tuple[ray.ObjectRef, str]]:
        return StoredResponses, (self.reference, self.node)

    def content(self, index: int) -> Content:
        return (self.arrays or _get([self.reference])[0]).content(index)


@dataclass(frozen=True, slots=True)
class StoredContent:
    """A `ContentHandle`: one response of a delivery."""

    stored: StoredResponses
    index: int
    repetition: float | None = None
    answer: str | None = None

    def load(self) -> Content:
        return self.stored.content(self.index)

    def locate(self) -> tuple[StoredResponses, int]:
        return self.stored, self.index


def fetch(sources: Sequence[ContentSource]) -> None:
    """Bring the arrays of all these sources into this process, many at a time."""
    missing = [source for source in sources if isinstance(source, StoredResponses) and source.arrays is None]
    for stored, arrays in zip(missing, _get([stored.reference for stored in missing]), strict=True):
        stored.arrays = arrays


def nodes_of(group: RolloutGroup) -> set[str]:
    """Return the nodes that hold the group's arrays; none where they are in the driver's process."""
    contents = (rollout.content for rollout in group.with_baseline)
    return {content.stored.node for content in contents if isinstance(content, StoredContent)}


def _get(references: Sequence[ray.ObjectRef]) -> list[ContentArrays]:
    try:
        arrays: list[ContentArrays] = ray.get(list(references))
    except ray.exceptions.ObjectLostError as error:
        raise WorkerError(f"rollouts are lost with the node that held them: {first_line(error)}") from error
    return arrays


@dataclass(slots=True)
class _Cuts:
    """All that is cut by one worker."""

    host: ActorHandle
    node: str
    pieces: list[list[tuple[int, int]]]
    """By share: the place of a reference and the index of a response there."""
    references: list[ray.ObjectRef] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    """The place of each reference, by the id of its record here."""

    def add(self, share: int, stored: StoredResponses, index: int) -> int:
        """Return the index that the response will have."""
        if id(stored) not in self.places:
            self.places[id(stored)] = len(self.references)
            self.references.append(stored.reference)
        self.pieces[share].append((self.places[id(stored)], index))
        return len(self.pieces[share]) - 1


async def cut_at_source(shares: Sequence[Share], nodes: Collection[str], *, timeout_s: float) -> list[Share]:
    """Return the shares with references to their own responses alone; they are loaded on these nodes.

    What is on the only such node stays whole, and so do the deliveries of a worker that is gone.
    """
    cuts: dict[str, _Cuts] = {}
    located = [
        [_add(cuts, shares, number, share.sources[source], index, nodes) for source, index in share.places]
        for number, share in enumerate(shares)
    ]
    names = list(cuts)
    sources = dict(
        zip(names, await asyncio.gather(*(_cut(each, timeout_s=timeout_s) for each in cuts.values())), strict=True)
    )
    return [
        _recut(share, [(key, index, sources.get(key)) for key, index in of_share], number)
        for number, (share, of_share) in enumerate(zip(shares, located, strict=True))
    ]


def _add(
    cuts: dict[str, _Cuts],
    shares: Sequence[Share],
    number: int,
    source: ContentSource,
    index: int,
    nodes: Collection[str],
) -> tuple[str, int]:
    """Return the name of the worker that cuts the response and the index after it; "" if no worker repacks it."""
    if not isinstance(source, StoredResponses) or source.host is None or set(nodes) == {source.node}:
        return "", index
    key = source.host._actor_id.hex()
    if key not in cuts:
        cuts[key] = _Cuts(source.host, source.node, [[] for _ in shares])
    return key, cuts[key].add(number, source, index)


async def _cut(cuts: _Cuts, *, timeout_s: float) -> list[StoredResponses] | None:
    """Return the cut responses by share; None if the worker is gone or does not answer."""
    method = cuts.host.cut.options(num_returns=1 + len(cuts.pieces))
    done, *references = method.remote(cuts.references, cuts.pieces)
    try:
        async with asyncio.timeout(timeout_s):
            await done
    except (ray.exceptions.RayError, TimeoutError):
        return None
    return [StoredResponses(reference, cuts.node) for reference in references]


def _recut(share: Share, located: Sequence[tuple[str, int, Sequence[StoredResponses] | None]], number: int) -> Share:
    """Return the share with its cut sources; `located` says of each response who cut it and where it is now."""
    places: dict[int, int] = {}
    sources: list[ContentSource] = []
    located_now = []
    for (old_source, old_index), (_, index, cut) in zip(share.places, located, strict=True):
        source: ContentSource = share.sources[old_source] if cut is None else cut[number]
        if id(source) not in places:
            places[id(source)] = len(sources)
            sources.append(source)
        located_now.append((places[id(source)], old_index if cut is None else index))
    return replace(share, sources=tuple(sources), places=tuple(located_now))


async def write_samples(path: Path, samples: Sequence[SampledRollout], hosts: Sequence[ActorHandle]) -> None:
    """Have these workers write a file: each makes the rows of its own responses, and one of them writes all rows."""
    live = {host._actor_id: host for host in hosts}
    tables, writer = [], hosts[0]
    for owner, of_owner in groupby(samples, lambda sample: _owner(sample.sample.rollout.content)):
        host, rows = live.get(owner, writer), list(of_owner)
        batches = (rows[first : first + MAX_TABLE_ROWS] for first in range(0, len(rows), MAX_TABLE_ROWS))
        tables += [host.tabulate.remote(batch) for batch in batches]
    await writer.write.remote(path, tables)


async def write_answers(path: Path, answers: Sequence[EvaluatedRollout], hosts: Sequence[ActorHandle]) -> None:
    """Have these workers write an evaluation, with one call to each: an evaluation may have thousands of prompts."""
    places = {host._actor_id: place for place, host in enumerate(hosts)}
    order = [places.get(_owner(answer.content), 0) for answer in answers]
    parts: list[list[EvaluatedRollout]] = [[] for _ in hosts]
    for place, answer in zip(order, answers, strict=True):
        parts[place].append(answer)
    lines = [host.lines_of.remote(part) for host, part in zip(hosts, parts, strict=True)]
    await hosts[0].write_lines.remote(path, lines, order)


def _owner(content: ContentHandle) -> ray.ActorID | None:
    """Return the worker that made a response, None if it is not known."""
    source, _ = content.locate()
    return source.host._actor_id if isinstance(source, StoredResponses) and source.host is not None else None
