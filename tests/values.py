"""Prompts and rollouts for tests, with defaults for what a test does not look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megarl.tokens import Content
from megarl.types import Episode, FinishReason, Prompt, Rollout, RolloutGroup, Score, ScoredGroup


def make_prompt(
    number: int = 0,
    *,
    token_ids: Sequence[int] | npt.NDArray[np.integer] = (1,),
    file: str = "train.parquet",
    data_source: str = "sums",
    ground_truth: str = "",
) -> Prompt:
    """Return the prompt at this place of a file."""
    return Prompt(
        uid=f"{file}:{number}",
        position=number,
        epoch=0,
        token_ids=np.asarray(token_ids, np.int32),
        data_source=data_source,
        ground_truth=ground_truth,
        extra_info={},
    )


def make_rollout(
    token_ids: Sequence[int] | npt.NDArray[np.integer],
    *,
    text: str = "",
    logprobs: npt.NDArray[np.float32] | None = None,
    loss_mask: npt.NDArray[np.bool_] | None = None,
    version: int = 0,
    finish_reason: FinishReason = FinishReason.STOP,
    episode: Episode | None = None,
) -> Rollout:
    """Return a rollout that one policy sampled with probability 1; without a mask it chose every token."""
    size = len(token_ids)
    return Rollout(
        content=Content(
            token_ids=np.asarray(token_ids, np.int32),
            logprobs=np.zeros(size, np.float32) if logprobs is None else logprobs,
            text=text,
        ),
        versions=np.full(size, version, np.int32),
        loss_mask=np.ones(size, np.bool_) if loss_mask is None else loss_mask,
        finish_reason=finish_reason,
        episode=episode or Episode(),
    )


def versioned_group(position: int, *versions: int) -> ScoredGroup:
    """Return a group of one rollout with a token per version; without any, one token of version 0."""
    versions = versions or (0,)
    rollout = replace(make_rollout([2] * len(versions)), versions=np.array(versions, np.int32))
    group = RolloutGroup(prompt=make_prompt(position), rollouts=(rollout,))
    return ScoredGroup(group=group, scores=(Score(value=0.0, components={}),))
