"""The history of a run, and its symptoms: one function each, which returns the evidence, or None where there is none.

Thresholds hold for runs of any size. Where a healthy run may cross one for a while, the function looks at the end of
the run, or asks for two signs together.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from pydantic import JsonValue, ValidationError

from megarl.config.recipe import Recipe
from megarl.errors import DataError
from megarl.observe.events import (
    CheckpointFailed,
    EngineChanged,
    PhaseStarted,
    Record,
    RunFinished,
    RunStarted,
    RunStatus,
    StepFinished,
)
from megarl.observe.history import History, Series, fold_history
from megarl.observe.summary import Phase

_MAX_WINDOW = 8
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|Cannot allocate memory|MemoryError|low on memory|exited with SIGKILL", re.IGNORECASE
)
_OF_ENGINE = re.compile(r"\bengine \d+|\brollout rank|\brollout:", re.IGNORECASE)
_NOT_TALKING = re.compile(
    r"did not finish within|cannot join Ray|timed out|DistNetworkError|DistStoreError|DistBackendError|"
    r"Connection (?:reset|refused|closed|timed)|NCCL error|unhandled system error|heartbeat|gloo/transport",
    re.IGNORECASE,
)
_STEP_PHASES: tuple[Phase, ...] = ("generate", "assign", "update", "publish")
_MIN_STEPS_TO_TIME = 4
_SILENCE_S = 600.0
_MANY_RESTARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    recipe: Recipe
    history: History
    phase_seconds: Mapping[int, Mapping[Phase, float]]
    """By step."""
    failed_saves: tuple[CheckpointFailed, ...]
    lost_engines: tuple[EngineChanged, ...]
    """Engines that ended while the run went on, each time with the reason."""
    last_phase: Phase | None
    end: RunFinished | None
    """None while the run goes on, and where it was killed."""
    silence: timedelta
    """Since the last event."""

    @property
    def failure(self) -> str:
        """The message that a failed run ended with, else an empty text."""
        return self.end.reason if self.end is not None and self.end.status is RunStatus.FAILED else ""

    @property
    def last_step(self) -> int:
        return self.history.summaries[-1].step if self.history.summaries else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Medians of the beginning and the end of a series: a single odd step does not change them."""

    early: float
    late: float
    before: float
    """The median of all values before `late`."""
    late_steps: tuple[int, int]


def read_run_history(records: Iterable[Record], *, now: datetime) -> RunHistory:
    """Raise a DataError where no run has begun, or where its recipe is of another version of megarl."""
    all_records = tuple(records)
    recipe: Mapping[str, JsonValue] | None = None
    phase_seconds: dict[int, Mapping[Phase, float]] = {}
    failed_saves: list[CheckpointFailed] = []
    lost_engines: list[EngineChanged] = []
    last_phase: Phase | None = None
    end: RunFinished | None = None
    for record in all_records:
        match record.event:
            case RunStarted() as started:
                recipe = started.recipe
                end = None
                last_phase = None
            case PhaseStarted(phase=phase):
                last_phase = phase
            case StepFinished(summary=summary, phase_seconds=seconds):
                phase_seconds[summary.step] = seconds
            case CheckpointFailed() as failed:
                failed_saves.append(failed)
            case EngineChanged(is_running=False, reason=reason) as lost if reason:
                lost_engines.append(lost)
            case RunFinished() as finished:
                end = finished
    if recipe is None:
        raise DataError("no run has begun")
    return RunHistory(
        recipe=_recipe_of(recipe),
        history=fold_history(all_records),
        phase_seconds=phase_seconds,
        failed_saves=tuple(failed_saves),
        lost_engines=tuple(lost_engines),
        last_phase=last_phase,
        end=end,
        silence=now - all_records[-1].time,
    )


def _recipe_of(recipe: Mapping[str, JsonValue]) -> Recipe:
    try:
        return Recipe.model_validate(recipe)
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(str(part) for part in detail["loc"])
        raise DataError(f"the recipe is of another version of megarl: {key}: {detail['msg']}") from None


