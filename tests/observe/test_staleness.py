from __future__ import annotations

from megarl.observe.staleness import PolicyAges, Staleness
from megarl.types import DEMONSTRATION, PolicyVersion


def ages_after(*, step: int, version: int) -> PolicyAges:
    ages = PolicyAges()
    ages.start(step, PolicyVersion(version))
    return ages


def test_tokens_of_the_trained_policy_are_not_stale() -> None:
    assert ages_after(step=0, version=0).of({0: 96}) == Staleness(mean_steps=0, max_steps=0)


def test_a_step_of_several_updates_is_one_step() -> None:
    ages = ages_after(step=0, version=0)
    ages.trained(1, PolicyVersion(4))
    ages.trained(2, PolicyVersion(8))
    assert ages.of({4: 30, 8: 10}) == Staleness(mean_steps=0.75, max_steps=1)


def test_a_step_that_changed_no_weight_makes_nothing_older() -> None:
    ages = ages_after(step=0, version=0)
    ages.trained(1, PolicyVersion(0))
    assert ages.of({0: 8}) == Staleness(mean_steps=0, max_steps=0)


def test_what_was_carried_over_from_before_the_checkpoint_is_older_than_it() -> None:
    assert ages_after(step=5, version=20).of({16: 8}) == Staleness(mean_steps=1, max_steps=1)


def test_demonstrations_have_no_age() -> None:
    assert ages_after(step=0, version=0).of({DEMONSTRATION: 8}) is None
