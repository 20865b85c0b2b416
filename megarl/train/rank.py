"""One rank of a model that Megatron splits: its part in this process, and what every model needs.

Every method is collective: all ranks call it, each with the batch of its data-parallel rank. Columns of tokens are
returned by one rank of each data-parallel replica of the model and are None elsewhere; other results are the same on
all ranks. Only `write` may run concurrently with the others, in its own thread. Knows no Ray: `ranks` starts the
processes and sets deadlines.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.data.shares import unpack
from megarl.system.fault_points import Spoil, StepPoint
from megarl.system.faults import reach
from megarl.system.start_log import noted_piece
from megarl.tokens import SampleColumn
from megarl.train import cpu
from megarl.train.build import build_chunks, forget_buffers, forget_scales
from megarl.train.logprob import TokenScores
from megarl.train.model import DeviceMicroBatch, Model, named_weights, to_device, whole_column
from megarl.train.rank_spec import RankSpec
from megarl.train.topology import Topology, free_cache, initialize, shut_down
from megarl.train.tower import Tower
from megarl.types import MiniBatch, TrainBatch
from megarl.weights.executors.hf import load_hf
from megarl.weights.executors.tensors import check_holding, specs_of, torch_dtype
from megarl.weights.layouts.canonical import VALUE_HEAD
from megarl.weights.layouts.lora import LOCAL_A, LOCAL_B
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout

_PRODUCT_CPU, _PRODUCT_GPU = 256, 2048
"""Sizes of the matrices of `measure`: a few milliseconds, and on a GPU 48 MiB."""
_NUM_PRODUCTS = 32

Output = TypeVar("Output")
Result = TypeVar("Result")
Loss = Callable[[int, Output], tuple[Tensor, Result]]
"""(index of the micro-batch, the model's output) -> its part of the loss, and a report."""


class ModelRank:
    """Owns the model's chunks in this process; they have no weights until `load`."""

    ROLE = "reference"

    def __init__(self, spec: RankSpec, beside: ModelRank | None = None) -> None:
        """`beside` is a rank of this process with the same model, whose weights this one computes with as well."""
        self._spec = spec
        self._beside = beside
        self._topology: Topology = self._joined() if beside is None else beside._topology
        with self._on_device(), noted_piece("model"):
            self._models: list[Model] = build_chunks(
                spec.shape,
                self._topology,
                spec.split,
                device=spec.device,
                is_adapted=spec.lora is not None,
                adapts_experts=spec.lora is not None and spec.lora.is_merged,
                has_float32_head=spec.has_float32_head,
            )
        if beside is not None:
            theirs = beside.tensors()
            for name, weight in named_weights(self._models).items():
                weight.data = theirs[name]
            free_cache(self._topology.device)
        if spec.images is not None and spec.shape.vision is not None:
            dtype = torch_dtype(spec.split.dtype_on(spec.device))
            tower = Tower(spec.shape, spec.images, device=self._topology.device, dtype=dtype)
            for model in self._models:
                model.tower = tower
        self._has_columns = self._topology.is_last_stage and self._topology.tensor_rank == 0
        """Whether passes give this rank a column, or its part of one."""
        parallel = MegatronParallel.of(spec.split, data=self._topology.data)
        self._layout = megatron_layout(spec.shape, parallel, dtype=spec.split.dtype_on(spec.device))
        self._holding = self._layout.by_rank[spec.rank]
        check_holding(self._holding, specs_of(self.tensors().items()), holder=f"trainer rank {spec.rank}")

    def _joined(self) -> Topology:
        spec = self._spec
        if spec.device == "cpu":
            cpu.install()
            # One thread: sums must not depend on the number of cores.
            torch.set_num_threads(1)
        with self._on_device(), noted_piece("process groups"):
            return initialize(
                spec.split,
                rank=spec.rank,
                world=spec.world,
                master_address=spec.master_address,
                master_port=spec.master_port,
                listener=spec.listener,
                device=spec.device,
                seed=spec.seed,
                timeout_s=spec.timeout_s,
            )

    def load(self, folder: Path) -> None:
        """Load the weights of a Hugging Face folder; each rank reads only its part.

        A critic may start from a language model; its value head is then zero.
        """
        if self._beside is not None:
            return  # they are those of the other rank
        with noted_piece("weights"):
            self._read(folder, self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters, not copies, by their names in the weights' layout; adapters are not among them."""
        return {
            name: parameter.data
            for name, parameter in named_weights(self._models).items()
            if not name.endswith((LOCAL_A, LOCAL_B))
        }

    def trim(self) -> None:
        """Free the device's memory that only a pass needs, for engines of the same pool; the weights stay."""
        free_cache(self._topology.device)

    def release(self) -> None:
        """Free all memory that the recipe's `offload` says; here that is what `trim` frees."""
        self.trim()

    def reload(self) -> None:
        """Take back what `release` freed; here that is nothing."""

    def measure(self) -> float:
        """Return the seconds of a fixed product of matrices on this rank's device; no other rank takes part."""
        device = self._topology.device
        with self._on_device(), torch.no_grad():
            size = _PRODUCT_CPU if device.type == "cpu" else _PRODUCT_GPU
            factor = torch.full((size, size), 1 / size, device=device)
            result = factor @ factor  # not measured: it loads the kernel
            float(result[0, 0])  # waits for the device
            began = time.monotonic()
            for _ in range(_NUM_PRODUCTS):
                result = factor @ result
            float(result[0, 0])
            return time.monotonic() - began

    def close(self) -> None:
        """Leave the groups of ranks; no method may be called afterwards."""
        if self._beside is not None:
            return
        if self._spec.split.precision == "fp8":
            forget_scales()
        if self._spec.split.dispatcher == "deepep":
            forget_buffers()
        shut_down()

    def _read(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        may_lack = (VALUE_HEAD,) if self._spec.shape.has_value_head else ()
        with self._on_device():
            load_hf(folder, self._holding, self._layout.canonical, tensors, may_lack=may_lack)

    @property
    def _chunks(self) -> Sequence[torch.nn.Module]:
        """The chunks that passes run through."""
        return self._models

    @property
    def _step(self) -> int | None:
        """The number of the step under way, for a model that counts steps."""
        return None

    def _reach(self, point: StepPoint) -> Spoil | None:
        return reach(point, step=self._step, rank=self._spec.rank, of=self.ROLE)

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        return cpu.literal_devices() if self._spec.device == "cpu" else contextlib.nullcontext()

    def _column(self, batch: TrainBatch) -> SampleColumn | None:
        """Return the model's column of the response tokens: log-probabilities, values, or scores of a teacher."""
        with self._on_device():
            return self._unpack(batch, self._forward(batch))

    def _forward(self, batch: TrainBatch) -> list[list[Tensor]]:
        """Return the model's column per mini-batch and micro-batch, on the last stage; [] per mini-batch elsewhere."""
        self._reach("asked")
        columns = []
        for mini_batch in batch.mini_batches:
            micro_batches = self._to_device(batch, mini_batch)
            with torch.no_grad():
                outputs: list[TokenScores | Tensor] = run_passes(
                    self._chunks, micro_batches, _no_loss, has_backward=False
                )
            columns.append([each.logprobs if isinstance(each, TokenScores) else each for each in outputs])
        return columns

    def _to_device(self, batch: TrainBatch, mini_batch: MiniBatch) -> list[DeviceMicroBatch]:
        """Copy the micro-batches to this rank's device; of long sequences it has its part."""
        return [
            to_device(micro_batch, self._topology, temperature=batch.temperature)
            for micro_batch in mini_batch.micro_batches
        ]

    def _unpack(self, batch: TrainBatch, columns: Sequence[Sequence[Tensor]]) -> SampleColumn | None:
        topology = self._topology
        if not self._has_columns:
            return None
        # Ranks that share sequences gather their parts; one of them returns the whole.
        whole = [
            [
                whole_column(column, micro_batch, topology)
                for column, micro_batch in zip(of_share, mini_batch.micro_batches, strict=True)
            ]
            for of_share, mini_batch in zip(columns, batch.mini_batches, strict=True)
        ]
        return unpack(batch, whole) if topology.context_rank == 0 else None


def run_passes(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[DeviceMicroBatch],
    loss: Loss[Output, Result],
    *,
    has_backward: bool,
) -> list[Result]:
    """Run micro-batches through Megatron's pipeline schedule; return the reports in order, [] but on the last stage.

    The gradients are those of the sum of all losses over ranks.
    """

    def forward_step(indices: Iterator[int], model: torch.nn.Module) -> tuple[object, object]:
        index = next(indices)

        def loss_of(output: Output) -> tuple[Tensor, Tensor, Result]:
            value, report = loss(index, output)
            # Megatron sums the second one, a number of tokens; `optimizer` ignores the sum.
            return value, torch.zeros((), dtype=torch.int), report

        return model(micro_batches[index]), loss_of

    reports: list[Result] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(range(len(micro_batches))) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=micro_batches[0].num_pack_tokens,
        micro_batch_size=1,
        forward_only=not has_backward,
    )
    return reports


def _no_loss(_: int, output: Output) -> tuple[Tensor, Output]:
    """Stand in for a loss: without one Megatron reads the device of the output if there are experts."""
    return torch.zeros(()), output
