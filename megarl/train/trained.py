"""A rank of a model with an optimizer, the common part of actor and critic: skips updates that are not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.checkpoint.manifest import Contents, FileDigest
from megarl.checkpoint.resume import TrainerState
from megarl.config.roles import OptimizerConfig, TrainedModelConfig
from megarl.config.section import dtype_on
from megarl.errors import NumericsError
from megarl.results import RankUsage
from megarl.train.checkpoint import RankCheckpoints
from megarl.train.lora import attach_adapters, dropout_keys, initialize_adapters
from megarl.train.model import DeviceMicroBatch, named_weights
from megarl.train.offload import build_optimizer
from megarl.train.optimizer import learning_rate
from megarl.train.rank import Loss, ModelRank, Output, run_passes
from megarl.train.rank_spec import RankSpec
from megarl.train.stats import Report
from megarl.types import MiniBatch, TrainBatch
from megarl.weights.executors.tensors import check_holding, specs_of
from megarl.weights.layouts.lora import ADAPTED_HEAD, LoraShape, adapter_layout

MAX_SKIPPED_UPDATES = 3
"""Consecutive ones: a bad batch is skipped, a broken model ends the run."""


class TrainedRank(ModelRank):
    def __init__(
        self, spec: RankSpec, optimizer: OptimizerConfig, *, total_steps: int, beside: TrainedRank | None = None
    ) -> None:
        super().__init__(spec, beside)
        self._trained_layout = self._layout
        if spec.lora is not None:
            dtype = dtype_on(spec.device)
            self._trained_layout = adapter_layout(self._layout, LoraShape.of(spec.lora), dtype=dtype)
            holding = self._trained_layout.by_rank[spec.rank]
            attach_adapters(self._models, holding, spec.lora, device=self._topology.device)
            check_holding(holding, specs_of(self.trained_tensors().items()), holder=f"trainer rank {spec.rank}")
        self._config = optimizer
        self._total_steps = total_steps
        self._num_steps = 0
        self._num_updates = 0
        self._num_skipped = 0
        with self._on_device():
            assert isinstance(spec.split, TrainedModelConfig), "a model that is not trained"
            self._optimizer = build_optimizer(self._models, optimizer, spec.split)
            self._checkpoints = RankCheckpoints(
                spec,
                layout=self._trained_layout,
                tensors=self.trained_tensors,
                optimizer=self._optimizer,
                topology=self._topology,
            )

    def trained_tensors(self) -> dict[str, Tensor]:
        """Return the parameters that are trained, by their names in the layout of a checkpoint."""
        if self._spec.lora is None:
            return self.tensors()
        return {
            name: parameter.data for name, parameter in named_weights(self._models).items() if parameter.requires_grad
        }

    @property
    def _chunks(self) -> Sequence[torch.nn.Module]:
        return self._optimizer.chunks

    @property
    def _step(self) -> int:
        return self._num_steps + 1

    def _to_device(self, batch: TrainBatch, mini_batch: MiniBatch) -> list[DeviceMicroBatch]:
        assert not self._optimizer.is_released, "released; reload comes first"
        return super()._to_device(batch, mini_batch)

    def _learning_rate(self) -> float:
        return learning_rate(self._num_steps, self._config, self._total_steps)

    def _gradients(self, micro_batches: Sequence[DeviceMicroBatch], loss: Loss[Output, Report]) -> list[Report]:
        """Compute the gradients of the sum of all losses; return the reports, [] except on the last stage."""

        def loss_of(index: int, output: Output) -> tuple[Tensor, Report]:
            value, report = loss(index, output)
            return value * torch.nan if self._reach("backward") == "nan" else value, report

        if self._spec.lora is not None and self._spec.lora.dropout:
            for each in micro_batches:
                tokens = each.token_ids[0], each.positions[0]
                each.sequences.dropout_keys = dropout_keys(*tokens, seed=self._spec.seed, update=self._num_updates)
        self._reach("forward")
        self._optimizer.zero_grad()
        return run_passes(self._chunks, micro_batches, loss_of, has_backward=True)

    def _apply(self, loss: float, rate: float) -> float | None:
        """Apply the gradients and return their norm; None, with no weight changed, if norm or loss is not finite."""
        if self._reach("gradients") == "nan":
            self._optimizer.spoil_gradients()
        grad_norm = self._optimizer.grad_norm()
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._reach("optimizer")
            self._optimizer.step(rate)
            self._reach("updated")
            self._num_updates += 1
            self._num_skipped = 0
            return grad_norm
        self._num_skipped += 1
        if self._num_skipped > MAX_SKIPPED_UPDATES:
            raise NumericsError(
                f"step {self._step}: the loss is {loss}, the gradient norm {grad_norm}; "
                f"the {MAX_SKIPPED_UPDATES} updates before it were not finite either; none of them was applied"
            )
        return None

    def _measure_usage(self) -> RankUsage:
        """Return the worst of all ranks since the last call; collective, the same on every rank."""
        device = self._topology.device
        host = psutil.virtual_memory()
        # The maximum of the negated available memory is the minimum over ranks.
        values = [psutil.Process().memory_info().rss, -host.available, host.total]
        gpu_name = None
        if device.type == "cuda":
            gpu_name = torch.cuda.get_device_name(device)
            values += [
                torch.cuda.max_memory_allocated(device),
                torch.cuda.max_memory_reserved(device),
                torch.cuda.mem_get_info(device)[1],
            ]
            torch.cuda.reset_peak_memory_stats(device)
        worst = torch.tensor(values, dtype=torch.int64, device=device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        resident, negated_available, total, *of_gpu = worst.tolist()
        allocated, reserved, gpu_total = of_gpu or (None, None, None)
        return RankUsage(
            resident_bytes=resident,
            host_available_bytes=-negated_available,
            host_total_bytes=total,
            gpu_allocated_bytes=allocated,
            gpu_reserved_bytes=reserved,
            gpu_total_bytes=gpu_total,
            gpu_name=gpu_name,
        )

    def load(self, folder: Path) -> None:
        """Load the weights of a Hugging Face folder; adapters start as the recipe says."""
        super().load(folder)
        lora, rank = self._spec.lora, self._spec.rank
        with self._on_device():
            if lora is not None:
                tensors, layout = self.trained_tensors(), self._trained_layout
                initialize_adapters(tensors, layout, lora, rank=rank, seed=self._spec.seed)
                if lora.path is not None:
                    self._checkpoints.read(lora.path, may_lack=[ADAPTED_HEAD])
            self._optimizer.adopt_weights()

    def release(self) -> None:
        """Free the device until `reload`; meanwhile only saving is allowed, unless nothing is offloaded."""
        with self._on_device():
            self._optimizer.release()

    def trim(self) -> None:
        with self._on_device():
            self._optimizer.trim()

    def reload(self) -> None:
        with self._on_device():
            self._optimizer.reload()

    @property
    def has_weights(self) -> bool:
        """Whether the weights are on the device and can be published from there."""
        return self._optimizer.has_weights

    @property
    def state(self) -> TrainerState:
        return TrainerState(
            num_steps=self._num_steps, num_updates=self._num_updates, num_skipped_in_a_row=self._num_skipped
        )

    def verify(self, checkpoint: Path, inner: str) -> None:
        """Compare tensors that `resume` reads from the inner folder of a checkpoint with their digests."""
        self._checkpoints.verify(checkpoint, inner)

    def resume(self, folder: Path, state: TrainerState) -> None:
        """Continue from a checkpoint of any layout; `state` is what `snapshot` returned for it.

        The base of an adapter is not in the checkpoint: `load` comes first.
        """
        with self._on_device():
            self._checkpoints.restore(folder, num_updates=state.num_updates)
        self._num_steps = state.num_steps
        self._num_updates = state.num_updates
        self._num_skipped = state.num_skipped_in_a_row

    def snapshot(self, contents: Contents) -> TrainerState:
        """Copy the weights and, with contents "everything", the optimizer to host memory; return the current state.

        `write` writes this copy, even if training has continued meanwhile.
        """
        with self._on_device():
            self._checkpoints.saver.snapshot(contents)
        return self.state

    def write(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]:
        """Write the snapshot into a folder, while another thread may train; return this rank's files."""
        if self._topology.device.type == "cuda":
            torch.cuda.set_device(self._topology.device)
        return self._checkpoints.saver.write(folder, source_folder)

    def export(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]:
        """Write the current weights, even while a checkpoint is being written; return this rank's files."""
        with self._on_device():
            self._checkpoints.exporter.snapshot("weights")
        return self._checkpoints.exporter.write(folder, source_folder)

    def close(self) -> None:
        self._checkpoints.close()
        super().close()
