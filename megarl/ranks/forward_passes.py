"""The forward passes before an update: columns of tokens that credit or the loss needs, and credit from them.

Columns stay on the ranks that computed them. The driver fetches one only where a user's estimator needs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from megarl.algo.advantage import Float64Array
from megarl.algo.algorithm import AnyAlgorithm
from megarl.algo.token_credit import CreditTask
from megarl.config.algorithm import KlRewardConfig
from megarl.config.recipe import Recipe
from megarl.config.roles import teacher_of
from megarl.data.shares import UNUSED_FOR_LOSS_TOKENS
from megarl.ranks.calls import ActorCalls, CriticCalls, ModelCalls, PolicyCalls
from megarl.ranks.column_host import ColumnHost
from megarl.ranks.packings import ModelPackings
from megarl.ranks.ranks import RankGroup
from megarl.ranks.remote_columns import RemoteColumn, RemotePart
from megarl.ranks.start import Trainers
from megarl.tokens import ColumnName, RolloutSums
from megarl.types import Estimates, ScoredGroup, TrainSample

Columns: TypeAlias = Mapping[ColumnName, RemoteColumn]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPasses:
    """Computes the columns that an algorithm needs before an update."""

    trainers: Trainers
    packings: ModelPackings
    algorithm: AnyAlgorithm
    has_logprobs: bool = False
    """Compute the log-probabilities of the policy before the step."""
    has_reference: bool = False
    """Compute those of the reference."""
    teacher_sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The data sources of each teacher; a teacher without one has all that no other names."""
    fetched: frozenset[ColumnName] = frozenset()
    """The columns that the driver needs, if they are computed."""

    async def estimate(self, groups: Sequence[ScoredGroup]) -> tuple[Estimates, Columns]:
        """Return the estimates of a step, and the columns that stay with the ranks."""
        nothing = np.zeros(0, np.float32)
        samples = [
            TrainSample(
                prompt_ids=scored.group.prompt.token_ids,
                images=scored.group.prompt.images,
                rollout=rollout,
                advantages=nothing,
            )
            for scored in groups
            for rollout in scored.group.rollouts
        ]
        sources = [scored.group.prompt.data_source for scored in groups for _ in scored.group.rollouts]
        columns = await self._compute(samples, sources)
        names = [name for name in columns if name in self.fetched]
        arrays = await asyncio.gather(*(columns[name].fetch() for name in names))
        fetched = dict(zip(names, arrays, strict=True))
        sums = None
        task = self.algorithm.credit_task(groups)
        if task is not None:
            ranks: RankGroup[ModelCalls] = self.trainers.actor
            own = columns.get("old_logprobs")
            if self.trainers.critic is not None:
                ranks, own = self.trainers.critic, columns["values"]
            assert own is not None, "credit from columns, and none was computed"
            of_task = {name: columns[name] for name in task.columns}
            async with ranks.device_lock:  # ranks hold the credit of one policy at a time
                sums, credit = await assign_credit(ranks, task, own, of_task)
            columns |= credit
        estimates = Estimates(
            logprobs=fetched.get("old_logprobs"),
            reference_logprobs=fetched.get("reference_logprobs"),
            values=fetched.get("values"),
            sums=sums,
        )
        return estimates, columns

    async def _compute(self, samples: Sequence[TrainSample], sources: Sequence[str]) -> dict[ColumnName, RemoteColumn]:
        """Compute all columns side by side; `sources` are the data sources of the samples' prompts."""
        running: dict[ColumnName, Coroutine[object, object, RemoteColumn]] = {}
        if self.has_logprobs:
            shares = self.packings.actor.for_forward(samples)
            running["old_logprobs"] = self.trainers.actor.compute_column(ActorCalls.logprobs, shares)
        if self.has_reference:
            running["reference_logprobs"] = self._reference_logprobs(samples)
        if self.trainers.critic is not None:
            assert self.packings.critic is not None, "a critic without a packing"
            shares = self.packings.critic.for_forward(samples)
            running["values"] = self.trainers.critic.compute_column(CriticCalls.values, shares)
        if self.trainers.teachers:
            running["teacher"] = self._teacher_scores(samples, sources)
        return dict(zip(running, await asyncio.gather(*running.values()), strict=True))

    def _reference_logprobs(self, samples: Sequence[TrainSample]) -> Coroutine[object, object, RemoteColumn]:
        shares = self.packings.reference.for_forward(samples)
        if self.trainers.reference is None:
            return self.trainers.actor.compute_column(ActorCalls.reference_logprobs, shares)
        return self.trainers.reference.compute_column(PolicyCalls.logprobs, shares)

    async def _teacher_scores(self, samples: Sequence[TrainSample], sources: Sequence[str]) -> RemoteColumn:
        """Have the teacher of each sample's source score it."""
        indices: dict[str, list[int]] = {}
        for index, source in enumerate(sources):
            indices.setdefault(teacher_of(source, self.teacher_sources), []).append(index)
        columns = await asyncio.gather(
            *(
                self.trainers.teachers[role].compute_column(
                    PolicyCalls.logprobs,
                    self.packings.teachers[role].for_forward(samples, among=among, without=UNUSED_FOR_LOSS_TOKENS),
                )
                for role, among in indices.items()
            )
        )
        return replace(columns[0], parts=tuple(part for column in columns for part in column.parts))


