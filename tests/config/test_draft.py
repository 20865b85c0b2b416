"""Keys of a draft that are derived, and what is said about it; `engine.test_drafts` has what SGLang is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.draft import DraftConfig, ModelDraftConfig, NgramDraftConfig
from megarl.config.roles import RolloutRoleConfig

MODEL = ModelDraftConfig(kind="model", path=Path("small"), num_tokens=7)


@pytest.mark.parametrize(
    ("draft", "requests", "expected"),
    [
        (NgramDraftConfig(kind="ngram"), 2, "drafts of 7 tokens from n-grams of responses"),
        (NgramDraftConfig(kind="ngram"), 3, "no drafts: with more than 2 requests at a time"),
        (NgramDraftConfig(kind="ngram", max_requests=64), 33, "drafts of 7 tokens from n-grams"),
        (MODEL, 17, "no drafts: with more than 16 requests at a time"),
        (MODEL, 16, "drafts of 7 tokens from small, which stays as it is"),
    ],
)
def test_a_note_says_when_engines_draft(draft: DraftConfig, requests: int, expected: str) -> None:
    assert draft.note(requests).startswith(expected)


@pytest.mark.parametrize(("every", "expected"), [(1, "which learns every step"), (8, "which learns every 8 steps")])
def test_a_note_says_when_a_draft_learns(every: int, expected: str) -> None:
    assert MODEL.note(16, learns_every=every) == f"drafts of 7 tokens from small, {expected}"


def test_engines_that_get_too_many_requests_are_started_without() -> None:
    drafts = (NgramDraftConfig(kind="ngram"), MODEL)
    roles = [RolloutRoleConfig(pool="all", draft=each, max_running_requests=16) for each in drafts]
    assert [role.served_draft for role in roles] == [None, MODEL]
