"""One run, from recipe to result: builds what the loop needs, in the order it can fail, and takes it down.

Data and ports come before Ray, Ray before roles, roles before the first publish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megarl.algo.algorithm import build_algorithm
from megarl.algo.greedy import WithGreedyRollout, WithGreedyScore
from megarl.checkpoint.carried import read_carried
from megarl.checkpoint.manifest import FileDigest
from megarl.checkpoint.resume import ResumePoint
from megarl.config.algorithm import PolicyGradientConfig, RemaxConfig, SftConfig
from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.data.prompts import Demonstrations, DemonstrationScorer
from megarl.data.stream import PromptStream
from megarl.errors import WorkerError
from megarl.observe.events import ALL_TRAINERS
from megarl.observe.observer import Observer
from megarl.reward.build import build_scorer
from megarl.rollout.generator import FleetGenerator, Sampling, Vocabulary, evaluation_seed
from megarl.rollout.in_flight import Pauses, PausingPublisher
from megarl.runtime.buffer import Buffer
from megarl.runtime.cluster import Pool, open_cluster
from megarl.runtime.engines.canary import Canary, CanaryPublisher, CanaryQuestion
from megarl.runtime.engines.serving import (
    ExternalServing,
    ManagedServing,
    NoServing,
    Roles,
    Serving,
    connect,
    reserve_pools,
    start_serving,
)
from megarl.runtime.evaluate import Evaluator, HeldOutEvaluator, NoEvaluation, ScheduledEvaluation
from megarl.runtime.inputs import Inputs, read_inputs
from megarl.runtime.loop import Loop, Start
from megarl.runtime.preemption import Preemption, preemptible
from megarl.runtime.resume import Restarts, checked_resume_point, last_good
from megarl.runtime.rollout_samples import RolloutSampler, SampledTrainer
from megarl.runtime.saver import RunSaver, SavedModel
from megarl.runtime.tasks import task_group
from megarl.runtime.timed import TimedGenerator
from megarl.runtime.trainers.build import build_trainer
from megarl.runtime.trainers.ranks import RankGroup
from megarl.runtime.trainers.start import critic_folder, critic_shape, running_trainers
from megarl.runtime.trainers.trainer import ModelsTrainer
from megarl.stages import Generator, Publisher, Scorer, Stages, Trainer
from megarl.train.trained import TrainedRank
from megarl.types import PolicyVersion


def run_recipe(
    recipe: Recipe,
    observer: Observer,
    *,
    ray_address: str | None,
    resume: ResumePoint | None,
    allows_data_change: bool,
    tasks_file: Path | None,
) -> None:
    """Everything of one run, or what is left of it. Ctrl-C and SIGTERM end it in order, with nothing left running.

    What Ray knows of its tasks goes to `tasks_file`, if there is one.
    """
    asyncio.run(
        _run(recipe, observer, ray_address, resume, allows_data_change=allows_data_change, tasks_file=tasks_file)
    )


async def _run(
    recipe: Recipe,
    observer: Observer,
    ray_address: str | None,
    resume: ResumePoint | None,
    *,
    allows_data_change: bool,
    tasks_file: Path | None,
) -> None:
    with observer.phase("start"):
        inputs = read_inputs(recipe)
        if resume is not None:
            resume = checked_resume_point(
                resume,
                model_folder=recipe.model.path,
                shape=inputs.shape,
                data_digest=inputs.train.digest,
                allows_data_change=allows_data_change,
                warn=observer.warned,
            )
    observer.data_read(num_prompts=len(inputs.train.prompts), num_dropped=inputs.train.num_dropped)
    if inputs.train.num_dropped:
        observer.warned(f"{inputs.train.num_dropped} prompts are too long and were dropped (data.overlong_prompts)")
    with (
        open_cluster(recipe, address=ray_address, tasks_file=tasks_file) as cluster,
        preemptible(grace_s=recipe.checkpoint.grace_s) as leave,
    ):
        pools = reserve_pools(cluster, recipe.pools, recipe.roles.used_pools)
        async with AsyncExitStack() as stack, task_group() as tasks:
            starting = start_serving(recipe, inputs.shape, pools, stack, observer=observer)
            generating = tasks.create_task(starting)
            scorer = build_scorer(recipe.reward, log_path=recipe.run_folder / "reward.log", observer=observer)
            stack.callback(scorer.close)
            run = _Run(
                recipe=recipe,
                inputs=inputs,
                pools=pools,
                generating=generating,
                scorer=scorer,
                observer=observer,
                preemption=leave,
            )
            await run.live_on(resume)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What lasts for the whole run. Trainer ranks may be lost; each set of them is a life, with a loop of its own."""

    recipe: Recipe
    inputs: Inputs
    pools: Mapping[str, Pool]
    generating: asyncio.Task[Serving]
    scorer: Scorer
    observer: Observer
    preemption: Preemption
    saved_steps: list[int] = field(default_factory=list)
    """Of all lives."""

    async def live_on(self, first: ResumePoint | None) -> None:
        """One life after the other, until one reaches the end."""
        train = self.recipe.train
        restarts = Restarts(max_restarts=train.max_restarts, pause_s=train.restart_pause_s)
        point = first
        while True:
            try:
                await self._live(point)
                return
            except WorkerError as error:
                if self.generating.done() and self.generating.exception() is not None:
                    raise  # the engines did not start
                pause_s = restarts.spend(error, saved_step=max(self.saved_steps, default=0))
                point = last_good(self.recipe, first=first, saved_steps=self.saved_steps, warn=self.observer.warned)
                place = "the beginning" if point is None else f"step {point.step}"
                self.observer.restarted(ALL_TRAINERS, 0, f"from {place}: {error}")
                await asyncio.sleep(pause_s)

    async def _live(self, point: ResumePoint | None) -> None:
        """Trainer ranks from their start to the end of the run, or to the loss of one of them."""
        recipe, shape = self.recipe, self.inputs.shape
        async with AsyncExitStack() as stack:
            with self.observer.phase("start"):
                starting = running_trainers(recipe, shape, self.pools, resume=point)
                trainers = await stack.enter_async_context(starting)
                # Shielded: ranks that are lost meanwhile are no reason to begin with the engines again.
                serving = await asyncio.shield(self.generating)
                roles = await connect(recipe.roles, trainers, serving, stack, observer=self.observer)
            loop = _build_loop(
                recipe, self.inputs, roles, self.scorer, self.observer, self.preemption, point, self.saved_steps
            )
            self.preemption.begin_steps()
            await loop.run()


