from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from megarl.cli.display import LiveDisplay, make_display
from megarl.cli.lines import PlainDisplay, format_seconds, make_console
from megarl.cli.main import run_app
from megarl.errors import DataError
from megarl.observe.events import Event, PhaseStarted, RunFinished, RunStatus, Sink, StepFinished, Warned
from megarl.observe.observing import logging_to
from megarl.types import PolicyVersion
from tests.observe.samples import (
    evaluated,
    grades,
    one_of_each,
    records,
    run_started,
    step_finished,
    step_summary,
)

GENERATE = PhaseStarted(phase="generate")

SPEED = "1,200 tokens/s  75% computed  2.0 s"


def console_to(file: StringIO, *, is_terminal: bool) -> Console:
    return Console(file=file, force_terminal=is_terminal, width=100, highlight=False, markup=False, soft_wrap=True)


def show(display: Sink, events: Sequence[Event]) -> None:
    for record in records(events):
        display.record(record)
    display.close()


def test_without_a_terminal_a_run_is_one_line_per_step() -> None:
    out = StringIO()
    events: list[Event] = [
        run_started(steps=2),
        evaluated(0, 0.25),
        GENERATE,
        step_finished(1, reward=0.5),
        Warned(text="3 prompts [too long] were dropped"),
        GENERATE,
        step_finished(2, reward=0.75),
        evaluated(2, 0.875),
        RunFinished(status=RunStatus.DONE),
    ]
    show(make_display(console_to(out, is_terminal=False)), events)
    assert out.getvalue().splitlines() == [
        "run sample: grpo, 2 steps, in runs/sample  metrics http://127.0.0.1:1234/metrics",
        "evaluated after step 0: accuracy 0.250 of 64 prompts",
        f"step 1/2  reward 0.500  age 0.50 (at most 1)  loss 0.5000  accuracy 0.250  {SPEED}  ETA 10s",
        "warning: 3 prompts [too long] were dropped",
        f"step 2/2  reward 0.750  age 0.50 (at most 1)  loss 0.5000  accuracy 0.250  {SPEED}  ETA 0s",
        "evaluated after step 2: accuracy 0.875 of 64 prompts",
        "run done",
    ]


def test_sampled_answers_and_doubtful_steps_are_in_the_lines() -> None:
    out = StringIO()
    summary = step_summary(1, num_zero_signal_groups=8, dropped_groups={"equal": 3, "above_band": 2})
    sampled = grades(0.5, rollouts_per_prompt=4, pass_at={1: 0.5, 4: 0.75})
    events: list[Event] = [
        run_started(steps=2),
        StepFinished(summary=summary, phase_seconds={}),
        evaluated(1, 0.25, sampled=sampled),
    ]
    show(PlainDisplay(console_to(out, is_terminal=False)), events)
    assert out.getvalue().splitlines()[1:] == [
        f"step 1/2  reward 0.500  no signal  dropped 5 groups  age 0.50 (at most 1)  loss 0.5000  {SPEED}",
        "evaluated after step 1: accuracy 0.250 of 64 prompts  "
        "mean@4 0.500  pass@1 0.500  pass@4 0.750  majority@4 0.500",
    ]


def test_an_evaluation_beside_training_names_the_versions_that_answered() -> None:
    out = StringIO()
    event = evaluated(1, 0.25)
    event = replace(event, result=replace(event.result, newest_version=PolicyVersion(3)))
    show(PlainDisplay(console_to(out, is_terminal=False)), [event])
    assert out.getvalue() == "evaluated after step 1: accuracy 0.250 of 64 prompts  by versions 1 to 3\n"


def test_plain_lines_have_no_escape_codes() -> None:
    out = StringIO()
    show(PlainDisplay(console_to(out, is_terminal=False)), one_of_each())
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_view_moves_and_warnings_stay() -> None:
    out = StringIO()
    display = make_display(console_to(out, is_terminal=True))
    assert isinstance(display, LiveDisplay)
    show(display, [run_started(steps=2), GENERATE, step_finished(1), Warned(text="careful"), GENERATE])
    shown = out.getvalue()
    assert "step 1/2" in shown
    assert "reward 0.500" in shown
    assert "generate" in shown
    assert "warning: careful" in shown
    hide, show_again = "\x1b[?25l", "\x1b[?25h"
    assert shown.rfind(show_again) > shown.rfind(hide), "the cursor stays hidden"


def test_a_live_view_that_never_started_can_be_closed() -> None:
    LiveDisplay(console_to(StringIO(), is_terminal=True)).close()


@pytest.mark.parametrize(("value", "no_color"), [("1", True), ("", False)])
def test_no_color_is_honoured(value: str, no_color: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", value)
    assert make_console().no_color is no_color


TALKER = """
import sys
from megarl.cli.lines import make_console
console = make_console()
for number in range(500):
    console.print(f"step {number}", "x" * 1000 * (number > 0))  # together more than a pipe holds
print("went on", file=sys.stderr)
"""


@pytest.mark.patient
def test_a_run_goes_on_when_its_reader_has_left() -> None:
    words = [sys.executable, "-c", TALKER]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as talker:
        assert talker.stdout is not None
        assert talker.stderr is not None
        assert talker.stdout.readline() == "step 0 \n"
        talker.stdout.close()
        assert talker.stderr.read().endswith("went on\n")
        assert talker.wait(120) == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (200, "3m20s"), (3600, "1h00m"), (7530, "2h05m")]
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


HOSTILE = "gone\x1b[2J\x1b]0;title\x07\x9b31m\u202e\ud800\r\nstep 9/9  reward 1.000"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_text_from_outside_neither_controls_the_terminal_nor_forges_a_line(is_terminal: bool) -> None:
    out = StringIO()
    console = make_console()
    console.file = out
    console._force_terminal = is_terminal
    show(make_display(console), [run_started(steps=2), Warned(text=HOSTILE), RunFinished(status=RunStatus.DONE)])
    console.print(Text(HOSTILE), HOSTILE, Panel(HOSTILE))
    shown = out.getvalue()
    shown.encode()  # half a character would not be
    for sequence in ("\x1b[2J", "\x1b]0;", "\x07", "\x9b", "\u202e"):
        assert sequence not in shown
    assert "warning: gone\\x1b[2J" in shown
    assert "\n  step 9/9" in shown
    assert "\nstep 9/9" not in shown.partition("run done")[0]


def test_messages_of_commands_and_logs_control_no_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def fail() -> None:
        raise DataError(HOSTILE)

    app = typer.Typer()
    app.command()(fail)
    assert run_app(app, [], prog_name="megarl") == 3
    assert "\x1b" not in capsys.readouterr().err
    with logging_to(tmp_path / "megarl.log"):
        logging.getLogger("megarl.episodes").warning("refused %s", HOSTILE)
    lines = (tmp_path / "megarl.log").read_text().splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("  step 9/9")
