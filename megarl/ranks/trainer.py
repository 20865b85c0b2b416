"""The loop's Trainer: updates the actor and, where the recipe has one, the critic."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megarl.algo.algorithm import AnyAlgorithm
from megarl.config.recipe import Recipe
from megarl.data.packing import SequenceCost
from megarl.data.rollout_files import write_samples
from megarl.data.shares import Share, row_lengths
from megarl.errors import MachineError, NumericsError
from megarl.families.shape import ModelShape
from megarl.planner.hardware import gpu_named
from megarl.ranks.calls import ActorCalls, CriticCalls
from megarl.ranks.forward_passes import ForwardPasses, passes_of
from megarl.ranks.packings import ModelPackings, packings_of
from megarl.ranks.profiling import PROFILES_FOLDER, Profiling
from megarl.ranks.remote_columns import RemoteColumn
from megarl.ranks.start import Trainers
from megarl.results import CriticResult, DraftStats, RankUsage, TrainingWork, UpdateResult
from megarl.tokens import ColumnName
from megarl.types import Estimates, FloatArray, PolicyVersion, ScoredGroup, TrainSample

SKIPPED_FOLDER = "skipped"
"""In the run's folder: rollouts whose updates were skipped."""
_PASSES = 3
"""In units of the forward pass: the backward pass multiplies with weights and with activations."""


@dataclass(kw_only=True)
class ModelsTrainer:
    trainers: Trainers
    packings: ModelPackings
    passes: ForwardPasses | None
    """None if the algorithm needs no column of tokens before an update."""
    algorithm: AnyAlgorithm
    epochs: int
    num_steps: int
    """Steps that the models have taken."""
    version: PolicyVersion
    """The version that they are at."""
    skipped_folder: Path
    """Samples of skipped updates are written there."""
    warmup_steps: int
    """First steps, in which the critic alone is updated."""
    refresh_every_steps: int | None
    """Steps after which the reference takes the actor's weights."""
    draft_every_steps: int | None = None
    """Steps after which the model that drafts learns the responses of the last one."""
    profiling: Profiling | None = None
    _columns: Mapping[ColumnName, RemoteColumn] = field(default_factory=dict, init=False)
    """Columns of the step under way, which ranks have computed."""

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        shape: ModelShape,
        trainers: Trainers,
        *,
        num_steps: int,
        version: PolicyVersion,
        algorithm: AnyAlgorithm,
    ) -> ModelsTrainer:
        """Return the trainer of a recipe; `shape` is the policy's."""
        packings, critic = packings_of(recipe, shape), recipe.roles.critic
        return cls(
            trainers=trainers,
            packings=packings,
            passes=passes_of(recipe, trainers, packings, algorithm),
            algorithm=algorithm,
            epochs=recipe.train.epochs,
            num_steps=num_steps,
            version=version,
            skipped_folder=recipe.run_folder / SKIPPED_FOLDER,
            warmup_steps=0 if critic is None else critic.warmup_steps,
            refresh_every_steps=recipe.algorithm.needs.self_play_steps,
            draft_every_steps=recipe.roles.draft_learns_every,
            profiling=None
            if recipe.observe.profile is None
            else Profiling(
                config=recipe.observe.profile,
                actor=trainers.actor,
                folder=recipe.run_folder.absolute() / PROFILES_FOLDER,
            ),
        )

    async def estimate(self, groups: Sequence[ScoredGroup]) -> Estimates:
        if self.profiling is not None:
            await self.profiling.begin(self.num_steps + 1)
        if self.passes is None:
            return Estimates()
        estimates, self._columns = await self.passes.estimate(groups)
        return estimates

    async def logprobs(self, samples: Sequence[TrainSample]) -> tuple[FloatArray, ...]:
        """Return the actor's log-probabilities of every token of the samples' responses."""
        shares = self.packings.actor.for_forward(samples)
        return await (await self.trainers.actor.compute_column(ActorCalls.logprobs, shares)).fetch()

    async def update(self, samples: Sequence[TrainSample]) -> UpdateResult:
        step = self.num_steps + 1
        try:
            result = replace(await self._update(samples), preference=self.algorithm.pairs)
            if result.num_skipped_updates:
                warning = (
                    f"step {step}: {result.num_skipped_updates} updates were skipped, their loss or gradient was not "
                    f"finite; {await self._write_skipped(step, samples)}"
                )
                result = replace(result, warnings=(*result.warnings, warning))
        except NumericsError as error:
            raise NumericsError(f"{error}; {await self._write_skipped(step, samples)}") from error
        finally:
            self._columns = {}
        if self.profiling is not None:
            await self.profiling.end()
        self.num_steps = step
        self.version = result.version
        if self.refresh_every_steps is not None and step % self.refresh_every_steps == 0:
            await self.trainers.actor.compute(ActorCalls.refresh_reference)
        return result

    async def _update(self, samples: Sequence[TrainSample]) -> UpdateResult:
        every = self.draft_every_steps
        if every is None or (self.num_steps + 1) % every:
            return await self._update_policy(samples)
        return _with_draft(*await asyncio.gather(self._update_policy(samples), self._update_drafter(samples)))

    async def _update_policy(self, samples: Sequence[TrainSample]) -> UpdateResult:
        if self.trainers.critic is None:
            return await self._update_actor(samples)
        if self.num_steps < self.warmup_steps:
            return _with_critic(UpdateResult(version=self.version, stats=None), await self._update_critic(samples))
        update, critic = await asyncio.gather(self._update_actor(samples), self._update_critic(samples))
        return _with_critic(update, critic)

    async def _update_actor(self, samples: Sequence[TrainSample]) -> UpdateResult:
        actor = self.trainers.actor
        columns = self._of_step("old_logprobs", "teacher", "advantages")
        if self.passes is not None and "reference_logprobs" not in self.passes.fetched:
            columns |= self._of_step("reference_logprobs")
        shared: list[int] = []

        def counted(shares: Iterable[Share]) -> Iterator[Share]:
            for share in shares:
                shared.extend(share.shared_lengths)
                yield share

        shares = counted(self.packings.actor.for_update(samples))
        update = await actor.compute_shares(ActorCalls.update, shares, columns)
        work = training_work(
            [length for sample in samples for length in row_lengths(sample)],
            update.usage["actor"],
            shared=shared,
            cost=self.packings.actor.packing.cost,
            epochs=self.epochs,
            num_ranks=len(actor),
        )
        return replace(update, work=work)

    async def _update_critic(self, samples: Sequence[TrainSample]) -> CriticResult:
        critic, packing = self.trainers.critic, self.packings.critic
        assert critic is not None, "a run without a critic"
        assert packing is not None, "a critic without a packing"
        columns = self._of_step("values", "returns")
        return await critic.compute_shares(CriticCalls.update, packing.for_update(samples), columns)

    async def _update_drafter(self, samples: Sequence[TrainSample]) -> UpdateResult:
        drafter, packing = self.trainers.drafter, self.packings.drafter
        assert drafter is not None, "a run without a drafter"
        assert packing is not None, "a drafter without a packing"
        return await drafter.compute_shares(ActorCalls.update, packing.for_update(_as_drafted(samples)))

    def _of_step(self, *names: ColumnName) -> dict[ColumnName, RemoteColumn]:
        """Return those of the columns that ranks have computed for this step."""
        return {name: self._columns[name] for name in names if name in self._columns}

    async def _write_skipped(self, step: int, samples: Sequence[TrainSample]) -> str:
        """Return where the rollouts are, or why they are nowhere: a full disk ends no run."""
        path = self.skipped_folder / f"step_{step:06d}.parquet"
        try:
            await asyncio.to_thread(write_samples, path, await self.complete(samples, range(len(samples))))
        except MachineError as error:
            return f"the rollouts are lost: {error}"
        return f"the rollouts are in {path}"

    async def complete(self, samples: Sequence[TrainSample], indices: Sequence[int]) -> list[TrainSample]:
        """Return these samples with all columns of their tokens that ranks have."""
        remote = self._of_step("old_logprobs", "reference_logprobs", "values", "advantages", "returns")
        selected = await asyncio.gather(*(column.select(indices) for column in remote.values()))
        columns = dict(zip(remote, selected, strict=True))

        def completed(index: int) -> TrainSample:
            arrays = {name: column[index] for name, column in columns.items()}
            sample = samples[index]
            return replace(
                sample,
                advantages=arrays.get("advantages", sample.advantages),
                old_logprobs=arrays.get("old_logprobs", sample.old_logprobs),
                reference_logprobs=arrays.get("reference_logprobs", sample.reference_logprobs),
                values=arrays.get("values", sample.values),
                returns=arrays.get("returns", sample.returns),
            )

        return [completed(index) for index in indices]