def _build_loop(
    recipe: Recipe,
    inputs: Inputs,
    roles: Roles,
    scorer: Scorer,
    observer: Observer,
    preemption: Preemption,
    resume: ResumePoint | None,
    saved_steps: list[int],
) -> Loop:
    train, start = recipe.train, _start(resume)
    pauses = None if recipe.in_flight is None else Pauses(recipe.in_flight)
    generator, judge = _producers(recipe, inputs, roles, scorer, observer, pauses)
    prompts = PromptStream(
        inputs.train.prompts,
        seed=recipe.run.seed,
        is_shuffled=recipe.data.is_shuffled,
        cursor=0 if resume is None else resume.state.prompt_cursor,
        pending=() if resume is None else resume.state.ledger.pending,
    )
    filtering = recipe.algorithm.filter if isinstance(recipe.algorithm, PolicyGradientConfig) else None
    buffer = Buffer(
        prompts_per_step=train.prompts_per_step,
        max_staleness=train.max_staleness,
        oversampling=1.0 if filtering is None else filtering.oversampling,
        versions=(*(() if resume is None else map(PolicyVersion, resume.state.versions)), start.version),
        carried=() if resume is None else read_carried(resume.folder, resume.state.ledger.num_carried, prompts.at),
    )
    observer.watch_queue(
        num_waiting=lambda: len(buffer.counts.carried),
        num_under_way=lambda: len(buffer.counts.under_way),
        capacity=lambda: buffer.capacity,
    )
    algorithm = build_algorithm(
        recipe.algorithm,
        max_response_tokens=recipe.sampling.max_response_tokens,
        kl_coef=None if resume is None else resume.state.kl_coef,
    )
    models = build_trainer(recipe, inputs.shape, roles.trainers, num_steps=start.step, version=start.version)
    saver = RunSaver(
        recipe,
        actor=_saved_model(roles.trainers.actor, inputs.shape, recipe.model.path),
        critic=_saved_critic(recipe, inputs, roles),
        algorithm=algorithm,
        prompts=prompts,
        buffer=buffer,
        data_digest=inputs.train.digest,
        preemption=preemption,
        observer=observer,
        resumed=None if resume is None else resume.state,
        is_lost=lambda: roles.trainers.is_lost,
        saved=saved_steps.append,
    )
    evaluator = _evaluator(recipe, inputs, roles, scorer, pauses)
    stages = Stages(
        prompts=prompts,
        generator=generator,
        scorer=judge,
        algorithm=algorithm,
        trainer=_with_samples(recipe, inputs, models, observer, num_steps=start.step),
        publisher=_checked_publisher(recipe, inputs, roles, pauses, models, observer),
        phases=roles.phases,
    )
    return Loop(
        stages,
        buffer=buffer,
        evaluation=NoEvaluation()
        if evaluator is None
        else ScheduledEvaluation(
            evaluator,
            phases=roles.phases,
            observer=observer,
            saver=saver,
            is_synchronous=buffer.is_synchronous,
        ),
        saver=saver,
        observer=observer,
        start=start,
        num_steps=recipe.run.steps,
    )


