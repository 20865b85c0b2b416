"""This rank's place among the others, and the memory of its device.

The only file that starts torch.distributed or asks Megatron for ranks. Ranks are numbered tensor fastest, then context,
data, pipeline: neighbours share a node and exchange most.
"""

from __future__ import annotations

import datetime
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import TCPStore

from megarl.config.roles import ModelParallelConfig
from megarl.config.section import Device
from megarl.errors import MachineError, first_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A snapshot of ranks and groups; the groups exist until `shut_down`."""

    rank: int
    world: int
    tensor_rank: int
    tensor: int
    context_rank: int
    context: int
    pipeline_rank: int
    pipeline: int
    virtual_pipeline: int
    data_rank: int
    data: int
    tensor_group: dist.ProcessGroup
    context_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup
    """The ranks with the same parameters outside of experts: context x data."""
    device: torch.device

    def is_first_chunk(self, chunk: int) -> bool:
        """Whether this rank's model chunk holds the embedding."""
        return self.pipeline_rank == 0 and chunk == 0

    def is_last_chunk(self, chunk: int) -> bool:
        """Whether this rank's model chunk computes the log-probabilities."""
        return self.is_last_stage and chunk == self.virtual_pipeline - 1

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    @property
    def returns_columns(self) -> bool:
        """Whether this rank returns the columns of its share: one of the ranks with the same share does."""
        return self.is_last_stage and self.tensor_rank == self.context_rank == 0

    def sum_over_context(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks that share each sequence; its gradient is summed over them as well."""
        summed: Tensor = _SumOverRanks.apply(values, self.context_group)  # type: ignore[no-untyped-call]
        return summed


class _SumContext(FunctionCtx):
    group: dist.ProcessGroup


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _SumContext, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(values, group)

    @staticmethod
    def backward(ctx: _SumContext, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


def _summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def initialize(
    split: ModelParallelConfig,
    *,
    rank: int,
    world: int,
    master_address: str,
    master_port: int,
    listener: int | None = None,
    device: Device,
    seed: int,
    timeout_s: float,
) -> Topology:
    """Rendezvous with the other ranks, build Megatron's groups, seed its random states. Every later wait ends after
    `timeout_s`. `listener` as in `RankSpec`."""
    assert world % split.model_parallel == 0, f"{world} ranks, {split.model_parallel} per model"
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store = _rendezvous_store(
            master_address, master_port, rank=rank, world=world, timeout=timeout, listener=listener
        )
        dist.init_process_group(
            backend="gloo" if device == "cpu" else "nccl", store=store, rank=rank, world_size=world, timeout=timeout
        )
    except (dist.DistError, OSError) as error:
        raise MachineError(
            f"trainer rank {rank} of {world} could not join the other ranks at {master_address}:{master_port} "
            f"within {timeout_s:g} s: {first_line(error)}"
        ) from None
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=split.tensor,
        context_parallel_size=split.context,
        pipeline_model_parallel_size=split.pipeline,
        virtual_pipeline_model_parallel_size=split.virtual_pipeline if split.virtual_pipeline > 1 else None,
        expert_model_parallel_size=split.expert,
        expert_tensor_parallel_size=split.expert_tensor,
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    cuda_or_cpu = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    return joined_topology(split, rank=rank, world=world, device=cuda_or_cpu)


def joined_topology(split: ModelParallelConfig, *, rank: int, world: int, device: torch.device) -> Topology:
    """Return the place of a rank in the groups that Megatron has built."""
    return Topology(
        rank=rank,
        world=world,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor=split.tensor,
        context_rank=parallel_state.get_context_parallel_rank(),
        context=split.context,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline=split.pipeline,
        virtual_pipeline=split.virtual_pipeline,
        data_rank=parallel_state.get_data_parallel_rank(),
        data=parallel_state.get_data_parallel_world_size(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        context_group=parallel_state.get_context_parallel_group(),
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
        replica_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        device=device,
    )


def _rendezvous_store(
    address: str, port: int, *, rank: int, world: int, timeout: datetime.timedelta, listener: int | None
) -> TCPStore:
    """Connect to the store of rank 0, which listens on this address only; by default it would on every interface."""
    if rank > 0:
        return TCPStore(address, port, world_size=world, is_master=False, timeout=timeout)
    if listener is None:
        listener = socket.create_server((address, port), backlog=1024).detach()
    return TCPStore(address, port, world_size=world, is_master=True, timeout=timeout, master_listen_fd=listener)


def shut_down() -> None:
    """Leave the groups. A process that never joined may call it."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything that was submitted."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_cache(device: torch.device) -> None:
    """Give back the memory that torch keeps for later: other processes of the device need it now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
