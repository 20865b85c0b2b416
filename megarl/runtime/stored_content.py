"""Responses in Ray's object store: a group's arrays stay on the node that made them until a rank loads its share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import ray

from megarl.errors import WorkerError
from megarl.tokens import Content, ContentHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupArrays:
    """The responses of one group, end to end."""

    token_ids: npt.NDArray[np.int32]  # [sum of T]
    logprobs: npt.NDArray[np.float32]  # [sum of T]
    starts: npt.NDArray[np.int64]  # [R + 1], where each response begins
    texts: tuple[str, ...]

    @classmethod
    def of(cls, contents: Sequence[Content]) -> GroupArrays:
        return cls(
            token_ids=np.concatenate([content.token_ids for content in contents]),
            logprobs=np.concatenate([content.logprobs for content in contents]),
            starts=np.cumsum([0, *(len(content.token_ids) for content in contents)], dtype=np.int64),
            texts=tuple(content.text for content in contents),
        )

    def content(self, index: int) -> Content:
        part = slice(self.starts[index], self.starts[index + 1])
        return Content(token_ids=self.token_ids[part], logprobs=self.logprobs[part], text=self.texts[index])


@dataclass(slots=True, eq=False)
class StoredGroup:
    """A reference to the arrays of one group; the responses of the group share it."""

    reference: ray.ObjectRef
    arrays: GroupArrays | None = field(default=None, repr=False)
    """Set where `fetch` brought them."""

    def load(self) -> GroupArrays:
        return self.arrays or _get([self.reference])[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredContent:
    """A `ContentHandle`: one response of a stored group."""

    group: StoredGroup
    index: int

    def load(self) -> Content:
        return self.group.load().content(self.index)


def fetch(handles: Sequence[ContentHandle]) -> None:
    """Bring the arrays of all these responses into this process, each once and many at a time."""
    groups = {id(handle.group): handle.group for handle in handles if isinstance(handle, StoredContent)}
    missing = [group for group in groups.values() if group.arrays is None]
    for group, arrays in zip(missing, _get([group.reference for group in missing]), strict=True):
        group.arrays = arrays


def _get(references: Sequence[ray.ObjectRef]) -> list[GroupArrays]:
    try:
        arrays: list[GroupArrays] = ray.get(list(references))
    except ray.exceptions.ObjectLostError as error:
        raise WorkerError(f"rollouts are lost with the node that held them: {str(error).splitlines()[0]}") from error
    return arrays