def _checked_publisher(
    recipe: Recipe, inputs: Inputs, roles: Roles, pauses: Pauses | None, learner: ModelsTrainer, observer: Observer
) -> Publisher:
    """The canary asks after the pause: a paused engine would not answer."""
    publisher, serving = roles.publisher, roles.serving
    if isinstance(serving, NoServing):
        return publisher
    if pauses is not None:
        publisher = PausingPublisher(publisher, serving.fleet, pauses)
    if serving.config.canary_every is None:
        return publisher
    question = CanaryQuestion.of(
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        max_response_tokens=recipe.sampling.max_response_tokens,
        temperature=1.0 if isinstance(recipe.algorithm, SftConfig) else recipe.sampling.temperature,
        vocab=inputs.shape.vocab,
        eos_ids=inputs.tokenizer.eos_ids,
        dtype=recipe.run.dtype,
    )
    canary = Canary(
        serving.fleet, question=question, logprobs=learner.logprobs, phases=roles.phases, warn=observer.warned
    )
    # By files nothing but the canary shows that what was written is what an engine computes with.
    every = 1 if isinstance(serving, ExternalServing) else serving.config.canary_every
    return CanaryPublisher(publisher, canary, every=every)


def _with_samples(
    recipe: Recipe, inputs: Inputs, models: ModelsTrainer, observer: Observer, *, num_steps: int
) -> Trainer:
    if isinstance(recipe.algorithm, SftConfig):
        return models
    sampler = RolloutSampler(
        recipe.observe.rollouts,
        run_folder=recipe.run_folder,
        seed=recipe.run.seed,
        logprobs=models.logprobs,
        decode=inputs.tokenizer.decode,
        warn=observer.warned,
    )
    return SampledTrainer(models, sampler, num_steps=num_steps)


def _saved_critic(recipe: Recipe, inputs: Inputs, roles: Roles) -> SavedModel | None:
    ranks, config = roles.trainers.critic, recipe.roles.critic
    if ranks is None or config is None:
        return None
    return _saved_model(ranks, critic_shape(config, inputs.shape), critic_folder(config, recipe.model.path))


def _saved_model(ranks: RankGroup[TrainedRank], shape: ModelShape, source_folder: Path) -> SavedModel:
    async def write(folder: Path, companions: Path) -> dict[str, FileDigest]:
        written = await ranks.call_beside(TrainedRank.write, folder, companions)
        return {name: digest for files in written for name, digest in files.items()}

    return SavedModel(
        snapshot=ranks.computing(TrainedRank.snapshot), write=write, shape=shape, source_folder=source_folder
    )


def _start(resume: ResumePoint | None) -> Start:
    if resume is None:
        return Start(step=0, version=PolicyVersion(0))
    return Start(step=resume.step, version=PolicyVersion(resume.state.trainer.num_updates))


def _producers(
    recipe: Recipe, inputs: Inputs, roles: Roles, scorer: Scorer, observer: Observer, pauses: Pauses | None
) -> tuple[Generator, Scorer]:
    """Who answers the prompts, and who judges the answers."""
    serving = roles.serving
    if isinstance(recipe.algorithm, SftConfig) or isinstance(serving, NoServing):
        return Demonstrations(inputs.tokenizer), DemonstrationScorer()
    max_tokens, seed = recipe.sampling.max_response_tokens, recipe.run.seed
    sampling = Sampling.of(recipe.sampling, max_response_tokens=max_tokens)
    sampled = _generator(inputs, serving, sampling, seed=seed, pauses=pauses)
    if isinstance(recipe.algorithm, RemaxConfig):
        sampling = Sampling.nearly_greedy(max_response_tokens=max_tokens)
        greedy = _generator(inputs, serving, sampling, seed=seed, pauses=pauses)
        return TimedGenerator(WithGreedyRollout(sampled, greedy), observer), WithGreedyScore(scorer)
    return TimedGenerator(sampled, observer), scorer


def _evaluator(recipe: Recipe, inputs: Inputs, roles: Roles, scorer: Scorer, pauses: Pauses | None) -> Evaluator | None:
    config, serving = recipe.evaluation, roles.serving
    if config is None or isinstance(serving, NoServing):
        return None
    generator = partial(_generator, inputs, serving, seed=evaluation_seed(recipe.run.seed), pauses=pauses)
    max_tokens = recipe.evaluation_response_tokens
    # Beside rollouts of the next steps it must not change what their seeds mean.
    greedy = Sampling.greedy if pauses is None else Sampling.nearly_greedy
    return HeldOutEvaluator(
        config,
        prompts=inputs.eval,
        greedy=generator(greedy(max_response_tokens=max_tokens)) if config.is_greedy else None,
        sampled=generator(Sampling.of(config.sampled, max_response_tokens=max_tokens)) if config.sampled else None,
        scorer=scorer,
        decode=inputs.tokenizer.decode,
        run_folder=recipe.run_folder,
    )


def _generator(
    inputs: Inputs,
    serving: ExternalServing | ManagedServing,
    sampling: Sampling,
    *,
    seed: int,
    pauses: Pauses | None,
) -> Generator:
    return FleetGenerator(
        serving.fleet,
        sampling=sampling,
        vocabulary=Vocabulary.of(inputs.shape, inputs.tokenizer),
        seed=seed,
        max_attempts=serving.config.max_attempts,
        pauses=pauses,
    )
