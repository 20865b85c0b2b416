from __future__ import annotations

import asyncio

import pytest

from megarl.observe.events import PhaseEnded, PhaseStarted, StepFinished, Warned
from megarl.observe.observer import Observer, StepWarnings
from megarl.observe.observing import StepFaults
from megarl.observe.summary import RewardOutlier
from tests.observe.samples import ListSink, step_summary


def test_phases_are_timed_and_their_seconds_go_to_the_next_step() -> None:
    sink = ListSink()
    observer = Observer([sink])
    for _ in range(2):
        with observer.phase("generate"):
            pass
    with observer.phase("update"):
        asyncio.run(asyncio.sleep(0.05))
    observer.step_summarized(step_summary(1))
    observer.step_summarized(step_summary(2))
    assert [event.phase for event in sink.events if isinstance(event, PhaseStarted)] == [
        "generate",
        "generate",
        "update",
    ]
    ended = [(event.phase, event.seconds) for event in sink.events if isinstance(event, PhaseEnded)]
    assert [phase for phase, _ in ended] == ["generate", "generate", "update"]
    first, second = (event for event in sink.events if isinstance(event, StepFinished))
    assert first.phase_seconds["update"] == ended[-1][1]
    assert 0 <= first.phase_seconds["generate"] < first.phase_seconds["update"]
    assert first.phase_seconds["update"] >= 0.05
    assert second.phase_seconds == {}


def test_a_step_has_the_share_of_prompts_that_engines_had_in_their_caches() -> None:
    sink = ListSink()
    observer = Observer([sink])
    for num_tokens, num_cached in ((100, 0), (300, 100)):
        observer.prompt_read(num_tokens, num_cached=num_cached)
    observer.step_summarized(step_summary(1))
    observer.step_summarized(step_summary(2))
    assert [event.summary.cached_prompt_ratio for event in sink.events if isinstance(event, StepFinished)] == [
        0.25,
        None,
    ]


def test_a_step_has_the_tokens_of_a_pass_over_drafts() -> None:
    sink = ListSink()
    observer = Observer([sink])
    observer.draft_checked(100, num_passes=40)
    observer.draft_checked(50, num_passes=20)
    observer.step_summarized(step_summary(1))
    observer.step_summarized(step_summary(2))
    found = [event.summary.tokens_per_pass for event in sink.events if isinstance(event, StepFinished)]
    assert found == [2.5, None]


def test_the_warnings_of_a_step_come_before_it() -> None:
    sink = ListSink()
    with Observer([sink]) as observer:
        observer.step_summarized(step_summary(1, num_zero_signal_groups=8))
    assert [type(event) for event in sink.events[:2]] == [Warned, StepFinished]


def test_the_fault_points_of_a_step_follow_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[tuple[str, int]] = []
    monkeypatch.setattr("megarl.observe.observing.reach", lambda point, *, step: reached.append((point, step)))
    observer = Observer([StepFaults()])
    with observer.phase("publish"):
        pass
    assert reached == [], "the first publish belongs to no step"
    for step in (1, 2):
        with observer.phase("generate"):
            pass
        with observer.phase("update"):
            pass
        with observer.phase("publish"):
            pass
        observer.step_summarized(step_summary(step))
        with observer.phase("evaluate"):
            pass
    points = ("step_begun", "step_taken", "step_trained", "step_published")
    assert reached == [(point, step) for step in (1, 2) for point in points]


def test_a_step_with_some_signal_has_no_warning() -> None:
    assert StepWarnings().after(step_summary(1, num_zero_signal_groups=7)) == ()


def test_demonstrations_have_no_warning() -> None:
    assert StepWarnings().after(step_summary(1, reward=None)) == ()


def test_equal_rewards_are_named_and_said_once_not_twice() -> None:
    (text,) = StepWarnings().after(step_summary(4, num_zero_signal_groups=8, reward_min=1.0))
    assert text.startswith("step 4: all rewards are 0.5, nothing was learned; the prompts are too easy or too hard")


def test_the_first_outlier_is_named() -> None:
    (text,) = StepWarnings().after(step_summary(2, outlier=RewardOutlier(prompt_uid="train.parquet:7", reward=-1000)))
    assert text == ("step 2: 3 rewards are far from the median 0.5; the first is -1000, of prompt train.parquet:7")


def test_what_lasts_is_said_ever_more_rarely_and_anew_after_a_break() -> None:
    warnings = StepWarnings()
    bad = [bool(warnings.after(step_summary(step, num_zero_signal_groups=8))) for step in range(1, 10)]
    assert bad == [True, True, False, True, False, False, False, True, False]
    assert warnings.after(step_summary(10)) == ()
    (text,) = warnings.after(step_summary(11, num_zero_signal_groups=8))
    assert text.startswith("step 11: none")
    (text,) = warnings.after(step_summary(12, num_zero_signal_groups=8))
    assert text.startswith("step 12, for 2 steps now: none")
