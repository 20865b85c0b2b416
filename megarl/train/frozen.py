"""Ranks of models that are not trained: a reference policy in its own pool, and teachers."""

from __future__ import annotations

from functools import partial

from megarl.tokens import SampleColumn
from megarl.train.likeliest import top_scores
from megarl.train.model import PolicyModel
from megarl.train.rank import ModelRank
from megarl.train.rank_spec import RankSpec
from megarl.types import TrainBatch


class ReferenceRank(ModelRank):
    """A rank of a reference policy in its own pool."""

    def logprobs(self, batch: TrainBatch) -> SampleColumn | None:
        """Return the log-probabilities of the response tokens."""
        return self._column(batch)


class TeacherRank(ModelRank):
    """A rank of a teacher, of any shape with the policy's vocabulary."""

    ROLE = "teacher"

    def __init__(self, spec: RankSpec, *, num_top: int, vocab: int) -> None:
        """`vocab` is the size of the policy's vocabulary, from which the likeliest tokens are."""
        super().__init__(spec)
        for model in self._models:
            assert isinstance(model, PolicyModel), "a teacher without a language head"
            model.teaching = partial(top_scores, num_top=num_top, vocab=vocab)

    def scores(self, batch: TrainBatch) -> SampleColumn | None:
        """Return `top_scores` of the response tokens."""
        return self._column(batch)
