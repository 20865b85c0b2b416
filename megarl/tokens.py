"""Numbers per token that may be many and may lie on another node. Numpy only; below `types`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The tokens of one response and their text."""

    token_ids: npt.NDArray[np.int32]  # [T]
    logprobs: npt.NDArray[np.float32]  # [T], of the engine, after temperature
    text: str
    routes: RouteArray | None = None  # [P + T - 1], of the prompt's tokens too; None where no engine chose experts
    teacher: npt.NDArray[np.float32] | None = None  # [T, 1 + 2K], of a teacher on engines, see `rollout.teacher`
    repetition: float | None = None
    answer: str | None = None

    def load(self) -> Content:
        return self

    def locate(self) -> tuple[ContentSource, int]:
        return self, 0

    def content(self, _index: int) -> Content:
        return self


class ContentSource(Protocol):
    """Some contents that are brought to a process together."""

    def content(self, index: int, /) -> Content: ...


class ContentHandle(Protocol):
    """A content in this process, or a reference to one that lies on another node."""

    def load(self) -> Content: ...

    def locate(self) -> tuple[ContentSource, int]: ...  # where the content is, and its index there

    @property
    def repetition(self) -> float | None: ...  # `repeated_share` of its tokens, where it was computed beside them
    @property
    def answer(self) -> str | None: ...  # `answer_in` its text, likewise


def repeated(value: _Number, count: int) -> npt.NDArray[_Number]:
    """Return an array whose elements are one number in memory; a fraction of the time of `np.broadcast_to`."""
    array: npt.NDArray[_Number] = np.ndarray((count,), value.dtype, value, 0, (0,))
    return array


def is_repeated(array: npt.NDArray[np.generic]) -> bool:
    """Whether all elements are one number in memory, as `repeated` makes them: a step's tokens are many."""
    return array.strides == (0,) and len(array) > 0


def shared_if_equal(numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return numbers that are all equal as one that is repeated: a step's tokens fill the driver's memory."""
    if not len(numbers) or (numbers != numbers[0]).any():
        return numbers
    return repeated(numbers[0], len(numbers))


def num_true(mask: npt.NDArray[np.bool_]) -> int:
    return len(mask) * int(mask[0]) if is_repeated(mask) else int(np.count_nonzero(mask))


def counted(numbers: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    """Return the different numbers in ascending order, each with how often it occurs."""
    if len(numbers) and (is_repeated(numbers) or (numbers == numbers[0]).all()):  # nearly always, and far quicker
        return [(numbers.item(0), len(numbers))]
    different, counts = np.unique(numbers, return_counts=True)
    return list(zip(different.tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """The S sequences of a micro-batch as rows of samples, of which some have several."""

    firsts: npt.NDArray[np.int32]  # [S], place among the sample's tokens of the first one that the row predicts
    episode_starts: npt.NDArray[np.int32]  # [E + 1], ends with N: where the rows of a sample, or the padding, begin
    num_loss_tokens: npt.NDArray[np.int64]  # [E], of all rows of the sample, in whatever micro-batch they are


ColumnName: TypeAlias = Literal["old_logprobs", "reference_logprobs", "values", "advantages", "returns", "teacher"]
"""A column of tokens that ranks compute, named as in `MicroBatch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleNumbers:
    """Numbers of the response tokens of some rows of a step's samples, such as the values that one rank computed."""

    sample_ids: npt.NDArray[np.int32]  # [S], indices into the step's samples
    starts: npt.NDArray[np.int64]  # [S + 1], where the numbers of each row begin
    numbers: npt.NDArray[np.float32]  # [sum of T], or [sum of T, K] where each token has several
    firsts: npt.NDArray[np.int32] | None = None  # [S], as in `PackedRows`; None where every row is a whole sample

    def only(self, sample_ids: Iterable[int]) -> SampleNumbers:
        """Return the rows of these samples."""
        rows = np.flatnonzero(np.isin(self.sample_ids, list(sample_ids)))
        parts = [self.numbers[self.starts[row] : self.starts[row + 1]] for row in rows]
        return SampleNumbers(
            sample_ids=self.sample_ids[rows],
            starts=np.cumsum([0, *map(len, parts)], dtype=np.int64),
            numbers=np.concatenate([self.numbers[:0], *parts]),
            firsts=None if self.firsts is None else self.firsts[rows],
        )


def joined_numbers(arrays: Mapping[int, npt.NDArray[np.float32]]) -> SampleNumbers:
    """Return the numbers of whole samples, given by their indices."""
    return SampleNumbers(
        sample_ids=np.fromiter(arrays, np.int32, len(arrays)),
        starts=np.cumsum([0, *map(len, arrays.values())], dtype=np.int64),
        numbers=np.concatenate([np.zeros(0, np.float32), *arrays.values()]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSums:
    """Numbers of B rollouts of a step, made where the numbers of their tokens are."""

    counts: npt.NDArray[np.float64]  # [B], tokens that the policy chose
    kl: npt.NDArray[np.float64] | None  # [B], sum of the estimates of KL at these tokens; None without a penalty
    ratios: npt.NDArray[np.float64] | None = None  # [B], their log-probability less the reference's, to compare pairs
    advantages: npt.NDArray[np.float64] | None = None  # [B], their size; None where all tokens have the same


def by_sample(parts: Iterable[SampleNumbers]) -> dict[int, npt.NDArray[np.float32]]:
    """Return the numbers of each sample; tokens of rows that are in none of the parts have 0."""
    found: dict[int, list[tuple[int, npt.NDArray[np.float32]]]] = {}
    for part in parts:
        firsts = np.zeros(len(part.sample_ids), np.int32) if part.firsts is None else part.firsts
        arrays = np.split(part.numbers, part.starts[1:-1]) if len(part.sample_ids) else []
        for sample_id, first, array in zip(part.sample_ids.tolist(), firsts.tolist(), arrays, strict=True):
            found.setdefault(sample_id, []).append((first, array))
    return {sample_id: _joined(rows) for sample_id, rows in found.items()}


def assemble(parts: Iterable[SampleNumbers]) -> tuple[npt.NDArray[np.float32], ...]:
    """Return one array per sample of a step from the parts of all data-parallel ranks."""
    found = by_sample(parts)
    return tuple(found[sample_id] for sample_id in range(len(found)))


def _joined(rows: Sequence[tuple[int, npt.NDArray[np.float32]]]) -> npt.NDArray[np.float32]:
    if len(rows) == 1 and rows[0][0] == 0:
        return rows[0][1]
    num_tokens = max(first + len(array) for first, array in rows)
    joined = np.zeros((num_tokens, *rows[0][1].shape[1:]), np.float32)
    for first, array in rows:
        joined[first : first + len(array)] = array
    return joined


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
    def bytes_per_token(self) -> int:
        return self.num_layers * self.per_token * (1 if self._is_narrow else 2)

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
