"""The recipe's `roles.rollout.draft`: who guesses the next tokens, which the policy then checks in one pass.

A guess changes no probability: a token is kept with the probability that the policy gives it, else another is drawn
from what remains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, PositiveInt

from megarl.config.section import Section

_TOKENS_AT_ONCE = 128
"""Tokens of a pass up to which a small model pays: on an H200 a 7B shape with three tokens kept of four generated 2.0
times as fast with one request, 1.05 times with 32, and 0.26 times with 256 and the draft switched off."""
_MOST_NGRAM_REQUESTS = 2
"""SGLang looks n-grams up on the host: the same shape with about two tokens a pass generated 1.5 times as fast with one
request, and 0.6 times with 32."""


class _DraftConfig(Section):
    num_tokens: PositiveInt | None = None
    """Tokens that are guessed for each pass of the policy; null: 3, and 7 with ngram."""
    max_requests: PositiveInt | None = None
    """Requests that an engine may get at a time if it is to guess; null: as many as have 128 tokens in a pass, guesses
    included, and 2 with ngram. An engine that gets more starts without guesses: they would cost more than they save,
    switched off as well."""

    @property
    def tokens(self) -> int:
        return self.num_tokens or 3

    @property
    def most_requests(self) -> int:
        return self.max_requests or max(1, _TOKENS_AT_ONCE // (self.tokens + 1))

    def is_started(self, requests: int) -> bool:
        """Whether engines that get so many requests at a time start with it."""
        return requests <= self.most_requests

    def _none(self) -> str:
        return f"no drafts: with more than {self.most_requests} requests at a time an engine is faster without them"


class _WeightsConfig(_DraftConfig):
    path: Path
    """Its folder."""

    def note(self, requests: int, *, learns_every: int | None = None) -> str:
        """Return what engines with so many requests at a time do with it; it learns after so many steps."""
        if not self.is_started(requests):
            return self._none()
        fate = "which stays as it is" if learns_every is None else f"which learns {_every(learns_every)}"
        return f"drafts of {self.tokens} tokens from {self.path}, {fate}"


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"


class NgramDraftConfig(_DraftConfig):
    """Guesses what followed the last tokens where they occurred before, in any response of the engine."""

    kind: Literal["ngram"]

    @property
    def tokens(self) -> int:
        return self.num_tokens or 7

    @property
    def most_requests(self) -> int:
        return self.max_requests or _MOST_NGRAM_REQUESTS

    def note(self, requests: int, *, learns_every: int | None = None) -> str:
        """Return what engines with so many requests at a time do with it; n-grams are always those of responses."""
        return (
            f"drafts of {self.tokens} tokens from n-grams of responses" if self.is_started(requests) else self._none()
        )


class ModelDraftConfig(_WeightsConfig):
    """A small model of the same vocabulary guesses. It stays as it is while the policy learns, or learns its responses
    with `roles.drafter`."""

    kind: Literal["model"]


class EagleDraftConfig(_WeightsConfig):
    """An EAGLE or EAGLE-3 head of the policy's model guesses. It stays as it is while the policy learns."""

    kind: Literal["eagle"]


DraftConfig: TypeAlias = Annotated[NgramDraftConfig | ModelDraftConfig | EagleDraftConfig, Field(discriminator="kind")]
