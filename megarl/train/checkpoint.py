"""A trainer rank's part of a checkpoint: which tensors are saved to and loaded from which folder.

Master weights and moments are described as boxes of canonical tensors, like weights: every byte is written once, by a
rank that holds it, and can be read in any other layout.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.checkpoint.folder import below
from megarl.checkpoint.manifest import MODEL_FOLDER, OPTIMIZER_FOLDER, Contents, FileDigest, verify_tensors
from megarl.checkpoint.save import (
    Contribution,
    assign_tensors,
    contribution,
    copy_to_host,
    save_hf,
    save_tensors,
)
from megarl.errors import CheckpointError, WeightSyncError
from megarl.families import family_of
from megarl.system.faults import reach, step_in
from megarl.train.optimizer import ModelOptimizer
from megarl.train.optimizer_states import MOMENTS, Shard
from megarl.train.rank_spec import RankSpec
from megarl.train.topology import Topology
from megarl.weights.algebra.slices import Holding, Index, Layout, TensorSpec
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.hf import load_hf
from megarl.weights.executors.meeting import StoreAddress, StoreServer
from megarl.weights.executors.tensors import box_of
from megarl.weights.layouts.pieces import FlatRange, restrict, restrict_all

_MASTER = "master"
_DTYPE = "float32"
_ANY_PORT = 9
_VERIFYING_THREADS = 4
"""A node has several ranks."""


def weights_of(folder: Path) -> Path:
    """Return the folder of a checkpoint that has the weights in full precision."""
    master = folder / OPTIMIZER_FOLDER / _MASTER
    return master if master.exists() else folder / MODEL_FOLDER


def folders_read(folder: Path) -> list[Path]:
    """Return the folders with tensors that a rank reads to continue from a checkpoint."""
    return [weights_of(folder), *(folder / OPTIMIZER_FOLDER / kind for kind in MOMENTS)]


def has_own_master(layout: Layout) -> bool:
    """Whether master weights are more precise than `model/`, whose file or whose source has a narrower dtype."""
    of_ranks = (spec for holding in layout.holdings for spec in holding.tensors.values())
    return any(spec.dtype != _DTYPE for specs in (layout.canonical.values(), of_ranks) for spec in specs)


class RankCheckpoints:
    """Saves and restores the trained tensors and the optimizer of one rank. Constructing it is collective."""

    def __init__(
        self,
        spec: RankSpec,
        *,
        layout: Layout,
        tensors: Callable[[], dict[str, Tensor]],
        optimizer: ModelOptimizer,
        topology: Topology,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.tensors = tensors
        self.optimizer = optimizer
        self.topology = topology
        # Rank 0 serves the store at which all ranks meet, as long as its process lives.
        self._server = StoreServer(spec.master_address) if topology.rank == 0 else None
        port = torch.tensor(self._server.address.port if self._server else 0, device=topology.device)
        dist.broadcast(port, src=0)
        self.store = StoreAddress(host=spec.master_address, port=int(port))
        self.saver, self.exporter = RankSaver(self, "save"), RankSaver(self, "export")

    def verify(self, checkpoint: Path, inner: str) -> None:
        """Compare tensors that `restore` reads from the inner folder of a checkpoint with their digests.

        Each tensor is compared by one of the ranks that read it, so that all ranks together compare all of them once.
        """
        mine = assign_tensors(self.layout).by_rank[self.spec.rank].tensors
        read = (each.relative_to(checkpoint).as_posix() for each in folders_read(checkpoint / inner))
        verify_tensors(checkpoint, frozenset(read), mine, num_threads=_VERIFYING_THREADS)
        if frozen := {piece.slice.name for piece in self._frozen().pieces} & mine.keys():
            verify_tensors(checkpoint, {(Path(inner) / MODEL_FOLDER).as_posix()}, frozen)

    def restore(self, folder: Path, *, num_updates: int) -> None:
        """Load master weights and moments from a checkpoint of any layout, and round the weights from them.

        Every rank reads its own shard alone: replicas together read each byte once.
        """
        shards = self.optimizer.shards()
        ranges = {name: shard.range for name, shard in shards.items()}
        mine, frozen = restrict(self.layout.by_rank[self.spec.rank], ranges, dtype=_DTYPE), self._frozen()
        if frozen.tensors:
            load_hf(folder / MODEL_FOLDER, frozen, _specs_in(frozen, self.layout), self.tensors())
        canonical = {
            name: TensorSpec(shape=spec.shape, dtype=_DTYPE) for name, spec in _specs_in(mine, self.layout).items()
        }

        def load(inner: Path) -> dict[str, Tensor]:
            tensors = {name: torch.empty(spec.shape) for name, spec in mine.tensors.items()}
            load_hf(inner, mine, canonical, tensors)
            return {name: tensor.view(-1)[slice(*ranges[name])].clone() for name, tensor in tensors.items()}

        # One kind after the other: host memory holds one copy at most.
        for name, values in load(weights_of(folder)).items():
            shards[name].master.data.copy_(values)
        self.optimizer.adopt_masters()
        for kind in MOMENTS:
            for name, values in load(folder / OPTIMIZER_FOLDER / kind).items():
                shards[name].restore({kind: values}, num_updates=num_updates)

    def _frozen(self) -> Holding:
        """Return what this rank saves but does not train: buffers, which have no master weights and no moments."""
        holding, trained = self.layout.by_rank[self.spec.rank], self.optimizer.parameters()
        return replace(
            holding,
            tensors={name: spec for name, spec in holding.tensors.items() if name not in trained},
            pieces=tuple(piece for piece in holding.pieces if piece.local_name not in trained),
        )

    def read(self, folder: Path, *, may_lack: Collection[str] = ()) -> None:
        """Load the trained tensors of a folder."""
        load_hf(folder, self.layout.by_rank[self.spec.rank], self.layout.canonical, self.tensors(), may_lack=may_lack)
        self.optimizer.adopt_weights()

    def close(self) -> None:
        """Close the connections to the other ranks."""
        self.saver.close()
        self.exporter.close()


class RankSaver:
    """Saves one rank's part of one model: copies it while training waits, writes the copy while training continues.

    `snapshot` is collective and runs in the trainer's thread; `write` takes long and may run in another thread.
    """

    def __init__(self, of: RankCheckpoints, purpose: str) -> None:
        """`purpose` names the transfer groups: savers with different purposes can write at the same time."""
        self._of = of
        self._rank = of.spec.rank
        self._purpose = purpose
        self._weights: Contribution | None = None
        self._shards: Contribution | None = None
        self._num_snapshots = 0
        self._group: TransferGroup | None = None
        """Used for every save: connections of all pairs of ranks take long to make."""
        self._taken: dict[str, tuple[Layout, dict[str, Tensor]]] = {}
        """Copies of this rank's part, by inner folder of a checkpoint, and the layout of all ranks' copies."""

    def snapshot(self, contents: Contents) -> None:
        """Copy this rank's part to host memory; discard an earlier copy that was not written."""
        self._num_snapshots += 1
        # Free the earlier copy first: host memory holds one at most.
        self._taken = {}
        own, tensors = self._own_weights()
        parts = {MODEL_FOLDER: (own.layout, copy_to_host(own, self._rank, partial(_box, tensors)))}
        if contents == "everything":
            parts |= self._snapshot_optimizer()
        self._taken = parts

    def _own_weights(self) -> tuple[Contribution, dict[str, Tensor]]:
        """Return which boxes this rank contributes, and the tensors that have them."""
        if self._weights is None:
            self._weights = contribution(self._of.layout, self._rank)
        at_hand = self._of.optimizer.at_hand
        return self._weights, {name: at_hand(tensor) for name, tensor in self._of.tensors().items()}

    def write(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]:
        """Write the snapshot together with all ranks; return this rank's files by their path in `folder`.

        `model/` gets the tokenizer and configuration of `source_folder`.
        """
        reach("snapshot_taken", step=step_in(folder), rank=self._rank)
        parts, self._taken = self._taken, {}
        assert parts, "snapshot comes first"
        files: dict[str, FileDigest] = {}
        with self._meeting(str(folder)) as group:
            reach("ranks_met", step=step_in(folder), rank=self._rank)
            for inner in list(parts):
                layout, tensors = parts.pop(inner)  # freed once they are on disk
                files |= below(inner, self._write_part(folder / inner, layout, tensors, source_folder, group))
        return files

    def close(self) -> None:
        """Close the connections to the other ranks."""
        if self._group is not None:
            self._group.close()

    def _snapshot_optimizer(self) -> dict[str, tuple[Layout, dict[str, Tensor]]]:
        """Copy the moments, and the master weights if they are more precise than `model/`."""
        layout, shards = self._of.layout, self._of.optimizer.shards()
        if self._shards is None:
            ranges = _all_ranges(shards, self._of.topology)
            self._shards = contribution(restrict_all(layout, ranges, dtype=_DTYPE), self._rank)
        own = self._shards
        kinds: dict[str, dict[str, Tensor]] = {
            kind: {name: shard.moment(kind) for name, shard in shards.items()} for kind in MOMENTS
        }
        if has_own_master(layout):
            kinds[_MASTER] = {name: shard.master for name, shard in shards.items()}
        shapes = {name: spec.shape for name, spec in layout.by_rank[self._rank].tensors.items()}

        def box(values: Mapping[str, Tensor], name: str, offsets: Index, shape: Index) -> Tensor:
            return box_of_range(values[name], shards[name].range, shapes[name], offsets, shape)

        return {
            f"{OPTIMIZER_FOLDER}/{kind}": (own.layout, copy_to_host(own, self._rank, partial(box, values)))
            for kind, values in kinds.items()
        }

    def _write_part(
        self, folder: Path, layout: Layout, tensors: Mapping[str, Tensor], source_folder: Path, group: TransferGroup
    ) -> dict[str, FileDigest]:
        if folder.name != MODEL_FOLDER:
            return save_tensors(folder, layout=layout, tensors=tensors, group=group)
        lora, shape = self._of.spec.lora, self._of.spec.shape
        is_critic, fields = shape.has_value_head, None
        if lora is not None:
            base, modules = source_folder.absolute(), lora.peft_modules(shape)
            fields = lora.peft_fields(base=base, modules=modules, is_critic=is_critic)
        return save_hf(
            folder,
            source_folder=source_folder,
            layout=layout,
            tensors=tensors,
            group=group,
            is_critic=is_critic,
            adapter_fields=fields,
            kept=() if is_critic else family_of(shape).kept,
        )

    @contextmanager
    def _meeting(self, what: str) -> Iterator[TransferGroup]:
        """Yield the group of all ranks, which serves the next meeting too unless this one fails."""
        group, self._group = self._join_group(what), None
        try:
            yield group
        except BaseException as error:
            # Some peers may not have noticed: they learn it when they meet again.
            group.abandon(f"{what} was not saved: {error}")
            raise
        self._group = group

    def _join_group(self, what: str) -> TransferGroup:
        """Meet the other ranks in the group of the save before; in a new one after a save that failed."""
        group = self._group
        if group is not None:
            try:
                group.barrier()
            except WeightSyncError:
                group.close()
                group = None
        if group is None:
            try:
                group = self._join_new()
            except WeightSyncError as error:
                raise CheckpointError(f"{what} was not saved: {error}") from error
        return group

    def _join_new(self) -> TransferGroup:
        """Join a group in which peer r is rank r. Transfers go through host memory: speed does not matter for files."""
        return TransferGroup.join(
            self._of.store,
            name=f"{self._purpose} {self._num_snapshots}",
            peer=self._rank,
            num_peers=self._of.topology.world,
            timeout_s=self._of.spec.timeout_s,
            host=_own_address(self._of.store.host),
        )


