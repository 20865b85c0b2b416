"""The points at which a fault can happen, and what a planned one says.

A step in the trainer; `of` is actor, critic or drafter:
    forward            rank    a mini-batch has arrived, no micro-batch is begun
    backward           rank    the loss of a micro-batch is known, its gradients are not; on last stages; nan: the loss
    gradients          rank    gradients of a mini-batch are summed over all ranks; nan: this rank's
    optimizer          rank    gradients are known to be finite, no weight is changed
    updated            rank    every weight of this rank is changed
A forward pass that is not part of an update; `of` is actor, critic or reference:
    asked              rank    before the pass

A transfer of weights; `step` is the version, `of` the name of the group, such as publish, or save 2:
    bucket_packed      rank    the sender has packed it, not yet sent; corrupt: its bytes
    bucket_sent        rank    it is being transferred
    bucket_received    engine  the receiver has it, not yet read; corrupt: its bytes
    received           engine  everything has arrived and is digested, nothing is served; corrupt: a digest

A step in the driver:
    step_begun         driver
    step_taken         driver  its groups are complete
    step_trained       driver  not yet published
    step_published     driver
    generating         driver  one request is about to be sent to `engine`
    scoring            worker  a reward worker is about to call the user's function; nan: its score

The points of a save, in the order they are passed:
    begun              driver  step_N.tmp exists and is empty
    snapshot_taken     rank    the rank has its part in host memory; training may go on
    ranks_met          rank    the ranks are connected for this save
    tensors_received   rank    whole tensors are in host memory, no file is begun
    file_written       rank    a safetensors file has all its bytes, not yet synced
    file_synced        rank    the file is on disk
    index_written      rank    rank 0 has written the index
    companions_copied  rank    rank 0 has copied configuration and tokenizer
    ranks_done         driver  every tensor is on disk, no state yet
    state_written      driver
    manifest_written   driver  the last file is written, folders are not synced
    folders_synced     driver  the checkpoint is complete, under its temporary name
    later_set_aside    driver  older checkpoints of this step or later have another name
    renamed            driver  the checkpoint has its name; `latest` is still the one before
    latest_linked      driver  `latest` is this one; its number is still the one before
    latest_numbered    driver
    doomed             driver  an old checkpoint has a temporary name and is about to be removed
    pruned             driver  the old checkpoint is removed
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from megarl.env import FAULTS

StepPoint = Literal["forward", "backward", "gradients", "optimizer", "updated", "asked"]
PublishPoint = Literal["bucket_packed", "bucket_sent", "bucket_received", "received"]
DriverPoint = Literal["step_begun", "step_taken", "step_trained", "step_published", "generating", "scoring"]
SavePoint = Literal[
    "begun",
    "snapshot_taken",
    "ranks_met",
    "tensors_received",
    "file_written",
    "file_synced",
    "index_written",
    "companions_copied",
    "ranks_done",
    "state_written",
    "manifest_written",
    "folders_synced",
    "later_set_aside",
    "renamed",
    "latest_linked",
    "latest_numbered",
    "doomed",
    "pruned",
]
Point: TypeAlias = StepPoint | PublishPoint | DriverPoint | SavePoint
POINTS: tuple[str, ...] = tuple(name for group in get_args(Point) for name in get_args(group))

Spoil = Literal["nan", "corrupt"]
"""The damage that the caller does to the value at the point."""
SPOILABLE: dict[str, Spoil] = {
    "backward": "nan",
    "gradients": "nan",
    "scoring": "nan",
    "bucket_packed": "corrupt",
    "bucket_received": "corrupt",
    "received": "corrupt",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    point: Point
    kind: str
    step: int | None = None
    rank: int | None = None
    engine: int | None = None
    of: str | None = None
    seconds: float = 0.0
    once: str | None = None

    def __post_init__(self) -> None:
        assert self.point in POINTS, f"{FAULTS.name}: no point {self.point}"
        is_plain = self.kind in ("kill", "stop", "wait") or hasattr(errno, self.kind)
        assert is_plain or SPOILABLE.get(self.point) == self.kind, f"{FAULTS.name}: no {self.kind} at {self.point}"
