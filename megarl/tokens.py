"""Numbers per token that may be many and may lie on another node. Numpy only; below `types`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The tokens of one response and their text."""

    token_ids: npt.NDArray[np.int32]  # [T]
    logprobs: npt.NDArray[np.float32]  # [T], of the engine, after temperature
    text: str

    def load(self) -> Content:
        return self


class ContentHandle(Protocol):
    """A content in this process, or a reference to one that lies on another node."""

    def load(self) -> Content: ...


def is_repeated(array: npt.NDArray[np.generic]) -> bool:
    """Whether all elements are one number in memory, made by `np.broadcast_to`: a step's tokens are many."""
    return array.strides == (0,) and len(array) > 0


def num_true(mask: npt.NDArray[np.bool_]) -> int:
    return len(mask) * int(mask[0]) if is_repeated(mask) else int(np.count_nonzero(mask))


def counted(numbers: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Return the different numbers in ascending order, and how often each occurs."""
    if len(numbers) and (is_repeated(numbers) or (numbers == numbers[0]).all()):  # nearly always, and far quicker
        return numbers[:1], np.array([len(numbers)])
    return np.unique(numbers, return_counts=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleNumbers:
    """One number per response token of some samples of a step, such as the values that one rank computed."""

    sample_ids: npt.NDArray[np.int32]  # [S], indices into the step's samples
    starts: npt.NDArray[np.int64]  # [S + 1], where the numbers of each sample begin
    numbers: npt.NDArray[np.float32]  # [sum of T]

    def by_sample(self) -> dict[int, npt.NDArray[np.float32]]:
        arrays = np.split(self.numbers, self.starts[1:-1])
        return dict(zip(self.sample_ids.tolist(), arrays, strict=True)) if len(self.sample_ids) else {}
