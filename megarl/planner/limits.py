"""Limits that follow from the plan: steps between saves, time to save after a signal, deadline of a call to ranks.

A recipe that sets none gets derived ones; one whose own contradict the plan is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megarl.config.recipe import LEAST_DEADLINE_S, LEAST_GRACE_S, Recipe
from megarl.errors import Problem
from megarl.planner.deployment import Deployment, StepWorkload
from megarl.planner.run_time import RunTime
from megarl.planner.timing import Timing, longest_call_s

HOUR_S = 3600.0
"""The most that a crash or a time limit may cost, unless a step takes longer."""
_LONG_RESPONSES = 0.9
"""Mean length of the responses that deadlines are derived for, relative to the longest: answers grow in training."""
_DEADLINE_FACTOR = 3.0
_GRACE_FACTOR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Times by the plan, and the limits that hold in the run."""

    steps_per_hour: int
    """Steps between two saves; one that takes more than an hour is saved by itself."""
    step_s: float
    save_s: float
    """Copying the state to host memory and writing it."""
    longest_call_s: float
    """The longest call to ranks: training on long responses, saving, starting with a checkpoint."""
    grace_s: float
    operation_timeout_s: float
    first_save_s: float
    """From the start of a job to the first save of a step: what a time limit must leave beside the grace."""


def limits_of(
    recipe: Recipe, deployment: Deployment, workload: StepWorkload, timing: Timing, outside: RunTime
) -> RunLimits:
    train, save_s = recipe.train, timing.copy_s + timing.save_s
    long = replace(
        workload,
        mean_response_tokens=math.ceil(_LONG_RESPONSES * recipe.sampling.max_response_tokens),
        max_response_tokens=recipe.sampling.max_response_tokens,
        quantiles=(),
    )
    training_s = longest_call_s(deployment, long, algorithm=recipe.algorithm, train=train, sampling=recipe.sampling)
    start_s = outside.start_s + max(outside.load_s, outside.resume_s)
    longest_s = max(training_s, timing.save_s, start_s)
    deadline_s = max(LEAST_DEADLINE_S, _rounded(_DEADLINE_FACTOR * longest_s))
    grace_s = max(LEAST_GRACE_S, _rounded(_GRACE_FACTOR * save_s))
    return RunLimits(
        steps_per_hour=max(1, int(HOUR_S // timing.step_s)) if timing.step_s else 1,
        step_s=timing.step_s,
        save_s=save_s,
        longest_call_s=longest_s,
        grace_s=recipe.checkpoint.grace_s or grace_s,
        operation_timeout_s=train.operation_timeout_s or deadline_s,
        first_save_s=start_s + timing.step_s,
    )


def _rounded(seconds: float) -> float:
    """Round up to a minute."""
    return 60.0 * math.ceil(seconds / 60)


def with_limits(recipe: Recipe, limits: RunLimits | None) -> Recipe:
    """Return the recipe with the limits of its plan; on a CPU, which has no plan of times, as it is."""
    if limits is None:
        return recipe
    return recipe.model_copy(
        update={
            "checkpoint": recipe.checkpoint.model_copy(update={"grace_s": limits.grace_s}),
            "train": recipe.train.model_copy(update={"operation_timeout_s": limits.operation_timeout_s}),
        }
    )


def check_limits(recipe: Recipe, limits: RunLimits | None) -> Iterator[Problem]:
    """Yield the limits of a recipe that contradict its plan."""
    if limits is None:
        return
    checkpoint, train = recipe.checkpoint, recipe.train
    if checkpoint.contents == "everything":  # a run resumes from nothing else
        yield from _check_interval(checkpoint.save_every_steps, recipe.run.steps, limits)
    if checkpoint.grace_s is not None and checkpoint.grace_s < limits.save_s:
        yield Problem(
            key="checkpoint.grace_s",
            message=f"{checkpoint.grace_s:g} s, and a save takes about {limits.save_s:.0f} s at "
            f"cluster.file_system_gb_per_s {recipe.cluster.file_system_gb_per_s:g}: a run that is stopped loses its "
            f"steps; leave the key out, or set {_rounded(_GRACE_FACTOR * limits.save_s):g}",
        )
    needed_s = _DEADLINE_FACTOR * limits.longest_call_s
    if train.operation_timeout_s is not None and train.operation_timeout_s < needed_s:
        yield Problem(
            key="train.operation_timeout_s",
            message=f"{train.operation_timeout_s:g} s, and the longest call to ranks takes about "
            f"{limits.longest_call_s:.0f} s once responses are long: ranks that work would count as hanging; "
            f"leave the key out, or set {_rounded(needed_s):g}",
        )


def _check_interval(every_steps: int | str | None, steps: int | None, limits: RunLimits) -> Iterator[Problem]:
    taken = steps if every_steps is None else every_steps
    if not isinstance(taken, int) or taken <= limits.steps_per_hour or taken * limits.step_s <= HOUR_S:
        return
    what = "null saves only the last step" if every_steps is None else f"{every_steps} steps"
    yield Problem(
        key="checkpoint.save_every_steps",
        message=f"{what}, about {taken * limits.step_s / HOUR_S:.1f} h by the plan, which a crash or a time limit "
        f"may cost; leave the key out, or set at most {limits.steps_per_hour}",
    )
