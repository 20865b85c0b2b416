"""The endless stream of prompts, in a seeded order per epoch, and the position in it. Knows no files, no tokenizer.

The order of an epoch depends only on (seed, epoch), so that the position is the whole state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megarl.types import Prompt


class PromptStream(Iterator[Prompt]):
    """An iterator that draws every prompt once per epoch."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        is_shuffled: bool = True,
        cursor: int = 0,
        pending: Sequence[int] = (),
    ) -> None:
        """`pending` are positions before the cursor that are drawn again first."""
        assert len(prompts) > 0, "a stream needs at least one prompt"
        assert cursor >= 0, f"cursor is {cursor}"
        assert all(0 <= position < cursor for position in pending), f"{pending} are not all before {cursor}"
        self._prompts = prompts
        self._seed = seed
        self._is_shuffled = is_shuffled
        self._cursor = cursor
        self._pending = tuple(pending)
        self._first = cursor
        self._num_drawn = 0
        self._order = self._order_of(self.epoch)
        self._order_epoch = self.epoch

    @property
    def cursor(self) -> int:
        """The number of prompts drawn since the run began; a stream created with it continues this one."""
        return self._cursor

    @property
    def epoch(self) -> int:
        """The epoch of the next prompt."""
        return self._cursor // len(self._prompts)

    @property
    def pending(self) -> tuple[int, ...]:
        """The positions that are still to be drawn again."""
        return self._pending[self._num_drawn :]

    def position_of(self, number: int) -> int:
        """Return the position of the prompt that this stream draws after `number` others."""
        is_pending = number < len(self._pending)
        return self._pending[number] if is_pending else self._first + number - len(self._pending)

    def __next__(self) -> Prompt:
        prompt = self.at(self.position_of(self._num_drawn))
        self._num_drawn += 1
        self._cursor = max(self._cursor, prompt.position + 1)
        return prompt

    def at(self, position: int) -> Prompt:
        """Return the prompt at a position."""
        epoch, place = divmod(position, len(self._prompts))
        if epoch != self._order_epoch:
            self._order, self._order_epoch = self._order_of(epoch), epoch
        return replace(self._prompts[int(self._order[place])], position=position, epoch=epoch)

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._is_shuffled:
            return np.arange(len(self._prompts))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
