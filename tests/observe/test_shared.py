"""The run of each policy shows engines and nodes; texts for people are in the first alone."""

from __future__ import annotations

from megarl.observe.events import Noted, Record, Restarted
from megarl.observe.observer import Observer
from megarl.observe.shared import SharedObserver


class Kept:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def record(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None: ...


def test_events_are_in_every_run_and_texts_in_the_first() -> None:
    first, second = Kept(), Kept()
    shared = SharedObserver([Observer([first]), Observer([second])])
    shared.noted("Ray is ready")
    shared.restarted("rollout", 0, "restart 1 of 3")
    with shared.phase("start"):
        pass
    restarted = Restarted(role="rollout", index=0, reason="restart 1 of 3")
    assert [record.event for record in first.records][:2] == [Noted(text="Ray is ready"), restarted]
    assert second.records[0].event == restarted
    assert len(second.records) == len(first.records) - 1
    assert [record.sequence for record in second.records] == list(range(3)), "each run numbers its own"