def _specs_in(holding: Holding, layout: Layout) -> dict[str, TensorSpec]:
    """Return the canonical tensors of which the holding has a part."""
    names = {piece.slice.name for piece in holding.pieces}
    return {name: spec for name, spec in layout.canonical.items() if name in names}


def _box(tensors: Mapping[str, Tensor], name: str, offsets: Index, shape: Index) -> Tensor:
    return box_of(tensors[name], offsets, shape)


def box_of_range(flat: Tensor, held: FlatRange, tensor_shape: Index, offsets: Index, shape: Index) -> Tensor:
    """Return a view of a box of a tensor of which `flat` has the elements in `held`; the box lies within them."""
    strides = [prod(tensor_shape[axis + 1 :]) for axis in range(len(tensor_shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True)) - held[0]
    last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    assert 0 <= first <= last < flat.numel(), f"elements {first}..{last} of {flat.numel()}"
    flat = flat.detach()
    return flat.as_strided(shape, strides, flat.storage_offset() + first)


def _all_ranges(shards: Mapping[str, Shard], topology: Topology) -> dict[int, dict[str, FlatRange]]:
    """Gather every rank's ranges, which Megatron decides on the rank that holds the parameters."""
    ranges: list[dict[str, FlatRange]] = [{} for _ in range(topology.world)]
    dist.all_gather_object(ranges, {name: shard.range for name, shard in shards.items()})
    return dict(enumerate(ranges))


def _own_address(peer_address: str) -> str:
    """Return the address of this machine from which `peer_address` is reached. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer_address, _ANY_PORT))
        address: str = probe.getsockname()[0]
    return address
