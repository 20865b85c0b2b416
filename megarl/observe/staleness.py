"""How old the policies are that chose the tokens of a step. Versions count updates; people count steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from megarl.types import DEMONSTRATION, PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """In steps: 0 is the policy that the step trained."""

    mean_steps: float
    """Over loss tokens."""
    max_steps: int


class PolicyAges:
    """Remembers after which step each version was made."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._last_step = 0

    def start(self, step: int, version: PolicyVersion) -> None:
        """The run goes on from here; 0 is from the beginning."""
        if not self._steps:
            self._steps[version] = step
            self._last_step = step

    def trained(self, step: int, version: PolicyVersion) -> None:
        self._steps[version] = step
        self._last_step = step

    def of(self, tokens_by_version: Mapping[int, int]) -> Staleness | None:
        """Of the tokens of the step that is trained next."""
        ages: Counter[int] = Counter()
        for version, number in tokens_by_version.items():
            if version != DEMONSTRATION:
                ages[self._last_step - self._step_of(version)] += number
        num_tokens = ages.total()
        if not num_tokens:
            return None
        return Staleness(mean_steps=sum(age * number for age, number in ages.items()) / num_tokens, max_steps=max(ages))

    def _step_of(self, version: int) -> int:
        # What a run carries over from before its checkpoint is older than anything that was trained since.
        return self._steps.get(version, min(self._steps.values(), default=0) - 1)
