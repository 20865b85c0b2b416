"""All trainer ranks of a run: actor, critic, reference and teachers start, are adopted, report a hang, end together.

They cannot lose a member: a rank that died or hangs ends them all, and the next set starts from a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import ray

from megarl.checkpoint.manifest import CRITIC_FOLDER, DRAFTER_FOLDER
from megarl.checkpoint.resume import ResumePoint, TrainerState
from megarl.cluster.cluster import Pool
from megarl.cluster.tasks import task_group
from megarl.config.algorithm import AlgorithmConfig, SftConfig
from megarl.config.draft import ModelDraftConfig
from megarl.config.lora import LoraConfig
from megarl.config.model import read_model_shape
from megarl.config.recipe import Recipe, TrainConfig
from megarl.config.roles import CriticConfig, DrafterConfig, ModelParallelConfig, TeacherRanksConfig
from megarl.env import trainer_environment
from megarl.errors import WorkerError
from megarl.families.shape import ModelShape
from megarl.ranks.calls import ActorCalls, CriticCalls, ModelCalls, PolicyCalls, TrainedCalls
from megarl.ranks.rank_process import ALWAYS
from megarl.ranks.ranks import BESIDE_TRAINING, RankGroup, RankHost
from megarl.train.rank_spec import ImageFiles, RankSpec

if TYPE_CHECKING:
    from megarl.ranks.publishing import PublishingActor

logger = logging.getLogger(__name__)

Rank = TypeVar("Rank", bound=ModelCalls)

_HANG_REPORT_S = 60.0
"""How much longer than the driver a collective waits: only the driver's report names the rank that is missing."""
_ADOPT_S = 60.0
"""Time for ranks to end the calls that the earlier driver began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainers:
    actor: RankGroup[ActorCalls]
    critic: RankGroup[CriticCalls] | None
    reference: RankGroup[PolicyCalls] | None
    """None without a reference, and where the actor's ranks have it."""
    drafter: RankGroup[ActorCalls] | None = None
    teachers: Mapping[str, RankGroup[PolicyCalls]] = field(default_factory=dict)
    """By their key below `roles`."""

    def of_policy(self, policy: str) -> Trainers:
        return replace(self, actor=self.actor.of_policy(policy))

    @property
    def is_lost(self) -> bool:
        """Whether a rank is known to be dead."""
        return any(ranks.is_lost for ranks in self.all)

    @property
    def by_role(self) -> dict[str, RankGroup[ModelCalls]]:
        """The models with ranks of their own, by their key below `roles`."""
        named: dict[str, RankGroup[ModelCalls] | None] = {"actor": self.actor, "critic": self.critic}
        named |= {"drafter": self.drafter, "reference": self.reference, **self.teachers}
        return {role: ranks for role, ranks in named.items() if ranks is not None}

    def among(self, roles: Iterable[str]) -> list[RankGroup[ModelCalls]]:
        """Return those of the models that have these roles."""
        return [self.by_role[role] for role in roles if role in self.by_role]

    @property
    def all(self) -> tuple[RankGroup[ModelCalls], ...]:
        return tuple(self.by_role.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStart:
    """A policy that is trained beside the first: its adapter is on the ranks of that one."""

    name: str
    recipe: Recipe
    resume: ResumePoint | None


@asynccontextmanager
async def running_trainers(
    recipe: Recipe,
    shape: ModelShape,
    pools: Mapping[str, Pool],
    *,
    resume: ResumePoint | None,
    beside: Sequence[PolicyStart] | None = None,
) -> AsyncIterator[Trainers]:
    """Start all ranks and end them after the block; a rank that dies ends the block at once.

    `beside` is None in a run of one policy: ranks of several are not adopted, which has which may have changed.
    """
    async with AsyncExitStack() as stack:
        trainers = await start_trainers(recipe, shape, pools, stack, resume=resume, beside=beside)
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
    beside: Sequence[PolicyStart] | None = None,
) -> Trainers:
    """Start all models side by side; `stack` ends them."""
    starter = _Starter(recipe=recipe, shape=shape, pools=pools, stack=stack, resume=resume)
    async with task_group() as tasks:
        actor = tasks.create_task(starter.actors(beside))
        critic = tasks.create_task(starter.critic())
        drafter = tasks.create_task(starter.drafter())
        reference = tasks.create_task(starter.reference())
        teachers = {
            role: tasks.create_task(starter.teacher(role, each)) for role, each in recipe.roles.teacher_ranks.items()
        }
    return Trainers(
        actor=actor.result(),
        critic=critic.result(),
        reference=reference.result(),
        drafter=drafter.result(),
        teachers={role: starting.result() for role, starting in teachers.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOrigin:
    """Where the first weights of a model come from."""

    folder: Path
    """In Hugging Face format, or a checkpoint."""
    resumed: TrainerState | None = None
    """The trainer's state, if `folder` is a checkpoint."""
    inner: str = ""
    """The model's folder in the checkpoint."""
    base: Path | None = None
    """The folder of the model whose adapter is in the checkpoint."""

    def fill(self, model: TrainedCalls) -> None:
        if self.base is not None:
            model.load(self.base)
        if self.resumed is None:
            model.load(self.folder)
        else:
            model.verify(self.folder, self.inner)
            model.resume(self.folder / self.inner, self.resumed)

    def refill(self, model: TrainedCalls) -> bool:
        """Bring the model of an earlier driver of this run to its origin; return whether it was there already.

        Its weights and its optimizer are then those that the checkpoint was written from.
        """
        if self.resumed is not None and model.state == self.resumed:
            return True
        self.fill(model)
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Starter:
    recipe: Recipe
    shape: ModelShape
    pools: Mapping[str, Pool]
    stack: AsyncExitStack
    resume: ResumePoint | None

    async def actors(self, beside: Sequence[PolicyStart] | None) -> RankGroup[ActorCalls]:
        ranks = await self._actor(may_adopt=beside is None)
        for policy in beside or ():
            build, _ = replace(self, recipe=policy.recipe, resume=policy.resume)._build_of_actor()
            await ranks.start_beside(policy.name, build)
        return ranks

    async def _actor(self, *, may_adopt: bool) -> RankGroup[ActorCalls]:
        build, refill = self._build_of_actor()
        config, folder = self.recipe.roles.actor, self.recipe.model.path
        return await self._start(
            "actor", build, config, self.shape, pool=config.pool, folder=folder, refill=refill, may_adopt=may_adopt
        )

    def _build_of_actor(self) -> tuple[Callable[..., ActorCalls], Callable[[ActorCalls], bool]]:
        """Return what builds a rank of the policy, and what refills one of an earlier driver."""
        recipe, resume = self.recipe, self.resume
        reference, critic = recipe.roles.reference, recipe.roles.critic
        origin = WeightOrigin(folder=recipe.model.path.absolute())
        if resume is not None:
            base = origin.folder if recipe.model.lora else None
            origin = WeightOrigin(folder=resume.folder, resumed=resume.state.trainer, base=base)
        reference_folder = None
        if reference is not None and reference.pool is None:
            reference_folder = (reference.path or recipe.model.path).absolute()
        build = partial(
            _build_actor,
            seed=recipe.run.seed,
            origin=origin,
            algorithm=recipe.algorithm,
            train=recipe.train,
            total_steps=recipe.run.total_steps - (critic.warmup_steps if critic else 0),
            reference_folder=reference_folder,
            bind=recipe.network.bind,
        )
        is_self_play = recipe.algorithm.needs.self_play_steps is not None
        return build, partial(_refill_self_play, origin=origin) if is_self_play else origin.refill

    async def critic(self) -> RankGroup[CriticCalls] | None:
        recipe, config = self.recipe, self.recipe.roles.critic
        if config is None:
            return None
        start_folder = critic_folder(config, recipe.model.path).absolute()
        origin = WeightOrigin(folder=start_folder)
        if self.resume is not None:
            state = self.resume.state.critic
            assert state is not None, f"{self.resume.folder} has no critic"
            base = start_folder if recipe.model.lora else None
            origin = WeightOrigin(folder=self.resume.folder, resumed=state, inner=CRITIC_FOLDER, base=base)
        algorithm = recipe.algorithm
        assert algorithm.needs.has_critic, f"{algorithm.kind} has no critic"
        shape = critic_shape(config, self.shape, algorithm)
        build = partial(
            _build_critic,
            origin=origin,
            algorithm=algorithm,
            critic=config,
            total_steps=recipe.run.total_steps,
            start_folder=start_folder,
        )
        folder = start_folder
        return await self._start("critic", build, config, shape, pool=config.pool, folder=folder, refill=origin.refill)

    async def drafter(self) -> RankGroup[ActorCalls] | None:
        recipe, config = self.recipe, self.recipe.roles.drafter
        if config is None:
            return None
        folder = draft_folder(recipe).absolute()
        origin = WeightOrigin(folder=folder)
        # A run that got its drafter later has none in its checkpoint.
        if self.resume is not None and self.resume.state.drafter is not None:
            origin = WeightOrigin(folder=self.resume.folder, resumed=self.resume.state.drafter, inner=DRAFTER_FOLDER)
        build = partial(
            _build_drafter,
            origin=origin,
            drafter=config,
            total_steps=recipe.run.total_steps // config.every_steps,
            bind=recipe.network.bind,
        )
        shape, pool = read_model_shape(folder), config.pool
        return await self._start("drafter", build, config, shape, pool=pool, folder=folder, refill=origin.refill)

    async def reference(self) -> RankGroup[PolicyCalls] | None:
        config = self.recipe.roles.reference
        if config is None or config.pool is None:
            return None
        folder = (config.path or self.recipe.model.path).absolute()
        build = partial(_build_reference, folder=folder)
        return await self._start("reference", build, config, self.shape, pool=config.pool, folder=folder)

    async def teacher(self, role: str, config: TeacherRanksConfig) -> RankGroup[PolicyCalls]:
        distillation = self.recipe.algorithm.distillation
        assert distillation is not None, "a teacher without algorithm.distillation"
        build = partial(
            _build_teacher, folder=config.model.absolute(), num_top=distillation.top_k, vocab=self.shape.vocab
        )
        shape = read_model_shape(config.model)
        return await self._start(role, build, config, shape, pool=config.pool, folder=config.model)

    async def _start(
        self,
        role: str,
        build: Callable[[RankSpec], Rank],
        split: ModelParallelConfig,
        shape: ModelShape,
        *,
        pool: str,
        folder: Path,
        refill: Callable[[Rank], bool] = lambda _: True,  # frozen models stay as they are
        may_adopt: bool = True,
    ) -> RankGroup[Rank]:
        """Adopt the ranks of an earlier driver, or start one process per place of the pool and build a rank in each."""
        recipe, places = self.recipe, self.pools[pool]
        grouped = partial(
            RankGroup[Rank],
            role,
            split=split,
            timeout_s=recipe.train.deadline_s,
            run_folder=recipe.run_folder.absolute(),
            device_lock=places.device_lock,
        )
        left = [places.actors.take(f"{role}-{rank}") for rank in range(len(places.places))]
        workers = [worker for worker in left if worker is not None]
        if workers:
            adopted = grouped(workers)
            is_whole = may_adopt and len(workers) == len(left)
            if is_whole and await adopt_ranks(adopted, refill, is_shared=places.is_shared):
                self.stack.push_async_callback(adopted.end)
                return adopted
            await adopted.end()
        spec = self._spec(role, split, shape, world=len(places.places), folder=folder)
        # Of the threads that always answer, one stays in `watch`. The class is named for people who read `ps`.
        named = type(f"{role.capitalize().replace('.', '_')}Rank", (RankHost,), {})
        remote = ray.remote(concurrency_groups={BESIDE_TRAINING: 1, ALWAYS: 2})(named)
        environment = trainer_environment(recipe.run.device)
        options = [
            place.options(environment, gpu_fraction=places.gpu_fraction) | places.actors.options(f"{role}-{rank}")
            for rank, place in enumerate(places.places)
        ]
        logs = recipe.run_folder.absolute() / "ranks"
        group = grouped(
            [
                remote.options(**each).remote(recipe.network.bind, logs / rank_log_name(role, rank))
                for rank, each in enumerate(options)
            ]
        )
        self.stack.push_async_callback(group.end)
        await group.start(build, spec)
        return group

    def _spec(self, role: str, split: ModelParallelConfig, shape: ModelShape, *, world: int, folder: Path) -> RankSpec:
        """Return the arguments of the first rank; `folder` has what a model is not trained in."""
        recipe = self.recipe
        return RankSpec(
            rank=0,
            world=world,
            master_address="",
            master_port=0,
            device=recipe.run.device,
            split=split,
            shape=shape,
            seed=recipe.run.seed,
            lora=_adapter(role, recipe.model.lora, recipe.roles.critic),
            has_float32_head=recipe.model.has_float32_head,
            images=ImageFiles(model=folder.absolute(), store=recipe.images_folder),
            timeout_s=recipe.train.deadline_s + _HANG_REPORT_S,
        )


def rank_log_name(role: str, rank: int) -> str:
    """Return `rank_N.log` for the actor; the names of others begin with their role."""
    return f"{role.replace('actor', 'rank')}_{rank}.log"


def _adapter(role: str, lora: LoraConfig | None, critic: CriticConfig | None) -> LoraConfig | None:
    """Return the adapter of a role; that of a critic with a base of its own does not start from the policy's."""
    if lora is None or role not in ("actor", "critic"):
        return None
    has_own_base = role == "critic" and critic is not None and critic.path is not None
    return lora.model_copy(update={"path": None}) if has_own_base else lora


def _build_actor(
    spec: RankSpec,
    beside: PublishingActor | None = None,
    *,
    seed: int,
    origin: WeightOrigin,
    algorithm: AlgorithmConfig,
    train: TrainConfig,
    total_steps: int,
    reference_folder: Path | None,
    bind: str | None,
) -> ActorCalls:
    from megarl.ranks.publishing import PublishingActor  # noqa: PLC0415 - Megatron, which only a rank loads

    rank = PublishingActor(
        replace(spec, seed=seed),
        algorithm=algorithm,
        optimizer=train.optimizer,
        total_steps=total_steps,
        epochs=train.epochs,
        bind=bind,
        beside=beside,
    )
    origin.fill(rank)
    if reference_folder is not None:
        rank.load_reference(reference_folder)
    if algorithm.needs.self_play_steps is not None:
        # A resumed run begins an iteration.
        rank.refresh_reference()
    return rank


def _refill_self_play(model: ActorCalls, origin: WeightOrigin) -> bool:
    """Refill an actor of `spin`: one that goes back to a checkpoint begins an iteration, like a resumed run."""
    is_there = origin.refill(model)
    if not is_there:
        model.refresh_reference()
    return is_there


def _build_critic(
    spec: RankSpec,
    *,
    origin: WeightOrigin,
    algorithm: AlgorithmConfig,
    critic: CriticConfig,
    total_steps: int,
    start_folder: Path,
) -> CriticCalls:
    """`start_folder` has the model's first weights, which implicit rewards are relative to."""
    from megarl.train.critic import CriticRank, ImplicitRewardRank  # noqa: PLC0415 - as above

    if algorithm.needs.implicit_reward_beta is not None:
        rewards = ImplicitRewardRank(spec, algorithm=algorithm, optimizer=critic.optimizer, total_steps=total_steps)
        origin.fill(rewards)
        rewards.load_start(start_folder)
        return rewards
    rank = CriticRank(
        spec,
        algorithm=algorithm,
        optimizer=critic.optimizer,
        total_steps=total_steps,
        epochs=critic.epochs,
        clip=critic.clip,
    )
    origin.fill(rank)
    return rank


def _build_drafter(
    spec: RankSpec, *, origin: WeightOrigin, drafter: DrafterConfig, total_steps: int, bind: str | None
) -> ActorCalls:
    from megarl.ranks.publishing import Drafter  # noqa: PLC0415 - as above

    rank = Drafter(
        spec,
        algorithm=SftConfig(kind="sft"),
        optimizer=drafter.optimizer,
        total_steps=total_steps,
        epochs=drafter.epochs,
        bind=bind,
    )
    origin.fill(rank)
    return rank


def _build_reference(spec: RankSpec, *, folder: Path) -> PolicyCalls:
    from megarl.train.frozen import ReferenceRank  # noqa: PLC0415 - as above

    rank = ReferenceRank(spec)
    rank.load(folder)
    return rank


def _build_teacher(spec: RankSpec, *, folder: Path, num_top: int, vocab: int) -> PolicyCalls:
    """`vocab` is the size of the policy's vocabulary."""
    from megarl.train.frozen import TeacherRank  # noqa: PLC0415 - as above

    rank = TeacherRank(spec, num_top=num_top, vocab=vocab)
    rank.load(folder)
    return rank


def critic_folder(critic: CriticConfig, model_folder: Path) -> Path:
    """Return the folder with the critic's first weights, its configuration and its tokenizer."""
    return critic.path or model_folder


def draft_folder(recipe: Recipe) -> Path:
    """Return the folder of the draft that a drafter trains."""
    draft = None if recipe.roles.rollout is None else recipe.roles.rollout.draft
    assert isinstance(draft, ModelDraftConfig), "a drafter without a draft of kind model"
    return draft.path


def critic_shape(critic: CriticConfig, policy: ModelShape, algorithm: AlgorithmConfig) -> ModelShape:
    body = policy if critic.path is None else read_model_shape(critic.path)
    return body if algorithm.needs.implicit_reward_beta is not None else body.as_critic()


async def adopt_ranks(ranks: RankGroup[Rank], fill: Callable[[Rank], bool], *, is_shared: bool) -> bool:
    """Let `fill` bring every rank to this driver's state; return False if they must be started again.

    `fill` returns whether its rank was there already. `is_shared`: engines are on the devices of the ranks.
    """
    try:
        if is_shared:
            raise WorkerError("they may have given up memory to engines of their devices")
        is_there = await _adopt(ranks, fill)
    except WorkerError as error:
        logger.warning("role=%s ranks are not adopted, but started again: %s", ranks.role, error)
        return False
    logger.info("adopted role=%s %s", ranks.role, "as they are" if is_there else "with the checkpoint")
    return True


async def _adopt(ranks: RankGroup[Rank], fill: Callable[[Rank], bool]) -> bool:
    for group in (ALWAYS, BESIDE_TRAINING):  # in the latter after the calls that the earlier driver began
        started = [worker.follow.options(concurrency_group=group).remote(ranks.token) for worker in ranks.workers]
        ranks.processes = await ranks.gather("follow", started, timeout_s=_ADOPT_S)
    filling = [worker.adopt.remote(ranks.token, fill) for worker in ranks.workers]
    return all(await ranks.gather("adopt", filling, timeout_s=max(_ADOPT_S, ranks.timeout_s)))
