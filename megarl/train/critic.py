"""Ranks of critics: one that estimates the value of every token and learns from returns, and that of `prime`.

The critic of `prime` is a language model whose log-ratio to its own start is a reward per token. It learns from
outcomes by cross-entropy: the sum of an answer's rewards is the logit of the answer being right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megarl.algo.loss import aggregate
from megarl.algo.other_losses import CriticLoss, OutcomeTokens, ValueTokens, critic_loss
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.roles import OptimizerConfig
from megarl.results import CriticResult, CriticStats
from megarl.tokens import SampleColumn
from megarl.train.frozen import Reference
from megarl.train.logprob import TokenScores
from megarl.train.rank_spec import RankSpec
from megarl.train.stats import MiniBatchStats, Report, Statistics
from megarl.train.trained import TrainedRank
from megarl.types import MiniBatch, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticTokens:
    """One micro-batch of the critic as its statistics see it."""

    tokens: ValueTokens
    loss: CriticLoss

    @property
    def errors(self) -> Tensor:
        """[N], of the values before the step."""
        return self.tokens.returns - self.tokens.old_values


def _explained_variance(mean: Mapping[str, float]) -> float:
    variance = mean["_squared_return"] - mean["return_mean"] ** 2
    unexplained = mean["_squared_error"] - mean["_error"] ** 2
    # Returns that are all equal leave nothing to explain.
    return 1 - unexplained / variance if variance > 0 else 0.0


CRITIC: Statistics[CriticTokens, CriticStats] = Statistics(
    result=CriticStats,
    means={
        "clip_fraction": lambda seen: seen.loss.is_clipped,
        "value_mean": lambda seen: seen.tokens.old_values,
        "return_mean": lambda seen: seen.tokens.returns,
        "_squared_return": lambda seen: seen.tokens.returns.double().square(),
        "_error": lambda seen: seen.errors,
        "_squared_error": lambda seen: seen.errors.double().square(),
    },
    maxima={},
    formulas={"explained_variance": _explained_variance},
)


class _AnyCriticRank(TrainedRank):
    """The updates of both kinds of critic."""

    ROLE = "critic"
    _epochs = 1

    def update(self, batch: TrainBatch) -> CriticResult:
        """Update once per mini-batch and epoch."""
        rate = self._learning_rate()
        applied: list[tuple[MiniBatchStats, float]] = []
        with self._on_device():
            updates = batch.mini_batches * self._epochs
            for mini_batch in updates:
                stats = self._accumulate(batch, mini_batch)
                grad_norm = self._apply(stats.loss, rate)
                if grad_norm is not None:
                    applied.append((stats, grad_norm))
            usage = self._measure_usage()
        self._num_steps += 1
        return CriticResult(
            stats=CRITIC.summarise(applied, rate, {}) if applied else None,
            num_skipped_updates=len(updates) - len(applied),
            usage=usage,
        )

    def _accumulate(self, batch: TrainBatch, mini_batch: MiniBatch) -> MiniBatchStats:
        """Compute the gradients of one mini-batch's loss."""
        raise NotImplementedError


class CriticRank(_AnyCriticRank):
    """Its updates are clipped around the values before the first one."""

    def __init__(
        self,
        spec: RankSpec,
        *,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        total_steps: int,
        epochs: int,
        clip: float,
    ) -> None:
        assert spec.shape.has_value_head, "a critic without a value head"
        super().__init__(spec, optimizer, total_steps=total_steps)
        self._algorithm = algorithm
        self._epochs = epochs
        self._clip = clip

    def values(self, batch: TrainBatch) -> SampleColumn | None:
        """Return the values before each of the response tokens."""
        return self._column(batch)

    def _accumulate(self, batch: TrainBatch, mini_batch: MiniBatch) -> MiniBatchStats:
        micro_batches = self._to_device(batch, mini_batch)

        def loss(index: int, values: Tensor) -> tuple[Tensor, Report]:
            micro_batch = micro_batches[index]
            assert micro_batch.values is not None, "samples without values"
            assert micro_batch.returns is not None, "samples without returns"
            tokens = ValueTokens(
                values=values,
                old_values=micro_batch.values,
                returns=micro_batch.returns,
                segments=micro_batch.segments(self._topology),
            )
            critic = critic_loss(
                self._algorithm,
                tokens,
                clip=self._clip,
                num_loss_tokens=mini_batch.num_loss_tokens,
                num_sequences=mini_batch.num_sequences,
            )
            seen = CriticTokens(tokens=tokens, loss=critic)
            return critic.value, CRITIC.report(seen, critic.value, micro_batch.loss_mask)

        return CRITIC.reduce(self._gradients(micro_batches, loss), mini_batch, self._topology)


class ImplicitRewardRank(_AnyCriticRank):
    """Takes one update a step; `returns` are the signed cross-entropies of answers before the step."""

    def __init__(
        self, spec: RankSpec, *, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_steps: int
    ) -> None:
        super().__init__(spec, optimizer, total_steps=total_steps)
        beta = algorithm.needs.implicit_reward_beta
        assert beta is not None, f"{algorithm.kind} has no implicit rewards"
        self._beta = beta
        self._start = Reference(self._models, is_base=spec.lora is not None)

    def load_start(self, folder: Path) -> None:
        """Load the weights that rewards are relative to."""
        self._start.load(self.tensors(), self._topology.device, read=partial(self._read, folder))

    def values(self, batch: TrainBatch) -> SampleColumn | None:
        """Return beta * (log-probability - that of the model before training) of the response tokens."""
        now = self._column(batch)
        with self._start.in_place_of(self.tensors()):
            start = self._column(batch)
        if now is None or start is None:
            return None
        return replace(now, numbers=self._beta * (now.numbers - start.numbers))

    def _accumulate(self, batch: TrainBatch, mini_batch: MiniBatch) -> MiniBatchStats:
        micro_batches = self._to_device(batch, mini_batch)

        def loss(index: int, scores: TokenScores) -> tuple[Tensor, Report]:
            micro_batch = micro_batches[index]
            assert micro_batch.returns is not None, "samples without labels"
            outcomes = OutcomeTokens.of(micro_batch.returns)
            segments = micro_batch.segments(self._topology)

            def mean(values: Tensor, *, is_sum: bool) -> Tensor:
                return aggregate(
                    "seq_mean_token_sum" if is_sum else "seq_mean_token_mean",
                    values,
                    segments,
                    num_loss_tokens=mini_batch.num_loss_tokens,
                    num_sequences=mini_batch.num_sequences,
                )

            # The gradient of the cross-entropy, with its value.
            gradient = mean(-self._beta * outcomes.residuals * scores.logprobs, is_sum=True)
            value = gradient - gradient.detach() + mean(outcomes.losses, is_sum=False)
            probabilities = outcomes.labels - outcomes.residuals
            tokens = ValueTokens(
                values=probabilities, old_values=probabilities, returns=outcomes.labels, segments=segments
            )
            seen = CriticTokens(
                tokens=tokens, loss=CriticLoss(value=value, is_clipped=torch.zeros_like(micro_batch.loss_mask))
            )
            return value, CRITIC.report(seen, value, micro_batch.loss_mask)

        return CRITIC.reduce(self._gradients(micro_batches, loss), mini_batch, self._topology)
