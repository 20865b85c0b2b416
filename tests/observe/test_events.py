from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megarl.errors import DataError, MachineError
from megarl.observe.events import EventLog, Record, StepFinished, Warned, read_events
from tests.observe.samples import BEGAN, one_of_each, records, step_finished


def write(path: Path, *written: Record) -> None:
    log = EventLog(path)
    for record in written:
        log.record(record)
    log.close()


def test_every_kind_of_event_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = records(one_of_each())
    write(tmp_path / "run" / "events.jsonl", *written)
    assert list(read_events(tmp_path / "run" / "events.jsonl")) == written


def test_each_event_is_one_line_and_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for count, record in enumerate(records(one_of_each()), start=1):
        log.record(record)
        lines = path.read_text().splitlines()
        assert len(lines) == count
        assert json.loads(lines[-1])["sequence"] == record.sequence
    log.close()


def test_not_a_number_survives_in_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, *records([step_finished(1, loss=math.nan)]))
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (record,) = read_events(path)
    assert isinstance(record.event, StepFinished)
    assert record.event.summary.update is not None
    assert math.isnan(record.event.summary.update.loss)


def test_an_existing_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, *records([Warned(text="a"), Warned(text="b")]))
    log = EventLog(path)
    assert log.next_sequence == 2
    log.close()


def test_a_line_cut_off_by_a_crash_is_left_out_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, *records([Warned(text="a"), Warned(text="b")]))
    path.write_bytes(path.read_bytes()[:-5])
    assert len(list(read_events(path))) == 1

    log = EventLog(path)
    log.record(Record(sequence=log.next_sequence, time=BEGAN, event=Warned(text="c")))
    log.close()
    texts = [record.event.text for record in read_events(path) if isinstance(record.event, Warned)]
    assert texts == ["a", "c"]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, *records([Warned(text="a")]))
    path.write_text(path.read_text() + '{"sequence": 1}\n')
    with pytest.raises(DataError, match=r"events\.jsonl: line 2 is not an event"):
        list(read_events(path))


def test_a_folder_that_cannot_be_made_is_an_environment_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="cannot be written: Not a directory"):
        EventLog(tmp_path / "file" / "run" / "events.jsonl")
