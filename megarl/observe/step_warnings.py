"""Warnings about a step that did not fail: rewards without signal, rewards far from the others.

A warning is repeated at steps 1, 2, 4, 8 ... of its duration; the metrics count every step.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.observe.summary import RolloutSummary, StepSummary


class StepWarnings:
    """Remembers for how many steps each warning has lasted."""

    def __init__(self) -> None:
        self._streaks: dict[str, int] = {}

    def after(self, summary: StepSummary) -> tuple[str, ...]:
        """Return the warnings to show after this step."""
        warnings = {} if summary.rollouts is None else dict(_warnings(summary.rollouts))
        self._streaks = {name: self._streaks.get(name, 0) + 1 for name in warnings}
        return tuple(
            f"step {summary.step}{_duration(self._streaks[name])}: {text}"
            for name, text in warnings.items()
            if _is_power_of_two(self._streaks[name])
        )


def _warnings(rollouts: RolloutSummary) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each warning."""
    if rollouts.reward_min == rollouts.reward_max and rollouts.num_groups > 1:
        remedy = "the prompts are too easy or too hard, or the reward is broken"
        signal = "" if rollouts.has_signal else ", nothing was learned"
        yield "equal", f"all rewards are {rollouts.reward_median:g}{signal}; {remedy}"
    elif not rollouts.has_signal:
        yield (
            "zero_signal",
            f"none of {rollouts.num_groups} groups has signal, nothing was learned: within each the advantages are 0; "
            "more rollouts per prompt, other prompts or algorithm.filter can help",
        )
    outlier = rollouts.first_outlier
    if outlier is not None:
        yield (
            "outliers",
            f"{rollouts.num_reward_outliers} rewards are far from the median {rollouts.reward_median:g}; the first is "
            f"{outlier.reward:g}, of prompt {outlier.prompt_uid}",
        )


def _duration(num_steps: int) -> str:
    return f", for {num_steps} steps now" if num_steps > 1 else ""


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
