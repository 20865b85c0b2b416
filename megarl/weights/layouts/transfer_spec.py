"""One transfer, from a trainer's layout to engines: every process computes the same plan from its description. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megarl.families import family_of
from megarl.families.shape import ModelShape
from megarl.weights.algebra.plan import Plan, plan
from megarl.weights.algebra.slices import Gpu, Layout, Link, Locations, on_gpus
from megarl.weights.layouts.fp8 import fp8_engine_layout, fp8_trainer_layout
from megarl.weights.layouts.lora import LoraShape, adapter_layout, served_layout
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout
from megarl.weights.layouts.sglang import sglang_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSpec:
    """The trainer's layout, the engines' layout, and the GPU of each rank."""

    shape: ModelShape
    parallel: MegatronParallel
    trainer_dtype: str
    num_engines: int
    tensor: int
    """TP ranks of each engine."""
    engine_dtype: str
    is_cpu_engine: bool
    expert: int = 1
    """Sets that an engine's experts are divided into."""
    shares_devices: bool = False
    """Whether both roles are in one pool: each GPU then has a trainer rank and an engine rank."""
    trainer_gpus: tuple[Gpu, ...] = ()
    """GPU of each source rank; empty: a node each."""
    engine_gpus: tuple[Gpu, ...] = ()
    """GPU of each target rank; empty: a node each, with `shares_devices` that of the same trainer rank."""
    relays: bool = False
    """Whether nodes of engines forward weights to each other."""
    keeps_open: bool = True
    """Whether engines keep the trainer's memory open between publishes; the trainer cannot free it meanwhile."""
    farthest_read: Link = Link.NODE
    """The farthest link over which memory of another process can be opened; nearer than NODE where that has failed."""
    fp8_keep: tuple[str, ...] | None = None
    """Patterns of the modules in `engine_dtype` beside FP8 weights; None: no weights are in FP8."""
    lora: LoraShape | None = None
    """The adapter that is sent; None: the weights are."""

    @property
    def direct(self) -> Link:
        """The farthest link over which an engine rank reads the memory of a trainer rank.

        GPUs of a node read each other (CUDA IPC). CPU ranks that share no device stand for ranks on different nodes.
        """
        if self.is_cpu_engine and not self.shares_devices:
            return Link.PROCESS
        return min(self.farthest_read, Link.DEVICE if self.is_cpu_engine else Link.NODE)

    @property
    def unplanned(self) -> tuple[str, ...]:
        """Beginnings of the names of parameters that engines have loaded and keep."""
        return family_of(self.shape).engine.unplanned

    @property
    def num_targets(self) -> int:
        return self.num_engines * self.tensor

    @property
    def num_peers(self) -> int:
        return self.parallel.world_size + self.num_targets

    def target_rank(self, *, engine: int, tp_rank: int) -> int:
        """The plan's number of a TP rank; `engine` counts within the engines of this transfer."""
        return engine * self.tensor + tp_rank

    def peer(self, target_rank: int) -> int:
        """The number of a target rank in the transfer group, where trainer ranks come first."""
        return self.parallel.world_size + target_rank

    def engine_layout(self) -> Layout:
        layout = sglang_layout(
            self.shape,
            tensor=self.tensor,
            expert=self.expert,
            num_engines=self.num_engines,
            dtype=self.engine_dtype,
            is_cpu_engine=self.is_cpu_engine,
        )
        if self.lora is not None:
            return served_layout(layout, self.lora)
        return layout if self.fp8_keep is None else fp8_engine_layout(layout, self.shape, self.fp8_keep)

    def trainer_layout(self) -> Layout:
        """The tensors that trainer ranks send: adapters, or weights and the FP8 tensors that they derive."""
        layout = megatron_layout(self.shape, self.parallel, dtype=self.trainer_dtype)
        if self.lora is not None:
            return adapter_layout(layout, self.lora)
        return layout if self.fp8_keep is None else fp8_trainer_layout(layout, self.fp8_keep)

    def with_engines(self, positions: Sequence[int]) -> TransferSpec:
        """The transfer to the engines at `positions` only, in this order; each keeps its GPUs."""
        if [*positions] == [*range(self.num_engines)]:
            return self
        gpus = self._gpus_of_engines()
        chosen = [gpus[position * self.tensor : (position + 1) * self.tensor] for position in positions]
        return replace(self, num_engines=len(positions), engine_gpus=tuple(gpu for few in chosen for gpu in few))

    def plan(self) -> Plan:
        """The plan, cached for the last few transfers: engines come and go, and often come back."""
        return _cached_plan(self)

    def locations(self) -> Locations:
        trainers = self.trainer_gpus or tuple((rank, 0) for rank in range(self.parallel.world_size))
        engines = self._gpus_of_engines()
        expected = (self.parallel.world_size, self.num_targets)
        assert (len(trainers), len(engines)) == expected, f"{len(trainers)} and {len(engines)} GPUs, {expected} ranks"
        return on_gpus(trainers, engines)

    def _gpus_of_engines(self) -> tuple[Gpu, ...]:
        first = 0 if self.shares_devices else self.parallel.world_size
        return self.engine_gpus or tuple((first + rank, 0) for rank in range(self.num_targets))


@lru_cache(maxsize=8)
def _cached_plan(transfer: TransferSpec) -> Plan:
    locations, relays = transfer.locations(), transfer.relays
    return plan(transfer.trainer_layout(), transfer.engine_layout(), locations=locations, relays=relays)
