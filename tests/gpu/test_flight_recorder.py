"""A collective over NCCL that one of four ranks skips: the report names it, its group and the rank. On one card."""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import threading
import time
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.env import FLIGHT_RECORDER, update_environment
from megarl.ranks.flight import GroupCalls, capture_collectives, find_stalls
from megarl.ranks.hang import RankStacks, capture, explain_hang, write_report
from megarl.weights.executors.meeting import StoreAddress, StoreServer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

WORLD = 4
SKIPS = 2
LATE_S = 8.0
"""Time after which a driver would ask the ranks; NCCL is long under way."""
Account = tuple[int, RankStacks, tuple[GroupCalls, ...]]


def update(rank: int, pair: dist.ProcessGroup) -> None:
    """Sum in the world and in pairs; rank SKIPS leaves out the second sum of its pair, and sleeps."""
    values = torch.ones(4, 2, device="cuda")
    dist.all_reduce(values)
    dist.all_reduce(values, group=pair)
    values.sum().item()
    if rank == SKIPS:
        time.sleep(600)
    dist.all_reduce(values, group=pair)
    dist.all_reduce(values)
    values.sum().item()


def hang(rank: int, address: StoreAddress, folder: Path, accounts: Queue[Account]) -> None:
    update_environment(
        {
            "NCCL_HOSTID": f"host {rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            FLIGHT_RECORDER.name: FLIGHT_RECORDER.default,
        }
    )
    torch.cuda.set_device(0)
    store = dist.TCPStore(address.host, address.port, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=600))
    pairs = [dist.new_group([0, 1], group_desc="tensor"), dist.new_group([2, 3], group_desc="tensor")]
    threading.Thread(target=update, args=(rank, pairs[rank // 2]), daemon=True).start()
    time.sleep(LATE_S)
    accounts.put((rank, capture(__name__), capture_collectives(folder / f"rank_{rank}")))
    time.sleep(600)


def test_the_rank_that_skips_a_collective_over_nccl_is_named(tmp_path: Path) -> None:
    server = StoreServer()
    context = multiprocessing.get_context("spawn")
    accounts: Queue[Account] = context.Queue()
    processes = [
        context.Process(target=hang, args=(rank, server.address, tmp_path / "records", accounts), daemon=True)
        for rank in range(WORLD)
    ]
    try:
        for process in processes:
            process.start()
        told = sorted((accounts.get(timeout=150) for _ in processes), key=lambda account: account[0])
    finally:
        for process in processes:
            process.kill()
            process.join()
    stacks = [account[1] for account in told]
    stalls = find_stalls({rank: calls for rank, _, calls in told})
    report = explain_hang(stacks, method="update", late=range(WORLD), stalls=stalls)
    assert report.at_fault == (SKIPS,)
    said = str(report)
    assert said.startswith(f"rank {SKIPS} is missing: it is in ")
    assert "collective 2 of tensor of ranks 2, 3: 3 in all_reduce 4x2; missing: rank 2 ended with 1" in said
    write_report(tmp_path, role="actor", method="update", headline=said, ranks=stacks)
    assert "time.sleep(600)" in next(tmp_path.glob("hang_*.txt")).read_text()
    # The whole record is what torch's own analysis reads.
    assert pickle.loads((tmp_path / "records" / f"rank_{SKIPS}").read_bytes())["entries"]
