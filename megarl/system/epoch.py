"""The epoch of a run: the token of the driver that holds its lock (`system.run_lock`).

Every process that outlives a driver remembers the highest token that has called it and refuses lower ones: a driver
that was frozen until another took its place changes nothing any more.
"""

from __future__ import annotations

from megarl.errors import MachineError


class Fence:
    """Lets the drivers of a run pass in the order of their tokens. A driver without a lock has the token 0."""

    def __init__(self, token: int = 0) -> None:
        self.token = token
        """The highest so far."""

    def enter(self, token: int) -> None:
        """Raise MachineError for a driver that another one has followed."""
        if token < self.token:
            raise MachineError(
                f"driver {token} of this run called, and driver {self.token} has taken over; driver {token} ends"
            )
        self.token = token
