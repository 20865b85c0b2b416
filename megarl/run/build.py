"""From a recipe and its running roles to the loop: builds each stage, the buffer, the saver and the evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import ray

from megarl.algo.algorithm import PolicyGradient, Sft, build_algorithm
from megarl.checkpoint.carried import read_groups, take_open_step
from megarl.checkpoint.resume import ResumePoint
from megarl.config.recipe import EvaluationConfig, Recipe
from megarl.config.reward import RewardConfig
from megarl.config.teaching import teaching_of
from megarl.data.prompts import Demonstrations, DemonstrationScorer
from megarl.data.rollout_files import KeptRollout, write_rollouts
from megarl.data.stream import PromptStream
from megarl.engine.dispatch import divide_engines
from megarl.engine.fleet import Fleet
from megarl.episodes.play import EpisodeSetup
from megarl.observe.observer import Observer
from megarl.ranks.start import critic_folder, critic_shape
from megarl.ranks.trainer import ModelsTrainer
from megarl.reward.build import build_scorer
from megarl.reward.pool import WorkerPool
from megarl.rollout.frozen import FrozenEngines
from megarl.rollout.generator import Sampling, Vocabulary, evaluation_seed
from megarl.rollout.groups import ContestedGroups, GivenGroups, KeptGroups, KeptSource, TaskGroups
from megarl.rollout.host import WorkerSetup
from megarl.rollout.worker import Answering, RolloutTask, RolloutWorker, cache_sizes
from megarl.rollout.workers import RolloutWorkers
from megarl.run.buffer import Buffer
from megarl.run.evaluate import (
    DemonstrationEvaluator,
    Evaluation,
    Evaluator,
    HeldOutEvaluator,
    NoEvaluation,
    PairEvaluator,
    ScheduledEvaluation,
)
from megarl.run.inputs import Inputs
from megarl.run.loop import Loop, Start
from megarl.run.preemption import Preemption
from megarl.run.rollout_samples import RolloutSampler, SampledTrainer
from megarl.run.saver import RunSaver, SavedModel
from megarl.serving.adapter_publisher import AdapterPublisher
from megarl.serving.canary import Canary, CanaryProbe
from megarl.serving.connect import NoPublisher, Roles
from megarl.serving.frozen import FrozenRole, models_of, open_access
from megarl.serving.serving import ExternalServing, ManagedServing, NoServing
from megarl.stages import Algorithm, GroupSource, Publisher, Scorer, Stages, Trainer
from megarl.types import PolicyVersion


@dataclass(frozen=True, kw_only=True)
class LoopBuilder:
    """Builds the loop of one set of trainer ranks."""

    recipe: Recipe
    inputs: Inputs
    roles: Roles
    workers: Answering | None
    """None without engines."""
    observer: Observer
    preemption: Preemption
    resume: ResumePoint | None
    saved: Callable[[int], None]
    """Called with every saved step."""
    kept: KeptGroups
    """Groups of the step that the ranks before these were lost in."""

    def loop(self) -> Loop:
        recipe, start = self.recipe, self._start
        prompts, algorithm = self._prompts(), self._algorithm()
        groups = self._groups()
        buffer = self._buffer(prompts, groups)
        models = ModelsTrainer.of(
            recipe,
            self.inputs.shape,
            self.roles.trainers,
            num_steps=start.step,
            version=start.version,
            algorithm=algorithm,
        )
        saver = self._saver(algorithm, prompts, buffer)
        evaluation = self._evaluation(saver, models, algorithm, groups, is_synchronous=buffer.is_synchronous)
        stages = Stages(
            prompts=prompts,
            groups=self._kept(groups, prompts) if buffer.is_synchronous else groups,
            algorithm=algorithm,
            trainer=self._sampled(models),
            publisher=self._publisher(models),
            phases=self.roles.phases,
        )
        return Loop(
            stages,
            buffer=buffer,
            evaluation=evaluation,
            saver=saver,
            observer=self.observer,
            start=start,
            num_steps=recipe.run.total_steps,
        )

    @property
    def _start(self) -> Start:
        resume = self.resume
        if resume is None:
            return Start(step=0, version=PolicyVersion(0))
        return Start(step=resume.step, version=PolicyVersion(resume.state.trainer.num_updates))

    def _prompts(self) -> PromptStream:
        state = None if self.resume is None else self.resume.state
        return PromptStream(
            self.inputs.train.prompts,
            seed=self.recipe.run.seed,
            is_shuffled=self.recipe.data.is_shuffled,
            cursor=0 if state is None else state.prompt_cursor,
            pending=() if state is None else state.ledger.pending,
        )

    def _algorithm(self) -> Sft | PolicyGradient:
        return build_algorithm(
            self.recipe.algorithm,
            max_response_tokens=self.recipe.sampling.max_response_tokens,
            kl_coef=None if self.resume is None else self.resume.state.kl_coef,
        )

    def _buffer(self, prompts: PromptStream, groups: TaskGroups | GivenGroups) -> Buffer:
        resume, algorithm, train = self.resume, self.recipe.algorithm, self.recipe.train
        filtering = algorithm.filter
        buffer = Buffer(
            prompts_per_step=train.prompts_per_step,
            max_staleness=train.max_staleness,
            oversampling=1.0 if filtering is None else filtering.oversampling,
            versions=(*(() if resume is None else map(PolicyVersion, resume.state.versions)), self._start.version),
            carried=() if resume is None else read_groups(resume.folder, resume.state.ledger.num_carried, prompts.at),
            restore=groups.restore if isinstance(groups, TaskGroups) else None,
        )
        self.observer.watch_queue(
            num_waiting=lambda: buffer.num_ready,
            num_under_way=lambda: buffer.num_under_way,
            capacity=lambda: buffer.capacity,
        )
        return buffer

    def _groups(self) -> TaskGroups | GivenGroups:
        recipe, needs = self.recipe, self.recipe.algorithm.needs
        if not needs.has_engines or self.workers is None:
            # The first answer of a pair is the better one.
            values = (1.0, 0.0) if needs.rows == "pairs" else (1.0,)
            answers = Demonstrations(self.inputs.tokenizer, is_scored_at_end=needs.is_scorer)
            return GivenGroups(answers, DemonstrationScorer(values))
        max_tokens = recipe.sampling.max_response_tokens
        nearly_greedy = Sampling.nearly_greedy(max_response_tokens=max_tokens)
        task = RolloutTask(
            sampling=Sampling.of(recipe.sampling, max_response_tokens=max_tokens),
            seed=recipe.run.seed,
            in_flight=recipe.in_flight,
            generator=recipe.sampling.generator,
            baseline=nearly_greedy if needs.has_baseline else None,
            has_routes=recipe.replays_routing(self.inputs.shape),
            teaching=teaching_of(recipe.algorithm, recipe.roles, self.inputs.shape.vocab),
        )
        if needs.self_play_steps is not None:
            return ContestedGroups(self.workers, task, self.observer, Demonstrations(self.inputs.tokenizer))
        return TaskGroups(self.workers, task, self.observer)

    def _kept(self, groups: GroupSource, prompts: PromptStream) -> GroupSource:
        serving = self.roles.serving
        if isinstance(serving, NoServing):
            return groups
        if self.kept.is_new and self.resume is not None:
            self._restore(prompts)
        return KeptSource(self.kept, groups, version=lambda: serving.fleet.committed_version)

    def _restore(self, prompts: PromptStream) -> None:
        """Begin with what a preempted run of this folder was answered for this step."""
        left = take_open_step(
            self.recipe.run_folder.absolute(),
            version=self._start.version,
            identity=self.inputs.answers_digest(self.recipe.model_dump_json()),
            prompt_at=prompts.at,
            warn=self.observer.warned,
        )
        if left:
            self.kept.restore(left, self._start.version)
            self.observer.noted(f"{len(left)} groups of the step are kept from before the run was stopped")

    def _sampled(self, models: ModelsTrainer) -> Trainer:
        recipe = self.recipe
        if not recipe.algorithm.needs.has_engines:
            return models
        sampler = RolloutSampler(
            config=recipe.observe.rollouts,
            run_folder=recipe.run_folder.absolute(),
            seed=recipe.run.seed,
            logprobs=models.logprobs,
            complete=models.complete,
            write=self._write,
            warn=self.observer.warned,
        )
        return SampledTrainer(models, sampler, num_steps=self._start.step)

    async def _write(self, path: Path, kept: Sequence[KeptRollout]) -> None:
        """Write a file of rollouts, where their tokens are."""
        if isinstance(self.workers, RolloutWorkers):
            return await self.workers.write(path, kept)
        return await asyncio.to_thread(write_rollouts, path, kept, decode=self.inputs.tokenizer.decode)

    def _publisher(self, models: ModelsTrainer) -> Publisher:
        """Return the publisher of these ranks, with the steps around it that this run takes."""
        publisher, serving = self.roles.publisher, self.roles.serving
        if isinstance(publisher, NoPublisher) or isinstance(serving, NoServing) or self.workers is None:
            return publisher
        canary = self._canary(models, serving)
        if canary is not None and isinstance(publisher.transport, AdapterPublisher):
            # Probed before the first request uses the version; in a shared pool none does before the check anyway.
            publisher.transport.compare_with(canary.differences, every=canary.every)
            canary = None
        return replace(publisher, in_flight=self.recipe.in_flight, announce=self.workers.announce, canary=canary)

    def _canary(self, models: ModelsTrainer, serving: ExternalServing | ManagedServing) -> Canary | None:
        recipe, config = self.recipe, serving.config
        if config.canary_every is None:
            return None
        probe = CanaryProbe.of(
            max_prompt_tokens=recipe.data.max_prompt_tokens,
            max_response_tokens=recipe.sampling.max_response_tokens,
            temperature=recipe.sampling.temperature if recipe.algorithm.needs.has_engines else 1.0,
            vocab=self.inputs.shape.vocab,
            eos_ids=self.inputs.tokenizer.eos_ids,
            dtype=recipe.run.dtype if config.fp8_keep is None else "fp8",
        )
        return Canary(
            serving.fleet,
            probe=probe,
            logprobs=models.logprobs,
            phases=self.roles.phases,
            warn=self.observer.warned,
            # Only the canary shows that an external engine computes with the files that were written.
            every=1 if isinstance(serving, ExternalServing) else config.canary_every,
        )

    def _saver(self, algorithm: Algorithm, prompts: PromptStream, buffer: Buffer) -> RunSaver:
        recipe, trainers, inputs = self.recipe, self.roles.trainers, self.inputs
        critic = None
        if trainers.critic is not None and recipe.roles.critic is not None:
            shape = critic_shape(recipe.roles.critic, inputs.shape, recipe.algorithm)
            folder = critic_folder(recipe.roles.critic, recipe.model.path)
            critic = SavedModel(ranks=trainers.critic, shape=shape, source_folder=folder)
        return RunSaver(
            recipe,
            actor=SavedModel(ranks=trainers.actor, shape=inputs.shape, source_folder=recipe.model.path),
            critic=critic,
            algorithm=algorithm,
            prompts=prompts,
            buffer=buffer,
            data_digest=inputs.train.digest,
            tools_digest=inputs.tools_digest,
            preemption=self.preemption,
            observer=self.observer,
            resumed=None if self.resume is None else self.resume.state,
            is_lost=lambda: trainers.is_lost,
            saved=self.saved,
            marked=self.kept.forget,
        )

    def _evaluation(
        self,
        saver: RunSaver,
        models: ModelsTrainer,
        algorithm: Sft | PolicyGradient,
        groups: GroupSource,
        *,
        is_synchronous: bool,
    ) -> Evaluation:
        recipe, config, inputs = self.recipe, self.recipe.evaluation, self.inputs
        if config is None:
            return NoEvaluation()
        evaluator = self._held_out_evaluator(config) if inputs.eval else None
        if inputs.eval_demonstrations:
            evaluator = DemonstrationEvaluator(
                config,
                demonstrations=inputs.eval_demonstrations,
                answers=evaluator,
                generator=Demonstrations(inputs.tokenizer),
                logprobs=models.logprobs,
                phases=self.roles.phases,
                samples_per_call=recipe.train.prompts_per_step,
            )
        if inputs.eval_pairs:
            evaluator = PairEvaluator(
                config,
                pairs=inputs.eval_pairs,
                answers=evaluator,
                groups=groups,
                estimate=models.estimate,
                measure=algorithm.measure,
                phases=self.roles.phases,
                pairs_per_call=recipe.train.prompts_per_step,
            )
        if evaluator is None:
            return NoEvaluation()
        return ScheduledEvaluation(
            evaluator, phases=self.roles.phases, observer=self.observer, saver=saver, is_synchronous=is_synchronous
        )

    def _held_out_evaluator(self, config: EvaluationConfig) -> Evaluator | None:
        recipe, workers = self.recipe, self.workers
        if workers is None:
            return None
        max_tokens = recipe.evaluation_response_tokens
        # A greedy request would change what the seeds of rollouts beside it mean.
        greedy = Sampling.nearly_greedy if recipe.train.max_staleness else Sampling.greedy

        def groups(sampling: Sampling) -> GroupSource:
            seed = evaluation_seed(recipe.run.seed)
            return TaskGroups(workers, RolloutTask(sampling=sampling, seed=seed, in_flight=recipe.in_flight))

        return HeldOutEvaluator(
            config,
            prompts=self.inputs.eval,
            greedy=groups(greedy(max_response_tokens=max_tokens)) if config.is_greedy else None,
            sampled=None
            if config.sampled is None
            else groups(Sampling.of(config.sampled, max_response_tokens=max_tokens)),
            write=self._write,
            run_folder=recipe.run_folder.absolute(),
        )


_PER_NODE = 1  # by default, in runs of several nodes


async def open_workers(
    serving: ExternalServing | ManagedServing,
    inputs: Inputs,
    stack: AsyncExitStack,
    reward: RewardConfig | None,
    frozen: Mapping[str, FrozenRole],
    *,
    episodes: EpisodeSetup | None,
    rollouts_per_prompt: int,
    run_folder: Path,
    observer: Observer,
) -> Answering:
    """Return the rollout workers of a run: actors, or one in this process. None as `reward`: they score nothing."""
    config, fleet = serving.config, serving.fleet
    own_node = str(ray.get_runtime_context().get_node_id())
    nodes = serving.nodes if isinstance(serving, ManagedServing) else (own_node,) * len(fleet.engines)
    default = 0 if len(set(nodes)) == 1 else _PER_NODE
    per_node = default if config.workers is None else config.workers
    if per_node == 0:
        open_pool = partial(WorkerPool, log_path=run_folder / "reward.log")
        models = models_of(frozen)
        scorer = build_scorer(reward, observer=observer, open_pool=open_pool, frozen=models)
        stack.callback(scorer.close)
        log_path = run_folder / "environment.log"
        worker = _local_worker(fleet, inputs, scorer, models, config.max_attempts, episodes, log_path)
        stack.push_async_callback(worker.close)
        return worker
    shares, access = divide_engines(nodes, per_node=per_node), open_access(frozen, stack)
    setups = [
        WorkerSetup(
            index=index,
            node=node,
            own=own,
            model_folder=inputs.tokenizer.folder.absolute(),
            shape=inputs.shape,
            reward=reward,
            frozen=access,
            num_on_node=sum(other == node for other, _ in shares),
            num_workers=len(shares),
            log_path=run_folder.absolute() / f"reward_{index}.log",
            episodes=episodes,
            max_outstanding=config.max_running_requests,
            max_attempts=config.max_attempts,
            publish_timeout_s=fleet.publish_timeout_s,
            request_timeout_s=fleet.engines[0].client.request_timeout_s,
            silence_timeout_s=config.silence_timeout_s,
        )
        for index, (node, own) in enumerate(shares)
    ]
    workers = RolloutWorkers(fleet, setups, observer=observer, rollouts_per_prompt=rollouts_per_prompt)
    await stack.enter_async_context(workers.running())
    return workers


def _local_worker(
    fleet: Fleet,
    inputs: Inputs,
    scorer: Scorer,
    models: Mapping[str, FrozenEngines],
    max_attempts: int,
    episodes: EpisodeSetup | None,
    log_path: Path,
) -> RolloutWorker:
    """Return a worker in this process, which uses the fleet of the run."""
    open_player = None
    if episodes is not None:
        open_player = episodes.opener(
            inputs.tokenizer,
            cache_sizes=partial(cache_sizes, fleet.engines),
            retried=lambda cause: fleet.requests.request_retried(cause),
            log_path=log_path,
        )
    vocabulary = Vocabulary.of(inputs.shape, inputs.tokenizer)
    return RolloutWorker(
        fleet, vocabulary=vocabulary, scorer=scorer, max_attempts=max_attempts, open_player=open_player, teachers=models
    )
