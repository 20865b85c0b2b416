"""All trainer ranks of a run: actor, critic and reference start together, live together and end together.

They cannot lose a member: a rank that died or hangs ends this life, and the next one starts from a checkpoint.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint.manifest import CRITIC_FOLDER
from megarl.checkpoint.resume import ResumePoint
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import ModelParallelConfig, Recipe
from megarl.runtime.cluster import Pool
from megarl.runtime.tasks import task_group
from megarl.runtime.trainers.ranks import (
    ActorProcess,
    ActorRanks,
    CriticProcess,
    CriticRanks,
    Ranks,
    ReferenceProcess,
    ReferenceRanks,
    WeightOrigin,
    start_processes,
)
from megarl.train.rank import RankSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainers:
    actor: ActorRanks
    critic: CriticRanks | None
    reference: ReferenceRanks | None
    """None where there is none, and where the actor's ranks keep it."""

    @property
    def is_lost(self) -> bool:
        """Whether one of them is known to be dead."""
        return any(ranks.is_lost for ranks in self.all)

    @property
    def all(self) -> tuple[Ranks, ...]:
        models: tuple[Ranks | None, ...] = (self.actor, self.critic, self.reference)
        return tuple(ranks for ranks in models if ranks is not None)


@asynccontextmanager
async def living_trainers(
    recipe: Recipe, shape: ModelShape, pools: Mapping[str, Pool], *, resume: ResumePoint | None
) -> AsyncIterator[Trainers]:
    """Ranks that are watched inside, so that one that dies ends the block at once, and gone after it."""
    async with AsyncExitStack() as stack:
        trainers = await start_trainers(recipe, shape, pools, stack, resume=resume)
        async with task_group() as tasks:
            watches = [tasks.create_task(ranks.watch()) for ranks in trainers.all]
            yield trainers
            for watch in watches:
                watch.cancel()


async def start_trainers(
    recipe: Recipe,
    shape: ModelShape,
    pools: Mapping[str, Pool],
    stack: AsyncExitStack,
    *,
    resume: ResumePoint | None,
) -> Trainers:
    """Side by side: each takes a while. `stack` takes down what was started."""
    async with task_group() as tasks:
        actor = tasks.create_task(_start_actor(recipe, shape, pools, stack, resume))
        critic = tasks.create_task(_start_critic(recipe, shape, pools, stack, resume))
        reference = tasks.create_task(_start_reference(recipe, shape, pools, stack))
    return Trainers(actor=actor.result(), critic=critic.result(), reference=reference.result())


async def _start_actor(
    recipe: Recipe, shape: ModelShape, pools: Mapping[str, Pool], stack: AsyncExitStack, resume: ResumePoint | None
) -> ActorRanks:
    config, reference, critic = recipe.roles.actor, recipe.roles.reference, recipe.roles.critic
    pool = pools[config.pool]
    origin = WeightOrigin(folder=recipe.model.path.absolute())
    if resume is not None:
        origin = WeightOrigin(folder=resume.folder, resumed=resume.state.trainer)
    kept = (reference.path or recipe.model.path).absolute() if reference and reference.pool is None else None
    workers = await start_processes(
        "actor",
        ActorProcess,
        pool.places,
        stack,
        _rank_spec(recipe, config, shape),
        origin,
        recipe.algorithm,
        recipe.train,
        recipe.run.steps - (critic.warmup_steps if critic else 0),
        kept,
        share=pool.share,
        bind=recipe.network.bind,
        report_folder=recipe.run_folder.absolute(),
    )
    return ActorRanks(workers, pool.turn)


async def _start_critic(
    recipe: Recipe, shape: ModelShape, pools: Mapping[str, Pool], stack: AsyncExitStack, resume: ResumePoint | None
) -> CriticRanks | None:
    config = recipe.roles.critic
    if config is None:
        return None
    pool = pools[config.pool]
    folder = critic_folder(recipe)
    origin = WeightOrigin(folder=folder.absolute())
    if resume is not None:
        assert resume.state.critic is not None, f"{resume.folder} has no critic"
        origin = WeightOrigin(folder=resume.folder / CRITIC_FOLDER, resumed=resume.state.critic)
    workers = await start_processes(
        "critic",
        CriticProcess,
        pool.places,
        stack,
        _rank_spec(recipe, config, critic_shape(recipe, shape)),
        origin,
        recipe.algorithm,
        config,
        recipe.run.steps,
        share=pool.share,
        bind=recipe.network.bind,
        report_folder=recipe.run_folder.absolute(),
    )
    return CriticRanks(workers, pool.turn)


async def _start_reference(
    recipe: Recipe, shape: ModelShape, pools: Mapping[str, Pool], stack: AsyncExitStack
) -> ReferenceRanks | None:
    config = recipe.roles.reference
    if config is None or config.pool is None:
        return None
    pool = pools[config.pool]
    workers = await start_processes(
        "reference",
        ReferenceProcess,
        pool.places,
        stack,
        _rank_spec(recipe, config, shape),
        (config.path or recipe.model.path).absolute(),
        share=pool.share,
        bind=recipe.network.bind,
        report_folder=recipe.run_folder.absolute(),
    )
    return ReferenceRanks(workers, pool.turn)


def critic_folder(recipe: Recipe) -> Path:
    """Where the critic's first weights, its configuration and its tokenizer are."""
    critic = recipe.roles.critic
    return recipe.model.path if critic is None or critic.path is None else critic.path


def critic_shape(recipe: Recipe, policy: ModelShape) -> ModelShape:
    critic = recipe.roles.critic
    body = policy if critic is None or critic.path is None else read_model_shape(critic.path)
    return body.as_critic()


def _rank_spec(recipe: Recipe, split: ModelParallelConfig, shape: ModelShape) -> RankSpec:
    return RankSpec(
        rank=0,
        world=1,
        master_address="",
        master_port=0,
        device=recipe.run.device,
        split=split,
        shape=shape,
        seed=recipe.run.seed,
        timeout_s=recipe.train.operation_timeout_s,
    )
