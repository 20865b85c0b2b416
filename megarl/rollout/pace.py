"""Counts of requests: the time of a token in those that were answered, and those sent again. Knows no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

_LEAST_REQUESTS = 8
"""Fewer requests say little about an engine: one may have waited for a publish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Requests that were answered, with their tokens and the time of all of them together."""

    num_requests: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Pace) -> Pace:
        return Pace(
            num_requests=self.num_requests + other.num_requests,
            num_tokens=self.num_tokens + other.num_tokens,
            seconds=self.seconds + other.seconds,
        )

    @property
    def token_s(self) -> float | None:
        """The time of a token; None if there were too few requests to tell."""
        if self.num_requests < _LEAST_REQUESTS or not self.num_tokens:
            return None
        return self.seconds / self.num_tokens


class RequestListener(Protocol):
    """Counts the requests that are sent again."""

    def request_retried(self, cause: str) -> None: ...


class Uncounted:
    """A `RequestListener` that counts nothing."""

    def request_retried(self, cause: str) -> None: ...
