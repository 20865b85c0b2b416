"""Whole runs that imitate conversations: epochs, the loss of held-out ones, and a stop inside an epoch."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.observe.events import RunStarted
from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.run.runs import Run, run

NUM_ROWS = 12


@pytest.fixture(scope="module")
def folder(whole_run: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    make_arithmetic(path / "arithmetic", num_train=4, num_sft=4, num_eval=4)
    rows = [{"messages": conversation(number)} for number in range(NUM_ROWS)]
    pq.write_table(pa.Table.from_pylist(rows), path / "chats.parquet")
    return path


def conversation(number: int) -> list[dict[str, str]]:
    sums = ((number, 1), (number, 2))
    return [
        {"role": role, "content": text}
        for left, right in sums
        for role, text in (("user", f"{left}+{right}="), ("assistant", str(left + right)))
    ]


def imitate(folder: Path, name: str, *overrides: str) -> Run:
    chats = f"[{folder}/chats.parquet]"
    done = run(
        folder,
        name,
        "algorithm={kind: sft}",
        f"data={{train: {chats}, eval_demonstrations: {chats}, prompt_key: messages, max_prompt_tokens: 16}}",
        "sampling={max_response_tokens: 32}",
        "pools={train: {gpus_per_node: 1}}",
        "roles={actor: {pool: train}}",
        "evaluation={every_steps: 1}",
        "checkpoint={save_every_steps: 1}",
        "run.epochs=2",
        *overrides,
    )
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.slow
def test_two_epochs_are_imitated_and_a_stop_inside_one_changes_nothing(folder: Path) -> None:
    whole = imitate(folder, "whole", "run.steps=null")
    losses = [whole.evaluations[step].numbers["held_out_loss"] for step in range(4)]
    assert losses == sorted(losses, reverse=True), "24 rows in steps of 8 are 3 steps, each of which learns"
    started = next(event for event in whole.events if isinstance(event, RunStarted))
    assert started.steps == 3

    imitate(folder, "stopped", "run.steps=2")  # after 16 rows, in the middle of the second epoch
    resumed = imitate(folder, "stopped", "run.steps=null")
    assert [event.resumed_step for event in resumed.events if isinstance(event, RunStarted)] == [0, 2]
    assert [step.summary.step for step in resumed.steps] == [1, 2, 3]
    ends = [sorted(done.model.glob("*.safetensors")) for done in (whole, resumed)]
    assert [path.read_bytes() for path in ends[0]] == [path.read_bytes() for path in ends[1]]
