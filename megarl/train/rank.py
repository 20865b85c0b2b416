"""One trainer rank: the policy's share in this process, and the operations all ranks perform together.

Every method is collective: all ranks call it with the same arguments and get the same answer. Knows no Ray; who
starts the processes and whether a rank is late is not decided here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.algo.loss import PolicyTokens
from megarl.algo.monitor import MismatchMonitor
from megarl.algo.objective import actor_loss
from megarl.algo.segments import Segments
from megarl.checkpoint.manifest import Contents, FileDigest
from megarl.checkpoint.state import TrainerState
from megarl.config.algorithm import AlgorithmConfig, SftConfig
from megarl.config.model import ModelShape
from megarl.config.recipe import ActorConfig, OptimizerConfig
from megarl.data.packing import unpack_logprobs
from megarl.errors import NumericsError
from megarl.train import cpu
from megarl.train.checkpoint import load_optimizer, save_optimizer, save_weights, weights_of
from megarl.train.logprob import TokenScores
from megarl.train.micro_batch import DeviceMicroBatch, to_device
from megarl.train.model import build_chunks
from megarl.train.optimizer import PolicyOptimizer
from megarl.train.passes import accumulate_gradients, score
from megarl.train.peers import peer_group
from megarl.train.schedule import learning_rate
from megarl.train.stats import (
    MicroBatchReport,
    MiniBatchStats,
    gather_logprobs,
    reduce_reports,
    report,
    summarise,
)
from megarl.train.topology import Device, initialize, shut_down
from megarl.types import FloatArray, MiniBatch, PolicyVersion, TrainBatch, UpdateResult
from megarl.weights.check import check_holding
from megarl.weights.hf import load_hf
from megarl.weights.megatron import MegatronParallel, megatron_layout
from megarl.weights.tensors import specs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """Everything a rank is told when it starts."""

    rank: int
    world: int
    master_address: str
    master_port: int
    """Of rank 0; every rank meets there."""
    device: Device
    actor: ActorConfig
    shape: ModelShape
    optimizer: OptimizerConfig
    algorithm: AlgorithmConfig
    total_steps: int
    seed: int
    timeout_s: float
    """Deadline of every wait for another rank."""


class TrainerRank:
    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._monitor = MismatchMonitor(spec.algorithm)
        self._num_steps = 0
        self._num_updates = 0
        if spec.device == "cpu":
            cpu.install()
            # Sums then do not depend on the number of cores.
            torch.set_num_threads(1)
        with self._on_device():
            self._topology = initialize(
                spec.actor,
                rank=spec.rank,
                world=spec.world,
                master_address=spec.master_address,
                master_port=spec.master_port,
                device=spec.device,
                seed=spec.seed,
                timeout_s=spec.timeout_s,
            )
            chunks = build_chunks(
                spec.shape,
                self._topology,
                is_sequence_parallel=spec.actor.is_sequence_parallel,
                device=spec.device,
                native=spec.actor.megatron,
            )
            self._optimizer = PolicyOptimizer(chunks, spec.optimizer)
        self._layout = megatron_layout(
            spec.shape,
            MegatronParallel(
                tensor=spec.actor.tensor,
                pipeline=spec.actor.pipeline,
                virtual_pipeline=spec.actor.virtual_pipeline,
                data=self._topology.data,
            ),
            dtype="float32" if spec.device == "cpu" else "bfloat16",
        )
        self._holding = self._layout.by_rank[spec.rank]
        check_holding(
            self._holding,
            specs_of(self.tensors().items()),
            holder=f"trainer rank {spec.rank}",
        )

    def load(self, folder: Path) -> None:
        """Take the weights of a Hugging Face folder, before the first update; each rank reads what it holds."""
        self._load_weights(folder)

    def resume(self, folder: Path, state: TrainerState) -> None:
        """Go on from a checkpoint, whatever layout wrote it; `state` is what its `save` answered."""
        self._load_weights(weights_of(folder))
        with self._on_device():
            load_optimizer(
                folder,
                holding=self._holding,
                layout=self._layout,
                optimizer=self._optimizer,
                num_updates=state.num_updates,
            )
        self._num_steps, self._num_updates = state.num_steps, state.num_updates
        self._monitor = MismatchMonitor(self._spec.algorithm, state.monitor)

    def update(self, batch: TrainBatch, *, wants_logprobs: bool = False) -> UpdateResult:
        """One step: an optimizer update per mini-batch, all with ratios to the policy as it was before the first."""
        rate = learning_rate(self._num_steps, self._spec.optimizer, self._spec.total_steps)
        is_single = len(batch.mini_batches) == 1
        with self._on_device():
            old = [] if is_single else [self._score(item, batch.temperature) for item in batch.mini_batches]
            stats, grad_norms = [], []
            for index, mini_batch in enumerate(batch.mini_batches):
                before = None if is_single else old[index]
                reports, mini_batch_stats = self._accumulate(mini_batch, batch.temperature, before)
                grad_norms.append(self._optimizer.step(rate))
                self._num_updates += 1
                stats.append(mini_batch_stats)
                if is_single:
                    old.append([item.logprobs for item in reports])
            logprobs = self._unpack(batch, old) if wants_logprobs else None
        self._num_steps += 1
        update_stats = summarise(batch.mini_batches, stats, grad_norms, rate)
        return UpdateResult(
            version=PolicyVersion(self._num_updates),
            stats=update_stats,
            logprobs=logprobs,
            warnings=self._monitor.observe(update_stats.mismatch_mean),
        )

    def logprobs(self, batch: TrainBatch) -> tuple[FloatArray, ...]:
        """Per sample, of its response tokens, under the weights as they are."""
        with self._on_device():
            return self._unpack(batch, [self._score(item, batch.temperature) for item in batch.mini_batches])

    def tensors(self) -> dict[str, Tensor]:
        """The parameters themselves, by the names the weights' layout knows them by."""
        return {name: parameter.data for name, parameter in self._optimizer.parameters().items()}

    @property
    def state(self) -> TrainerState:
        return TrainerState(num_steps=self._num_steps, num_updates=self._num_updates, monitor=self._monitor.state)

    def save(self, folder: Path, source_folder: Path, contents: Contents) -> dict[str, FileDigest]:
        """Write the weights and, asked for everything, the optimizer into a folder; returns what this rank wrote.

        `model/` gets the tokenizer and configuration of `source_folder`.
        """
        with (
            peer_group(self._topology, self._spec.master_address, name="save", timeout_s=self._spec.timeout_s) as group,
            self._on_device(),
        ):
            files = save_weights(
                folder, source_folder=source_folder, layout=self._layout, tensors=self.tensors(), group=group
            )
            if contents == "everything":
                files |= save_optimizer(folder, layout=self._layout, optimizer=self._optimizer, group=group)
        return files

    def close(self) -> None:
        """Leave the other ranks; nothing else may be called after."""
        shut_down()

    def _load_weights(self, folder: Path) -> None:
        with self._on_device():
            load_hf(folder, self._holding, self._layout.canonical, self.tensors())
            self._optimizer.adopt_weights()

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        return cpu.literal_devices() if self._spec.device == "cpu" else contextlib.nullcontext()

    def _accumulate(
        self, mini_batch: MiniBatch, temperature: float, old_logprobs: Sequence[Tensor] | None
    ) -> tuple[list[MicroBatchReport], MiniBatchStats]:
        """Gradients of one mini-batch's loss; raises before they are used if the loss is not finite."""
        algorithm = self._monitor.algorithm
        micro_batches = self._share(mini_batch)

        def loss(index: int, scores: TokenScores) -> tuple[Tensor, MicroBatchReport]:
            micro_batch = micro_batches[index]
            tokens = PolicyTokens(
                logprobs=scores.logprobs,
                entropy=scores.entropy,
                old_logprobs=scores.logprobs.detach() if old_logprobs is None else old_logprobs[index],
                rollout_logprobs=micro_batch.rollout_logprobs,
                advantages=micro_batch.advantages,
                segments=Segments.of(micro_batch.loss_mask, micro_batch.sequences.starts),
            )
            actor = actor_loss(
                algorithm,
                tokens,
                num_loss_tokens=mini_batch.num_loss_tokens,
                num_sequences=mini_batch.num_sequences,
            )
            return actor.value, report(tokens, actor, is_from_engine=not isinstance(algorithm, SftConfig))

        self._optimizer.zero_grad()
        reports = accumulate_gradients(self._optimizer.chunks, micro_batches, temperature=temperature, loss=loss)
        stats = reduce_reports(reports, mini_batch, self._topology)
        if not math.isfinite(stats.loss):
            raise NumericsError(
                f"step {self._num_steps}: the loss is {stats.loss} over {mini_batch.num_loss_tokens} tokens; "
                f"this update was not applied"
            )
        self._monitor.stop_above(stats.mismatch_mean)
        return reports, stats

    def _score(self, mini_batch: MiniBatch, temperature: float) -> list[Tensor]:
        scores = score(self._optimizer.chunks, self._share(mini_batch), temperature=temperature)
        return [item.logprobs for item in scores]

    def _share(self, mini_batch: MiniBatch) -> list[DeviceMicroBatch]:
        return [
            to_device(micro_batch, self._topology.device) for micro_batch in mini_batch.shares[self._topology.data_rank]
        ]

    def _unpack(self, batch: TrainBatch, logprobs: Sequence[Sequence[Tensor]]) -> tuple[FloatArray, ...]:
        arrays = []
        for mini_batch, of_share in zip(batch.mini_batches, logprobs, strict=True):
            share = mini_batch.shares[self._topology.data_rank]
            shape = (len(share), len(share[0].token_ids))
            arrays.append(gather_logprobs(of_share, shape, self._topology).cpu().numpy())
        return unpack_logprobs(batch, arrays)
