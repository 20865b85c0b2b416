"""A recorded run, replayed through the time model: the error on the run itself, and the factors that correct it.

Lengths, dropped groups and phase times come from the run's events. Each phase of the loop gets the factor by which the
model is off in total; the estimate of another recipe is multiplied by the same factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from pydantic import ValidationError

from megarl.config.algorithm import AlgorithmConfig, KlRewardConfig
from megarl.config.recipe import Recipe
from megarl.errors import DataError
from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import RunStarted, StepFinished
from megarl.planner.deployment import StepWorkload
from megarl.planner.hardware import GpuModel, gpu_named
from megarl.planner.timing import PhaseName, Timing

GENERATE, ASSIGN, UPDATE, PUBLISH, OTHER = "generate", "assign", "update", "publish", "other"
PARTS = (GENERATE, ASSIGN, UPDATE, PUBLISH, OTHER)
"""Phases of the loop, and the rest of a step: the change of hands in a shared pool."""

_NUM_TO_SPLIT = 4
_IS_WAITED_FOR = 0.05
"""Share of a step from which on the trainer counts as waiting for rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    step: int
    workload: StepWorkload
    seconds: Mapping[str, float]
    """By part."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    folder: Path
    recipe: Recipe
    steps: tuple[RecordedStep, ...]
    num_left_out: int
    """Steps in which processes were started."""
    gpu: GpuModel | None
    """None on a CPU, or for a GPU that the planner does not know."""

    @property
    def workload(self) -> StepWorkload:
        """Mean of all steps, with the lengths of all of them."""
        return _mean_workload([step.workload for step in self.steps])


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReplay:
    recorded_s: float
    modelled_s: float
    """Means over the steps."""

    @property
    def factor(self) -> float | None:
        """The recorded time over the modelled one; None if the model has no such work."""
        return self.recorded_s / self.modelled_s if self.modelled_s > 0 else None

    def corrected(self, modelled_s: float) -> float:
        """Return the estimate of the same part of another recipe; a part that the model lacks takes as long as here."""
        return self.recorded_s if self.factor is None else self.factor * modelled_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    parts: Mapping[str, PartReplay]
    knows_rollout: bool
    """False where generating ran beside training and was never waited for: its time was not recorded."""
    error: float
    """The modelled step over the recorded one, less 1, without factors."""
    corrected_error: float
    """Mean distance of a step from the recorded one, as a share of it, with factors from other steps."""
    num_fitted: int
    num_tested: int
    """Steps that gave the factors for `corrected_error`, and steps that it was measured on."""

    def corrected(self, timing: Timing, algorithm: AlgorithmConfig, *, is_concurrent: bool) -> dict[str, float]:
        """Return the seconds of each part of another recipe's step; generating takes only what training waits for."""
        modelled = part_seconds(timing, algorithm)
        return _waited({part: self.parts[part].corrected(modelled[part]) for part in PARTS}, is_concurrent)


def read_run(folder: Path) -> RecordedRun:
    """Read the steps of a run's last process; a DataError says what is missing."""
    path = folder / EVENTS_FILE
    if not path.is_file():
        raise DataError(f"{folder}: not the folder of a run, {EVENTS_FILE} is missing; name one like runs/quickstart")
    started: RunStarted | None = None
    steps: list[StepFinished] = []
    for record in read_events(path):
        match record.event:
            case RunStarted():
                started, steps = record.event, []
            case StepFinished():
                steps.append(record.event)
    if started is None or not steps:
        raise DataError(f"{path}: no step was finished since the run last started; there is nothing to replay")
    try:
        recipe = Recipe.model_validate(started.recipe)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise DataError(f"{path}: the recipe is not one of this version of megarl: {reason}") from None
    if recipe.roles.rollout is None or steps[0].summary.rollouts is None:
        raise DataError(f"{path}: the run generated nothing; only runs with rollouts can be replayed")
    # A start within a step, as of its first process or after a lost rank, says nothing about the next one.
    kept = [step for step in steps if "start" not in step.phase_seconds]
    if not kept:
        raise DataError(f"{path}: every step contains a start; let the run take a step more")
    names = [usage.gpu_name for usage in kept[-1].summary.usage.values() if usage.gpu_name is not None]
    return RecordedRun(
        folder=folder,
        recipe=recipe,
        steps=tuple(_recorded(step) for step in kept),
        num_left_out=len(steps) - len(kept),
        gpu=gpu_named(names[0]) if names else None,
    )


