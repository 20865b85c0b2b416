"""From a recipe and its running roles to the loop: builds its second half, from the trainer on, and joins both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megarl.algo.algorithm import PolicyGradient, Sft, build_algorithm
from megarl.checkpoint.resume import ResumePoint
from megarl.config.recipe import Recipe
from megarl.observe.observer import Observer
from megarl.ranks.trainer import ModelsTrainer
from megarl.rollout.groups import RetainedGroups
from megarl.rollout.worker import RolloutSource
from megarl.run.build_evaluation import RolloutWriter, build_evaluation
from megarl.run.build_groups import GroupBuilder
from megarl.run.inputs import Inputs
from megarl.run.loop import Loop, Start
from megarl.run.preemption import Preemption
from megarl.run.rollout_samples import RolloutSampler, SampledTrainer
from megarl.run.saver import RunSaver
from megarl.serving.adapter_publisher import AdapterPublisher
from megarl.serving.canary import Canary, CanaryProbe
from megarl.serving.connect import NoPublisher, Roles
from megarl.serving.serving import ExternalServing, ManagedServing, NoServing
from megarl.stages import Publisher, Stages, Trainer
from megarl.types import PolicyVersion


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
    retained: RetainedGroups
    """Groups of the step that the ranks before these were lost in."""

    def loop(self) -> Loop:
        recipe, start, resume = self.recipe, self._start, self.resume
        first_half = GroupBuilder(
            recipe=recipe,
            inputs=self.inputs,
            workers=self.workers,
            observer=self.observer,
            resume=resume,
            version=start.version,
            serves=self._served_version,
            retained=self.retained,
        )
        prompts = first_half.prompts()
        groups = first_half.groups(prompts)
        buffer = first_half.buffer(prompts, groups)
        algorithm = self._algorithm()
        models = self._models(algorithm)
        saver = RunSaver.of(
            recipe,
            self.inputs,
            self.roles.trainers,
            algorithm=algorithm,
            prompts=prompts,
            buffer=buffer,
            preemption=self.preemption,
            observer=self.observer,
            resumed=None if resume is None else resume.state,
            saved=self.saved,
            marked=self.retained.forget,
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
        )
        stages = Stages(
            prompts=prompts,
            groups=groups,
            algorithm=algorithm,
            trainer=self._trainer(models),
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

    def _algorithm(self) -> PolicyGradient | Sft:
        return build_algorithm(
            self.recipe.algorithm,
            max_response_tokens=self.recipe.sampling.max_response_tokens,
            kl_coef=None if self.resume is None else self.resume.state.kl_coef,
        )

    def _models(self, algorithm: PolicyGradient | Sft) -> ModelsTrainer:
        return ModelsTrainer.of(
            self.recipe,
            self.inputs.shape,
            self.roles.trainers,
            num_steps=self._start.step,
            version=self._start.version,
            algorithm=algorithm,
        )

    @property
    def _start(self) -> Start:
        resume = self.resume
        if resume is None:
            return Start(step=0, version=PolicyVersion(0))
        return Start(step=resume.step, version=PolicyVersion(resume.state.trainer.num_updates))

    def _served_version(self) -> PolicyVersion:
        serving = self.roles.serving
        assert not isinstance(serving, NoServing), "no engine serves a version"
        return serving.fleet.committed_version

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
            write=RolloutWriter(inputs=self.inputs, workers=self.workers).write,
            warn=self.observer.warned,
        )
        return SampledTrainer(models, sampler, num_steps=self._start.step)

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
