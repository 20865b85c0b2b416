"""The experts that an engine chose for the tokens of a mixture: the trainer sends each token to the same ones.

A row per token, with as many experts for each layer. The largest number of the type stands for an unknown expert: the
trainer's router chooses then. Numpy only; below `tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

RouteArray: TypeAlias = npt.NDArray[np.unsignedinteger]
"""[tokens, layers, experts of a token], uint8 or uint16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteShape:
    """The numbers of a mixture that the routes of its tokens follow from."""

    num_layers: int
    per_token: int
    """Experts that a layer sends a token to."""
    num_experts: int

    @property
    def _is_narrow(self) -> bool:
        return self.num_experts <= np.iinfo(np.uint8).max

    def unknown(self, num_tokens: int) -> RouteArray:
        dtype = np.uint8 if self._is_narrow else np.uint16
        return np.full((num_tokens, self.num_layers, self.per_token), np.iinfo(dtype).max, dtype)

    def read(self, content: bytes, num_tokens: int) -> RouteArray:
        """Return the routes in an engine's array of little-endian 32-bit numbers; a ValueError names the fault."""
        shape = (num_tokens, self.num_layers, self.per_token)
        if len(content) != 4 * num_tokens * self.num_layers * self.per_token:
            raise ValueError(f"{len(content)} bytes of routes, not 4 for each of {shape} tokens, layers and experts")
        if not num_tokens:
            return self.unknown(0)
        numbers = np.frombuffer(content, "<u4").reshape(shape)  # a negative number is a large one
        if (largest := int(numbers.max())) >= self.num_experts:
            raise ValueError(f"expert {largest} of {self.num_experts}")
        # An engine's buffer is zero where it did not record a token.
        if self.per_token > 1 and (repeats := numbers[..., 0] == numbers[..., 1]).any():
            place = tuple(map(int, np.argwhere(repeats)[0]))
            raise ValueError(f"token {place[0]} has expert {numbers[place][0]} twice in layer {place[1]}")
        return numbers.astype(np.uint8 if self._is_narrow else np.uint16)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRoutes:
    """The experts that a request asks for: of the tokens from `first` on, but for the last of the response."""

    shape: RouteShape
    first: int
    num_sent: int
    """Tokens of the request."""

    @classmethod
    def after(
        cls, shape: RouteShape | None, num_routed: int, so_far: RouteArray | None, *, num_sent: int
    ) -> AskedRoutes | None:
        """Return the question that leaves out known routes: of `num_routed` tokens, and of a response so far."""
        first = num_routed + (0 if so_far is None else len(so_far))
        return None if shape is None else cls(shape=shape, first=first, num_sent=num_sent)

    def read(self, content: bytes | None, *, num_tokens: int, num_kept: int) -> RouteArray:
        """Return those before the last of `num_kept` tokens: it will be computed again, or never.

        The reply has `num_tokens`; without content all experts are unknown. A ValueError names the fault.
        """
        num_routes, num_wanted = (max(self.num_sent + each - 1 - self.first, 0) for each in (num_tokens, num_kept))
        if content is None:
            return self.shape.unknown(num_wanted)
        return self.shape.read(content, num_routes)[:num_wanted]


def then(first: RouteArray | None, rest: RouteArray | None) -> RouteArray | None:
    """Return the routes of a response and of its continuation."""
    return rest if first is None or rest is None else np.concatenate([first, rest])


def joined(parts: Iterable[tuple[int, RouteArray]], num_tokens: int) -> RouteArray | None:
    """Return the routes of so many tokens from parts, each with its first token; None without parts."""
    routes: RouteArray | None = None
    for first, part in parts:
        if routes is None:
            routes = np.full((num_tokens, *part.shape[1:]), np.iinfo(part.dtype).max, part.dtype)
        routes[first : first + len(part)] = part[: max(num_tokens - first, 0)]
    return routes


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRoutes:
    """The routes of a micro-batch of N tokens, left where the responses are until a pass needs them.

    Ranks of one node share that memory, and each takes only its own layers from it.
    """

    num_tokens: int
    parts: tuple[tuple[int, RouteArray], ...]
    """The first token of each part, and its routes; at least one."""

    @classmethod
    def of(cls, parts: Sequence[tuple[int, RouteArray]], num_tokens: int) -> PackedRoutes | None:
        return cls(num_tokens=num_tokens, parts=tuple(parts)) if parts else None

    def of_layers(self, first: int, end: int) -> RouteArray:
        """Return the routes of some layers. [N, end - first, experts of a token]"""
        routes = joined(((start, part[:, first:end]) for start, part in self.parts), self.num_tokens)
        assert routes is not None, "packed routes without a part"
        return routes

    def are_known(self) -> npt.NDArray[np.bool_]:
        """Return for which tokens an engine chose. [N]"""
        routes = self.of_layers(0, 1)
        return np.not_equal(routes[:, 0, 0], np.iinfo(routes.dtype).max)
