"""The numbers per token of a response: which there are, where they lie, and how they are packed. Numpy only; below
`types`.

A new number per token is a field of `Content` (an engine returns it), of `types.Rollout` or of `types.TrainSample`, a
row of `COLUMNS` and, if a rank needs it, a field of `PackedColumns`. Whatever joins, stores, writes, cuts or packs
responses goes by `COLUMNS`. The experts of a mixture, which are many per token, have types of their own in `routes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

_Number = TypeVar("_Number", bound=np.generic)
_Floats = TypeVar("_Floats")
_Integers = TypeVar("_Integers")
_Booleans = TypeVar("_Booleans")

RouteArray: TypeAlias = npt.NDArray[np.unsignedinteger]
"""[tokens, layers, experts of a token], uint8 or uint16."""
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64)
"""Hash factors, one for each token of a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumn:
    """One number, or one row of numbers, per token."""

    name: str
    """The field of its owner."""
    owner: Literal["content", "rollout", "sample"]
    """A `Content` stays on the node that made it. A `Rollout` comes to the driver, which decides a step by it. A
    `TrainSample` has what the algorithm or a model computed."""
    dtype: type[np.generic]
    packed_as: str | None = None
    """The field of `PackedColumns`; None if ranks do not need it, or pack it in a way of its own."""
    is_single: bool = True
    """Has exactly one number for each of the T tokens."""
    is_optional: bool = False
    """None where a run does not need it."""


COLUMNS = (
    TokenColumn(name="token_ids", owner="content", dtype=np.int32),
    TokenColumn(name="logprobs", owner="content", dtype=np.float32, packed_as="rollout_logprobs"),
    TokenColumn(name="routes", owner="content", dtype=np.unsignedinteger, is_single=False, is_optional=True),
    TokenColumn(
        name="teacher", owner="content", dtype=np.float32, packed_as="teacher", is_single=False, is_optional=True
    ),
    TokenColumn(name="versions", owner="rollout", dtype=np.int32, packed_as="versions"),
    TokenColumn(name="loss_mask", owner="rollout", dtype=np.bool_, packed_as="loss_mask"),
    TokenColumn(name="advantages", owner="sample", dtype=np.float32, packed_as="advantages"),
    TokenColumn(name="old_logprobs", owner="sample", dtype=np.float32, packed_as="old_logprobs", is_optional=True),
    TokenColumn(
        name="reference_logprobs", owner="sample", dtype=np.float32, packed_as="reference_logprobs", is_optional=True
    ),
    TokenColumn(name="values", owner="sample", dtype=np.float32, packed_as="values", is_optional=True),
    TokenColumn(name="returns", owner="sample", dtype=np.float32, packed_as="returns", is_optional=True),
)
OF_CONTENT = tuple(column for column in COLUMNS if column.owner == "content")
OF_ROLLOUT = tuple(column for column in COLUMNS if column.owner == "rollout")
OF_SAMPLE = tuple(column for column in COLUMNS if column.owner == "sample")


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The tokens of one response and their text."""

    token_ids: npt.NDArray[np.int32]
    """[T]"""
    logprobs: npt.NDArray[np.float32]
    """[T], of the engine, after temperature."""
    text: str
    routes: RouteArray | None = None
    """[P + T - 1], of the prompt's tokens too; None where no engine chose experts."""
    teacher: npt.NDArray[np.float32] | None = None
    """[T, 1 + 2K], of a teacher on engines, see `rollout.teacher`."""
    repetition: float | None = None
    """`repeated_share(token_ids)`, if the worker computed it."""
    answer: str | None = None
    """`answer_in(text)`, if the worker computed it."""

    def load(self) -> Content:
        return self

    def locate(self) -> tuple[ContentSource, int]:
        return self, 0

    def content(self, _index: int) -> Content:
        return self

    @property
    def num_bytes(self) -> int:
        arrays = (getattr(self, column.name) for column in OF_CONTENT)
        return sum(array.nbytes for array in arrays if array is not None)


