"""Which curves the page draws, in which order: every number of a step that people watch, one line of code each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megarl.observe.history import History, Series
from megarl.observe.summary import RolloutSummary, StepSummary
from megarl.results import CriticStats, UpdateStats

_MAX_POINTS = 1500
"""Of one series, more than a screen has columns; a longer one is thinned out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    section: str
    title: str
    series: Mapping[str, Series]
    """By name; a chart of one series has no need of it."""


def draw_charts(history: History) -> list[Chart]:
    """Those that have something to show."""
    charts = [
        Chart(section=section, title=title, series={name: thinned(one) for name, one in series.items() if one})
        for section, title, series in _all(history)
    ]
    return [chart for chart in charts if chart.series]


def _all(history: History) -> list[tuple[str, str, Mapping[str, Series]]]:
    update, rollouts, steps, critic = _makers(history)
    return [
        ("Outcome", "Evaluation", _evaluations(history)),
        ("Outcome", "Reward", {"mean": history.reward, "median": rollouts(lambda r: r.reward_median)}),
        ("Outcome", "Reward by component", _components(history)),
        ("Outcome", "Reward spread", {"standard deviation": rollouts(lambda r: r.reward_std)}),
        ("Policy", "Loss", {"loss": history.loss}),
        ("Policy", "Entropy", {"entropy": update(lambda u: u.entropy)}),
        ("Policy", "Gradient norm", {"gradient norm": update(lambda u: u.grad_norm)}),
        ("Policy", "KL from the policy before", {"k3": update(lambda u: u.approx_kl)}),
        ("Policy", "KL from the reference", {"KL": _known(history, lambda u: u.reference_kl)}),
        ("Policy", "Clipped tokens", {"share": update(lambda u: u.clip_fraction)}),
        ("Policy", "Learning rate", {"actor": update(lambda u: u.learning_rate)}),
        (
            "Rollouts",
            "Response tokens",
            {
                "mean": rollouts(lambda r: r.response_tokens_mean),
                "longest": rollouts(lambda r: float(r.response_tokens_max)),
            },
        ),
        ("Rollouts", "Cut off at the limit", {"share": rollouts(lambda r: r.truncated_ratio)}),
        (
            "Rollouts",
            "Groups without signal",
            {
                "no advantage": rollouts(lambda r: float(r.num_zero_signal_groups)),
                "dropped": rollouts(lambda r: float(r.num_dropped_groups)),
            },
        ),
        ("Rollouts", "Age of the trained tokens", _age(history)),
        (
            "Engine against trainer",
            "|p_train - p_rollout|",
            {"mean": update(lambda u: u.mismatch_mean), "largest": update(lambda u: u.mismatch_max)},
        ),
        (
            "Engine against trainer",
            "KL(rollout || train)",
            {"k1": update(lambda u: u.mismatch_kl), "k3": update(lambda u: u.mismatch_k3)},
        ),
        ("Engine against trainer", "Tokens taken out of the loss", {"share": update(lambda u: u.rejected_fraction)}),
        ("Critic", "Value loss", {"loss": critic(lambda c: c.loss)}),
        ("Critic", "Explained variance", {"share": critic(lambda c: c.explained_variance)}),
        (
            "Critic",
            "Value and return",
            {"value": critic(lambda c: c.value_mean), "return": critic(lambda c: c.return_mean)},
        ),
        ("Speed", "Tokens per second", {"tokens/s": steps(lambda s: s.tokens_per_second)}),
        ("Speed", "Seconds per step", {"seconds": steps(lambda s: s.seconds)}),
    ]


def _makers(
    history: History,
) -> tuple[
    Callable[[Callable[[UpdateStats], float]], Series],
    Callable[[Callable[[RolloutSummary], float]], Series],
    Callable[[Callable[[StepSummary], float]], Series],
    Callable[[Callable[[CriticStats], float]], Series],
]:
    def of_critic(number: Callable[[CriticStats], float]) -> Series:
        return Series.of((s.step, number(s.critic)) for s in history.summaries if s.critic is not None)

    return history.of_updates, history.of_rollouts, history.of_steps, of_critic


def _known(history: History, number: Callable[[UpdateStats], float | None]) -> Series:
    found = ((s.step, number(s.update)) for s in history.summaries if s.update is not None)
    return Series.of((step, value) for step, value in found if value is not None)


def _evaluations(history: History) -> dict[str, Series]:
    names = dict.fromkeys(name for _, result in history.evaluations for name in result.numbers)
    return {name: history.of_evaluations(name) for name in names}


def _components(history: History) -> dict[str, Series]:
    found = [(s.step, s.rollouts.component_means) for s in history.summaries if s.rollouts is not None]
    names = dict.fromkeys(name for _, means in found for name in means)
    return {name: Series.of((step, means[name]) for step, means in found if name in means) for name in names}


def _age(history: History) -> dict[str, Series]:
    """In versions, before the newest token of the step; nothing where all tokens are of one version."""
    points = [(s.step, _mean_age(s.rollouts.tokens_by_version)) for s in history.summaries if s.rollouts is not None]
    return {"mean": Series.of(points)} if any(age for _, age in points) else {}


def _mean_age(tokens_by_version: Mapping[int, int]) -> float:
    newest, total = max(tokens_by_version, default=0), sum(tokens_by_version.values())
    return sum((newest - version) * count for version, count in tokens_by_version.items()) / max(1, total)


def thinned(series: Series) -> Series:
    """Every nth point and the last one."""
    stride = -(-len(series.steps) // _MAX_POINTS)
    if stride <= 1:
        return series
    places = sorted({*range(0, len(series.steps), stride), len(series.steps) - 1})
    return Series(
        steps=tuple(series.steps[place] for place in places), values=tuple(series.values[place] for place in places)
    )