def replay(run: RecordedRun, timings: Sequence[Timing]) -> Replay:
    """Compare the run with the timings of its own steps."""
    is_concurrent = run.recipe.train.max_staleness > 0
    modelled = [part_seconds(timing, run.recipe.algorithm) for timing in timings]
    is_known = not is_concurrent or any(step.seconds[GENERATE] > _IS_WAITED_FOR * step.total_s for step in run.steps)
    recorded = [
        _generating(step, model, is_concurrent, is_known) for step, model in zip(run.steps, modelled, strict=True)
    ]
    half = len(run.steps) // 2 if len(run.steps) >= _NUM_TO_SPLIT else 0
    fitted = _fit(recorded[:half] or recorded, modelled[:half] or modelled)
    tested = list(zip(modelled, run.steps, strict=True))[half:]
    errors = [
        abs(_total({part: fitted[part].corrected(model[part]) for part in PARTS}, is_concurrent) / step.total_s - 1)
        for model, step in tested
    ]
    modelled_s = sum(_total(model, is_concurrent) for model in modelled)
    return Replay(
        parts=_fit(recorded, modelled),
        knows_rollout=is_known,
        error=modelled_s / sum(step.total_s for step in run.steps) - 1,
        corrected_error=fmean(errors),
        num_fitted=half or len(run.steps),
        num_tested=len(errors),
    )


def part_seconds(timing: Timing, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Return the modelled seconds of each part, as if generating and training alternated."""
    is_in_reward = isinstance(algorithm.kl, KlRewardConfig)
    part_of = {
        PhaseName.ROLLOUT: GENERATE,
        PhaseName.OLD: ASSIGN if is_in_reward else UPDATE,
        PhaseName.REFERENCE: ASSIGN,
        PhaseName.TEACHER: ASSIGN,
        PhaseName.VALUES: ASSIGN,
        PhaseName.UPDATE: UPDATE,
        PhaseName.CRITIC_UPDATE: UPDATE,
        PhaseName.DRAFT_UPDATE: UPDATE,
        PhaseName.PUBLISH: PUBLISH,
        PhaseName.SWITCH: OTHER,
    }
    seconds = dict.fromkeys(PARTS, 0.0)
    for phase in timing.phases:
        if phase.is_longest:
            seconds[part_of[phase.name]] += phase.seconds
    return seconds


def _recorded(event: StepFinished) -> RecordedStep:
    summary, rollouts = event.summary, event.summary.rollouts
    assert rollouts is not None, f"step {summary.step} has no rollouts"
    seconds = {str(phase): spent for phase, spent in event.phase_seconds.items() if phase in PARTS}
    seconds = {part: seconds.get(part, 0.0) for part in (GENERATE, ASSIGN, UPDATE, PUBLISH)}
    generated = rollouts.num_groups + rollouts.num_dropped_groups
    return RecordedStep(
        step=summary.step,
        workload=StepWorkload(
            mean_prompt_tokens=max(1, round(summary.prompt_tokens_mean)),
            mean_response_tokens=max(1, round(rollouts.response_tokens_mean)),
            max_response_tokens=max(1, rollouts.response_tokens_max),
            quantiles=rollouts.response_tokens_quantiles,
            kept_share=rollouts.num_groups / generated,
        ),
        seconds=seconds | {OTHER: max(0.0, summary.seconds - sum(seconds.values()))},
    )


def _generating(
    step: RecordedStep, modelled: Mapping[str, float], is_concurrent: bool, is_known: bool
) -> dict[str, float]:
    """Return the seconds of each part, with the whole time of generating where it ran beside training."""
    seconds = dict(step.seconds)
    if is_concurrent:
        beside_s = seconds[ASSIGN] + seconds[UPDATE]
        seconds[GENERATE] = seconds[GENERATE] + beside_s if is_known else modelled[GENERATE]
    return seconds


def _fit(recorded: Sequence[Mapping[str, float]], modelled: Sequence[Mapping[str, float]]) -> dict[str, PartReplay]:
    return {
        part: PartReplay(
            recorded_s=fmean(seconds[part] for seconds in recorded),
            modelled_s=fmean(seconds[part] for seconds in modelled),
        )
        for part in PARTS
    }


def _waited(seconds: Mapping[str, float], is_concurrent: bool) -> dict[str, float]:
    waited = dict(seconds)
    if is_concurrent:
        waited[GENERATE] = max(0.0, seconds[GENERATE] - seconds[ASSIGN] - seconds[UPDATE])
    return waited


def _total(seconds: Mapping[str, float], is_concurrent: bool) -> float:
    return sum(_waited(seconds, is_concurrent).values())


def _mean_workload(workloads: Sequence[StepWorkload]) -> StepWorkload:
    kept = [workload.kept_share for workload in workloads if workload.kept_share is not None]
    columns = list(zip(*(workload.quantiles for workload in workloads), strict=False))
    return StepWorkload(
        mean_prompt_tokens=round(fmean(workload.mean_prompt_tokens for workload in workloads)),
        mean_response_tokens=round(fmean(workload.mean_response_tokens for workload in workloads)),
        max_response_tokens=round(fmean(workload.max_response_tokens for workload in workloads)),
        quantiles=tuple(round(fmean(column)) for column in columns),
        kept_share=fmean(kept) if kept else None,
    )
