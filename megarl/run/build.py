"""From a recipe and its running roles to the loop: prompts, the source of their groups, the buffer, and all stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.algo.algorithm import AnyAlgorithm, build_algorithm
from megarl.checkpoint.resume import ResumePoint
from megarl.config.recipe import Recipe
from megarl.data.prompts import Demonstrations, DemonstrationScorer
from megarl.data.stream import PromptStream
from megarl.observe.observer import Observer
from megarl.ranks.trainer import ModelsTrainer
from megarl.rollout.groups import GivenGroups, LongestFirst, SampledGroups
from megarl.rollout.task import RolloutSource, RolloutTask
from megarl.run.buffer import Buffer
from megarl.run.checkpoint_writer import saved_models
from megarl.run.evaluate import build_evaluation
from megarl.run.inputs import Inputs
from megarl.run.loop import Loop, Start
from megarl.run.preemption import Preemption
from megarl.run.rollout_samples import RolloutSampler, SampledTrainer, sample_writer
from megarl.run.saver import RunSaver
from megarl.serving.connect import Roles, publisher_of
from megarl.stages import Publisher, Stages, Trainer
from megarl.types import ONE_POLICY, PolicyVersion

if TYPE_CHECKING:
    from megarl.rollout.journal import GroupJournal


@dataclass(frozen=True, kw_only=True)
class LoopBuilder:
    """Builds the loop of one set of trainer ranks."""

    recipe: Recipe
    inputs: Inputs
    roles: Roles
    workers: RolloutSource | None
    """None without engines."""
    observer: Observer
    preemption: Preemption
    resume: ResumePoint | None
    saved: Callable[[int], None]
    """Called with every saved step."""
    journal: GroupJournal
    """Has groups of the step that the ranks or the driver before these were lost in."""
    policy: str = ONE_POLICY

    def loop(self) -> Loop:
        recipe, resume = self.recipe, self.resume
        prompts = self._prompts()
        groups = self._groups(prompts)
        buffer = self._buffer(prompts, groups)
        algorithm = build_algorithm(
            recipe.algorithm,
            max_response_tokens=recipe.sampling.max_response_tokens,
            kl_coef=None if resume is None else resume.state.kl_coef,
        )
        models = self._models(algorithm)
        trainers = self.roles.trainers
        saver = RunSaver(
            recipe,
            models=saved_models(recipe, trainers, self.inputs.shape),
            algorithm=algorithm,
            prompts=prompts,
            buffer=buffer,
            data_digest=self.inputs.train.digest,
            tools_digest=self.inputs.tools_digest,
            preemption=self.preemption,
            observer=self.observer,
            resumed=None if resume is None else resume.state,
            is_lost=lambda: trainers.is_lost,
            saved=self.saved,
            marked=self.journal.retained.forget,
        )
        stages = Stages(
            prompts=prompts,
            groups=groups,
            algorithm=algorithm,
            trainer=self._trainer(models),
            publisher=self._publisher(models),
            phases=self.roles.phases,
        )
        evaluation = build_evaluation(
            recipe,
            self.inputs,
            self.workers,
            models,
            algorithm,
            phases=self.roles.phases,
            observer=self.observer,
            saver=saver,
            policy=self.policy,
        )
        return Loop(
            stages,
            buffer=buffer,
            evaluation=evaluation,
            saver=saver,
            observer=self.observer,
            start=self._start,
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

    def _groups(self, prompts: PromptStream) -> SampledGroups | GivenGroups:
        needs = self.recipe.algorithm.needs
        if not needs.has_engines or self.workers is None:
            # The first answer of a pair is the better one.
            values = (1.0, 0.0) if needs.rows == "pairs" else (1.0,)
            answers = Demonstrations(self.inputs.tokenizer, is_scored_at_end=needs.is_scorer)
            return GivenGroups(answers, DemonstrationScorer(values))
        is_synchronous = self.recipe.train.max_staleness == 0
        if is_synchronous:
            self._take_left(prompts)
        return SampledGroups(
            self.workers,
            RolloutTask.of(self.recipe, self.inputs.shape, policy=self.policy),
            self.observer,
            retained=self.journal.retained if is_synchronous else None,
            fleet=self.roles.serving.fleet,
            order=LongestFirst() if is_synchronous else None,
            demonstrations=None if needs.self_play_steps is None else Demonstrations(self.inputs.tokenizer),
        )

    def _take_left(self, prompts: PromptStream) -> None:
        """Begin with the groups of this step that a preempted run of this folder left."""
        if self.resume is None:
            return
        num_left = self.journal.take_left(self._start.version, prompt_at=prompts.at)
        if num_left:
            self.observer.noted(f"{num_left} groups of the step are kept from before the run was stopped")

    def _buffer(self, prompts: PromptStream, groups: SampledGroups | GivenGroups) -> Buffer:
        resume, filtering, train = self.resume, self.recipe.algorithm.filter, self.recipe.train
        buffer = Buffer(
            prompts_per_step=train.prompts_per_step,
            max_staleness=train.max_staleness,
            oversampling=1.0 if filtering is None else filtering.oversampling,
            versions=(*(() if resume is None else map(PolicyVersion, resume.state.versions)), self._start.version),
            carried=() if resume is None else resume.carried_groups(prompts.at),
            replace_lost=groups.replace_lost if isinstance(groups, SampledGroups) else None,
        )
        self.observer.watch_queue(
            num_waiting=lambda: buffer.num_ready,
            num_under_way=lambda: buffer.num_under_way,
            capacity=lambda: buffer.capacity,
        )
        return buffer

    def _models(self, algorithm: AnyAlgorithm) -> ModelsTrainer:
        return ModelsTrainer.of(
            self.recipe,
            self.inputs.shape,
            self.roles.trainers,
            num_steps=self._start.step,
            version=self._start.version,
            algorithm=algorithm,
        )

    def _publisher(self, models: ModelsTrainer) -> Publisher:
        shape, eos_ids = self.inputs.shape, self.inputs.tokenizer.eos_ids
        return publisher_of(self.roles, self.recipe, self.workers, shape, eos_ids, models, self.observer)

    def _trainer(self, models: ModelsTrainer) -> Trainer:
        recipe = self.recipe
        if not recipe.algorithm.needs.has_engines:
            return models
        sampler = RolloutSampler(
            config=recipe.observe.rollouts,
            run_folder=recipe.run_folder.absolute(),
            seed=recipe.run.seed,
            logprobs=models.logprobs,
            complete=models.complete,
            write=sample_writer(self.inputs, self.workers),
            warn=self.observer.warned,
        )
        return SampledTrainer(models, sampler, num_steps=self._start.step)
