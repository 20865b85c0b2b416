"""One saved episode as a conversation: its rows, what was trained of it, and the trajectory that others read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.cli.main import run
from megarl.data.episode_trace import as_atif, as_json, find_episode
from megarl.data.rollout_files import rollouts_file, write_rollouts
from megarl.errors import DataError
from megarl.types import Ending, Episode, Turn, TurnKind
from tests.data.test_rollout_files import decode, sampled

PARTS = (
    (TurnKind.SAMPLED, "call", 1.0),
    (TurnKind.GIVEN, "<42>", 2.0),
    (TurnKind.SAMPLED, "more", 0.5),
    (TurnKind.CONTEXT, "1+1=short", 0.0),
    (TurnKind.SAMPLED, "42", 0.25),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with one episode whose agent wrote its history anew before its last turn."""
    one = sampled("".join(text for _, text, _ in PARTS), position=5)
    turns, start, mask = [], 0, []
    for kind, text, seconds in PARTS:
        is_sampled = kind is TurnKind.SAMPLED
        versions = (3, 3) if is_sampled else None
        turns.append(Turn(start=start, end=start + len(text), kind=kind, seconds=seconds, versions=versions))
        mask += [is_sampled] * len(text)
        start += len(text)
    episode = Episode(rows=(12,), turns=tuple(turns), ending=Ending.ANSWERED, began=1_700_000_000.0)
    rollout = replace(one.sample.rollout, episode=episode, loss_mask=np.array(mask))
    write_rollouts(
        rollouts_file(tmp_path, 12), [replace(one, sample=replace(one.sample, rollout=rollout))], decode=decode
    )
    return tmp_path


def test_an_episode_has_its_turns_rows_and_trained_tokens(folder: Path) -> None:
    trace = find_episode(folder, "12/train.parquet:5/0")
    assert [(turn.kind, turn.text, turn.row, turn.num_trained) for turn in trace.turns] == [
        (TurnKind.SAMPLED, "call", 0, 4),
        (TurnKind.GIVEN, "<42>", 0, 0),
        (TurnKind.SAMPLED, "more", 0, 4),
        (TurnKind.CONTEXT, "1+1=short", 1, 0),
        (TurnKind.SAMPLED, "42", 1, 2),
    ]
    assert [turn.began_s for turn in trace.turns] == [0.0, 1.0, 3.0, 3.5, 3.5]
    assert (trace.num_trained, trace.num_rows, trace.ending, trace.score) == (10, 2, "answered", 1.0)
    assert json.loads(json.dumps(as_json(trace)))["turns"][1]["text"] == "<42>"


def test_atif_has_results_beside_their_calls_and_marks_copied_history(folder: Path) -> None:
    found = json.loads(json.dumps(as_atif(find_episode(folder, "12/train.parquet:5/0"))))
    steps = found["steps"]
    assert [step["step_id"] for step in steps] == [1, 2, 3, 4, 5]
    assert [(step["source"], step["message"]) for step in steps] == [
        ("user", "1+1="),
        ("agent", "call"),
        ("agent", "more"),
        ("user", "1+1=short"),
        ("agent", "42"),
    ]
    assert steps[1]["observation"] == {"results": [{"content": "<42>"}]}
    assert steps[3]["is_copied_context"]
    assert [step["metrics"]["prompt_tokens"] for step in steps if step["source"] == "agent"] == [4, 12, 9]
    assert steps[4]["metrics"]["completion_token_ids"] == list(b"42")
    assert steps[4]["metrics"]["logprobs"] == [-1.0, -1.0]
    assert steps[4]["timestamp"] == "2023-11-14T22:13:23.500000+00:00"
    assert found["extra"]["tokens_trained"] == 10


def test_the_command_shows_a_conversation_or_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["samples", str(folder), "--episode", "12/train.parquet:5/0"]) == 0
    shown = capsys.readouterr().out
    for text in ("<42>", "row 2: the history was written anew", "10 tokens trained of 10 sampled", "answered"):
        assert text in shown
    assert run(["samples", str(folder), "--episode", "12/train.parquet:5/0", "--format", "atif"]) == 0
    assert json.loads(capsys.readouterr().out)["schema_version"] == "ATIF-v1.6"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("12", "write STEP/PROMPT/INDEX"),
        ("x/row/0", "write STEP/PROMPT/INDEX"),
        ("3/row/0", "no rollouts of step 3; choose one of 12"),
        ("12/row/0", "no episode 12/row/0; it has 1, the first is 12/train.parquet:5/0"),
    ],
)
def test_an_episode_that_is_not_there_is_refused(folder: Path, name: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        find_episode(folder, name)