def trend(series: Series, *, min_steps: int = 6) -> Trend | None:
    """Return None where fewer than `min_steps` values are finite."""
    points = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)]
    if len(points) < min_steps:
        return None
    window = max(2, min(_MAX_WINDOW, len(points) // 4))
    values = [value for _, value in points]
    return Trend(
        early=statistics.median(values[:window]),
        late=statistics.median(values[-window:]),
        before=statistics.median(values[:-window]),
        late_steps=(points[-window][0], points[-1][0]),
    )


def mostly_at_end(series: Series, holds: Callable[[float], bool], *, min_steps: int = 3) -> tuple[int, int] | None:
    """Return in how many of how many last steps a condition holds, or None where that is less than half of them."""
    values = series.values[-_MAX_WINDOW:]
    num_steps = sum(map(holds, values))
    if len(values) < min_steps or not num_steps or num_steps * 2 < len(values):
        return None
    return num_steps, len(values)


def reward_up_eval_down(run: RunHistory) -> str | None:
    accuracy, reward = run.history.accuracy, run.history.reward
    if len(accuracy.steps) < 3 or len(reward.steps) < 6:
        return None
    best = max(range(len(accuracy.steps)), key=lambda index: accuracy.values[index])
    drop = accuracy.values[best] - accuracy.values[-1]
    then, now = _mean_near(reward, accuracy.steps[best]), _mean_near(reward, accuracy.steps[-1])
    rise_needed = 0.2 * (max(reward.values) - min(reward.values))
    if drop < 0.05 or now - then <= rise_needed:
        return None
    return (
        f"reward {then:.3g} -> {now:.3g} while accuracy {accuracy.values[best]:.3f} -> {accuracy.values[-1]:.3f}, "
        f"steps {accuracy.steps[best]} to {accuracy.steps[-1]}"
    )


def kl_exploding(run: RunHistory) -> str | None:
    updates = [summary for summary in run.history.summaries if summary.update is not None]
    measured = [
        (item.step, item.update.reference_kl)
        for item in updates
        if item.update is not None and item.update.reference_kl is not None
    ]
    reference = Series(steps=tuple(step for step, _ in measured), values=tuple(nats for _, nats in measured))
    step_kl = run.history.of_updates(lambda update: update.approx_kl)
    names = (("KL to the reference", reference, 0.2, 2.0), ("KL of an update", step_kl, 0.1, 0.5))
    for name, series, suspicious, alarming in names:
        kl = trend(series)
        if kl is None or kl.late < suspicious:
            continue
        if kl.late >= alarming or kl.late >= 4 * kl.before:
            return f"{name} {kl.before:.3g} -> {kl.late:.3g} nats, steps {kl.late_steps[0]} to {kl.late_steps[1]}"
    return None


def loss_oscillating(run: RunHistory) -> str | None:
    """The loss swings up and down at almost every step, the swings grow, and the gradient is clipped."""
    loss, norms = run.history.loss, run.history.of_updates(lambda update: update.grad_norm)
    if len(loss.steps) < 12 or not all(map(math.isfinite, (*loss.values, *norms.values))):
        return None
    clip = run.recipe.train.optimizer.clip_grad_norm
    swings = [later - earlier for earlier, later in pairwise(loss.values)]
    window = max(5, min(12, len(swings) // 3))
    early, late = swings[:window], swings[-window:]
    turns = sum(before * after < 0 for before, after in pairwise(late)) / (window - 1)
    num_clipped = sum(norm > clip for norm in norms.values[-window:])
    growth = _mean_size(late) / max(_mean_size(early), 1e-12)
    if turns < 0.7 or growth < 4 or num_clipped < window / 2:
        return None
    return (
        f"swings of the loss {_mean_size(early):.2g} -> {_mean_size(late):.2g}, turning in {turns:.0%} of the last "
        f"{window} steps; gradient norm above {clip:g} in {num_clipped} of them"
    )


def equal_rewards(run: RunHistory) -> str | None:
    steps = _steps_of_equal_rewards(run)
    if steps is None or never_rewarded(run) is not None:
        return None
    last = run.history.reward.values[-1]
    return (
        f"all rewards of a step are equal in {steps[0]} of the last {steps[1]} steps; in the last one they are {last:g}"
    )


def never_rewarded(run: RunHistory) -> str | None:
    """Whether rewards are equal and none was ever above 0, as those of a model that cannot do the task."""
    best = run.history.of_rollouts(lambda rollouts: rollouts.reward_max)
    if _steps_of_equal_rewards(run) is None or max(best.values) > 0:
        return None
    return f"no response of {len(best.values)} steps scored above 0; the best scored {max(best.values):g}"


def _steps_of_equal_rewards(run: RunHistory) -> tuple[int, int] | None:
    spread = run.history.of_rollouts(lambda rollouts: rollouts.reward_max - rollouts.reward_min)
    return mostly_at_end(spread, lambda value: value == 0)


def no_signal(run: RunHistory) -> str | None:
    share = run.history.of_rollouts(lambda rollouts: rollouts.num_zero_signal_groups / rollouts.num_groups)
    steps = mostly_at_end(share, lambda value: value >= 0.9)
    if steps is None or (equal_rewards(run) or never_rewarded(run)) is not None:
        return None
    return f"90 % of the groups or more teach nothing in {steps[0]} of the last {steps[1]} steps"


def empty_responses(run: RunHistory) -> str | None:
    lengths = trend(run.history.of_rollouts(lambda rollouts: rollouts.response_tokens_mean), min_steps=4)
    empty = trend(run.history.of_rollouts(lambda rollouts: rollouts.empty_ratio), min_steps=4)
    if lengths is None or empty is None:
        return None
    has_shrunk = lengths.early >= 16 and lengths.late <= lengths.early / 4
    if empty.late < 0.2 and not has_shrunk:
        return None
    return (
        f"a response has {lengths.late:.3g} tokens, and {empty.late:.0%} are empty, in steps "
        f"{lengths.late_steps[0]} to {lengths.late_steps[1]}; "
        f"{lengths.early:.3g} and {empty.early:.0%} at the beginning"
    )


def cut_responses(run: RunHistory) -> str | None:
    cut = trend(run.history.of_rollouts(lambda rollouts: rollouts.truncated_ratio), min_steps=4)
    if cut is None or cut.late < 0.5:
        return None
    limit = run.recipe.sampling.max_response_tokens
    return (
        f"{cut.late:.0%} of the responses are cut at {limit} tokens in steps {cut.late_steps[0]} to "
        f"{cut.late_steps[1]}, {cut.early:.0%} at the beginning"
    )


def repetition(run: RunHistory) -> str | None:
    repeated = trend(run.history.of_rollouts(lambda rollouts: rollouts.repetition_ratio), min_steps=4)
    if repeated is None or repeated.late < 0.2 or repeated.late < 2 * repeated.early:
        return None
    return (
        f"{repeated.late:.0%} of a response repeats an earlier part of it in steps {repeated.late_steps[0]} to "
        f"{repeated.late_steps[1]}; {repeated.early:.0%} at the beginning"
    )


def entropy_collapsed(run: RunHistory) -> str | None:
    """The entropy is near zero although the reward no longer rises and is not the best one seen."""
    entropy = trend(run.history.of_updates(lambda update: update.entropy))
    reward = trend(run.history.reward)
    if entropy is None or reward is None:
        return None
    best = max(item.rollouts.reward_max for item in run.history.summaries if item.rollouts is not None)
    is_sure = entropy.late <= 0.05 and entropy.late <= entropy.early / 5
    if not is_sure or reward.late > reward.before or reward.late >= 0.9 * best:
        return None
    return (
        f"entropy {entropy.early:.3g} -> {entropy.late:.3g} nats while the reward stays at {reward.late:.3g} of "
        f"{best:.3g}, steps {entropy.late_steps[0]} to {entropy.late_steps[1]}"
    )


def not_finite(run: RunHistory) -> str | None:
    skipped = [summary.step for summary in run.history.summaries if summary.num_skipped_updates]
    broken = [
        summary.step
        for summary in run.history.summaries
        if summary.update is not None
        and not (math.isfinite(summary.update.loss) and math.isfinite(summary.update.grad_norm))
    ]
    steps = sorted({*skipped, *broken})
    if "not finite" in run.failure:
        return run.failure
    if not steps:
        return None
    return f"loss or gradient not finite in {len(steps)} step(s), first in step {steps[0]}, last in step {steps[-1]}"


def gradient_rises_with_mismatch(run: RunHistory) -> str | None:
    norm = trend(run.history.of_updates(lambda update: update.grad_norm))
    mismatch = trend(run.history.of_updates(lambda update: update.mismatch_mean))
    if norm is None or mismatch is None:
        return None
    if norm.late < 2 * norm.early or mismatch.late < max(1e-3, 2 * mismatch.early):
        return None
    return (
        f"gradient norm {norm.early:.3g} -> {norm.late:.3g} and |p_train - p_rollout| {mismatch.early:.2g} -> "
        f"{mismatch.late:.2g}, steps {norm.late_steps[0]} to {norm.late_steps[1]}"
    )


def eval_always_zero(run: RunHistory) -> str | None:
    accuracy, reward = run.history.accuracy, run.history.reward
    if len(accuracy.steps) < 2 or any(accuracy.values) or not reward or max(reward.values) <= 0:
        return None
    scores = run.history.of_evaluations("score")
    return (
        f"accuracy 0 in all {len(accuracy.steps)} evaluations, mean score {scores.values[-1]:.3g}, "
        f"while the reward in training is {reward.values[-1]:.3g}"
    )


def rollout_out_of_memory(run: RunHistory) -> str | None:
    """Engines that are restarted after running out of memory do not end the run, so their reasons count too."""
    if _OUT_OF_MEMORY.search(run.failure) and _OF_ENGINE.search(run.failure):
        return run.failure
    lost = [engine for engine in run.lost_engines if _OUT_OF_MEMORY.search(engine.reason)]
    return f"engines ended {len(lost)} times, the last, engine {lost[-1].index}: {lost[-1].reason}" if lost else None


def training_out_of_memory(run: RunHistory) -> str | None:
    is_training = _OUT_OF_MEMORY.search(run.failure) and not _OF_ENGINE.search(run.failure)
    return run.failure if is_training else None


def restart_loop(run: RunHistory) -> str | None:
    lost = [engine for engine in run.lost_engines if not _OUT_OF_MEMORY.search(engine.reason)]
    if len(lost) < _MANY_RESTARTS:
        return None
    return f"engines ended {len(lost)} times, the last, engine {lost[-1].index}: {lost[-1].reason}"


def slow_rollout(run: RunHistory) -> str | None:
    steps = sorted(run.phase_seconds)[-8:]
    if len(steps) < _MIN_STEPS_TO_TIME or run.recipe.roles.rollout is None:
        return None
    generating = sum(run.phase_seconds[step].get("generate", 0.0) for step in steps)
    all_seconds = sum(run.phase_seconds[step].get(phase, 0.0) for step in steps for phase in _STEP_PHASES)
    if all_seconds <= 0 or generating < 0.85 * all_seconds:
        return None
    rollouts = run.history.summaries[-1].rollouts
    tail = ""
    if rollouts is not None:
        tail = f"; longest response {_times(rollouts.response_tokens_max, rollouts.response_tokens_mean)}"
    return f"waiting for rollouts takes {generating / all_seconds:.0%} of the last {len(steps)} steps{tail}"


def nodes_not_talking(run: RunHistory) -> str | None:
    is_network = _NOT_TALKING.search(run.failure) and not _OUT_OF_MEMORY.search(run.failure)
    return run.failure if is_network else None


def went_silent(run: RunHistory) -> str | None:
    longest = max((summary.seconds for summary in run.history.summaries), default=0.0)
    seconds = run.silence.total_seconds()
    if run.end is not None or seconds < max(_SILENCE_S, 5 * longest):
        return None
    where = f" during {run.last_phase}" if run.last_phase is not None else ""
    return f"no event for {seconds / 60:.0f} minutes after step {run.last_step}{where}, and the run has not ended"


def saves_failed(run: RunHistory) -> str | None:
    if not run.failed_saves:
        return None
    last = run.failed_saves[-1]
    return f"{len(run.failed_saves)} checkpoint(s) not saved, the last at step {last.step}: {last.reason}"


def _mean_near(series: Series, step: int) -> float:
    """Return the mean of the four steps up to this one, or of the first four."""
    values = [value for at, value in zip(series.steps, series.values, strict=True) if step - 4 < at <= step]
    values = values or list(series.values[:4])
    return sum(values) / len(values)


def _mean_size(numbers: list[float]) -> float:
    return sum(map(abs, numbers)) / len(numbers)


def _times(longest: int, mean: float) -> str:
    return f"{longest} tokens, {longest / mean:.1f} times the mean" if mean > 0 else f"{longest} tokens"
