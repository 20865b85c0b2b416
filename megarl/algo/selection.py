"""Which groups are worth training on: dynamic sampling. Knows scores, not tokens or losses."""

from __future__ import annotations

from collections import Counter

from megarl.config.algorithm import FilterConfig
from megarl.errors import DataError
from megarl.types import Score, ScoredGroup


class Selection:
    """Drops groups without signal, and ends the run when it has seen nothing else for too long."""

    def __init__(self, config: FilterConfig) -> None:
        self._config = config
        self._num_dropped = 0
        """Since the last group that was kept."""
        self._causes: Counter[str] = Counter()

    def keeps(self, group: ScoredGroup) -> bool:
        values = [self._value(score, group) for score in group.scores]
        found = self._complaint(values)
        if found is None:
            self._num_dropped = 0
            return True
        cause, complaint = found
        self._causes[cause] += 1
        self._num_dropped += 1
        if self._num_dropped >= self._config.max_dropped_groups:
            raise DataError(
                f"algorithm.filter dropped {self._num_dropped} groups in a row; the last, prompt "
                f"{group.group.prompt.uid}, because {complaint}. The prompts are too easy or too hard for the policy, "
                "or the reward is broken: look at some responses, change data.train, or widen the filter"
            )
        return False

    def take_dropped(self) -> dict[str, int]:
        """How many groups were dropped since this was last asked, by cause."""
        causes, self._causes = self._causes, Counter()
        return dict(sorted(causes.items()))

    def _value(self, score: Score, group: ScoredGroup) -> float:
        name = self._config.component
        return score.value if name is None else component(score, name, group)

    def _complaint(self, values: list[float]) -> tuple[str, str] | None:
        """Why a group with these values is dropped, in a word and in a clause; None where it is kept."""
        config = self._config
        what = config.component or "score"
        if max(values) - min(values) <= config.tolerance:
            return "equal", f"every {what} is {values[0]:g}"
        mean = sum(values) / len(values)
        if config.lowest_mean is not None and mean < config.lowest_mean:
            return "below_band", f"its mean {what} {mean:g} is below lowest_mean {config.lowest_mean:g}"
        if config.highest_mean is not None and mean > config.highest_mean:
            return "above_band", f"its mean {what} {mean:g} is above highest_mean {config.highest_mean:g}"
        return None


def component(score: Score, name: str, group: ScoredGroup) -> float:
    """One named part of a score; a reward that does not give it is an error, never a zero."""
    if name not in score.components:
        known = ", ".join(sorted(score.components)) or "none"
        raise DataError(
            f"the reward of prompt {group.group.prompt.uid} has no component {name}; it has {known}: "
            "return it from the reward function or change the recipe"
        )
    return score.components[name]
