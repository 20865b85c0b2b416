"""Models that are not trained: a reference policy on the actor's ranks or in its own pool, and teachers.

On the actor's ranks the weights of a reference are in host memory, and take the place of the trained ones during a
pass. The base of an adapter is in the model already: a pass without adapters computes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor

from megarl.tokens import SampleColumn
from megarl.train.likeliest import top_scores
from megarl.train.lora import adapters_off
from megarl.train.model import Model, PolicyModel
from megarl.train.offload import host_places
from megarl.train.rank import ModelRank
from megarl.train.rank_spec import RankSpec
from megarl.types import TrainBatch


class Reference:
    """One rank's part of a reference policy."""

    def __init__(self, models: Sequence[Model], *, is_base: bool) -> None:
        """With `is_base` it is the base of the models' adapters."""
        self._models = models
        self._is_base = is_base
        self._tensors: dict[str, Tensor] = {}

    def load(
        self, weights: Mapping[str, Tensor], device: torch.device, *, read: Callable[[dict[str, Tensor]], None]
    ) -> None:
        """Allocate memory for tensors like `weights`, the models', and let `read` fill it; a base needs none."""
        if self._is_base:
            return
        places = host_places([tensor.nbytes for tensor in weights.values()], device)
        self._tensors = {
            name: place.view(tensor.dtype).view(tensor.shape)
            for (name, tensor), place in zip(weights.items(), places, strict=True)
        }
        read(self._tensors)

    def refresh(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the models' weights of now."""
        assert self._tensors, "load comes first"
        for name, tensor in weights.items():
            self._tensors[name].copy_(tensor)

    def in_place_of(self, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Return a context in which the models, whose weights these are, compute with those of the reference."""
        assert self._tensors or self._is_base, "load comes first"
        return adapters_off(self._models) if self._is_base else self._exchanged(weights)

    @contextmanager
    def _exchanged(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        self._exchange(weights)
        try:
            yield
        finally:
            self._exchange(weights)

    @torch.no_grad()
    def _exchange(self, weights: Mapping[str, Tensor]) -> None:
        """Exchange the values tensor by tensor: the device never holds both."""
        for name, weight in weights.items():
            before = weight.clone()
            weight.copy_(self._tensors[name])
            self._tensors[name].copy_(before)


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

    def logprobs(self, batch: TrainBatch) -> SampleColumn | None:
        """Return `top_scores` of the response tokens: their log-probabilities and those of the likeliest tokens."""
        return self._column(batch)
