"""A run over its steps: the series a report is made of, folded from the records of `events.jsonl`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megarl.observe.events import Evaluated, Record, RunStarted, StepFinished
from megarl.observe.summary import RolloutSummary, StepSummary
from megarl.results import EvalResult, UpdateStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One number, at the steps after which it is known."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> Series:
        pairs = tuple(points)
        return cls(steps=tuple(step for step, _ in pairs), values=tuple(value for _, value in pairs))

    def __bool__(self) -> bool:
        return bool(self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    run: str
    summaries: tuple[StepSummary, ...]
    evaluations: tuple[tuple[int, EvalResult], ...]
    """Each with the step after which it ran; 0 is before the first."""

    def of_steps(self, number: Callable[[StepSummary], float]) -> Series:
        return Series.of((summary.step, number(summary)) for summary in self.summaries)

    def of_updates(self, number: Callable[[UpdateStats], float]) -> Series:
        """Without the steps in which only the critic learned."""
        return Series.of(
            (summary.step, number(summary.update)) for summary in self.summaries if summary.update is not None
        )

    def of_rollouts(self, number: Callable[[RolloutSummary], float]) -> Series:
        """Empty where the run trained on demonstrations."""
        return Series.of(
            (summary.step, number(summary.rollouts)) for summary in self.summaries if summary.rollouts is not None
        )

    @property
    def reward(self) -> Series:
        return self.of_rollouts(lambda rollouts: rollouts.reward_mean)

    @property
    def accuracy(self) -> Series:
        return self.of_evaluations("accuracy")

    def of_evaluations(self, name: str) -> Series:
        """One number of the evaluations that have it, such as `pass@4`."""
        return Series.of((step, result.numbers[name]) for step, result in self.evaluations if name in result.numbers)

    @property
    def loss(self) -> Series:
        return self.of_updates(lambda update: update.loss)


def fold_history(records: Iterable[Record]) -> History:
    """The run as it stands: what was done after the checkpoint that it went on from is done anew, and counts once."""
    run = ""
    summaries: list[StepSummary] = []
    evaluations: list[tuple[int, EvalResult]] = []
    for record in records:
        match record.event:
            case RunStarted(name=name, resumed_step=resumed_step):
                run = name
                summaries = [summary for summary in summaries if summary.step <= resumed_step]
                evaluations = [item for item in evaluations if resumed_step > 0 and item[0] <= resumed_step]
            case StepFinished(summary=summary):
                summaries.append(summary)
            case Evaluated(step=step, result=result):
                evaluations.append((step, result))
    return History(run=run, summaries=tuple(summaries), evaluations=tuple(evaluations))
