from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megarl.checkpoint import carried as open_step
from megarl.checkpoint.carried import GROUPS_FILE, OPEN_STEP_FOLDER, TOKENS_FILE, take_open_step, write_open_step
from megarl.types import PolicyVersion, ScoredGroup
from tests.checkpoint.test_carried import GROUPS, prompt_at, rollouts_of


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
    monkeypatch.setattr(open_step, "_PART_TOKENS", part_tokens)
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


@pytest.mark.parametrize("name", [f"0/{TOKENS_FILE}", f"0/{GROUPS_FILE}", "open_step.json"])
@pytest.mark.parametrize("is_missing", [False, True], ids=["damaged", "missing"])
def test_what_cannot_be_read_is_asked_again(tmp_path: Path, name: str, is_missing: bool) -> None:
    write(tmp_path)
    path = tmp_path / OPEN_STEP_FOLDER / name
    if is_missing:
        path.unlink()
    else:
        path.write_bytes(b"{" + path.read_bytes()[1:-1] + b"\0")
    left, (warning,) = take(tmp_path)
    assert left == []
    assert "asked again" in warning


def test_a_half_written_one_is_as_if_there_were_none(tmp_path: Path) -> None:
    (tmp_path / f"{OPEN_STEP_FOLDER}.tmp" / "0").mkdir(parents=True)
    write(tmp_path)
    assert len(take(tmp_path)[0]) == len(GROUPS)
