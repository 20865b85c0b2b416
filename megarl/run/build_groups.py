"""Builds the first half of a loop: its prompts, the source of its scored groups, and the buffer they wait in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megarl.checkpoint.carried import read_groups
from megarl.checkpoint.resume import ResumePoint
from megarl.config.recipe import Recipe
from megarl.config.roles import teaching_of
from megarl.data.prompts import Demonstrations, DemonstrationScorer
from megarl.data.stream import PromptStream
from megarl.observe.observer import Observer
from megarl.rollout.generator import Sampling
from megarl.rollout.groups import GivenGroups, RetainedGroups, SampledGroups
from megarl.rollout.worker import RolloutSource, RolloutTask
from megarl.run.buffer import Buffer
from megarl.run.inputs import Inputs
from megarl.types import PolicyVersion


@dataclass(frozen=True, kw_only=True)
class GroupBuilder:
    recipe: Recipe
    inputs: Inputs
    workers: RolloutSource | None
    """None without engines."""
    observer: Observer
    resume: ResumePoint | None
    version: PolicyVersion
    """The version that the loop begins with."""
    serves: Callable[[], PolicyVersion]
    """Returns the version that the engines serve."""
    retained: RetainedGroups
    """Groups of the step that the ranks before these were lost in."""

    def prompts(self) -> PromptStream:
        state = None if self.resume is None else self.resume.state
        return PromptStream(
            self.inputs.train.prompts,
            seed=self.recipe.run.seed,
            is_shuffled=self.recipe.data.is_shuffled,
            cursor=0 if state is None else state.prompt_cursor,
            pending=() if state is None else state.ledger.pending,
        )

    def groups(self, prompts: PromptStream) -> SampledGroups | GivenGroups:
        needs, workers = self.recipe.algorithm.needs, self.workers
        if not needs.has_engines or workers is None:
            # The first answer of a pair is the better one.
            values = (1.0, 0.0) if needs.rows == "pairs" else (1.0,)
            answers = Demonstrations(self.inputs.tokenizer, is_scored_at_end=needs.is_scorer)
            return GivenGroups(answers, DemonstrationScorer(values))
        is_synchronous = self.recipe.train.max_staleness == 0
        if is_synchronous:
            self._take_left(prompts)
        return SampledGroups(
            workers,
            self._task(),
            self.observer,
            retained=self.retained if is_synchronous else None,
            serves=self.serves,
            demonstrations=None if needs.self_play_steps is None else Demonstrations(self.inputs.tokenizer),
        )

    def buffer(self, prompts: PromptStream, groups: SampledGroups | GivenGroups) -> Buffer:
        resume, filtering, train = self.resume, self.recipe.algorithm.filter, self.recipe.train
        buffer = Buffer(
            prompts_per_step=train.prompts_per_step,
            max_staleness=train.max_staleness,
            oversampling=1.0 if filtering is None else filtering.oversampling,
            versions=(*(() if resume is None else map(PolicyVersion, resume.state.versions)), self.version),
            carried=() if resume is None else read_groups(resume.folder, resume.state.ledger.num_carried, prompts.at),
            replace_lost=groups.replace_lost if isinstance(groups, SampledGroups) else None,
        )
        self.observer.watch_queue(
            num_waiting=lambda: buffer.num_ready,
            num_under_way=lambda: buffer.num_under_way,
            capacity=lambda: buffer.capacity,
        )
        return buffer

    def _task(self) -> RolloutTask:
        recipe, max_tokens = self.recipe, self.recipe.sampling.max_response_tokens
        nearly_greedy = Sampling.nearly_greedy(max_response_tokens=max_tokens)
        return RolloutTask(
            sampling=Sampling.of(recipe.sampling, max_response_tokens=max_tokens),
            seed=recipe.run.seed,
            in_flight=recipe.in_flight,
            generator=recipe.sampling.generator,
            baseline=nearly_greedy if recipe.algorithm.needs.has_baseline else None,
            has_routes=recipe.replays_routing(self.inputs.shape),
            teaching=teaching_of(recipe.algorithm, recipe.roles, self.inputs.shape.vocab),
        )

    def _take_left(self, prompts: PromptStream) -> None:
        """Begin with the groups of this step that a preempted run of this folder left."""
        if self.resume is None:
            return
        num_left = self.retained.take_left(
            self.recipe.run_folder.absolute(),
            self.version,
            identity=self.inputs.answers_digest(self.recipe.model_dump_json()),
            prompt_at=prompts.at,
            warn=self.observer.warned,
        )
        if num_left:
            self.observer.noted(f"{num_left} groups of the step are kept from before the run was stopped")