def _with_critic(update: UpdateResult, critic: CriticResult) -> UpdateResult:
    return replace(
        update,
        critic=critic.stats,
        num_skipped_updates=update.num_skipped_updates + critic.num_skipped_updates,
        usage=update.usage if critic.usage is None else {**update.usage, "critic": critic.usage},
    )


def _as_drafted(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """Return the samples as SGLang shows them to a draft, which learns what it will see: without their first token.

    It hands a draft each token in the place of the one before, as an EAGLE head needs them beside hidden states.
    """
    prompts = {id(sample.prompt_ids): sample.prompt_ids[1:] for sample in samples if len(sample.prompt_ids) > 1}
    return [replace(each, prompt_ids=prompts.get(id(each.prompt_ids), each.prompt_ids)) for each in samples]


def _with_draft(update: UpdateResult, learned: UpdateResult) -> UpdateResult:
    draft = None
    if (stats := learned.stats) is not None:
        draft = DraftStats(loss=stats.loss, grad_norm=stats.grad_norm, learning_rate=stats.learning_rate)
    return replace(
        update,
        draft=draft,
        num_skipped_updates=update.num_skipped_updates + learned.num_skipped_updates,
        usage={**update.usage, "drafter": learned.usage["actor"]},
    )


def training_work(
    lengths: Sequence[int],
    usage: RankUsage,
    *,
    cost: SequenceCost,
    epochs: int,
    num_ranks: int,
    shared: Sequence[int] = (),
) -> TrainingWork:
    """Return the work of all sequences of a step, less that of their `shared` beginnings; padding is not counted."""
    gpu = None if usage.gpu_name is None else gpu_named(usage.gpu_name)
    peak = None if gpu is None else num_ranks * gpu.flops
    return TrainingWork(
        flops=_PASSES * epochs * (sum(cost.of(lengths)) - sum(cost.of(shared))),
        peak_flops_per_second=peak,
        num_tokens=sum(lengths),
        num_shared_tokens=sum(shared),
    )
