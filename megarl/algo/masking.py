"""Rollouts that nobody could score: out of their group's statistics and out of the loss, but still in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from megarl.types import Estimates, FloatArray, ScoredGroup, TrainSample


def is_lost(scored: ScoredGroup) -> bool:
    """Nothing is left to learn from: no rollout has a score, or what all are compared with has none."""
    has_no_baseline = scored.baseline is not None and scored.baseline.is_masked
    return has_no_baseline or all(score.is_masked for score in scored.scores)


def are_scored(groups: Sequence[ScoredGroup]) -> list[bool]:
    """Of every rollout of a step, in the order of the groups."""
    return [not score.is_masked for scored in groups for score in scored.scores]


def scored_only(scored: ScoredGroup) -> ScoredGroup:
    kept = [not score.is_masked for score in scored.scores]
    return replace(
        scored,
        group=replace(scored.group, rollouts=tuple(compress(scored.group.rollouts, kept))),
        scores=tuple(compress(scored.scores, kept)),
    )


def estimates_of(estimates: Estimates, kept: Sequence[bool]) -> Estimates:
    def of_kept(arrays: tuple[FloatArray, ...] | None) -> tuple[FloatArray, ...] | None:
        return None if arrays is None else tuple(compress(arrays, kept))

    return Estimates(
        logprobs=of_kept(estimates.logprobs),
        reference_logprobs=of_kept(estimates.reference_logprobs),
        values=of_kept(estimates.values),
    )


def with_masked(
    samples: Sequence[TrainSample], groups: Sequence[ScoredGroup], kept: Sequence[bool]
) -> list[TrainSample]:
    """The samples of the kept rollouts, and between them one without loss tokens for each of the others."""
    rollouts = [(scored.group.prompt, rollout) for scored in groups for rollout in scored.group.rollouts]
    remaining = iter(samples)
    like = samples[0]
    result: list[TrainSample] = []
    for (prompt, rollout), is_kept in zip(rollouts, kept, strict=True):
        if is_kept:
            result.append(next(remaining))
            continue
        nothing = np.zeros(len(rollout.token_ids), dtype=np.float32)
        # Nobody reads what no loss token has; only that it is there where the others have it.
        result.append(
            TrainSample(
                prompt_ids=prompt.token_ids,
                rollout=replace(rollout, loss_mask=np.zeros_like(rollout.loss_mask)),
                advantages=nothing,
                old_logprobs=None if like.old_logprobs is None else nothing,
                reference_logprobs=None if like.reference_logprobs is None else nothing,
                values=None if like.values is None else nothing,
                returns=None if like.returns is None else nothing,
            )
        )
    return result
