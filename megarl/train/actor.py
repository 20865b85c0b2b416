"""A rank of the actor: updates the policy and computes log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megarl.algo.loss import PolicyTokens
from megarl.algo.objective import MismatchMonitor, actor_loss
from megarl.checkpoint.resume import TrainerState
from megarl.config.algorithm import AlgorithmConfig, KlLossConfig
from megarl.config.roles import OptimizerConfig
from megarl.results import UpdateResult, UpdateStats
from megarl.tokens import SampleColumn
from megarl.train.frozen import Reference
from megarl.train.logprob import TokenScores
from megarl.train.rank_spec import RECORD_PREFIX, RankSpec, TrainerRecord
from megarl.train.recording import recorded
from megarl.train.routing import routing_stats
from megarl.train.stats import ACTOR, ActorTokens, MiniBatchStats, Report
from megarl.train.trained import TrainedRank
from megarl.types import DEMONSTRATION, MiniBatch, PolicyVersion, TrainBatch
from megarl.weights.recordings import weight_digests


class ActorRank(TrainedRank):
    ROLE = "actor"

    def __init__(
        self,
        spec: RankSpec,
        *,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        total_steps: int,
        epochs: int = 1,
        beside: ActorRank | None = None,
    ) -> None:
        super().__init__(spec, optimizer, total_steps=total_steps, beside=beside)
        self._algorithm = algorithm
        self._is_from_engine = algorithm.needs.has_engines
        self._epochs = epochs
        self._dtype = spec.split.dtype_on(spec.device)
        self._monitor = MismatchMonitor(algorithm, self._dtype)
        self._reference = Reference(self._models, is_base=spec.lora is not None)

    def update(self, batch: TrainBatch) -> UpdateResult:
        """Update once per mini-batch and epoch, with ratios to the policy before the first update."""
        rate = self._learning_rate()
        version = self._num_updates
        is_single = len(batch.mini_batches) * self._epochs == 1
        applied: list[tuple[MiniBatch, MiniBatchStats, float]] = []
        with self._on_device():
            # Old log-probabilities are not needed for a single update, whose ratio is 1, and may come with the batch.
            is_known = is_single or batch.mini_batches[0].micro_batches[0].old_logprobs is not None
            befores = [None] * len(batch.mini_batches) if is_known else self._forward(batch)
            updates = list(zip(batch.mini_batches, befores, strict=True)) * self._epochs
            for mini_batch, before in updates:
                stats = self._accumulate(batch, mini_batch, before, is_single=is_single, version=version)
                engine_mismatch = stats.values["engine_mismatch"]
                if engine_mismatch is not None:
                    self._monitor.stop_above(engine_mismatch)
                grad_norm = self._apply(stats.loss, rate)
                if grad_norm is not None:
                    applied.append((mini_batch, stats, grad_norm))
            usage = self._measure_usage()
        self._num_steps += 1
        summary = self._summarise(applied, rate) if applied else None
        if self._spec.shape.experts is not None:
            routing = routing_stats(self._models, batch, self._spec.shape.num_layers, self._topology)
            summary = summary and replace(summary, **routing)
        return UpdateResult(
            version=PolicyVersion(self._num_updates),
            stats=summary,
            num_skipped_updates=len(updates) - len(applied),
            usage={"actor": usage},
            warnings=()
            if summary is None or summary.engine_mismatch is None
            else self._monitor.observe(summary.engine_mismatch),
        )

    def _accumulate(
        self,
        batch: TrainBatch,
        mini_batch: MiniBatch,
        recomputed: Sequence[Tensor] | None,
        *,
        is_single: bool,
        version: int,
    ) -> MiniBatchStats:
        """Compute the gradients of one mini-batch's loss; `version` is the policy's before the step."""
        algorithm = self._monitor.algorithm
        micro_batches = self._to_device(batch, mini_batch)

        def loss(index: int, output: TokenScores | Tensor) -> tuple[Tensor, Report]:
            micro_batch, scores = micro_batches[index], _scores_of(output)
            versions, rollout_logprobs = micro_batch.versions, micro_batch.rollout_logprobs
            old_logprobs = micro_batch.old_logprobs if recomputed is None else recomputed[index]
            if is_single or old_logprobs is None:
                old_logprobs = scores.logprobs.detach()
            if versions is not None:
                # No engine sampled a demonstration.
                rollout_logprobs = torch.where(versions == DEMONSTRATION, old_logprobs, rollout_logprobs)
            tokens = PolicyTokens(
                logprobs=scores.logprobs,
                entropy=scores.entropy,
                old_logprobs=old_logprobs,
                rollout_logprobs=rollout_logprobs,
                advantages=micro_batch.advantages,
                segments=micro_batch.segments(self._topology),
                reference_logprobs=micro_batch.reference_logprobs,
                teacher=micro_batch.teacher,
                candidates=scores.candidates,
            )
            actor = actor_loss(
                algorithm,
                tokens,
                num_loss_tokens=mini_batch.num_loss_tokens,
                num_sequences=mini_batch.num_sequences,
            )
            seen = ActorTokens.of(
                tokens,
                actor,
                is_from_engine=self._is_from_engine,
                is_behind=None if versions is None else (versions != DEMONSTRATION) & (versions < version),
            )
            return actor.value, ACTOR.report(seen, actor.value, micro_batch.loss_mask)

        return ACTOR.reduce(self._gradients(micro_batches, loss), mini_batch, self._topology)

    def _summarise(self, applied: Sequence[tuple[MiniBatch, MiniBatchStats, float]], rate: float) -> UpdateStats:
        mini_batches = [mini_batch for mini_batch, _, _ in applied]
        fixed: dict[str, float | None] = {
            "num_loss_tokens": sum(mini_batch.num_loss_tokens for mini_batch in mini_batches),
            "num_sequences": sum(mini_batch.num_sequences for mini_batch in mini_batches),
            "num_micro_batches": sum(len(mini_batch.micro_batches) for mini_batch in mini_batches),
        }
        if not isinstance(self._algorithm.kl, KlLossConfig):
            fixed["reference_kl"] = None
        if self._algorithm.distillation is None:
            fixed["teacher_kl"] = None
        return ACTOR.summarise([(stats, grad_norm) for _, stats, grad_norm in applied], rate, fixed)

    def logprobs(self, batch: TrainBatch) -> SampleColumn | None:
        """Return the log-probabilities of the response tokens."""
        return self._column(batch)

    def record(self, batch: TrainBatch, folder: Path) -> TrainerRecord:
        """Score a batch of one sample; write the modules' inputs and outputs to a file in `folder`."""
        topology = self._topology
        assert topology.data == 1, f"{topology.data} data-parallel ranks; recording is for one copy of the model"
        part = topology.tensor_rank if self._spec.split.is_sequence_parallel else 0
        path = folder / f"{RECORD_PREFIX}{self._spec.rank}.safetensors"
        with recorded(self._models, self._holding, path, part=part):
            logprobs = self.logprobs(batch)
        digests = weight_digests(self._holding, self._layout.canonical, self.tensors())
        return TrainerRecord(logprobs=None if logprobs is None else logprobs.numbers, weight_digests=digests)

    def load_reference(self, folder: Path) -> None:
        """Load this rank's part of the reference policy into host memory; the base of an adapter is there already."""
        self._reference.load(self.tensors(), self._topology.device, read=partial(self._read, folder))

    def refresh_reference(self) -> None:
        """Make the policy of now the reference."""
        self._reference.refresh(self.tensors())

    def reference_logprobs(self, batch: TrainBatch) -> SampleColumn | None:
        """Return what `logprobs` does, with the weights of the reference."""
        with self._reference.in_place_of(self.tensors()):
            return self._column(batch)

    def resume(self, folder: Path, state: TrainerState) -> None:
        super().resume(folder, state)
        self._monitor = MismatchMonitor(self._algorithm, self._dtype, state.monitor)

    @property
    def state(self) -> TrainerState:
        return replace(super().state, monitor=self._monitor.state)


def _scores_of(output: TokenScores | Tensor) -> TokenScores:
    """Return the scores of tokens; the numbers of a value head take the place of log-probabilities."""
    return output if isinstance(output, TokenScores) else TokenScores(output, torch.zeros_like(output))
