"""Trainer ranks that are killed, frozen or late in real runs: all ranks start again, and the end has the same bits.

The cheapest run that has ranks at all imitates demonstrations; it has no engines. Runs with engines are slow tests.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from megarl.checkpoint.resume import read_state
from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import ALL_TRAINERS, Noted, PhaseStarted, Restarted, RunStarted, StepFinished, Warned
from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.faults.leftovers import Footprint, nothing_left
from tests.processes import command_of
from tests.run.runs import Driver, Run, finished, run, started

STEPS = 4
SFT = (
    f"run.steps={STEPS}",
    "checkpoint.save_every_steps=1",
    "pools={train: {gpus_per_node: 2}}",
    "roles={actor: {pool: train, tensor: 2}}",
    "algorithm={kind: sft}",
    "data.train=[arithmetic/sft.parquet]",
    "data.eval=[]",
    "evaluation=null",
    "reward={kind: exact}",
    "sampling={max_response_tokens: 6}",
    "train.operation_timeout_s=20",
    "train.restart_pause_s=0.1",
)
PPO = (
    f"run.steps={STEPS}",
    "checkpoint.save_every_steps=1",
    "pools={train: {gpus_per_node: 2}, rollout: {gpus_per_node: 1}, critic: {gpus_per_node: 1}, "
    "reference: {gpus_per_node: 1}}",
    "roles.critic={pool: critic, warmup_steps: 1}",
    "roles.reference={pool: reference}",
    "algorithm={kind: gae, kl: {kind: reward, coef: 0.1, adaptive: {target: 0.01, horizon: 100}}, "
    "filter: {oversampling: 1.5}}",
    "train.operation_timeout_s=20",
    "evaluation=null",
    "data.eval=[]",
)
"""Every model that has ranks, and all that a run can remember."""


@pytest.fixture(scope="module")
def folder(whole_run: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    make_arithmetic(path / "arithmetic", num_train=12, num_sft=64, num_eval=16)
    return path


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Run:
    with nothing_left() as footprint:
        done = run(folder, "undisturbed", *SFT, footprint=footprint)
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture(scope="module")
def undisturbed_ppo(folder: Path) -> Run:
    with nothing_left() as footprint:
        done = run(folder, "undisturbed_ppo", *PPO, footprint=footprint)
    assert done.exit_code == 0, done.output
    return done


def disturb(folder: Path, name: str, overrides: Sequence[str], *faults: dict[str, object]) -> Run:
    """Each fault happens once, whoever passes its point again."""
    planned = [{**fault, "once": str(folder / f"{name}.{index}")} for index, fault in enumerate(faults)]
    with nothing_left() as footprint:
        done = run(folder, name, *overrides, faults=planned, footprint=footprint)
    assert all(Path(str(fault["once"])).exists() for fault in planned), "a fault did not happen"
    return done


def check_same_end(done: Run, undisturbed: Run) -> None:
    assert done.exit_code == 0, done.output
    assert "Traceback" not in done.output
    assert "(raylet)" not in done.output
    ends = [each.folder / "checkpoints" / f"step_{STEPS:06d}" for each in (done, undisturbed)]
    found, expected = (
        {str(path.relative_to(end)): path.read_bytes() for path in end.rglob("*.safetensors")} for end in ends
    )
    assert found == expected
    assert read_state(ends[0]) == read_state(ends[1])
    assert list(done.folder.glob("checkpoints/*.tmp")) == []


def restarts(done: Run) -> list[str]:
    return [event.reason for event in done.events if isinstance(event, Restarted) and event.role == ALL_TRAINERS]


def steps_lost(done: Run) -> int:
    """Finished ones that were taken again."""
    return len(done.steps) - len({event.summary.step for event in done.steps})


@pytest.fixture(scope="module")
def disturbed(folder: Path) -> Run:
    """A run whose rank is killed, whose driver is killed then, and whose next driver has a rank that freezes."""
    faults = [
        {"point": "forward", "of": "actor", "rank": 1, "step": 2, "kind": "kill"},
        {"point": "step_trained", "step": 3, "kind": "kill"},
        {"point": "backward", "of": "actor", "rank": 0, "step": 4, "kind": "stop"},
    ]
    assert disturb(folder, "disturbed", SFT, *faults[:2]).exit_code == -9
    return disturb(folder, "disturbed", SFT, *faults)


@pytest.mark.fault(
    "kill -9 and SIGSTOP of a trainer rank in one run",
    "all ranks start again; the hang report names rank and collective; the same bits",
)
def test_a_killed_and_a_frozen_rank_are_replaced_and_the_run_ends_with_the_same_bits(
    disturbed: Run, undisturbed: Run
) -> None:
    check_same_end(disturbed, undisturbed)
    first, second = restarts(disturbed)
    assert re.match(r"from (step 1|the beginning): actor rank 1: died during ", first)
    assert re.search(
        r"from step [23]: actor: update did not finish within 20 s \(train.operation_timeout_s\): rank 0 is missing: "
        r"it does not answer; it is stopped \(SIGSTOP\) \(pid \d+\); "
        r"rank 1 waits in all_reduce of ranks 0, 1 \(.*mappings.py:\d+\); "
        r"collective \d+ of \w+ of ranks 0, 1: 1 in all_?reduce .*; missing: rank 0 called none; "
        r"all stacks are in .*/hang_\w+_actor_update.txt",
        second,
    )
    (report,) = disturbed.folder.glob("hang_*_actor_update.txt")
    assert "==== actor rank 1 ====" in report.read_text()
    assert "torch.distributed.all_reduce" in report.read_text()


@pytest.mark.fault(
    "kill -9 of a trainer rank in forward, backward, optimizer, save", "at most one step lost; the same bits"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    "point", ["forward", "backward", "gradients", "optimizer", "updated", "snapshot_taken", "ranks_met", "file_written"]
)
def test_a_rank_killed_at_any_point_of_a_step_or_a_save(folder: Path, undisturbed: Run, point: str) -> None:
    done = disturb(folder, f"killed_at_{point}", SFT, {"point": point, "rank": 1, "step": 3, "kind": "kill"})
    check_same_end(done, undisturbed)
    assert len(restarts(done)) == 1
    assert steps_lost(done) <= 1


@pytest.mark.fault("a trainer rank that is late", "named with the line it is in; the same bits")
@pytest.mark.slow
def test_a_rank_that_does_something_else_is_named_with_the_place(folder: Path, undisturbed: Run) -> None:
    fault = {"point": "optimizer", "rank": 1, "step": 3, "kind": "wait", "seconds": 600}
    done = disturb(folder, "late", SFT, fault)
    check_same_end(done, undisturbed)
    (text,) = restarts(done)
    place = r"megarl/system/faults.py:\d+"
    assert re.search(rf"rank 1 is missing: it is in _happen, {place}; rank 0 waits in all_reduce", text)


@pytest.mark.fault("kill -9 of a trainer rank before the first checkpoint", "from the beginning; the same bits")
@pytest.mark.slow
def test_ranks_without_a_checkpoint_start_from_the_beginning(folder: Path, undisturbed: Run) -> None:
    fault = {"point": "forward", "rank": 0, "step": 3, "kind": "kill"}
    done = disturb(folder, "from_the_beginning", (*SFT, "checkpoint.save_every_steps=null"), fault)
    check_same_end(done, undisturbed)
    assert restarts(done)[0].startswith("from the beginning: actor rank 0: died")


@pytest.mark.fault("a trainer rank that dies again and again", "exit code 70 and one line when the budget is spent")
@pytest.mark.slow
def test_a_rank_that_dies_again_and_again_ends_the_run_with_one_line(folder: Path) -> None:
    fault = {"point": "forward", "rank": 1, "step": 3, "kind": "kill"}
    with nothing_left() as footprint:
        done = run(folder, "hopeless", *SFT, "train.max_restarts=1", faults=[fault], footprint=footprint)
    assert done.exit_code == 70, done.output
    last = done.output.strip().splitlines()[-1]
    assert re.fullmatch(
        r"megarl: actor rank 1: died during .*; the ranks were started again 1 times since step \d .*", last
    )
    assert "Traceback" not in done.output
    assert "(raylet)" not in done.output


@pytest.mark.fault("one gradient that is not finite", "the update is skipped and told; nothing starts again")
@pytest.mark.slow
def test_one_gradient_that_is_not_finite_skips_an_update_and_starts_nothing_again(folder: Path) -> None:
    fault = {"point": "gradients", "rank": 1, "step": 3, "kind": "nan"}
    done = disturb(folder, "nan_gradient", SFT, fault)
    assert done.exit_code == 0, done.output
    assert restarts(done) == []
    assert any("1 updates were skipped" in event.text for event in done.events if isinstance(event, Warned))
    assert read_state(done.folder / "checkpoints" / "latest").trainer.num_updates == STEPS - 1


@pytest.mark.fault("gradients that are never finite", "exit code 77")
@pytest.mark.slow
def test_gradients_that_are_never_finite_end_the_run_as_numerics(folder: Path) -> None:
    with nothing_left() as footprint:
        fault = {"point": "gradients", "rank": 1, "kind": "nan"}
        done = run(folder, "nan_gradients", *SFT, "run.steps=9", faults=[fault], footprint=footprint)
    assert done.exit_code == 77, done.output
    assert restarts(done) == []


@pytest.mark.fault(
    "kill -9 of critic, reference, or a sender in a publish; a frozen sender",
    "ranks start again, engines stay up; the same bits",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("critic_killed", [{"point": "backward", "of": "critic", "step": 3, "kind": "kill"}]),
        ("reference_killed", [{"point": "asked", "of": "reference", "kind": "kill"}]),
        ("sender_killed", [{"point": "bucket_sent", "of": "publish", "rank": 1, "step": 2, "kind": "kill"}]),
        ("sender_frozen", [{"point": "bucket_packed", "of": "publish", "rank": 0, "step": 2, "kind": "stop"}]),
    ],
)
def test_models_are_lost_and_the_engines_stay_up(
    folder: Path, undisturbed_ppo: Run, name: str, faults: list[dict[str, object]]
) -> None:
    done = disturb(folder, name, PPO, *faults)
    check_same_end(done, undisturbed_ppo)
    assert len(restarts(done)) == 1
    assert (done.folder / "engines" / "engine_0.log").read_text().count("The server is fired up") == 1
    assert _notes_kept_groups(done)


@pytest.mark.fault(
    "kill -9 of a trainer rank while engines generate", "what they answered is kept while ranks start; the same bits"
)
@pytest.mark.slow
def test_a_rank_that_dies_while_engines_generate_loses_no_answer(folder: Path, undisturbed_ppo: Run) -> None:
    with (
        nothing_left() as footprint,
        started(folder, "generating", *PPO, footprint=footprint) as process,
    ):
        events = folder / "runs" / "generating" / EVENTS_FILE
        _await(lambda: _generates_step(events, 3), process, events)
        _running(footprint, "ActorRank")[0].kill()
        process.wait(timeout=1200)
    done = finished(folder, "generating", process)
    check_same_end(done, undisturbed_ppo)
    assert len(restarts(done)) == 1
    assert _notes_kept_groups(done)


def _generates_step(events: Path, step: int) -> bool:
    found = [record.event for record in read_events(events)]
    steps = [place for place, event in enumerate(found) if isinstance(event, StepFinished)]
    begun = found[steps[step - 2] :] if len(steps) >= step - 1 else []
    return any(isinstance(event, PhaseStarted) and event.phase == "generate" for event in begun)


def _notes_kept_groups(done: Run) -> bool:
    return any(isinstance(event, Noted) and event.text.endswith("groups of the step are kept") for event in done.events)


@pytest.mark.fault("kill -9 of a trainer rank while engines start", "ranks start again, engines go on starting")
@pytest.mark.slow
def test_a_rank_that_dies_while_engines_start_does_not_end_them(folder: Path) -> None:
    overrides = ("run.steps=1", "evaluation=null", "data.eval=[]", "train.restart_pause_s=0.1")
    with (
        nothing_left() as footprint,
        started(folder, "early", *overrides, footprint=footprint) as process,
    ):
        log = folder / "runs" / "early" / "engines" / "engine_0.log"
        _await(lambda: len(_running(footprint, "ActorRank")) == 2, process, log)
        time.sleep(2)  # the ranks are there and wait for the engine
        assert "fired up" not in log.read_text()
        _running(footprint, "ActorRank")[0].kill()
        process.wait(timeout=1200)
    done = finished(folder, "early", process)
    assert done.exit_code == 0, done.output
    assert "Traceback" not in done.output
    assert len(restarts(done)) == 1
    assert log.read_text().count("The server is fired up") == 1


@pytest.mark.fault("kill -9 of the driver", "everything gone within 10 s; the next run goes on; the same bits")
def test_a_killed_driver_takes_everything_along_and_the_next_run_goes_on(disturbed: Run, undisturbed: Run) -> None:
    check_same_end(disturbed, undisturbed)
    first, second = (event.resumed_step for event in disturbed.events if isinstance(event, RunStarted))
    assert first == 0
    # It is killed after it trained step 3: the save of step 2 may be under way, and the one of step 1 is complete then.
    assert second in (1, 2, 3)
    assert steps_lost(disturbed) <= 3


@pytest.mark.fault(
    "kill -9 of a process of Ray's own", "a sentence; everything gone within 10 s; the next run goes on; the same bits"
)
@pytest.mark.slow
@pytest.mark.parametrize("program", ["raylet/raylet", "gcs/gcs_server"])
def test_a_run_that_loses_ray_ends_with_a_sentence_and_the_next_one_goes_on(
    folder: Path, undisturbed: Run, program: str
) -> None:
    name = f"no_{Path(program).stem}"
    once = folder / f"{name}.once"
    fault = {"point": "step_trained", "step": 3, "kind": "wait", "seconds": 60, "once": str(once)}
    with (
        nothing_left() as footprint,
        # A lease keeps a Ray that works.
        started(folder, name, *SFT, "cluster.lease_s=90", faults=[fault], footprint=footprint) as process,
    ):
        _await(once.exists, process, once)
        _running(footprint, program)[0].kill()
        process.wait(timeout=300)
    ended = finished(folder, name, process)
    assert ended.exit_code == 1
    assert "run the same command to resume from its last checkpoint" in ended.output.splitlines()[-1]
    with nothing_left() as footprint:
        done = run(folder, name, *SFT, footprint=footprint)
    check_same_end(done, undisturbed)


@pytest.mark.fault("kill -9 of a trainer rank that nobody asks anything", "noticed within 2 s")
@pytest.mark.slow
def test_a_rank_that_dies_while_nobody_asks_it_is_noticed_within_two_seconds(folder: Path) -> None:
    with (
        nothing_left() as footprint,
        started(
            folder, "idle", *SFT, "run.steps=2000", "checkpoint.save_every_steps=500", footprint=footprint
        ) as process,
    ):
        events = folder / "runs" / "idle" / EVENTS_FILE
        _await(lambda: any(isinstance(record.event, StepFinished) for record in read_events(events)), process, events)
        victim = _running(footprint, "ActorRank")[0]
        began = time.monotonic()
        victim.kill()
        _await(lambda: _has_restarted(events), process, events)
        assert time.monotonic() - began < 2 + 1  # a checkpoint under way, and reading the events
        process.terminate()
        process.wait(timeout=300)
    assert finished(folder, "idle", process).exit_code == 75


def _has_restarted(events: Path) -> bool:
    return any(isinstance(record.event, Restarted) for record in read_events(events))


def _running(footprint: Footprint, program: str) -> list[psutil.Process]:
    return [process for process in footprint.processes() if program in command_of(process)]


def _await(condition: object, process: Driver, events: Path, timeout_s: float = 1200) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not (events.exists() and condition()):
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)
