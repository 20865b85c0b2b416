"""Runs that never ran: event files written through the classes that real runs write theirs with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from megarl.config.recipe import Recipe
from megarl.observe.event_file import EVENTS_FILE
from megarl.observe.event_log import EventLog
from megarl.observe.events import (
    EngineChanged,
    Evaluated,
    Event,
    Record,
    RunFinished,
    RunStarted,
    RunStatus,
    StepFinished,
)
from megarl.observe.summary import Phase, RolloutSummary, StepSummary
from megarl.results import EvalResult, Grade, Grades
from megarl.types import PolicyVersion
from tests.observe.samples import BEGAN, step_summary

SECONDS_APART = 10.0

RECIPE = """\
run: {name: sample, steps: 40, device: cpu}
model: {path: model}
data: {train: [train.parquet], eval: [eval.parquet], max_prompt_tokens: 64}
pools: {train: {gpus_per_node: 2}, rollout: {gpus_per_node: 1}}
roles:
  actor: {pool: train, tensor: 2}
  rollout: {pool: rollout, is_deterministic: false}
algorithm: {kind: grpo}
sampling: {max_response_tokens: 192}
train: {prompts_per_step: 8, tokens_per_micro_batch: 1024, optimizer: {learning_rate: 3e-4}}
evaluation: {every_steps: 8, max_response_tokens: 96}
"""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a run that is fine, unless told otherwise."""

    reward: float = 0.5
    reward_min: float = 0.0
    reward_max: float = 1.0
    loss: float = 0.01
    grad_norm: float = 0.5
    entropy: float = 0.5
    mismatch: float = 1e-5
    approx_kl: float = 0.002
    reference_kl: float | None = None
    zero_signal: int = 2
    response_tokens: float = 100.0
    truncated: float = 0.05
    empty: float = 0.0
    repetition: float = 0.02
    num_skipped: int = 0
    generate_s: float = 1.0
    accuracy: float | None = None
    """Of an evaluation after it."""
    score: float | None = None

    def events(self, number: int) -> list[Event]:
        phase_seconds: dict[Phase, float] = {"generate": self.generate_s, "update": 1.0, "publish": 0.1}
        events: list[Event] = [StepFinished(summary=self._summary(number), phase_seconds=phase_seconds)]
        if self.accuracy is not None:
            events.append(evaluation(number, self.accuracy, score=self.score))
        return events

    def _summary(self, number: int) -> StepSummary:
        fine = step_summary(number)
        assert fine.update is not None
        assert fine.rollouts is not None
        update = replace(
            fine.update,
            loss=self.loss,
            grad_norm=self.grad_norm,
            entropy=self.entropy,
            mismatch_mean=self.mismatch,
            approx_kl=self.approx_kl,
            reference_kl=self.reference_kl,
        )
        return replace(
            fine, update=update, rollouts=self._rollouts(fine.rollouts), num_skipped_updates=self.num_skipped
        )

    def _rollouts(self, fine: RolloutSummary) -> RolloutSummary:
        return replace(
            fine,
            reward_mean=self.reward,
            reward_min=self.reward_min,
            reward_max=self.reward_max,
            num_zero_signal_groups=self.zero_signal,
            response_tokens_mean=self.response_tokens,
            response_tokens_max=int(2 * self.response_tokens),
            truncated_ratio=self.truncated,
            empty_ratio=self.empty,
            repetition_ratio=self.repetition,
        )


def evaluation(step: int, accuracy: float, *, score: float | None = None) -> Evaluated:
    grade = Grade(
        num_prompts=64,
        rollouts_per_prompt=1,
        score_mean=accuracy if score is None else score,
        accuracy=accuracy,
        majority=accuracy,
        pass_at={},
    )
    grades = Grades(overall=grade, by_source={"arithmetic": grade})
    return Evaluated(step=step, result=EvalResult(version=PolicyVersion(step), greedy=grades, sampled=None))


def lost_engine(index: int, reason: str) -> EngineChanged:
    return EngineChanged(
        index=index,
        state="dead",
        is_serving=False,
        is_running=False,
        version=PolicyVersion(3),
        address="127.0.0.1:1",
        reason=reason,
    )


def started(recipe: Recipe, *, resumed_step: int = 0) -> RunStarted:
    return RunStarted(
        name=recipe.run.name,
        folder=str(recipe.run_folder),
        algorithm=recipe.algorithm.kind,
        steps=recipe.run.total_steps,
        megarl_version="0.0.0",
        metrics_url=None,
        resumed_step=resumed_step,
        recipe=recipe.model_dump(mode="json"),
    )


def write_run(
    folder: Path,
    recipe: Recipe,
    steps: Sequence[Step],
    *,
    failure: str = "",
    extra: Sequence[Event] = (),
    has_ended: bool = True,
) -> datetime:
    """The events of a run in `folder`; gives the time of the last one."""
    events: list[Event] = [started(recipe)]
    for number, step in enumerate(steps, start=1):
        events += step.events(number)
    events += extra
    if has_ended:
        status = RunStatus.FAILED if failure else RunStatus.DONE
        events.append(RunFinished(status=status, reason=failure))
    log = EventLog(folder / EVENTS_FILE)
    for index, event in enumerate(events):
        log.record(Record(sequence=index, time=BEGAN + timedelta(seconds=SECONDS_APART * index), event=event))
    log.close()
    return BEGAN + timedelta(seconds=SECONDS_APART * (len(events) - 1))
