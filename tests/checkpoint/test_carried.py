from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.checkpoint.carried import GROUPS_FILE, read_groups, write_groups
from megarl.errors import CheckpointError
from megarl.types import Prompt, Rollout, ScoredGroup
from tests.algo.groups import scored_group, with_baseline

GROUPS = [
    scored_group(3, [1, 0], lengths=[2, 5], cut=[1]),
    with_baseline(scored_group(7, [0.5], components=[{"right": 0.25}]), score=1.0, length=4),
]
GROUPS[0] = replace(GROUPS[0], scores=(replace(GROUPS[0].scores[0], tokens=(0.5, -1.0)), GROUPS[0].scores[1]))
PROMPTS = {group.group.prompt.position: group.group.prompt for group in GROUPS}


def prompt_at(position: int) -> Prompt:
    return PROMPTS[position]


def rollouts_of(group: ScoredGroup) -> list[Rollout]:
    baseline = group.group.baseline
    return [*group.group.rollouts, *([] if baseline is None else [baseline])]


def test_groups_come_back_as_they_were(tmp_path: Path) -> None:
    files = write_groups(tmp_path, GROUPS)
    assert set(files) == {path.name for path in tmp_path.iterdir()}
    again = read_groups(tmp_path, 2, prompt_at)
    for found, expected in zip(again, GROUPS, strict=True):
        assert found.group.prompt is expected.group.prompt
        assert (found.scores, found.baseline) == (expected.scores, expected.baseline)
        for one, other in zip(rollouts_of(found), rollouts_of(expected), strict=True):
            for name in ("token_ids", "logprobs", "versions", "loss_mask"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
                assert getattr(one, name).dtype == getattr(other, name).dtype
            assert (one.finish_reason, one.text) == (other.finish_reason, other.text)


def test_the_engines_experts_come_back_for_the_rollouts_that_have_some(tmp_path: Path) -> None:
    rollouts = list(GROUPS[0].group.rollouts)
    content = rollouts[1].content.load()
    routes = np.random.default_rng(0).integers(0, 8, (9, 3, 2)).astype(np.uint8)
    rollouts[1] = replace(rollouts[1], content=replace(content, routes=routes))
    group = replace(GROUPS[0], group=replace(GROUPS[0].group, rollouts=tuple(rollouts)))
    write_groups(tmp_path, [group, GROUPS[1]])
    (first, second), other = (each.group.rollouts for each in read_groups(tmp_path, 2, prompt_at))
    assert first.content.load().routes is None
    found = second.content.load().routes
    assert found is not None
    np.testing.assert_array_equal(found, routes)
    assert found.dtype == np.uint8
    assert other[0].content.load().routes is None


def test_the_numbers_of_a_teacher_come_back_for_the_rollouts_that_have_some(tmp_path: Path) -> None:
    rollouts = list(GROUPS[0].group.rollouts)
    numbers = [
        np.random.default_rng(place).random((each.num_tokens, 5), np.float32) for place, each in enumerate(rollouts)
    ]
    rollouts = [
        replace(each, content=replace(each.content.load(), teacher=taught))
        for each, taught in zip(rollouts, numbers, strict=True)
    ]
    group = replace(GROUPS[0], group=replace(GROUPS[0].group, rollouts=tuple(rollouts)))
    write_groups(tmp_path, [GROUPS[1], group])
    other, own = (each.group.rollouts for each in read_groups(tmp_path, 2, prompt_at))
    assert other[0].content.load().teacher is None
    for rollout, expected in zip(own, numbers, strict=True):
        np.testing.assert_array_equal(rollout.content.load().teacher, expected)


def test_nothing_to_carry_is_no_file(tmp_path: Path) -> None:
    assert write_groups(tmp_path, []) == {}
    assert not any(tmp_path.iterdir())
    assert read_groups(tmp_path, 0, prompt_at) == []


def test_another_number_than_the_state_says_is_refused(tmp_path: Path) -> None:
    write_groups(tmp_path, GROUPS)
    with pytest.raises(CheckpointError, match=r"has 2 groups, state\.json counts 3"):
        read_groups(tmp_path, 3, prompt_at)
    (tmp_path / GROUPS_FILE).unlink()
    with pytest.raises(CheckpointError, match="cannot read its carried groups"):
        read_groups(tmp_path, 2, prompt_at)
