from __future__ import annotations

import errno
import json
import math
from pathlib import Path

import pytest

from megarl.errors import MachineError
from megarl.observe import event_log
from megarl.observe.event_file import read_events
from megarl.observe.event_log import EventLog
from megarl.observe.events import Record, StepFinished, Warned
from tests.observe.samples import BEGAN, one_of_each, records, step_finished
from tests.small_disk import filled, small_disk


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


DAMAGES = {
    "zeros": lambda lines: [lines[0], b"\0" * 300, *lines[1:]],
    "half a line and the next one": lambda lines: [lines[0], lines[1][:40] + lines[2], *lines[3:]],
    "an event of another version": lambda lines: [b'{"sequence": 0, "kind": "of_old"}', *lines],
    "text that is not UTF-8": lambda lines: [*lines, b"\xff\xfe"],
}


@pytest.mark.fault("a damaged line in events.jsonl", "left out and told; train, report and doctor go on")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_line_is_left_out_and_counted(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    write(path, *records([Warned(text=text) for text in "abcd"]))
    path.write_bytes(b"\n".join(DAMAGES[damage](path.read_bytes().splitlines())) + b"\n")
    texts = [record.event.text for record in read_events(path) if isinstance(record.event, Warned)]
    assert texts == (["a", "d"] if damage.startswith("half") else ["a", "b", "c", "d"])
    assert f"{path}: 1 damaged lines are left out; the first is line " in caplog.text

    log = EventLog(path)
    assert log.next_sequence == 4
    log.record(Record(sequence=log.next_sequence, time=BEGAN, event=Warned(text="e")))
    log.close()
    assert list(read_events(path))[-1].event == Warned(text="e")


def test_a_file_without_any_event_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\0" * 4096 + b"\n")
    log = EventLog(path)
    log.record(Record(sequence=log.next_sequence, time=BEGAN, event=Warned(text="a")))
    log.close()
    assert [record.sequence for record in read_events(path)] == [0]


@pytest.mark.needs("root")
def test_a_full_disk_leaves_whole_lines_and_loses_no_event(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", num_bytes=1 << 20) as disk:
        path = disk / "events.jsonl"
        log = EventLog(path)
        # Longer than a page: the disk takes the first part of a line.
        written = records([Warned(text=f"event {number}, " * 400) for number in range(9)])
        failures: list[int | None] = []
        for record in written[:3]:
            log.record(record)
        with filled(disk, leaving=4096):
            for record in written[3:7]:
                try:
                    log.record(record)
                except OSError as error:
                    failures.append(error.errno)
                assert path.read_bytes().endswith(b"\n"), "no half line, whoever reads now"
        for record in written[7:]:
            log.record(record)
        log.close()
        assert set(failures) == {errno.ENOSPC}
        assert list(read_events(path)) == written


def test_events_that_wait_too_long_are_dropped_from_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_log, "MAX_WAITING_BYTES", 2000)
    log = EventLog(tmp_path / "events.jsonl")
    with Path("/dev/full").open("ab", buffering=0) as full, monkeypatch.context() as context:
        context.setattr(log, "_file", full)
        for record in records([Warned(text=str(number) * 500) for number in range(9)]):
            with pytest.raises(OSError, match="No space left"):
                log.record(record)
    log.close()
    assert [record.sequence for record in read_events(tmp_path / "events.jsonl")] == [6, 7, 8]
    assert "6 events are lost" in caplog.text


def test_a_folder_that_cannot_be_made_is_an_environment_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="cannot be written: Not a directory"):
        EventLog(tmp_path / "file" / "run" / "events.jsonl")
