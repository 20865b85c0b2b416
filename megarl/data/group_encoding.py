"""The encoding of scored groups where they leave a process: for the driver, Ray's object store and files.

A group is a small record, the columns of its rollouts, and its contents end to end with those of other groups. Which
columns there are is in `tokens.COLUMNS`. Knows neither Ray nor files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megarl.tokens import COLUMNS, OF_CONTENT, OF_ROLLOUT, Content, ContentHandle
from megarl.types import Episode, FinishReason, Prompt, Rollout, RolloutGroup, Score, ScoredGroup

ScoreRow: TypeAlias = tuple[
    float, Mapping[str, float], str | None, bool, tuple[float, ...] | None, tuple[float, ...] | None
]
"""The fields of a score, as pickle reads them quickest."""
_OPTIONAL = frozenset(column.name for column in COLUMNS if column.is_optional)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedColumns:
    """The columns of R responses, end to end; a column that none of them has is left out."""

    arrays: Mapping[str, npt.NDArray[Any]]
    starts: Mapping[str, npt.NDArray[np.int64]]
    """[R + 1] for each column: where the numbers of each response begin."""

    @classmethod
    def of(cls, responses: Sequence[Mapping[str, npt.NDArray[Any] | None]]) -> JoinedColumns:
        """Join columns by name; all responses have the same names."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        starts: dict[str, npt.NDArray[np.int64]] = {}
        for name in responses[0] if responses else ():
            of_column = [response[name] for response in responses]
            present = [array for array in of_column if array is not None]
            if present:
                arrays[name] = np.concatenate(present)
                lengths = (0 if array is None else len(array) for array in of_column)
                starts[name] = np.cumsum([0, *lengths], dtype=np.int64)
        return cls(arrays=arrays, starts=starts)

    def of_response(self, index: int) -> dict[str, Any]:
        """Return the columns of one response; an optional one without numbers is left out."""
        columns: dict[str, Any] = {}
        for name, array in self.arrays.items():
            start, end = self.starts[name][index], self.starts[name][index + 1]
            if start != end or name not in _OPTIONAL:
                columns[name] = array[start:end]
        return columns


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentArrays:
    """The contents of R responses, end to end (a `ContentSource`)."""

    columns: JoinedColumns
    texts: tuple[str, ...]

    @classmethod
    def of(cls, contents: Sequence[Content]) -> ContentArrays:
        return cls(
            columns=JoinedColumns.of([content_columns(content) for content in contents]),
            texts=tuple(content.text for content in contents),
        )

    def content(self, index: int) -> Content:
        return Content(text=self.texts[index], **self.columns.of_response(index))


def content_columns(content: Content) -> dict[str, npt.NDArray[Any] | None]:
    return {column.name: getattr(content, column.name) for column in OF_CONTENT}


def rollout_columns(rollout: Rollout) -> dict[str, npt.NDArray[Any]]:
    return {column.name: getattr(rollout, column.name) for column in OF_ROLLOUT}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """A scored group without its prompt and its numbers per token. A baseline, if there is one, comes last."""

    num_tokens: tuple[int, ...]
    finish_reasons: tuple[FinishReason, ...]
    episodes: tuple[Episode, ...]
    prompt_routes: tuple[str, ...]
    scores: tuple[ScoreRow, ...]
    baseline: ScoreRow | None

    @classmethod
    def of(cls, scored: ScoredGroup) -> GroupRecord:
        rollouts = scored.group.with_baseline
        return cls(
            num_tokens=tuple(rollout.num_tokens for rollout in rollouts),
            finish_reasons=tuple(rollout.finish_reason for rollout in rollouts),
            episodes=tuple(rollout.episode for rollout in rollouts),
            prompt_routes=tuple(rollout.prompt_routes for rollout in rollouts),
            scores=tuple(map(_score_row, scored.scores)),
            baseline=None if scored.baseline is None else _score_row(scored.baseline),
        )

    def scored_group(
        self, prompt: Prompt, contents: Iterable[ContentHandle], columns: Iterable[Mapping[str, Any]]
    ) -> ScoredGroup:
        """Return the group; `contents` and `columns` are those of its rollouts, in their order."""
        rollouts = tuple(
            Rollout(finish_reason=reason, episode=episode, prompt_routes=routes, content=content, **of_rollout)
            for reason, episode, routes, content, of_rollout in zip(
                self.finish_reasons, self.episodes, self.prompt_routes, contents, columns, strict=True
            )
        )
        num_trained = len(self.scores)
        group = RolloutGroup(
            prompt=prompt,
            rollouts=rollouts[:num_trained],
            baseline=rollouts[num_trained] if len(rollouts) > num_trained else None,
        )
        return ScoredGroup(
            group=group,
            scores=tuple(map(_score, self.scores)),
            baseline=None if self.baseline is None else _score(self.baseline),
        )


def _score_row(score: Score) -> ScoreRow:
    return score.value, score.components, score.prediction, score.is_masked, score.turns, score.tokens


def _score(row: ScoreRow) -> Score:
    value, components, prediction, is_masked, turns, tokens = row
    return Score(
        value=value, components=components, prediction=prediction, is_masked=is_masked, turns=turns, tokens=tokens
    )
