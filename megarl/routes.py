"""Routes: the experts of a mixture that tokens were sent to, as engines choose them and training follows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megarl.tokens import RouteArray

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteShape:
    """The numbers of a mixture that the routes of its tokens follow from."""

    num_layers: int
    per_token: int
    """Experts that a layer sends a token to."""
    num_experts: int
    dense_layers: frozenset[int] = frozenset()
    """Layers without experts: an engine's record has a row for them too, of zeros."""

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
        repeats = numbers[..., 0] == numbers[..., 1] if self.per_token > 1 else np.zeros(shape[:2], np.bool_)
        repeats[:, sorted(self.dense_layers)] = False
        if repeats.any():
            place = tuple(map(int, np.argwhere(repeats)[0]))
            raise ValueError(f"token {place[0]} has expert {numbers[place][0]} twice in layer {place[1]}")
        return numbers.astype(np.uint8 if self._is_narrow else np.uint16)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """Requests the experts of the tokens from `first` on, but for the last of the response."""

    shape: RouteShape
    first: int
    num_sent: int
    """Tokens of the request."""

    @classmethod
    def after(cls, shape: RouteShape, num_routed: int, so_far: RouteArray | None, *, num_sent: int) -> RouteRequest:
        """Return the request that leaves out known routes: of `num_routed` tokens, and of a response so far."""
        return cls(shape=shape, first=num_routed + (0 if so_far is None else len(so_far)), num_sent=num_sent)

    def read(self, content: bytes | None, *, num_tokens: int, num_kept: int) -> RouteArray:
        """Return those before the last of `num_kept` tokens: it will be computed again, or never.

        The reply has `num_tokens`; without content all experts are unknown. A ValueError names the fault.
        """
        num_routes = max(self.num_sent + num_tokens - 1 - self.first, 0)
        num_kept_routes = max(self.num_sent + num_kept - 1 - self.first, 0)
        if content is None:
            return self.shape.unknown(num_kept_routes)
        return self.shape.read(content, num_routes)[:num_kept_routes]


def join_routes(parts: Iterable[tuple[int, RouteArray]], num_tokens: int) -> RouteArray | None:
    """Return the routes of so many tokens from parts, each with its first token; None without parts."""
    routes: RouteArray | None = None
    for first, part in parts:
        if routes is None:
            routes = np.full((num_tokens, *part.shape[1:]), np.iinfo(part.dtype).max, part.dtype)
        routes[first : first + len(part)] = part[: max(num_tokens - first, 0)]
    return routes


def prompt_digest(routes: RouteArray, num_tokens: int) -> str:
    """Return a digest of the routes of a prompt, behind which are those of `num_tokens` tokens but the last."""
    of_prompt = np.ascontiguousarray(routes[: len(routes) - num_tokens + 1])
    return hashlib.blake2b(of_prompt.data, digest_size=_DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRoutes:
    """The routes of a micro-batch of N tokens, left where the responses are until a pass needs them.

    Ranks of one node share that memory, and each takes only its own layers from it.
    """

    num_tokens: int
    parts: tuple[tuple[int, RouteArray], ...]
    """The first token of each part, and its routes; at least one."""

    def of_layers(self, first: int, end: int) -> RouteArray:
        """Return the routes of some layers. [N, end - first, experts of a token]"""
        routes = join_routes(((start, part[:, first:end]) for start, part in self.parts), self.num_tokens)
        assert routes is not None, "packed routes without a part"
        return routes

    def are_known(self) -> npt.NDArray[np.bool_]:
        """Return for which tokens an engine chose. [N]"""
        routes = self.of_layers(0, 1)
        return np.not_equal(routes[:, 0, 0], np.iinfo(routes.dtype).max)