class ContentSource(Protocol):
    """Some contents that are brought to a process together."""

    def content(self, index: int, /) -> Content: ...


class ContentHandle(Protocol):
    """A content in this process, or a reference to one that lies on another node."""

    def load(self) -> Content: ...

    def locate(self) -> tuple[ContentSource, int]:
        """Return where the content is, and its index there."""
        ...

    @property
    def repetition(self) -> float | None:
        """`repeated_share(token_ids)`, if the worker computed it."""
        ...

    @property
    def answer(self) -> str | None:
        """`answer_in(text)`, if the worker computed it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Tokens that an engine sampled in one or several requests, end token included."""

    token_ids: npt.NDArray[np.int32]
    """[T]"""
    logprobs: npt.NDArray[np.float32]
    """[T]"""
    versions: npt.NDArray[np.int32]
    """[T]"""
    routes: RouteArray | None = None
    """From the first token without known experts to the one before the last."""
    is_cut: bool = False
    """The last token is the last that was allowed, and no end token."""

    def columns(self) -> dict[str, Any]:
        """Return the columns of a `Content` that this has."""
        names = (column.name for column in OF_CONTENT if column.name in self.__dataclass_fields__)
        return {name: getattr(self, name) for name in names}


def join_tokens(parts: Sequence[SampledTokens]) -> dict[str, Any]:
    """Return the columns of consecutive tokens, without their routes. Single numbers that some parts lack are 0."""
    joined: dict[str, Any] = {"versions": np.concatenate([part.versions for part in parts])}
    for column in OF_CONTENT:
        arrays = [getattr(part, column.name, None) for part in parts]
        if column.is_single and any(array is not None for array in arrays):
            nothing = (np.zeros(len(part.token_ids), column.dtype) for part in parts)
            joined[column.name] = np.concatenate(
                [zeros if array is None else array for array, zeros in zip(arrays, nothing, strict=True)]
            )
    return joined


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedColumns(Generic[_Floats, _Integers, _Booleans]):
    """The numbers per token of a micro-batch of N tokens, each of the token that its position predicts.

    In arrays, or in tensors of a rank's own tokens. Empty or None where the pass does not need them.
    """

    loss_mask: _Booleans
    """[N], True where the policy chose the token."""
    rollout_logprobs: _Floats
    """[N], of the engine."""
    advantages: _Floats
    """[N]"""
    old_logprobs: _Floats | None = None
    """[N], of the policy before the step."""
    reference_logprobs: _Floats | None = None
    """[N]"""
    values: _Floats | None = None
    """[N], of the critic before the step."""
    returns: _Floats | None = None
    """[N], what the critic learns."""
    versions: _Integers | None = None
    """[N], which policy chose the token; None where one policy chose all."""
    teacher: _Floats | None = None
    """[N, 1 + 2K], see `train.likeliest.top_scores`."""


def repeated_share(token_ids: npt.NDArray[np.int32]) -> float:
    """Return the share of 4-token windows that occurred before in the response."""
    num_windows = len(token_ids) - len(_FACTORS) + 1
    if num_windows < 1:
        return 0.0
    tokens, keys = token_ids.astype(np.uint64), np.zeros(num_windows, np.uint64)
    # A sum with odd factors, modulo 2^64: two different windows collide in about one of 2^64 pairs.
    for index, factor in enumerate(_FACTORS):
        keys += tokens[index : index + num_windows] * factor
    return 1 - len(np.unique(keys)) / num_windows


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

    firsts: npt.NDArray[np.int32]
    """[S], place among the sample's tokens of the first one that the row predicts."""
    episode_starts: npt.NDArray[np.int32]
    """[E + 1], ends with N: where the rows of a sample, or the padding, begin."""
    num_loss_tokens: npt.NDArray[np.int64]
    """[E], of all rows of the sample, in whatever micro-batch they are."""


