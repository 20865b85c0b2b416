"""A rank of the actor: updates the policy and computes log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megarl.algo.loss import PolicyTokens
from megarl.algo.monitor import MismatchMonitor
from megarl.algo.objective import actor_loss
from megarl.checkpoint.resume import TrainerState
from megarl.config.algorithm import AlgorithmConfig, KlLossConfig
from megarl.config.roles import OptimizerConfig
from megarl.results import UpdateResult, UpdateStats
from megarl.tokens import SampleNumbers
from megarl.train.interface import RECORD_PREFIX, RankSpec, TrainerRecord
from megarl.train.layer_spec import recordable
from megarl.train.logprob import TokenScores
from megarl.train.lora import adapters_off
from megarl.train.memory import host_places, measure_usage
from megarl.train.passes import forward
from megarl.train.routing import routing_stats
from megarl.train.stats import ACTOR, ActorTokens, MiniBatchStats, Report
from megarl.train.trained import TrainedRank
from megarl.types import DEMONSTRATION, MiniBatch, PolicyVersion, TrainBatch
from megarl.weights.hook_points import module_hooks
from megarl.weights.recordings import Recorder, weight_digests, write_patches


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
    ) -> None:
        super().__init__(spec, optimizer, total_steps=total_steps)
        self._algorithm = algorithm
        self._epochs = epochs
        self._monitor = MismatchMonitor(algorithm)
        self._reference: dict[str, Tensor] = {}

    def resume(self, folder: Path, state: TrainerState) -> None:
        super().resume(folder, state)
        self._monitor = MismatchMonitor(self._algorithm, state.monitor)

    @property
    def state(self) -> TrainerState:
        return replace(super().state, monitor=self._monitor.state)

    def update(self, batch: TrainBatch) -> UpdateResult:
        """Update once per mini-batch and epoch, with ratios to the policy before the first update."""
        rate, version = self._learning_rate(), self._num_updates
        is_single = len(batch.mini_batches) * self._epochs == 1
        applied: list[tuple[MiniBatch, MiniBatchStats, float]] = []
        with self._on_device():
            # Old log-probabilities are not needed for a single update, whose ratio is 1, and may come with the batch.
            is_known = is_single or batch.mini_batches[0].micro_batches[0].old_logprobs is not None
            old = [] if is_known else [self._score(batch, item) for item in batch.mini_batches]
            befores: list[list[Tensor] | None] = [*old] if old else [None] * len(batch.mini_batches)
            updates = list(zip(batch.mini_batches, befores, strict=True)) * self._epochs
            for mini_batch, before in updates:
                stats = self._accumulate(batch, mini_batch, before, is_single=is_single, version=version)
                engine_mismatch = stats.values["engine_mismatch"]
                if engine_mismatch is not None:
                    self._monitor.stop_above(engine_mismatch)
                grad_norm = self._apply(stats.loss, rate)
                if grad_norm is not None:
                    applied.append((mini_batch, stats, grad_norm))
            usage = measure_usage(self._topology)
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

    def logprobs(self, batch: TrainBatch) -> SampleNumbers | None:
        """Return the log-probabilities of the response tokens."""
        with self._on_device():
            return self._unpack(batch, [self._score(batch, item) for item in batch.mini_batches])

    def record(self, batch: TrainBatch, folder: Path) -> TrainerRecord:
        """Score a batch of one sample; write the modules' inputs and outputs to a file in `folder`."""
        topology = self._topology
        assert topology.data == 1, f"{topology.data} data-parallel ranks; recording is for one copy of the model"
        modules = {
            f"chunk{index}.{name}": module
            for index, model in enumerate(self._models)
            for name, module in model.named_modules()
        }
        # If micro-batches come in multiples, the sample is in the first and the others are padding.
        recorder = Recorder(modules, recordable(module_hooks(self._holding), modules), max_calls=1)
        try:
            logprobs = self.logprobs(batch)
        finally:
            recorder.close()
        part = topology.tensor_rank if self._spec.split.is_sequence_parallel else 0
        write_patches(folder / f"{RECORD_PREFIX}{self._spec.rank}.safetensors", recorder.patches(part=part))
        digests = weight_digests(self._holding, self._layout.canonical, self.tensors())
        return TrainerRecord(logprobs=None if logprobs is None else logprobs.numbers, weight_digests=digests)

    def keep_reference(self, folder: Path) -> None:
        """Load this rank's share of the reference policy into host memory; the base of an adapter is there already."""
        if self._spec.lora is not None:
            return
        weights = self.tensors()
        places = host_places([tensor.nbytes for tensor in weights.values()], self._topology.device)
        self._reference = {
            name: place.view(tensor.dtype).view(tensor.shape)
            for (name, tensor), place in zip(weights.items(), places, strict=True)
        }
        self._read(folder, self._reference)

    def refresh_reference(self) -> None:
        """Make the policy of now the reference."""
        assert self._reference, "keep_reference comes first"
        for name, tensor in self.tensors().items():
            self._reference[name].copy_(tensor)

    def reference_logprobs(self, batch: TrainBatch) -> SampleNumbers | None:
        """Return what `logprobs` does, with the weights of the reference."""
        assert self._reference or self._spec.lora is not None, "keep_reference comes first"
        base = _exchanged(self.tensors(), self._reference) if self._reference else adapters_off(self._models)
        with self._on_device(), base:
            return self._unpack(batch, [self._score(batch, item) for item in batch.mini_batches])

    def _summarise(self, applied: Sequence[tuple[MiniBatch, MiniBatchStats, float]], rate: float) -> UpdateStats:
        mini_batches = [mini_batch for mini_batch, _, _ in applied]
        known: dict[str, float | None] = {
            "num_loss_tokens": sum(mini_batch.num_loss_tokens for mini_batch in mini_batches),
            "num_sequences": sum(mini_batch.num_sequences for mini_batch in mini_batches),
            "num_micro_batches": sum(len(mini_batch.micro_batches) for mini_batch in mini_batches),
        }
        if not isinstance(self._algorithm.kl, KlLossConfig):
            known["reference_kl"] = None
        if self._algorithm.distillation is None:
            known["teacher_kl"] = None
        return ACTOR.summarise([(stats, grad_norm) for _, stats, grad_norm in applied], rate, known)

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
        micro_batches = self._share(batch, mini_batch)

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
                is_from_engine=algorithm.needs.has_engines,
                is_behind=None if versions is None else (versions != DEMONSTRATION) & (versions < version),
            )
            return actor.value, ACTOR.report(seen, actor.value, micro_batch.loss_mask)

        return ACTOR.reduce(self._gradients(micro_batches, loss), mini_batch, self._topology)

    def _score(self, batch: TrainBatch, mini_batch: MiniBatch) -> list[Tensor]:
        self._reach("asked", step=self._num_steps + 1)
        outputs: list[TokenScores | Tensor] = forward(self._optimizer.chunks, self._share(batch, mini_batch))
        return [_scores_of(output).logprobs for output in outputs]


def _scores_of(output: TokenScores | Tensor) -> TokenScores:
    """Return the scores of tokens; the numbers of a value head take the place of log-probabilities."""
    return output if isinstance(output, TokenScores) else TokenScores(output, torch.zeros_like(output))


@contextmanager
def _exchanged(weights: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> Iterator[None]:
    """Exchange their values within the context, tensor by tensor: the device never holds both."""
    _exchange(weights, kept)
    try:
        yield
    finally:
        _exchange(weights, kept)


@torch.no_grad()
def _exchange(weights: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        before = weight.clone()
        weight.copy_(kept[name])
        kept[name].copy_(before)
