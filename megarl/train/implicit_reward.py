"""A rank of the critic of `prime`: a language model whose log-ratio to its own start is a reward per token.

It learns from outcomes by cross-entropy: the sum of an answer's rewards is the logit of the answer being right.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megarl.algo.loss import aggregate
from megarl.algo.other_losses import CriticLoss, ValueTokens
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.roles import OptimizerConfig
from megarl.results import CriticResult
from megarl.tokens import SampleColumn
from megarl.train.critic import CRITIC, CriticTokens
from megarl.train.logprob import TokenScores
from megarl.train.memory import measure_usage
from megarl.train.rank_spec import RankSpec
from megarl.train.reference import Reference
from megarl.train.stats import MiniBatchStats, Report
from megarl.train.trained import TrainedRank
from megarl.types import MiniBatch, TrainBatch


class ImplicitRewardRank(TrainedRank):
    ROLE = "critic"

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

    def update(self, batch: TrainBatch) -> CriticResult:
        """Take one update of the cross-entropy; `returns` are label - probability of each answer before the step."""
        rate = self._learning_rate()
        (mini_batch,) = batch.mini_batches
        with self._on_device():
            stats = self._accumulate(batch, mini_batch)
            grad_norm = self._apply(stats.loss, rate)
            usage = measure_usage(self._topology)
        self._num_steps += 1
        return CriticResult(
            stats=CRITIC.summarise([(stats, grad_norm)], rate, {}) if grad_norm is not None else None,
            num_skipped_updates=0 if grad_norm is not None else 1,
            usage=usage,
        )

    def _accumulate(self, batch: TrainBatch, mini_batch: MiniBatch) -> MiniBatchStats:
        micro_batches = self._to_device(batch, mini_batch)

        def loss(index: int, scores: TokenScores) -> tuple[Tensor, Report]:
            micro_batch = micro_batches[index]
            residuals = micro_batch.returns
            assert residuals is not None, "samples without labels"
            segments = micro_batch.segments(self._topology)

            def mean(values: Tensor, *, is_sum: bool) -> Tensor:
                return aggregate(
                    "seq_mean_token_sum" if is_sum else "seq_mean_token_mean",
                    values,
                    segments,
                    num_loss_tokens=mini_batch.num_loss_tokens,
                    num_sequences=mini_batch.num_sequences,
                )

            # The gradient of the cross-entropy, with its value: the residual is 1 - p of the label, or -p.
            gradient = mean(-self._beta * residuals * scores.logprobs, is_sum=True)
            value = gradient - gradient.detach() + mean(-torch.log1p(-residuals.abs()), is_sum=False)
            labels = (residuals > 0).to(residuals.dtype)
            tokens = ValueTokens(
                values=labels - residuals, old_values=labels - residuals, returns=labels, segments=segments
            )
            seen = CriticTokens(
                tokens=tokens, loss=CriticLoss(value=value, is_clipped=torch.zeros_like(micro_batch.loss_mask))
            )
            return value, CRITIC.report(seen, value, micro_batch.loss_mask)

        return CRITIC.reduce(self._gradients(micro_batches, loss), mini_batch, self._topology)
