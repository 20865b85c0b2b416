"""A rank of a model with an optimizer: the common part of actor and critic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megarl.checkpoint.manifest import Contents, FileDigest, verify_tensors
from megarl.checkpoint.save import assign_tensors
from megarl.checkpoint.state import TrainerState
from megarl.config.roles import OptimizerConfig, TrainedModelConfig
from megarl.errors import NumericsError
from megarl.train.checkpoint import Peers, RankSaver, folders_read, load_optimizer, weights_of
from megarl.train.model import DeviceMicroBatch
from megarl.train.optimizer import ModelOptimizer, learning_rate
from megarl.train.passes import Loss, Output, accumulate_gradients
from megarl.train.rank import ModelRank, RankSpec
from megarl.train.stats import Report
from megarl.types import MiniBatch, TrainBatch

_VERIFYING_THREADS = 4
"""A node has several ranks."""
MAX_SKIPPED_UPDATES = 3
"""Consecutive ones: a bad batch is skipped, a broken model ends the run."""


class TrainedRank(ModelRank):
    def __init__(self, spec: RankSpec, optimizer: OptimizerConfig, *, total_steps: int) -> None:
        super().__init__(spec)
        self._config = optimizer
        self._total_steps = total_steps
        self._num_steps = 0
        self._num_updates = 0
        self._num_skipped = 0
        with self._on_device():
            assert isinstance(spec.split, TrainedModelConfig), "a model that is not trained"
            self._optimizer = ModelOptimizer(self._models, optimizer, spec.split)
            peers = Peers(self._topology, spec.master_address, timeout_s=spec.timeout_s)
            self._saver, self._exporter = (
                RankSaver(
                    layout=self._layout,
                    tensors=self.tensors,
                    optimizer=self._optimizer,
                    topology=self._topology,
                    peers=peers,
                    is_critic=spec.shape.has_value_head,
                    purpose=purpose,
                )
                for purpose in ("save", "export")
            )

    def load(self, folder: Path) -> None:
        super().load(folder)
        with self._on_device():
            self._optimizer.adopt_weights()

    def verify(self, checkpoint: Path, inner: str) -> None:
        """Compare tensors that `resume` reads from the inner folder of a checkpoint with their digests.

        Each tensor is compared by one of the ranks that read it, so that all ranks together compare all of them once.
        """
        folder = checkpoint / inner
        mine = assign_tensors(self._layout).by_rank[self._spec.rank].tensors
        read = (each.relative_to(checkpoint).as_posix() for each in folders_read(folder))
        verify_tensors(checkpoint, frozenset(read), mine, num_threads=_VERIFYING_THREADS)

    def resume(self, folder: Path, state: TrainerState) -> None:
        """Continue from a checkpoint of any layout; `state` is what `snapshot` returned for it."""
        self.load(weights_of(folder))
        with self._on_device():
            load_optimizer(
                folder,
                holding=self._holding,
                layout=self._layout,
                optimizer=self._optimizer,
                num_updates=state.num_updates,
            )
        self._num_steps, self._num_updates = state.num_steps, state.num_updates
        self._num_skipped = state.num_skipped_in_a_row

    def close(self) -> None:
        self._saver.close()
        self._exporter.close()
        super().close()

    @property
    def state(self) -> TrainerState:
        return TrainerState(
            num_steps=self._num_steps, num_updates=self._num_updates, num_skipped_in_a_row=self._num_skipped
        )

    def release(self) -> None:
        """Free the device until `reload`; meanwhile only saving is allowed, unless nothing is offloaded."""
        with self._on_device():
            self._optimizer.release()

    def trim(self) -> None:
        with self._on_device():
            self._optimizer.trim()

    @property
    def has_weights(self) -> bool:
        """Whether the weights are on the device and can be published from there."""
        return self._optimizer.has_weights

    def reload(self) -> None:
        with self._on_device():
            self._optimizer.reload()

    def snapshot(self, contents: Contents) -> TrainerState:
        """Copy the weights and, with contents "everything", the optimizer to host memory; return the current state.

        `write` writes this copy, even if training has continued meanwhile.
        """
        with self._on_device():
            self._saver.snapshot(contents)
        return self.state

    def write(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]:
        """Write the snapshot into a folder, while another thread may train; return this rank's files."""
        if self._topology.device.type == "cuda":
            torch.cuda.set_device(self._topology.device)
        return self._saver.write(folder, source_folder)

    def export(self, folder: Path, source_folder: Path) -> dict[str, FileDigest]:
        """Write the current weights, even while a checkpoint is being written; return this rank's files."""
        with self._on_device():
            self._exporter.snapshot("weights")
        return self._exporter.write(folder, source_folder)

    def _share(self, batch: TrainBatch, mini_batch: MiniBatch) -> list[DeviceMicroBatch]:
        assert not self._optimizer.is_released, "released; reload comes first"
        return super()._share(batch, mini_batch)

    def _learning_rate(self) -> float:
        return learning_rate(self._num_steps, self._config, self._total_steps)

    def _gradients(self, micro_batches: Sequence[DeviceMicroBatch], loss: Loss[Output, Report]) -> list[Report]:
        """Compute the gradients of the sum of all losses; return the reports, [] except on the last stage."""
        step = self._num_steps + 1

        def loss_of(index: int, output: Output) -> tuple[Tensor, Report]:
            value, report = loss(index, output)
            return value * torch.nan if self._reach("backward", step=step) == "nan" else value, report

        self._reach("forward", step=step)
        self._optimizer.zero_grad()
        return accumulate_gradients(self._optimizer.chunks, micro_batches, loss=loss_of)

    def _apply(self, loss: float, rate: float) -> float | None:
        """Apply the gradients and return their norm; None, with no weight changed, if norm or loss is not finite."""
        step = self._num_steps + 1
        if self._reach("gradients", step=step) == "nan":
            self._optimizer.spoil_gradients()
        grad_norm = self._optimizer.grad_norm()
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._reach("optimizer", step=step)
            self._optimizer.step(rate)
            self._reach("updated", step=step)
            self._num_updates += 1
            self._num_skipped = 0
            return grad_norm
        self._num_skipped += 1
        if self._num_skipped > MAX_SKIPPED_UPDATES:
            raise NumericsError(
                f"step {step}: the loss is {loss}, the gradient norm {grad_norm}; "
                f"the {MAX_SKIPPED_UPDATES} updates before it were not finite either; none of them was applied"
            )
        return None
