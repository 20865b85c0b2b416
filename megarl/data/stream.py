"""The endless stream of prompts: a seeded order per epoch, and where one stands in it. Knows no files, no tokenizer.

The order of an epoch depends on (seed, epoch) alone, so a position is all there is to remember.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megarl.types import Prompt


class PromptStream:
    """Every prompt once per epoch, epoch after epoch. A `stages.PromptSource`."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, is_shuffled: bool = True, cursor: int = 0) -> None:
        assert len(prompts) > 0, "a stream needs at least one prompt"
        assert cursor >= 0, f"cursor is {cursor}"
        self._prompts = prompts
        self._seed = seed
        self._is_shuffled = is_shuffled
        self._cursor = cursor
        self._order = self._order_of(self.epoch)

    @property
    def cursor(self) -> int:
        """How many prompts were drawn since the run began; a stream made with it goes on where this one stands."""
        return self._cursor

    @property
    def epoch(self) -> int:
        """The epoch of the next prompt."""
        return self._cursor // len(self._prompts)

    def next(self) -> Prompt:
        epoch, place = divmod(self._cursor, len(self._prompts))
        if place == 0:
            self._order = self._order_of(epoch)
        prompt = replace(self._prompts[int(self._order[place])], position=self._cursor, epoch=epoch)
        self._cursor += 1
        return prompt

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._is_shuffled:
            return np.arange(len(self._prompts))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
