"""A model with an optimizer: what the actor and the critic have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from megarl.checkpoint.manifest import Contents, FileDigest
from megarl.checkpoint.state import TrainerState
from megarl.config.recipe import OptimizerConfig
from megarl.errors import NumericsError
from megarl.train.checkpoint import load_optimizer, save_optimizer, save_weights, weights_of
from megarl.train.optimizer import ModelOptimizer
from megarl.train.peers import peer_group
from megarl.train.rank import ModelRank, RankSpec
from megarl.train.schedule import learning_rate
from megarl.types import MiniBatch, TrainBatch

MAX_SKIPPED_UPDATES = 3
"""In a row: one bad batch is survived, a broken model is not trained on."""


class TrainedRank(ModelRank):
    def __init__(self, spec: RankSpec, optimizer: OptimizerConfig, *, total_steps: int) -> None:
        super().__init__(spec)
        self._config = optimizer
        self._total_steps = total_steps
        self._num_steps = 0
        self._num_updates = 0
        self._num_skipped = 0
        with self._on_device():
            self._optimizer = ModelOptimizer(self._models, optimizer)

    def load(self, folder: Path) -> None:
        super().load(folder)
        with self._on_device():
            self._optimizer.adopt_weights()

    def resume(self, folder: Path, state: TrainerState) -> None:
        """Go on from a checkpoint, whatever layout wrote it; `state` is what its `save` found."""
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

    @property
    def state(self) -> TrainerState:
        return TrainerState(
            num_steps=self._num_steps, num_updates=self._num_updates, num_skipped_in_a_row=self._num_skipped
        )

    def save(self, folder: Path, source_folder: Path, contents: Contents) -> dict[str, FileDigest]:
        """Write the weights and, asked for everything, the optimizer into a folder; returns what this rank wrote.

        `model/` gets the tokenizer and configuration of `source_folder`.
        """
        with (
            peer_group(self._topology, self._spec.master_address, name="save", timeout_s=self._spec.timeout_s) as group,
            self._on_device(),
        ):
            files = save_weights(
                folder,
                source_folder=source_folder,
                layout=self._layout,
                tensors=self.tensors(),
                group=group,
                is_critic=self._spec.shape.has_value_head,
            )
            if contents == "everything":
                files |= save_optimizer(folder, layout=self._layout, optimizer=self._optimizer, group=group)
        return files

    def _learning_rate(self) -> float:
        return learning_rate(self._num_steps, self._config, self._total_steps)

    def _apply(self, loss: float, rate: float) -> float | None:
        """The update whose gradients are there; answers with their norm. One that is not finite changes no weight."""
        grad_norm = self._optimizer.grad_norm()
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._optimizer.step(rate)
            self._num_updates += 1
            self._num_skipped = 0
            return grad_norm
        self._num_skipped += 1
        if self._num_skipped > MAX_SKIPPED_UPDATES:
            raise NumericsError(
                f"step {self._num_steps + 1}: the loss is {loss}, the gradient norm {grad_norm}; "
                f"{MAX_SKIPPED_UPDATES} updates before it were not finite either, and none of them was applied"
            )
        return None


def in_epochs(
    batch: TrainBatch, old: Sequence[Sequence[Tensor]], *, epochs: int
) -> list[tuple[MiniBatch, Sequence[Tensor] | None]]:
    """Every update of a step: its mini-batch, and what `old` has of it, if anything."""
    pairs = [(item, old[index] if old else None) for index, item in enumerate(batch.mini_batches)]
    return pairs * epochs
