"""Rollouts for people: what is written is what is read, in a list and one at a time."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.data.rollout_files import (
    SampledRollout,
    list_rollouts,
    make_table,
    prune_rollouts,
    rollouts_file,
    write_rollouts,
    write_tables,
)
from megarl.data.rollout_reading import read_list, read_rollout
from megarl.errors import DataError, MachineError
from megarl.types import RolloutGroup, Score, ScoredGroup, TokenArray, TrainSample
from tests.values import make_prompt, make_rollout


def decode(token_ids: TokenArray) -> str:
    """One byte a token."""
    return bytes(token_ids.tolist()).decode("utf-8", errors="replace")


def sampled(text: str, *, position: int = 0, reward: float = 1.0, gap: float = 0.0) -> SampledRollout:
    size = len(text.encode())
    rollout = make_rollout(list(text.encode()), logprobs=np.full(size, -1.0, np.float32), text=text)
    rollout = replace(rollout, versions=np.arange(size, dtype=np.int32))
    prompt = make_prompt(position, token_ids=list(b"1+1="), data_source="arithmetic", ground_truth="2")
    score = Score(value=reward, components={"format": 0.5, "answer": reward}, prediction=text)
    trainer_logprobs = rollout.logprobs.copy()
    trainer_logprobs[-1] += gap
    sample = TrainSample(prompt_ids=prompt.token_ids, rollout=rollout, advantages=np.zeros(size, np.float32))
    scored = ScoredGroup(group=RolloutGroup(prompt=prompt, rollouts=(rollout,)), scores=(score,))
    return SampledRollout(group=scored, index=0, sample=sample, trainer_logprobs=trainer_logprobs)


def test_a_list_shows_the_small_columns_of_every_rollout(tmp_path: Path) -> None:
    path = rollouts_file(tmp_path, 3)
    write_rollouts(path, [sampled("2"), sampled("three\nlines", position=1, reward=0.0, gap=0.25)], decode=decode)
    assert list_rollouts(tmp_path) == {3: path}
    first, second = read_list(path)
    assert first["score"] == 1.0
    assert first["largest_gap"] == 0.0
    assert second == {
        "prompt_uid": "train.parquet:1",
        "data_source": "arithmetic",
        "index": 0,
        "score": 0.0,
        "is_masked": False,
        "num_tokens": 11,
        "finish_reason": "stop",
        "largest_gap": pytest.approx(0.25),
        "first_version": 0,
        "last_version": 10,
        "ending": None,
        "line": "three lines",
    }


def test_one_rollout_has_every_token_whatever_its_row_group(tmp_path: Path) -> None:
    path = rollouts_file(tmp_path, 1)
    write_rollouts(path, [sampled(str(number), position=number) for number in range(200)], decode=decode)
    found = read_rollout(path, 150)
    assert found["prompt"] == "1+1="
    assert found["pieces"] == ["1", "5", "0"]
    assert found["components"] == {"format": 0.5, "answer": 1.0}
    assert found["versions"] == [0, 1, 2]
    for row in (200, 10_000):
        with pytest.raises(DataError, match=f"has no row {row}"):
            read_rollout(path, row)


def test_a_character_of_several_tokens_appears_once_with_the_last(tmp_path: Path) -> None:
    path = rollouts_file(tmp_path, 1)
    write_rollouts(path, [sampled("aé∑😀b")], decode=decode)
    pieces = read_rollout(path, 0)["pieces"]
    assert "".join(pieces) == "aé∑😀b"
    assert pieces == ["a", "", "é", "", "", "∑", "", "", "", "😀", "b"]


def test_the_oldest_files_go_first_and_the_newest_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write_rollouts(rollouts_file(tmp_path, step), [sampled("2")], decode=decode)
    size = rollouts_file(tmp_path, 1).stat().st_size
    prune_rollouts(tmp_path, max_bytes=2 * size)
    assert list(list_rollouts(tmp_path)) == [3, 4]
    prune_rollouts(tmp_path, max_bytes=1)
    assert list(list_rollouts(tmp_path)) == [4]


def test_a_file_that_is_no_parquet_is_an_error_of_one_line(tmp_path: Path) -> None:
    path = rollouts_file(tmp_path, 1)
    path.parent.mkdir()
    path.write_text("nonsense")
    with pytest.raises(DataError, match=r"step_000001\.parquet: cannot be read") as caught:
        read_list(path)
    assert "\n" not in str(caught.value)


def obvious_pieces(token_ids: TokenArray) -> list[str]:
    """Decode from the last whole character to each token, one after the other."""
    pieces: list[str] = []
    first = 0
    for end in range(1, len(token_ids) + 1):
        text = decode(token_ids[first:end])
        is_open = text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(token_ids) and end - first < 4
        pieces.append("" if is_open else text)
        if not is_open:
            first = end
    return pieces


@pytest.mark.parametrize("seed", range(5))
def test_the_pieces_of_random_bytes_are_those_of_decoding_one_after_the_other(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    alphabet = np.frombuffer("aé€😀".encode() + b"\xff\xe2\x80", np.uint8)
    token_ids = random.choice(alphabet, 400).astype(np.int32)
    base = sampled("x" * 400)
    rollout = replace(base.sample.rollout, content=replace(base.sample.rollout.content.load(), token_ids=token_ids))
    path = rollouts_file(tmp_path, 1)
    write_rollouts(path, [replace(base, sample=replace(base.sample, rollout=rollout))], decode=decode)
    assert read_rollout(path, 0)["pieces"] == obvious_pieces(token_ids)


def test_the_work_of_a_file_grows_with_the_vocabulary_in_use_and_not_with_the_tokens(tmp_path: Path) -> None:
    num_calls = 0

    def counted(token_ids: TokenArray) -> str:
        nonlocal num_calls
        num_calls += 1
        return decode(token_ids)

    path = rollouts_file(tmp_path, 1)
    num_rollouts = 130
    write_rollouts(path, [sampled("0123456789" * 50, position=i) for i in range(num_rollouts)], decode=counted)
    assert num_calls == 10 + num_rollouts  # ten tokens, and a prompt each
    assert [row["prompt_uid"] for row in read_list(path)] == [f"train.parquet:{i}" for i in range(num_rollouts)]
    assert read_rollout(path, 129)["pieces"] == list("0123456789" * 50)


def test_columns_that_repeat_one_number_are_written_for_each_token(tmp_path: Path) -> None:
    base = sampled("abc")
    rollout = replace(
        base.sample.rollout,
        versions=np.broadcast_to(np.int32(4), 3),
        loss_mask=np.broadcast_to(np.True_, 3),
    )
    path = rollouts_file(tmp_path, 1)
    write_rollouts(path, [replace(base, sample=replace(base.sample, rollout=rollout))], decode=decode)
    row = read_rollout(path, 0)
    assert (row["versions"], row["loss_mask"]) == ([4, 4, 4], [True, True, True])


def test_a_file_that_was_not_finished_leaves_nothing_and_the_next_one_removes_those_of_killed_processes(
    tmp_path: Path,
) -> None:
    path = rollouts_file(tmp_path, 1)

    def broken(token_ids: TokenArray) -> str:
        if token_ids.tolist() == [ord("9")]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return decode(token_ids)

    rollouts = [sampled("1", position=i) for i in range(64)]
    with pytest.raises(MachineError, match=r"step_000001\.parquet: cannot be written: No space left on device"):
        write_rollouts(path, [*rollouts, sampled("9")], decode=broken)
    assert not list(path.parent.iterdir())
    path.with_name("step_000001.parquet.0123abcd.tmp").write_bytes(b"PAR1")
    write_rollouts(path, rollouts, decode=decode)
    prune_rollouts(tmp_path, max_bytes=1 << 20)
    assert list(path.parent.iterdir()) == [path]


def test_a_file_of_tables_of_several_sizes_is_read_as_one(tmp_path: Path) -> None:
    path = rollouts_file(tmp_path, 1)
    rollouts = [sampled(str(number), position=number) for number in range(9)]
    parts = (rollouts[:1], rollouts[1:6], rollouts[6:])
    write_tables(path, (make_table(part, decode, {}) for part in parts))
    assert [read_rollout(path, row)["text"] for row in range(9)] == [str(number) for number in range(9)]
    with pytest.raises(DataError, match="has no row 9"):
        read_rollout(path, 9)


def test_columns_have_the_same_types_whatever_is_in_them(tmp_path: Path) -> None:
    empty = make_table([sampled("1", reward=1)], decode, {})
    base = sampled("23")
    blank = replace(base.sample.rollout, content=replace(base.sample.rollout.content.load(), text=""))
    other = make_table([replace(base, sample=replace(base.sample, rollout=blank))], decode, {})
    assert empty.schema == other.schema
