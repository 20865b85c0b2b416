"""How to tell, from a run's events, that something is wrong: one function each, from the story to the evidence.

Thresholds are about runs of any size; where a healthy run may cross one for a while, the end of the run counts, or
two things have to come together.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise

from megarl.observe.history import Series
from megarl.observe.summary import Phase
from megarl.tools.doctor.run_history import Story, at_end, trend

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


def reward_up_eval_down(story: Story) -> str | None:
    accuracy, reward = story.history.accuracy, story.history.reward
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


def kl_exploding(story: Story) -> str | None:
    updates = [summary for summary in story.history.summaries if summary.update is not None]
    measured = [
        (item.step, item.update.reference_kl)
        for item in updates
        if item.update is not None and item.update.reference_kl is not None
    ]
    reference = Series(steps=tuple(step for step, _ in measured), values=tuple(kl for _, kl in measured))
    step_kl = story.history.of_updates(lambda update: update.approx_kl)
    names = (("KL to the reference", reference, 0.2, 2.0), ("KL of an update", step_kl, 0.1, 0.5))
    for name, series, suspicious, alarming in names:
        found = trend(series)
        if found is None or found.late < suspicious:
            continue
        if found.late >= alarming or found.late >= 4 * found.before:
            return (
                f"{name} {found.before:.3g} -> {found.late:.3g} nats, steps {found.late_steps[0]} to "
                f"{found.late_steps[1]}"
            )
    return None


def loss_oscillating(story: Story) -> str | None:
    """Swings that turn at every step, grow, and are cut by the gradient clip."""
    loss, norms = story.history.loss, story.history.of_updates(lambda update: update.grad_norm)
    if len(loss.steps) < 12 or not all(map(math.isfinite, (*loss.values, *norms.values))):
        return None
    clip = story.recipe.train.optimizer.clip_grad_norm
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


def equal_rewards(story: Story) -> str | None:
    spread = story.history.of_rollouts(lambda rollouts: rollouts.reward_max - rollouts.reward_min)
    found = at_end(spread, lambda value: value == 0)
    reward = story.history.reward
    if found is None or found[0] * 2 < found[1]:
        return None
    return (
        f"all rewards of a step are equal in {found[0]} of the last {found[1]} steps, {reward.values[-1]:g} in the last"
    )


def no_signal(story: Story) -> str | None:
    share = story.history.of_rollouts(lambda rollouts: rollouts.num_zero_signal_groups / rollouts.num_groups)
    found = at_end(share, lambda value: value >= 0.9)
    if found is None or found[0] * 2 < found[1] or equal_rewards(story) is not None:
        return None
    return f"90 % of the groups or more teach nothing in {found[0]} of the last {found[1]} steps"


def empty_responses(story: Story) -> str | None:
    lengths = trend(story.history.of_rollouts(lambda rollouts: rollouts.response_tokens_mean), min_steps=4)
    empty = trend(story.history.of_rollouts(lambda rollouts: rollouts.empty_ratio), min_steps=4)
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


def cut_responses(story: Story) -> str | None:
    found = trend(story.history.of_rollouts(lambda rollouts: rollouts.truncated_ratio), min_steps=4)
    if found is None or found.late < 0.5:
        return None
    limit = story.recipe.sampling.max_response_tokens
    return (
        f"{found.late:.0%} of the responses are cut at {limit} tokens in steps {found.late_steps[0]} to "
        f"{found.late_steps[1]}, {found.early:.0%} at the beginning"
    )


def repetition(story: Story) -> str | None:
    found = trend(story.history.of_rollouts(lambda rollouts: rollouts.repetition_ratio), min_steps=4)
    if found is None or found.late < 0.2 or found.late < 2 * found.early:
        return None
    return (
        f"{found.late:.0%} of a response was said in it before, in steps {found.late_steps[0]} to "
        f"{found.late_steps[1]}; {found.early:.0%} at the beginning"
    )


def entropy_collapsed(story: Story) -> str | None:
    """A policy that is sure of itself though its reward no longer rises and is not the best there is."""
    entropy = trend(story.history.of_updates(lambda update: update.entropy))
    reward = trend(story.history.reward)
    if entropy is None or reward is None:
        return None
    best = max(item.rollouts.reward_max for item in story.history.summaries if item.rollouts is not None)
    is_sure = entropy.late <= 0.05 and entropy.late <= entropy.early / 5
    if not is_sure or reward.late > reward.before or reward.late >= 0.9 * best:
        return None
    return (
        f"entropy {entropy.early:.3g} -> {entropy.late:.3g} nats while the reward stays at {reward.late:.3g} of "
        f"{best:.3g}, steps {entropy.late_steps[0]} to {entropy.late_steps[1]}"
    )


def not_finite(story: Story) -> str | None:
    skipped = [summary.step for summary in story.history.summaries if summary.num_skipped_updates]
    broken = [
        summary.step
        for summary in story.history.summaries
        if summary.update is not None
        and not (math.isfinite(summary.update.loss) and math.isfinite(summary.update.grad_norm))
    ]
    steps = sorted({*skipped, *broken})
    if "not finite" in story.failure:
        return story.failure
    if not steps:
        return None
    return f"loss or gradient not finite in {len(steps)} step(s), first in step {steps[0]}, last in step {steps[-1]}"


def gradient_rises_with_mismatch(story: Story) -> str | None:
    norm = trend(story.history.of_updates(lambda update: update.grad_norm))
    mismatch = trend(story.history.of_updates(lambda update: update.mismatch_mean))
    if norm is None or mismatch is None:
        return None
    if norm.late < 2 * norm.early or mismatch.late < max(1e-3, 2 * mismatch.early):
        return None
    return (
        f"gradient norm {norm.early:.3g} -> {norm.late:.3g} and |p_train - p_rollout| {mismatch.early:.2g} -> "
        f"{mismatch.late:.2g}, steps {norm.late_steps[0]} to {norm.late_steps[1]}"
    )


def eval_always_zero(story: Story) -> str | None:
    accuracy, reward = story.history.accuracy, story.history.reward
    if len(accuracy.steps) < 2 or any(accuracy.values) or not reward or max(reward.values) <= 0:
        return None
    scores = story.history.of_evaluations("score")
    return (
        f"accuracy 0 in all {len(accuracy.steps)} evaluations, mean score {scores.values[-1]:.3g}, "
        f"while the reward in training is {reward.values[-1]:.3g}"
    )


def rollout_out_of_memory(story: Story) -> str | None:
    """An engine that is started again does not end the run, and will run out of memory again."""
    if _OUT_OF_MEMORY.search(story.failure) and _OF_ENGINE.search(story.failure):
        return story.failure
    lost = [engine for engine in story.lost_engines if _OUT_OF_MEMORY.search(engine.reason)]
    return f"engines ended {len(lost)} times, the last, engine {lost[-1].index}: {lost[-1].reason}" if lost else None


def training_out_of_memory(story: Story) -> str | None:
    is_it = _OUT_OF_MEMORY.search(story.failure) and not _OF_ENGINE.search(story.failure)
    return story.failure if is_it else None


def restart_loop(story: Story) -> str | None:
    lost = [engine for engine in story.lost_engines if not _OUT_OF_MEMORY.search(engine.reason)]
    if len(lost) < _MANY_RESTARTS:
        return None
    return f"engines ended {len(lost)} times, the last, engine {lost[-1].index}: {lost[-1].reason}"


def slow_rollout(story: Story) -> str | None:
    steps = sorted(story.phase_seconds)[-8:]
    if len(steps) < _MIN_STEPS_TO_TIME or story.recipe.roles.rollout is None:
        return None
    generating = sum(story.phase_seconds[step].get("generate", 0.0) for step in steps)
    all_seconds = sum(story.phase_seconds[step].get(phase, 0.0) for step in steps for phase in _STEP_PHASES)
    if all_seconds <= 0 or generating < 0.85 * all_seconds:
        return None
    rollouts = story.history.summaries[-1].rollouts
    tail = ""
    if rollouts is not None:
        tail = f"; longest response {_times(rollouts.response_tokens_max, rollouts.response_tokens_mean)}"
    return f"{generating / all_seconds:.0%} of the last {len(steps)} steps is waiting for rollouts{tail}"


def nodes_not_talking(story: Story) -> str | None:
    is_it = _NOT_TALKING.search(story.failure) and not _OUT_OF_MEMORY.search(story.failure)
    return story.failure if is_it else None


def went_silent(story: Story) -> str | None:
    longest = max((summary.seconds for summary in story.history.summaries), default=0.0)
    seconds = story.silence.total_seconds()
    if story.end is not None or seconds < max(_SILENCE_S, 5 * longest):
        return None
    where = f" during {story.last_phase}" if story.last_phase is not None else ""
    return f"no event for {seconds / 60:.0f} minutes after step {story.last_step}{where}, and no word of an end"


def saves_failed(story: Story) -> str | None:
    if not story.failed_saves:
        return None
    last = story.failed_saves[-1]
    return f"{len(story.failed_saves)} checkpoint(s) not saved, the last at step {last.step}: {last.reason}"


def _mean_near(series: Series, step: int) -> float:
    """Over the four steps up to this one, or the first four."""
    values = [value for at, value in zip(series.steps, series.values, strict=True) if step - 4 < at <= step]
    values = values or list(series.values[:4])
    return sum(values) / len(values)


def _mean_size(numbers: list[float]) -> float:
    return sum(map(abs, numbers)) / len(numbers)


def _times(longest: int, mean: float) -> str:
    return f"{longest} tokens, {longest / mean:.1f} times the mean" if mean > 0 else f"{longest} tokens"