ColumnName: TypeAlias = Literal["old_logprobs", "reference_logprobs", "values", "advantages", "returns", "teacher"]
"""A column that ranks compute, named as in `PackedColumns`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleColumn:
    """A column of the response tokens of some rows of a step's samples, such as the values that one rank computed."""

    sample_ids: npt.NDArray[np.int32]
    """[S], indices into the step's samples."""
    starts: npt.NDArray[np.int64]
    """[S + 1], where the numbers of each row begin."""
    numbers: npt.NDArray[np.float32]
    """[sum of T], or [sum of T, K] where each token has several."""
    firsts: npt.NDArray[np.int32] | None = None
    """[S], as in `PackedRows`; None where every row is a whole sample."""

    def only(self, sample_ids: Iterable[int]) -> SampleColumn:
        """Return the rows of these samples."""
        rows = np.flatnonzero(np.isin(self.sample_ids, list(sample_ids)))
        parts = [self.numbers[self.starts[row] : self.starts[row + 1]] for row in rows]
        return SampleColumn(
            sample_ids=self.sample_ids[rows],
            starts=np.cumsum([0, *map(len, parts)], dtype=np.int64),
            numbers=np.concatenate([self.numbers[:0], *parts]),
            firsts=None if self.firsts is None else self.firsts[rows],
        )


def sample_column(arrays: Mapping[int, npt.NDArray[np.float32]]) -> SampleColumn:
    """Return the column of whole samples, by their indices."""
    return SampleColumn(
        sample_ids=np.fromiter(arrays, np.int32, len(arrays)),
        starts=np.cumsum([0, *map(len, arrays.values())], dtype=np.int64),
        numbers=np.concatenate([np.zeros(0, np.float32), *arrays.values()]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSums:
    """Numbers of B rollouts of a step, made where the numbers of their tokens are."""

    counts: npt.NDArray[np.float64]
    """[B], tokens that the policy chose."""
    kl: npt.NDArray[np.float64] | None
    """[B], sum of the estimates of KL at these tokens; None without a penalty."""
    ratios: npt.NDArray[np.float64] | None = None
    """[B], their log-probability less the reference's, to compare pairs."""
    advantages: npt.NDArray[np.float64] | None = None
    """[B], their size; None where all tokens have the same."""


def by_sample(parts: Iterable[SampleColumn]) -> dict[int, npt.NDArray[np.float32]]:
    """Return the numbers of each sample; tokens of rows that are in none of the parts have 0."""
    by_id: dict[int, list[tuple[int, npt.NDArray[np.float32]]]] = {}
    for part in parts:
        firsts = np.zeros(len(part.sample_ids), np.int32) if part.firsts is None else part.firsts
        arrays = np.split(part.numbers, part.starts[1:-1]) if len(part.sample_ids) else []
        for sample_id, first, array in zip(part.sample_ids.tolist(), firsts.tolist(), arrays, strict=True):
            by_id.setdefault(sample_id, []).append((first, array))
    return {sample_id: _joined(rows) for sample_id, rows in by_id.items()}


def assemble(parts: Iterable[SampleColumn]) -> tuple[npt.NDArray[np.float32], ...]:
    """Return one array per sample of a step from the parts of all data-parallel ranks."""
    by_id = by_sample(parts)
    return tuple(by_id[sample_id] for sample_id in range(len(by_id)))


def _joined(rows: Sequence[tuple[int, npt.NDArray[np.float32]]]) -> npt.NDArray[np.float32]:
    if len(rows) == 1 and rows[0][0] == 0:
        return rows[0][1]
    num_tokens = max(first + len(array) for first, array in rows)
    joined = np.zeros((num_tokens, *rows[0][1].shape[1:]), np.float32)
    for first, array in rows:
        joined[first : first + len(array)] = array
    return joined
