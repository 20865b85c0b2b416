"""The collectives that ranks have called, from torch's flight recorder: which one does not end, and who is missing.

NCCL computes beside Python: ranks that wait for it are anywhere in their code, and their stacks do not tell whom they
wait for. The recorder counts the collectives of every group on every rank. `read_record` and `find_stalls` are pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch._C import _distributed_c10d as recorder

GroupMembers = Mapping[str, tuple[int, ...]]
"""The ranks of each group, by torch's name of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCalls:
    """The collectives of one group that one rank has called."""

    group: str
    description: str
    members: tuple[int, ...]
    number: int
    """Number of the last one in the group, from 1."""
    operation: str
    """Its name, such as all_reduce, with the sizes of its arguments."""
    is_done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledCollective:
    """A collective that did not end."""

    calls: Mapping[int, GroupCalls | None]
    """The last call of each member of the group; None where a rank has called none, or does not answer."""

    @property
    def number(self) -> int:
        return max(call.number for call in self.calls.values() if call is not None)

    @property
    def waiting(self) -> dict[int, GroupCalls]:
        return {rank: call for rank, call in self.calls.items() if call is not None and call.number == self.number}

    @property
    def missing(self) -> tuple[int, ...]:
        """The members that have not called it."""
        return tuple(rank for rank in self.calls if rank not in self.waiting)

    def __str__(self) -> str:
        operations: dict[str, list[int]] = {}
        for rank, call in self.waiting.items():
            operations.setdefault(call.operation, []).append(rank)
        first = next(iter(self.waiting.values()))
        name = f"{first.description or 'group'} of ranks {_listed(first.members)}"
        called = "; ".join(f"{_listed(ranks)} in {operation}" for operation, ranks in operations.items())
        ending = ", all ranks called it: look at the network and the GPUs between them"
        if len(operations) > 1:
            ending = ", which are not the same: one of these ranks took another way"
        if self.missing:
            each = [f"rank {rank} {self._last(rank)}" for rank in self.missing]
            ending = f"; missing: {', '.join(each)}"
        return f"collective {self.number} of {name}: {called}{ending}"

    def _last(self, rank: int) -> str:
        call = self.calls[rank]
        return "called none" if call is None else f"ended with {call.number}, {call.operation}"


def capture_collectives(path: Path) -> tuple[GroupCalls, ...]:
    """Return this rank's last collective of every group, and write the whole record to a file for torch's own tools."""
    if not dist.is_initialized():
        return ()
    record, whole = _dumps()
    members = {
        str(name): tuple(dist.get_process_group_ranks(group))
        for group, name in dist.distributed_c10d._world.pg_names.items()  # there is no public list
    }
    calls = read_record(record(), members)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole())
    except OSError:
        pass  # what is returned is what a person reads first
    return calls


def _dumps() -> tuple[Callable[[], bytes], Callable[[], bytes]]:
    """Return the functions of the backend that write its record as JSON and as torch's tools read it."""
    kind = "nccl" if dist.get_backend() == "nccl" else "fr"
    as_json: Callable[[], bytes] = getattr(recorder, f"_dump_{kind}_trace_json")
    whole: Callable[[], bytes] = getattr(recorder, f"_dump_{kind}_trace")
    return as_json, whole


def read_record(record: bytes, members: GroupMembers) -> tuple[GroupCalls, ...]:
    """Return the last collective of every group in a record; transfers between two ranks are left out."""
    last: dict[str, GroupCalls] = {}
    for entry in json.loads(record).get("entries", ()):
        name, description = entry["process_group"]
        number = entry["collective_seq_id"]
        if entry["is_p2p"] or (name in last and number <= last[name].number):
            continue
        last[name] = GroupCalls(
            group=name,
            description="" if description == "undefined" else description,
            members=members.get(name, ()),
            number=number,
            operation=f"{entry['profiling_name'].rpartition(':')[2]} {_sizes(entry['input_sizes'])}",
            is_done=entry["retired"] or entry["state"] == "completed",
        )
    return tuple(last.values())


def _sizes(sizes: Sequence[Sequence[int]]) -> str:
    return ", ".join("x".join(map(str, size)) or "scalar" for size in sizes[:2])


def find_stalls(ranks: Mapping[int, Sequence[GroupCalls]]) -> list[StalledCollective]:
    """Return the collectives that some rank still waits in, those that hold up the others first.

    A rank that is missing in one group may wait in another: it is held up there. `ranks` has those that answered.
    """
    of_group: dict[tuple[str, tuple[int, ...]], dict[int, GroupCalls]] = {}
    for rank, groups in ranks.items():
        for calls in groups:
            of_group.setdefault((calls.group, calls.members), {})[rank] = calls
    stalls = []
    for (_, members), calls_of in of_group.items():
        newest = max(calls.number for calls in calls_of.values())
        if any(calls.number == newest and not calls.is_done for calls in calls_of.values()):
            stalls.append(StalledCollective(calls={rank: calls_of.get(rank) for rank in members or sorted(calls_of)}))
    waiting = {rank for stall in stalls for rank in stall.waiting}
    return sorted(stalls, key=lambda stall: waiting.issuperset(stall.missing))


def ranks_at_fault(stalls: Sequence[StalledCollective]) -> tuple[int, ...]:
    """Return the ranks that others wait for and that wait in no collective themselves."""
    waiting = {rank for stall in stalls for rank in stall.waiting}
    return tuple(sorted({rank for stall in stalls for rank in stall.missing} - waiting))


def _listed(ranks: Sequence[int]) -> str:
    """Return numbers of ranks, long rows as their ends."""
    whole = list(ranks)
    if len(whole) > 2 and whole == list(range(whole[0], whole[-1] + 1)):
        return f"{whole[0]}-{whole[-1]}"
    return ", ".join(map(str, whole))
