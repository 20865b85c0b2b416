from __future__ import annotations

from megarl.observe.observer import StepWarnings
from megarl.observe.summary import RewardOutlier
from tests.observe.samples import step_summary


def test_a_step_with_some_signal_has_no_warning() -> None:
    assert StepWarnings().after(step_summary(1, num_zero_signal_groups=7)) == ()


def test_demonstrations_have_no_warning() -> None:
    assert StepWarnings().after(step_summary(1, reward=None)) == ()


def test_a_step_without_signal_is_said() -> None:
    (text,) = StepWarnings().after(step_summary(4, num_zero_signal_groups=8))
    assert text.startswith("step 4: none of 8 groups has signal, nothing was learned")


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
