"""Actors for tests of groups of them. A module of its own: Ray's processes import nothing but this."""

from __future__ import annotations

import os
import time

from megarl.errors import NumericsError


class Worker:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def square(self, number: int) -> int:
        return (self._rank + 1) * number**2

    def fail_on(self, rank: int) -> None:
        if rank == self._rank:
            raise ValueError("broken on purpose")

    def diverge_on(self, rank: int) -> None:
        if rank == self._rank:
            raise NumericsError("the loss is nan")

    def diverge_first_or_sleep(self, seconds: float) -> float:
        if self._rank == 0:
            raise NumericsError("the loss is nan")
        time.sleep(seconds)
        return seconds

    def die_on(self, rank: int) -> None:
        if rank == self._rank:
            os._exit(1)

    def die_first_or_sleep(self, seconds: float) -> None:
        if self._rank == 0:
            os._exit(1)
        time.sleep(seconds)

    def sleep_on(self, rank: int) -> None:
        if rank == self._rank:
            time.sleep(60)


class Seen:
    """Says which GPUs its process sees."""

    def gpus(self) -> tuple[str, str]:
        # A process that joins a Ray sets variables before it imports it.
        import ray

        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]
