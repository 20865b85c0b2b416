"""Scores the stored rollouts of a run again with another reward. Starts no engine and trains nothing.

Frozen models can score if their engines run already: those of `endpoints`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from megarl.config.recipe import DataConfig, NetworkConfig, RunConfig
from megarl.config.reward import RewardConfig, longest_reply
from megarl.config.roles import FrozenRoleConfig
from megarl.data.rollout_files import list_rollouts
from megarl.data.rows import DataRow, read_rows
from megarl.errors import DataError, first_line
from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import RunStarted
from megarl.observe.observer import Observer
from megarl.reward.build import build_scorer
from megarl.reward.judge import FrozenModel
from megarl.stages import Scorer
from megarl.tokens import Content
from megarl.types import FinishReason, Prompt, Rollout, RolloutGroup, Score

_COLUMNS = (
    "prompt_uid",
    "data_source",
    "index",
    "score",
    "is_masked",
    "ground_truth",
    "line",
    "text",
    "finish_reason",
    "prompt_ids",
    "token_ids",
    "loss_mask",
    "versions",
    "rollout_logprobs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """One rollout with both scores; None where there is none."""

    step: int
    prompt_uid: str
    data_source: str
    index: int
    line: str
    """The beginning of the response."""
    stored: float | None
    new: float | None


OpenModels: TypeAlias = Callable[[AsyncExitStack], Awaitable[Mapping[str, FrozenModel]]]


def rescore(
    run: Path,
    config: RewardConfig,
    *,
    step: int | None,
    on_step: Callable[[int, int], None],
    open_models: OpenModels | None = None,
) -> list[Rescored]:
    """Return all stored rollouts of a run, or of one step, with the scores of this reward.

    `on_step` receives each step when it is scored, with the number of its rollouts. `open_models` returns the frozen
    models that the reward may ask.
    """
    files = list_rollouts(run)
    if not files:
        raise DataError(f"{run}: no rollouts are stored here; observe.rollouts says how many a run keeps")
    if step is not None and step not in files:
        raise DataError(f"{run}: no rollouts of step {step} are stored; choose one of {', '.join(map(str, files))}")
    chosen = files if step is None else {step: files[step]}
    return asyncio.run(_score_all(chosen, config, _rows_of(run), on_step, open_models))


def running_models(
    frozen: Mapping[str, FrozenRoleConfig], reward: RewardConfig, *, run: RunConfig, network: NetworkConfig
) -> OpenModels:
    """Return how those frozen models are reached whose engines run already."""
    from megarl.rollout.frozen import models_of  # noqa: PLC0415 - imports Ray, for seconds
    from megarl.serving.frozen import start_frozen  # noqa: PLC0415 - as above

    roles = {role: config for role, config in frozen.items() if config.pool is None}
    longest, observer = longest_reply(reward), Observer(())

    async def open_models(stack: AsyncExitStack) -> Mapping[str, FrozenModel]:
        return models_of(
            await start_frozen(roles, {}, stack, run=run, network=network, observer=observer, longest_reply=longest)
        )

    return open_models


def _rows_of(run: Path) -> Mapping[str, DataRow]:
    """Return the rows that the run trained on, by the names of their prompts."""
    started = [record.event for record in read_events(run / EVENTS_FILE) if isinstance(record.event, RunStarted)]
    if not started:
        raise DataError(f"{run / EVENTS_FILE}: no run has started here")
    try:
        data = DataConfig.model_validate(started[-1].recipe["data"])
    except (KeyError, ValidationError):
        raise DataError(f"{run / EVENTS_FILE}: its data section is not one of this version of megarl") from None
    return {row.uid: row for row in read_rows(data.train, data, as_demonstrations=False)}


async def _score_all(
    files: Mapping[int, Path],
    config: RewardConfig,
    rows: Mapping[str, DataRow],
    on_step: Callable[[int, int], None],
    open_models: OpenModels | None,
) -> list[Rescored]:
    found: list[Rescored] = []
    async with AsyncExitStack() as stack:
        scorer = build_scorer(config, frozen={} if open_models is None else await open_models(stack))
        stack.callback(scorer.close)
        for step, path in files.items():
            tasks = [_score(scorer, step, members, rows) for members in _groups(path)]
            scored = [each for group in await asyncio.gather(*tasks) for each in group]
            found += scored
            on_step(step, len(scored))
    return found


def _groups(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the stored rollouts of each prompt of a file."""
    try:
        rollouts: list[dict[str, Any]] = pq.read_table(path, columns=list(_COLUMNS)).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read: {first_line(error)}") from error
    rollouts.sort(key=lambda rollout: (rollout["prompt_uid"], rollout["index"]))
    for _, members in groupby(rollouts, key=lambda rollout: rollout["prompt_uid"]):
        yield list(members)


async def _score(
    scorer: Scorer, step: int, members: Sequence[dict[str, Any]], rows: Mapping[str, DataRow]
) -> list[Rescored]:
    scores = (await scorer.score(_group(members, rows))).scores
    return [
        Rescored(
            step=step,
            prompt_uid=member["prompt_uid"],
            data_source=member["data_source"],
            index=member["index"],
            line=member["line"],
            stored=None if member["is_masked"] else member["score"],
            new=_value(score),
        )
        for member, score in zip(members, scores, strict=True)
    ]


def _value(score: Score) -> float | None:
    return None if score.is_masked else score.value


def _group(members: Sequence[dict[str, Any]], rows: Mapping[str, DataRow]) -> RolloutGroup:
    first = members[0]
    row = rows.get(first["prompt_uid"])
    if row is None:
        raise DataError(f"prompt {first['prompt_uid']} of a stored rollout is not in data.train any more")
    prompt = Prompt(
        uid=row.uid,
        position=0,
        epoch=0,
        token_ids=np.array(first["prompt_ids"], dtype=np.int32),
        data_source=first["data_source"],
        ground_truth=first["ground_truth"],
        extra_info=row.extra_info,
        messages=row.chat,
    )
    return RolloutGroup(prompt=prompt, rollouts=tuple(map(_rollout, members)))


def _rollout(member: Mapping[str, Any]) -> Rollout:
    return Rollout(
        versions=np.array(member["versions"], dtype=np.int32),
        loss_mask=np.array(member["loss_mask"], dtype=np.bool_),
        finish_reason=FinishReason(member["finish_reason"]),
        content=Content(
            token_ids=np.array(member["token_ids"], dtype=np.int32),
            logprobs=np.array(member["rollout_logprobs"], dtype=np.float32),
            text=member["text"],
        ),
    )