def passes_of(
    recipe: Recipe, trainers: Trainers, packings: ModelPackings, algorithm: AnyAlgorithm
) -> ForwardPasses | None:
    """Return the forward passes of a recipe; None if it needs none."""
    config, needs = recipe.algorithm, recipe.algorithm.needs
    teachers = recipe.roles.teacher_ranks
    if not (needs.has_logprobs or config.kl is not None or trainers.critic is not None or teachers):
        return None
    fetched: set[ColumnName] = {"old_logprobs", "values"} if needs.fetches_columns else set()
    if needs.fetches_columns and isinstance(config.kl, KlRewardConfig):
        fetched.add("reference_logprobs")
    return ForwardPasses(
        trainers=trainers,
        packings=packings,
        algorithm=algorithm,
        has_logprobs=needs.has_logprobs,
        has_reference=config.kl is not None,
        teacher_sources={role: teacher.sources for role, teacher in teachers.items()},
        fetched=frozenset(fetched),
    )


async def assign_credit(
    ranks: RankGroup[ModelCalls],
    task: CreditTask,
    own: RemoteColumn,
    columns: Mapping[ColumnName, RemoteColumn],
) -> tuple[RolloutSums, dict[ColumnName, RemoteColumn]]:
    """Have the ranks that computed `own` assign the credit of its rollouts; return the credit's sums and columns."""
    tasks: dict[int, CreditTask] = {}
    samples: dict[int, frozenset[int]] = {}
    assigned: frozenset[int] = frozenset()
    for part in own.parts:  # rows of one sample may be in several
        samples[part.rank] = part.sample_ids - assigned
        tasks[part.rank] = task.among(samples[part.rank])
        assigned |= part.sample_ids
    started = [
        ranks.workers[rank].compute_credit.remote(
            ranks.token, tasks[rank], {name: column.references(ids) for name, column in columns.items()}, ids
        )
        for rank, ids in samples.items()
    ]
    parts: list[Float64Array] = await ranks.gather(ColumnHost.compute_credit.__name__, started, ranks=list(tasks))
    order = {sample_id: index for index, sample_id in enumerate(task.sample_ids)}
    indices = [[order[sample_id] for sample_id in of_rank.sample_ids] for of_rank in tasks.values()]
    back = np.argsort(np.concatenate(indices))  # the parts end to end are in the order of the ranks
    rows = np.concatenate(parts)[back]
    scales = task.scales(rows)
    if scales is None:
        return task.sums(rows), {}
    started = [
        ranks.workers[rank].normalise_credit.remote(ranks.token, scales[of_rank])
        for rank, of_rank in zip(tasks, indices, strict=True)
    ]
    normalised: list[tuple[dict[ColumnName, RemotePart], Float64Array]]
    normalised = await ranks.gather(ColumnHost.normalise_credit.__name__, started, ranks=list(tasks))
    by_rank = {rank: credit for rank, (credit, _) in zip(tasks, normalised, strict=True)}
    credit = {
        name: ranks.remote_column({rank: of_rank[name] for rank, of_rank in by_rank.items()})
        for name in normalised[0][0]
    }
    sizes = np.concatenate([sizes for _, sizes in normalised])[back]
    return replace(task.sums(rows), advantages=sizes), credit
