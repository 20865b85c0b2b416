"""The recipe's `roles.rollout.draft`: who guesses the next tokens, which the policy then checks in one pass.

A guess changes no probability: a token is kept with the probability that the policy gives it, else another is drawn
from what remains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, PositiveInt

from megarl.config.section import Section

_TOKENS_AT_ONCE = 256
"""Tokens of a pass on an H100 or H200 up to which it reads weights for longer than it multiplies."""
_MOST_NGRAM_REQUESTS = 2
"""SGLang looks n-grams up on the host: on an H200 a 7B shape with about two tokens a pass generated 1.23 times as fast
with one request, and 0.53 times with 32."""


class _DraftConfig(Section):
    num_tokens: PositiveInt | None = None
    """Tokens that are guessed for each pass of the policy; null: 3, and 7 with ngram."""
    max_requests: PositiveInt | None = None
    """Requests of an engine up to which it guesses; null: as many as have 256 tokens in a pass, guesses included, and 2
    with ngram. Above it an engine switches to passes without guesses, and back; with ngram SGLang cannot, and an engine
    that gets more requests at a time starts without guesses."""

    @property
    def tokens(self) -> int:
        return self.num_tokens or 3

    @property
    def most_requests(self) -> int:
        return self.max_requests or max(1, _TOKENS_AT_ONCE // (self.tokens + 1))

    def is_started(self, requests: int) -> bool:
        """Whether engines that get so many requests at a time start with it; they may yet switch it off and on."""
        return True


class _WeightsConfig(_DraftConfig):
    path: Path
    """Its folder."""

    def note(self, requests: int, *, learns_every: int | None = None) -> str:
        """Return what engines with so many requests at a time do with it; it learns after so many steps."""
        fate = "which stays as it is" if learns_every is None else f"which learns {_every(learns_every)}"
        start = f"drafts of {self.tokens} tokens from {self.path}, {fate}"
        return (
            start
            if requests <= self.most_requests
            else f"{start}, while an engine has up to {self.most_requests} requests"
        )


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

    def is_started(self, requests: int) -> bool:
        return requests <= self.most_requests

    def note(self, requests: int, *, learns_every: int | None = None) -> str:
        """Return what engines with so many requests at a time do with it; n-grams are always those of responses."""
        if self.is_started(requests):
            return f"drafts of {self.tokens} tokens from n-grams of responses"
        return f"no drafts: SGLang cannot leave n-grams out while an engine has more than {self.most_requests} requests"


class ModelDraftConfig(_WeightsConfig):
    """A small model of the same vocabulary guesses. It stays as it is while the policy learns, or learns its responses
    with `roles.drafter`."""

    kind: Literal["model"]


class EagleDraftConfig(_WeightsConfig):
    """An EAGLE or EAGLE-3 head of the policy's model guesses. It stays as it is while the policy learns."""

    kind: Literal["eagle"]


DraftConfig: TypeAlias = Annotated[NgramDraftConfig | ModelDraftConfig | EagleDraftConfig, Field(discriminator="kind")]
