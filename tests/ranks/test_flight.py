"""Which collective hangs and who is missing, from the records of real gloo ranks and from records of NCCL's form."""

from __future__ import annotations

import datetime
import json
import pickle
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.env import FLIGHT_RECORDER
from megarl.ranks.flight import GroupCalls, capture_collectives, find_stalls, ranks_at_fault, read_record
from megarl.ranks.hang import RankStacks, ThreadStack, explain_hang
from tests.processes import run_processes

WORLD = 4
SKIPS = 2


def hang(rank: int, folder: Path) -> tuple[GroupCalls, ...]:
    """Take part in two collectives of two groups; rank SKIPS leaves out the next of the world."""
    FLIGHT_RECORDER.set(FLIGHT_RECORDER.default)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=120))
    pairs = [dist.new_group([0, 1], group_desc="tensor"), dist.new_group([2, 3], group_desc="tensor")]
    values = torch.ones(4, 2)
    dist.all_reduce(values)
    dist.all_reduce(values, group=pairs[rank // 2])
    waits = dist.all_reduce(values, async_op=True) if rank != SKIPS else None
    time.sleep(1.0)
    called = capture_collectives(folder / f"rank_{rank}")
    store.set(f"done{rank}", "1")
    store.wait([f"done{each}" for each in range(WORLD)])
    if waits is None:
        dist.all_reduce(values)
    else:
        waits.wait()
    return called


def test_the_rank_that_skips_a_collective_is_named_with_its_group(tmp_path: Path) -> None:
    outcomes = run_processes([(hang, (rank, tmp_path)) for rank in range(WORLD)])
    called = {rank: outcome.get() for rank, outcome in enumerate(outcomes)}
    (stall,) = find_stalls(called)
    assert stall.missing == (SKIPS,)
    assert ranks_at_fault([stall]) == (SKIPS,)
    assert str(stall) == (
        "collective 2 of default_pg of ranks 0-3: 0, 1, 3 in all_reduce 4x2; "
        "missing: rank 2 ended with 1, all_reduce 4x2"
    )
    # The whole record is what torch's own analysis reads.
    written = pickle.loads((tmp_path / "rank_2").read_bytes())
    assert len(written["entries"]) == 2


def entry(group: str, number: int, *, state: str, operation: str = "nccl:all_reduce") -> dict[str, object]:
    return {
        "process_group": [group, f"{group.upper()}_GROUP"],
        "collective_seq_id": number,
        "is_p2p": operation.endswith("send"),
        "profiling_name": operation,
        "input_sizes": [[8]],
        "state": state,
        "retired": state == "completed",
    }


def record(*entries: dict[str, object]) -> bytes:
    return json.dumps({"entries": entries}).encode()


MEMBERS = {"tp": (0, 1), "dp": (0, 1, 2, 3)}


def test_a_rank_that_is_held_up_elsewhere_is_not_at_fault() -> None:
    """Rank 1 never calls the sum of the tensor group; rank 0 waits for it there, ranks 2 and 3 for both in another."""
    done = entry("dp", 1, state="completed")
    ranks = {
        0: read_record(record(done, entry("tp", 5, state="started")), MEMBERS),
        1: read_record(record(done, entry("tp", 4, state="completed")), MEMBERS),
        2: read_record(record(done, entry("dp", 2, state="started")), MEMBERS),
        3: read_record(record(done, entry("dp", 2, state="scheduled")), MEMBERS),
    }
    first, second = find_stalls(ranks)
    assert first.missing == (1,) or second.missing == (1,)
    assert ranks_at_fault([first, second]) == (1,)


def test_a_rank_that_does_not_answer_is_missing() -> None:
    ranks = {0: read_record(record(entry("tp", 1, state="started")), MEMBERS)}
    (stall,) = find_stalls(ranks)
    assert str(stall).endswith("missing: rank 1 called none")


def test_different_collectives_and_a_broken_network_are_told_apart() -> None:
    gather = entry("tp", 3, state="started", operation="nccl:all_gather")
    ranks = {0: read_record(record(gather), MEMBERS), 1: read_record(record(entry("tp", 3, state="started")), MEMBERS)}
    assert "0 in all_gather 8; 1 in all_reduce 8, which are not the same" in str(find_stalls(ranks)[0])
    ranks[0] = ranks[1]
    (stall,) = find_stalls(ranks)
    assert str(stall).endswith(
        "0, 1 in all_reduce 8, all ranks called it: look at the network and the GPUs between them"
    )
    assert ranks_at_fault([stall]) == ()


def test_transfers_between_two_ranks_and_what_has_ended_are_no_stall() -> None:
    sent = entry("tp", 9, state="started", operation="nccl:send")
    assert read_record(record(sent), MEMBERS) == ()
    ended = read_record(record(entry("tp", 1, state="completed")), MEMBERS)
    assert find_stalls({0: ended, 1: ended}) == []


def test_a_hang_over_nccl_names_the_rank_that_the_recorder_misses() -> None:
    """All ranks are somewhere in Python: the stacks show no wait."""
    stacks = [
        RankStacks(
            threads=(ThreadStack(name="main", lines=(), place=f"item, a.py:{rank}", method="update", wait=None),)
        )
        for rank in range(2)
    ]
    ranks = {
        0: read_record(record(entry("tp", 2, state="started")), MEMBERS),
        1: read_record(record(entry("tp", 1, state="completed")), MEMBERS),
    }
    report = explain_hang(stacks, method="update", late=[0, 1], stalls=find_stalls(ranks))
    assert report.at_fault == (1,)
    assert str(report) == (
        "rank 1 is missing: it is in item, a.py:1; collective 2 of TP_GROUP of ranks 0, 1: 0 in all_reduce 8; "
        "missing: rank 1 ended with 1, all_reduce 8"
    )
