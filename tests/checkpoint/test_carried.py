"""Scored groups in a checkpoint, and those that a preempted run leaves in its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.checkpoint.carried import (
    GROUPS_FILE,
    OPEN_STEP_FOLDER,
    TOKENS_FILE,
    read_groups,
    take_open_step,
    write_groups,
    write_open_step,
)
from megarl.errors import CheckpointError, MachineError
from megarl.system.run_lock import run_lock
from megarl.types import PolicyVersion, Prompt, Rollout, ScoredGroup
from tests.algo.groups import scored_group, with_baseline
from tests.system.test_run_lock import ELSEWHERE
from tests.system.test_run_lock import write as write_lock

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


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("routes", np.random.default_rng(0).integers(0, 8, (9, 3, 2)).astype(np.uint8)),
        ("teacher", np.random.default_rng(0).random((5, 5), np.float32)),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_experts_and_a_teachers_numbers_come_back_for_the_rollouts_that_have_some(
    name: str, array: np.ndarray, is_first: bool, tmp_path: Path
) -> None:
    rollouts = list(GROUPS[0].group.rollouts)
    rollouts[1] = replace(rollouts[1], content=replace(rollouts[1].content.load(), **{name: array}))  # type: ignore[arg-type]
    group = replace(GROUPS[0], group=replace(GROUPS[0].group, rollouts=tuple(rollouts)))
    write_groups(tmp_path, [group, GROUPS[1]] if is_first else [GROUPS[1], group])
    again = {each.group.prompt.position: each.group.rollouts for each in read_groups(tmp_path, 2, prompt_at)}
    (first, second), other = again[3], again[7]
    found = getattr(second.content.load(), name)
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype
    assert [getattr(each.content.load(), name) for each in (first, *other)] == [None] * 2


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


def write(folder: Path) -> None:
    write_open_step(folder, GROUPS, version=PolicyVersion(4), identity="a run")


def take(folder: Path, *, version: int = 4, identity: str = "a run") -> tuple[list[ScoredGroup], list[str]]:
    warnings: list[str] = []
    left = take_open_step(
        folder, version=PolicyVersion(version), identity=identity, prompt_at=prompt_at, warn=warnings.append
    )
    assert list(folder.iterdir()) == []
    return left, warnings


@pytest.mark.parametrize("part_tokens", [1, 1 << 20], ids=["in_parts", "at_once"])
def test_groups_come_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_tokens: int) -> None:
    monkeypatch.setattr("megarl.checkpoint.carried._PART_TOKENS", part_tokens)
    write(tmp_path)
    assert len(list((tmp_path / OPEN_STEP_FOLDER).glob(f"*/{TOKENS_FILE}"))) == (2 if part_tokens == 1 else 1)
    left, warnings = take(tmp_path)
    assert warnings == []
    assert [scored.scores for scored in left] == [scored.scores for scored in GROUPS]
    for found, expected in zip(left, GROUPS, strict=True):
        for one, other in zip(rollouts_of(found), rollouts_of(expected), strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
    assert take(tmp_path) == ([], [])


@pytest.mark.parametrize(("version", "identity"), [(5, "a run"), (4, "one with another reward")])
def test_answers_that_would_be_others_now_are_not_used(tmp_path: Path, version: int, identity: str) -> None:
    write(tmp_path)
    assert take(tmp_path, version=version, identity=identity) == ([], [])


@pytest.mark.parametrize("name", [TOKENS_FILE, GROUPS_FILE, "part.json"])
@pytest.mark.parametrize("is_missing", [False, True], ids=["damaged", "missing"])
def test_what_cannot_be_read_is_asked_again(tmp_path: Path, name: str, is_missing: bool) -> None:
    write(tmp_path)
    (path,) = (tmp_path / OPEN_STEP_FOLDER).glob(f"*/{name}")
    if is_missing:
        path.unlink()
    else:
        path.write_bytes(b"{" + path.read_bytes()[1:-1] + b"\0")
    left, (warning,) = take(tmp_path)
    assert left == []
    assert "asked again" in warning


def test_a_half_written_one_is_as_if_there_were_none(tmp_path: Path) -> None:
    (tmp_path / OPEN_STEP_FOLDER / "0.tmp").mkdir(parents=True)
    assert take(tmp_path) == ([], [])


def test_a_driver_that_lost_its_run_leaves_the_answers_of_its_successor_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write(folder)
    with run_lock(folder, beat_s=3600):
        write_lock(folder, replace(ELSEWHERE, token=99))
        with pytest.raises(MachineError, match="has taken over"):
            write_open_step(folder, GROUPS[:1], version=PolicyVersion(5), identity="a run")
    assert len(take(folder)[0]) == len(GROUPS)


def test_parts_are_added_while_a_step_goes_on_and_a_new_step_begins_anew(tmp_path: Path) -> None:
    write_open_step(tmp_path, GROUPS, version=PolicyVersion(3), identity="a run")
    for group, is_continued in zip(reversed(GROUPS), (False, True), strict=True):
        write_open_step(tmp_path, [group], version=PolicyVersion(4), identity="a run", is_continued=is_continued)
    left, warnings = take(tmp_path)
    assert warnings == []
    positions = [scored.group.prompt.position for scored in left]
    assert positions == sorted(scored.group.prompt.position for scored in GROUPS)
