from __future__ import annotations

import pytest

from megarl.errors import MachineError
from megarl.system.epoch import Fence


def test_drivers_pass_in_the_order_of_their_tokens() -> None:
    fence = Fence()
    for token in (0, 3, 3, 7):
        fence.enter(token)
    with pytest.raises(MachineError, match="driver 3 of this run called, and driver 7 has taken over; driver 3 ends"):
        fence.enter(3)
    fence.enter(7)
