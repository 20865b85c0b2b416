from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.cli.main import run
from megarl.data.rollout_files import SampledRollout, rollouts_file, write_rollouts
from megarl.observe.events import EVENTS_FILE, EventLog
from megarl.types import JsonValue
from tests.data.test_rollout_files import decode, sampled
from tests.observe.samples import records, run_started

LENGTH = """
def compute_score(prompt, response, extra_info, ground_truth):
    assert prompt == "1+1=" and ground_truth == "2" and extra_info["level"] == 3
    return None if response == "?" else len(response) / 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that has stored the rollouts of two steps."""
    rows = [{"prompt": "1+1=", "ground_truth": "2", "extra_info": {"level": 3}}] * 2
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    data: dict[str, JsonValue] = {
        "train": [str(tmp_path / "train.parquet")],
        "max_prompt_tokens": 16,
        "ground_truth_key": "ground_truth",
    }
    path = tmp_path / "run"
    path.mkdir()
    log = EventLog(path / EVENTS_FILE)
    for record in records([replace(run_started(), recipe={"data": data})]):
        log.record(record)
    log.close()
    store(path, 1, [sampled("2"), sampled("22", position=1, reward=0.0)])
    store(path, 2, [sampled("2222", reward=0.0), sampled("?", position=1)])
    (tmp_path / "reward.py").write_text(LENGTH)
    return path


def store(path: Path, step: int, rollouts: Iterable[SampledRollout]) -> None:
    write_rollouts(rollouts_file(path, step), list(rollouts), decode=decode)


def test_stored_rollouts_get_new_scores_beside_the_old_ones(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rescore", str(folder), "--reward", str(folder.parent / "reward.py")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["step 1: 2 rollouts", "step 2: 2 rollouts"]
    (all_of_them,) = [line for line in lines if line.startswith("│ all")]
    # Stored 1, 0, 0 and new .5, 1, 2; one rollout has no new score.
    assert [cell.strip() for cell in all_of_them.strip("│").split("│")] == [
        *("all", "4", "0.3333", "1.1667", "3", "-0.756", "1")
    ]
    assert lines[-4:] == [
        "step 2, prompt train.parquet:1, rollout 0: 1 -> no score: ?",
        "step 2, prompt train.parquet:0, rollout 0: 0 -> 2: 2222",
        "step 1, prompt train.parquet:1, rollout 0: 0 -> 1: 22",
        "step 1, prompt train.parquet:0, rollout 0: 1 -> 0.5: 2",
    ]


def test_one_step_alone_may_be_scored(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rescore", str(folder), "--reward", str(folder.parent / "reward.py"), "--step", "1"]) == 0
    assert "step 2" not in capsys.readouterr().out


def test_what_cannot_be_scored_again_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def complaint(*words: str) -> str:
        assert run(["rescore", *words]) != 0
        return capsys.readouterr().err.strip().splitlines()[-1].strip()

    good = str(folder.parent / "reward.py")
    assert complaint(str(folder), "--reward", good, "--step", "7").endswith(
        "no rollouts of step 7 are stored; choose one of 1, 2"
    )
    assert (
        complaint(str(folder), "--reward", "nowhere.py")
        == "reward.path: nowhere.py is not a file; name your Python file"
    )
    assert "no rollouts are stored here" in complaint(str(folder.parent), "--reward", good)
    store(folder, 3, [sampled("2", position=9)])
    assert complaint(str(folder), "--reward", good).endswith(
        "prompt train.parquet:9 of a stored rollout is not in data.train any more"
    )
