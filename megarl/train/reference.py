"""A rank of a reference policy that has a pool of its own: weights, and no optimizer."""

from __future__ import annotations

from megarl.train.logprob import TokenScores
from megarl.train.passes import forward
from megarl.train.rank import ModelRank
from megarl.types import FloatArray, MiniBatch, TrainBatch


class ReferenceRank(ModelRank):
    def logprobs(self, batch: TrainBatch) -> tuple[FloatArray, ...]:
        """Per sample, of its response tokens."""
        with self._on_device():
            scores: list[list[TokenScores]] = [self._score(batch, item) for item in batch.mini_batches]
            return self._unpack(batch, [[item.logprobs for item in of_share] for of_share in scores])

    def _score(self, batch: TrainBatch, mini_batch: MiniBatch) -> list[TokenScores]:
        self._reach("asked")
        return forward(self._models, self._share(batch, mini_batch))
