"""How often, and how soon, lost trainer ranks are started again. Pure; `run` starts them."""

from __future__ import annotations

from megarl.errors import WorkerError

_MAX_PAUSE_S = 60.0


class Restarts:
    """So many between two checkpoints: a run that gets on may lose ranks for as long as it takes."""

    def __init__(self, *, max_restarts: int, pause_s: float) -> None:
        self._max_restarts = max_restarts
        self._pause_s = pause_s
        self._num_restarts = 0
        self._saved_step = 0
        self._last = ""

    def spend(self, error: WorkerError, *, saved_step: int) -> float:
        """Seconds to wait before the next start; raises where there is to be none. `error` ended the last life."""
        if saved_step > self._saved_step:
            self._saved_step, self._num_restarts, self._last = saved_step, 0, ""
        before, self._last = self._last, str(error)
        if self._max_restarts == 0:
            raise error
        # What a rank says itself, unlike a death or a hang, and says again at the same place, it will say for ever.
        if type(error) is WorkerError and before == str(error):
            raise WorkerError(f"{error}; it failed the same way when the ranks were started again") from error
        if self._num_restarts == self._max_restarts:
            raise WorkerError(
                f"{error}; the ranks were started again {self._num_restarts} times since step {saved_step} was saved "
                "(train.max_restarts)"
            ) from error
        self._num_restarts += 1
        pause_s: float = self._pause_s * 2 ** (self._num_restarts - 1)
        return min(pause_s, _MAX_PAUSE_S)
