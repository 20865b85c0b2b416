"""Accidents at every point of a publish, with ranks and an engine in processes of their own.

Each is noticed, and the next publish succeeds. What happens when the engine itself is killed, and when the plans
differ, is in test_control; that nobody uses an engine in between, in tests/serving/test_publisher.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.engine.tool_commands import ToolControl
from megarl.errors import WeightSyncError
from megarl.types import PolicyVersion
from megarl.weights.executors.digest import check_digests
from megarl.weights.executors.meeting import abandon_group
from megarl.weights.layouts.megatron import MegatronParallel
from tests.engine.engines import ServedModel, control_of, fingerprints_from_disk
from tests.engine.faulty_ranks import Accident, Digests, rank_calls
from tests.engine.trainers import Trainers, rendezvous_at, transfer_to
from tests.processes import Outcome, run_processes
from tests.tiny_models import write_tiny_model

SPLIT = MegatronParallel(tensor=2)
ENDED_BY_DEADLINE = (Accident.DUPLICATED, Accident.LATE, Accident.OLD)
"""Nobody can tell these from a slow wire: what nobody waits for blocks its sender."""
DEADLINE_S = 120.0
SHORT_DEADLINE_S = 5.0
"""Includes the time to join, in processes of a template that is running already."""

ACCIDENTS = {
    Accident.KILLED: "TP rank 0: receive: .*",
    Accident.FLIPPED: r"target rank 0: .* has digest .*, the senders' is",
    Accident.TRUNCATED: r"target rank 0: .* has digest .*, the senders' is",
    Accident.DUPLICATED: "TP rank 0: receive: .*",
    Accident.LATE: "TP rank 0: receive: .*",
    Accident.OLD: "TP rank 0: receive: .*",
}
"""What the publish is refused with."""


async def publish(
    served: ServedModel, control: ToolControl, folder: Path, *, accidents: Mapping[int, Accident], timeout_s: float
) -> None:
    """The transaction, with ranks that live for one publish and send the weights of `folder`."""
    transfer = transfer_to(served, SPLIT)
    rendezvous = replace(rendezvous_at(control), timeout_s=timeout_s)
    calls = rank_calls(transfer, rendezvous, folder, version=1, accidents=accidents)
    ranks = asyncio.create_task(asyncio.to_thread(run_processes, calls))
    try:
        await control.join(transfer, plan_hash=transfer.plan().hash, rendezvous=rendezvous)
        arrived = await control.receive(PolicyVersion(1))
    except WeightSyncError as error:
        abandon_group(rendezvous.address, name=rendezvous.name, reason=str(error))
        await ranks
        raise
    outcomes: list[Outcome[Digests]] = await ranks
    check_digests([outcome.get() for outcome in outcomes], arrived)
    await control.confirm(PolicyVersion(1))


@pytest.mark.fault(
    "a sender that is killed, late, sends too little, sends twice or sends something else",
    "noticed, nothing is served, the next publish succeeds",
)
@pytest.mark.parametrize("accident", ACCIDENTS)
async def test_an_accident_of_a_sender_is_noticed_and_the_next_publish_succeeds(
    qwen2_tp1: ServedModel, accident: Accident, tmp_path: Path
) -> None:
    # Weights that the engine has never seen: memory that it received earlier ones in would complete a truncated bucket
    # of the same ones.
    write_tiny_model(tmp_path, "qwen2", layers=2, seed=100 + list(ACCIDENTS).index(accident))
    run_processes([(os.getpid, ())])
    timeout_s = SHORT_DEADLINE_S if accident in ENDED_BY_DEADLINE else DEADLINE_S

    async with qwen2_tp1.fleet() as fleet:
        control = control_of(fleet)
        expected = await fingerprints_from_disk(control, fleet, qwen2_tp1.other_folder)
        await fingerprints_from_disk(control, fleet, qwen2_tp1.folder)
        start = time.monotonic()
        with pytest.raises(WeightSyncError, match=ACCIDENTS[accident]):
            await publish(qwen2_tp1, control, tmp_path, accidents={1: accident}, timeout_s=timeout_s)
        # What is not a matter of the deadline is noticed before it.
        assert accident in ENDED_BY_DEADLINE or time.monotonic() - start < DEADLINE_S
        assert fleet.committed_version() == 0

        with honest(qwen2_tp1, control) as trainers:
            await trainers.join()
            await trainers.publish(PolicyVersion(2))
        assert await control.fingerprints() == expected
        assert fleet.committed_version() == 2


@contextmanager
def honest(served: ServedModel, control: ToolControl) -> Iterator[Trainers]:
    trainers = Trainers(transfer_to(served, SPLIT), control, served.other_folder)
    try:
        yield trainers
    finally:
        trainers.close()
