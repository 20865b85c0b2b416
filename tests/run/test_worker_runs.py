"""Whole runs whose rollouts are made by rollout workers: killed and resumed, beside the trainer, with an adapter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megarl.checkpoint.resume import read_state
from megarl.data.rollout_files import list_rollouts
from megarl.data.rollout_reading import read_list
from megarl.observe.events import CheckpointSaved, Event, PhaseEnded, PhaseStarted
from tests.processes import command_of
from tests.run.runs import Driver, Run, await_events, descendants, kill, run, started

pytestmark = pytest.mark.slow

PROMPTS_PER_STEP = 8
ALONE = ("evaluation=null", "data.eval=[]")
STEPS = ("run.steps=3", "checkpoint.save_every_steps=1", *ALONE)
KEEP_ALL = f"observe.rollouts.groups_per_step={PROMPTS_PER_STEP}"


def with_workers(number: int, *, num_engines: int) -> tuple[str, ...]:
    return (f"roles.rollout.workers={number}", f"pools.rollout.gpus_per_node={num_engines}")


@pytest.fixture(scope="module")
def at_once(folder: Path) -> Run:
    """One engine, and no worker but the driver."""
    done = run(folder, "at_once", *STEPS, KEEP_ALL)
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.fault("kill -9 of the driver with rollout workers", "no worker is left; goes on; the same bits")
@pytest.mark.parametrize(("num_workers", "num_later"), [(1, 1), (2, 1), (4, 4)])
def test_a_run_with_workers_that_was_killed_in_a_step_goes_on_and_ends_with_the_same_bits(
    folder: Path, at_once: Run, num_workers: int, num_later: int
) -> None:
    name = f"killed_{num_workers}_{num_later}"
    with started(folder, name, *STEPS, KEEP_ALL, *with_workers(num_workers, num_engines=num_workers)) as process:
        await_events(folder / "runs" / name, process, _generates_after_a_save(1))
        _kill(process)
    resumed = run(folder, name, *STEPS, KEEP_ALL, *with_workers(num_later, num_engines=num_workers))
    assert resumed.exit_code == 0, resumed.output
    assert "resumed after step " in resumed.output
    assert resumed.tensors(3) == at_once.tensors(3)
    assert read_state(resumed.folder / "checkpoints" / "step_000003") == read_state(
        at_once.folder / "checkpoints" / "step_000003"
    )
    rollouts = {event.summary.step: event.summary.rollouts for event in resumed.steps}  # some steps were taken twice
    assert list(rollouts.values()) == [event.summary.rollouts for event in at_once.steps]
    # The workers wrote the files, here as there the driver.
    assert list(list_rollouts(resumed.folder)) == [1, 2, 3]
    for step, path in list_rollouts(resumed.folder).items():
        assert pq.read_table(path).equals(pq.read_table(list_rollouts(at_once.folder)[step]))


@pytest.mark.fault("kill -9 of the driver with rollouts in flight at workers (async)", "goes on; the ledger is exact")
def test_no_prompt_is_lost_or_trained_twice_when_workers_generate_beside_the_trainer(folder: Path) -> None:
    overrides = (
        "run.steps=6",
        "checkpoint.save_every_steps=1",
        *ALONE,
        KEEP_ALL,
        "train.max_staleness=2",
        "algorithm={kind: grpo, correction: {kind: tis}}",
        "sampling.max_response_tokens=40",
        "pools={train: {gpus_per_node: 1}, rollout: {gpus_per_node: 2}}",
        "roles.actor.tensor=1",
        "roles.rollout.workers=2",
    )
    with started(folder, "beside", *overrides) as process:
        await_events(folder / "runs" / "beside", process, _generates_after_a_save(2))
        _kill(process)
    resumed = run(folder, "beside", *overrides)
    assert resumed.exit_code == 0, resumed.output
    assert "resumed after step " in resumed.output
    state = read_state(resumed.folder / "checkpoints" / "step_000006")
    assert state.ledger.num_trained == 6 * PROMPTS_PER_STEP
    assert state.ledger.num_dropped == 0
    assert state.ledger.num_drawn == state.prompt_cursor
    uids = [{row["prompt_uid"] for row in read_list(path)} for path in list_rollouts(resumed.folder).values()]
    assert [len(of_step) for of_step in uids] == [PROMPTS_PER_STEP] * 6
    assert len(set(chain.from_iterable(uids))) == 6 * PROMPTS_PER_STEP, "the stream is in its first epoch"


def test_workers_change_no_bit_of_a_run_with_an_adapter(folder: Path) -> None:
    lora = ("run.steps=2", *ALONE, "model.lora={rank: 8, alpha: 16}")
    alone = run(folder, "lora_alone", *lora)
    assert alone.exit_code == 0, alone.output
    beside = run(folder, "lora_workers", *lora, *with_workers(2, num_engines=2))
    assert beside.exit_code == 0, beside.output
    assert [event.summary.rollouts for event in beside.steps] == [event.summary.rollouts for event in alone.steps]
    assert [event.summary.update for event in beside.steps] == [event.summary.update for event in alone.steps]
    assert beside.tensors(2) == alone.tensors(2)


def _kill(process: Driver) -> None:
    assert any("RolloutHost" in command_of(each) for each in descendants(process.pid))
    kill(process)


def _generates_after_a_save(number: int) -> Callable[[list[Event]], bool]:
    """Whether so many steps are saved and the run is generating another one."""

    def is_there(events: list[Event]) -> bool:
        num_saved = sum(isinstance(event, CheckpointSaved) for event in events)
        phases = [event for event in events if isinstance(event, PhaseStarted | PhaseEnded)]
        return num_saved >= number and phases[-1] == PhaseStarted(phase="generate")

    return is_there
