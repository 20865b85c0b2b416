"""Whole runs that are stopped and go on: the end is the same, to the last bit, as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from megarl.checkpoint.resume import read_state
from megarl.observe.catalogue import QUEUE
from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import CheckpointSaved, Noted, PhaseStarted, RunStarted, StepFinished
from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.run.runs import Run, await_event, descendants, finished, kill, run, started, survivors

STEPS = ("run.steps=4", "checkpoint.save_every_steps=2", "train.optimizer={learning_rate: 1e-3, decay: cosine}")
EVERY_STEP = ("checkpoint.save_every_steps=1",)
PPO = (
    "pools={train: {gpus_per_node: 2}, rollout: {gpus_per_node: 1}, critic: {gpus_per_node: 1}}",
    "roles.critic={pool: critic, warmup_steps: 1}",
    "roles.reference={}",
    "algorithm={kind: gae, kl: {kind: reward, coef: 0.1, adaptive: {target: 0.01, horizon: 100}}, "
    "filter: {oversampling: 1.5}}",
)
"""All that a run can remember: a critic, a coefficient that moves, groups left over from the step before."""


@pytest.fixture(scope="module")
def folder(whole_run: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    make_arithmetic(path / "arithmetic", num_train=12, num_sft=16, num_eval=16)
    return path


@pytest.fixture(scope="module")
def at_once(folder: Path) -> Run:
    """All four steps; 12 prompts and 8 a step, so that an epoch ends in the middle of a step."""
    done = run(folder, "at_once", *STEPS)
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.fault("kill -9 of the driver behind an unfinished save", "goes on from the save before; the same bits")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [("ppo", PPO), ("grpo", ()), ("ppo_lora", (*PPO, "model.lora={rank: 8, alpha: 16}"))],
    ids=["ppo", "grpo", "ppo_lora"],
)
def test_a_run_that_was_killed_behind_a_save_goes_on_and_ends_with_the_same_bits(
    folder: Path, name: str, overrides: tuple[str, ...]
) -> None:
    """Killed after step 3 was trained, while the checkpoint of step 2 was still being written."""
    overrides = (*STEPS, *EVERY_STEP, *overrides)
    at_once = run(folder, f"{name}_at_once", *overrides)
    assert at_once.exit_code == 0, at_once.output
    name = f"{name}_killed"
    faults = [{"point": "file_written", "rank": 1, "step": 2, "kind": "wait", "seconds": 600}]
    with started(folder, name, *overrides, faults=faults) as process:
        await_event(folder / "runs" / name, process, StepFinished, count=3)
        kill(process)
    checkpoints = folder / "runs" / name / "checkpoints"
    assert {path.name for path in checkpoints.glob("step_*")} == {"step_000001", "step_000002.1.tmp"}

    resumed = run(folder, name, *overrides)

    assert resumed.exit_code == 0, resumed.output
    expected, reached = (read_state(each.folder / "checkpoints" / "step_000004") for each in (at_once, resumed))
    assert reached == expected
    if "ppo" in name:
        assert expected.critic is not None
        assert expected.kl_coef not in (None, 0.1)
        assert read_state(checkpoints / "step_000003").ledger.num_carried > 0
    assert "resumed after step 1" in resumed.output
    assert [event.resumed_step for event in resumed.events if isinstance(event, RunStarted)] == [0, 1]
    assert resumed.tensors(4) == at_once.tensors(4)
    last = [event.summary.update for event in at_once.steps[1:]]
    assert [event.summary.update for event in resumed.steps[-3:]] == last
    assert list(checkpoints.glob("*.tmp")) == []
    assert not (folder / "runs" / f"{name}.1").exists()


@pytest.mark.fault("kill -9 of the driver at a random moment", "the same bits")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_was_killed_at_any_moment_goes_on_and_ends_with_the_same_bits(
    folder: Path, at_once: Run, seed: int
) -> None:
    name = f"killed_{seed}"
    with started(folder, name, *STEPS, *EVERY_STEP) as process:
        await_event(folder / "runs" / name, process, StepFinished)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=random.Random(seed).uniform(0, 4))
        if process.poll() is None:
            kill(process)
    _goes_on_to_the_same_end(folder, name, at_once)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        {"point": "snapshot_taken", "rank": 0},
        {"point": "file_written", "rank": 1},
        {"point": "companions_copied", "rank": 0},
        {"point": "manifest_written"},
        {"point": "renamed"},
        {"point": "latest_linked"},
    ],
    ids=lambda fault: fault["point"],
)
def test_a_run_that_was_killed_in_its_save_goes_on_and_ends_with_the_same_bits(
    folder: Path, at_once: Run, fault: dict[str, object]
) -> None:
    name = f"killed_at_{fault['point']}"
    with started(folder, name, *STEPS, *EVERY_STEP, faults=[{**fault, "step": 2, "kind": "kill"}]) as process:
        await_event(folder / "runs" / name, process, StepFinished)
        processes = descendants(process.pid)
        process.wait(timeout=1200)
    assert process.returncode != 0
    assert survivors(processes, timeout_s=60) == []
    _goes_on_to_the_same_end(folder, name, at_once)


@pytest.mark.fault("a flipped bit in the newest checkpoint", "its ranks find it; goes on from the one before")
@pytest.mark.slow
def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(folder: Path) -> None:
    """Without engines: the ranks find the damage while they load."""
    overrides = (
        "algorithm={kind: sft}",
        f"data={{train: [{folder}/arithmetic/sft.parquet], max_prompt_tokens: 16}}",
        "pools={train: {gpus_per_node: 2}}",
        "roles={actor: {pool: train, tensor: 2}}",
        "evaluation=null",
        *EVERY_STEP,
    )
    first = run(folder, "flipped", *overrides, "run.steps=3")
    assert first.exit_code == 0, first.output
    damaged = first.folder / "checkpoints" / "step_000003"
    whole = {path.relative_to(damaged): path.read_bytes() for path in damaged.rglob("*.safetensors")}
    path = next(damaged.glob("optimizer/exp_avg/*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    resumed = run(folder, "flipped", *overrides, "run.steps=4")

    assert resumed.exit_code == 0, resumed.output
    assert "from step 2: " in resumed.output
    assert f"{path}: damaged: tensor" in resumed.output
    again = first.folder / "checkpoints" / "step_000003"
    assert {path.relative_to(again): path.read_bytes() for path in again.rglob("*.safetensors")} == whole


@pytest.mark.fault("a disk that is full for a while", "told; the run goes on")
@pytest.mark.slow
def test_a_run_whose_disk_was_full_for_a_while_says_so_and_goes_on(folder: Path, at_once: Run) -> None:
    faults = [{"point": "file_written", "rank": 1, "step": 2, "kind": "ENOSPC"}]
    done = run(folder, "full", *STEPS, *EVERY_STEP, faults=faults)
    assert done.exit_code == 0, done.output
    assert "warning: step 2 was not saved" in done.output
    assert "No space left on device" in done.output
    assert [event.step for event in done.events if isinstance(event, CheckpointSaved)] == [1, 3, 4]
    assert done.tensors(4) == at_once.tensors(4)


@pytest.mark.fault("a last step that cannot be saved", "exit code 4")
@pytest.mark.slow
def test_a_run_whose_last_step_cannot_be_saved_ends_with_4(folder: Path) -> None:
    faults = [{"point": "state_written", "step": 4, "kind": "ENOSPC"}]
    done = run(folder, "full_at_the_end", *STEPS, faults=faults)
    assert done.exit_code == 4, done.output
    assert "the run is done, but its last step was not saved" in done.output
    checkpoints = {path.name for path in (done.folder / "checkpoints").glob("step_*")}
    assert checkpoints == {"step_000002"}


KINDS = {
    "dapo": ("algorithm={kind: grpo, filter: {}}", *EVERY_STEP),
    "spin": (
        "algorithm={kind: spin, iteration_steps: 2}",
        "checkpoint.save_every_steps=2",
        "roles.reference={}",
        "data.train=[FOLDER/arithmetic/pairs.parquet]",
        "data.response_key=chosen",
    ),
    "prime": ("algorithm={kind: prime}", *EVERY_STEP, "roles.critic={pool: train, tensor: 2}"),
}
"""`spin` is saved where its iterations end: a resumed run begins one. `dapo` drops prompts."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_drops_prompts_or_has_a_second_model_goes_on_as_well(kind: str, folder: Path) -> None:
    overrides = (*STEPS, *(option.replace("FOLDER", str(folder)) for option in KINDS[kind]))
    whole = run(folder, kind, *overrides)
    assert whole.exit_code == 0, whole.output
    state = read_state(whole.folder / "checkpoints" / "latest")
    assert state.ledger.num_trained == 32
    assert (state.ledger.num_dropped > 0) is (kind == "dapo")
    with started(folder, f"{kind}_killed", *overrides) as process:
        await_event(folder / "runs" / f"{kind}_killed", process, CheckpointSaved)
        kill(process)
    resumed = _goes_on_to_the_same_end(folder, f"{kind}_killed", whole, *overrides)
    assert read_state(resumed.folder / "checkpoints" / "latest") == state


@pytest.mark.fault("SIGTERM, SIGUSR1", "the step is saved, exit code 75; the next run goes on; the same bits")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_is_asked_to_leave_saves_its_step_and_goes_on_from_there(
    folder: Path, at_once: Run, number: signal.Signals
) -> None:
    name = f"preempted_by_{number.name}"
    with started(folder, name, *STEPS) as process:
        await_event(folder / "runs" / name, process, StepFinished)
        processes = descendants(process.pid)
        if number is signal.SIGTERM:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        process.wait(timeout=300)
    assert survivors(processes, timeout_s=60) == []
    left = finished(folder, name, process)
    assert left.exit_code == 75, left.output
    assert "Traceback" not in left.output
    steps_before = len(left.steps)
    saved = [event for event in left.events if isinstance(event, CheckpointSaved)]
    assert saved[-1].path.endswith(f"step_{steps_before:06d}")

    resumed = _goes_on_to_the_same_end(folder, name, at_once, *STEPS)

    assert [event.summary.step for event in resumed.steps] == [1, 2, 3, 4]


@pytest.mark.fault("SIGTERM in a long update", "it is given up, the step before it is saved; the same bits")
@pytest.mark.slow
@pytest.mark.parametrize("critic", [(), PPO], ids=["grpo", "ppo"])
def test_a_run_that_is_asked_to_leave_a_long_update_saves_the_step_before(
    folder: Path, critic: tuple[str, ...]
) -> None:
    """Left after the first of two updates of step 2: the weights of step 1 are in no device any more."""
    saves = ("checkpoint.save_every_steps=hourly", "checkpoint.grace_s=60")
    overrides = (*STEPS, *saves, "train.prompts_per_update=4", *critic)
    name = f"left_in_an_update_{len(critic)}"
    whole = run(folder, f"{name}_at_once", *overrides)
    assert whole.exit_code == 0, whole.output
    faults = [
        {"point": "updated", "of": "actor", "rank": 0, "step": step, "kind": "wait", "seconds": seconds}
        for step, seconds in ((1, 20), (2, 600))
    ]
    step = 1 + bool(critic)  # the actor's first update is in the step after the critic's warm-up
    with started(folder, name, *overrides, faults=faults) as process:
        run_folder = folder / "runs" / name
        await_event(run_folder, process, StepFinished, count=step)
        while _num_updates(run_folder) <= step:
            time.sleep(0.2)
        time.sleep(3)  # the first update is applied
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)
    left = finished(folder, name, process)
    assert left.exit_code == 75, left.output
    assert time.monotonic() - began < 60
    assert f"saving step {step}; step {step + 1} is given up" in left.output
    assert f"after step {step}: saved" in left.output
    assert read_state(run_folder / "checkpoints" / "latest").trainer.num_steps <= step

    resumed = _goes_on_to_the_same_end(folder, name, whole, *overrides)

    assert [event.summary.step for event in resumed.steps] == [1, 2, 3, 4]
    assert any("groups of the step are kept from before" in text for text in _notes(resumed))


def _num_updates(run_folder: Path) -> int:
    events = (record.event for record in read_events(run_folder / EVENTS_FILE))
    return sum(isinstance(event, PhaseStarted) and event.phase == "update" for event in events)


@pytest.mark.fault("SIGTERM in the middle of a step", "groups that were answered are kept; the same bits")
@pytest.mark.slow
def test_a_run_that_is_asked_to_leave_does_not_answer_twice(folder: Path) -> None:
    long = ("train.prompts_per_step=24", "sampling.max_response_tokens=32")
    one_by_one = "roles.rollout.max_running_requests=4"
    overrides = (*STEPS, *EVERY_STEP, *long, one_by_one)
    whole = run(folder, "long_step", *overrides)
    assert whole.exit_code == 0, whole.output
    name = "left_in_a_step"
    with started(folder, name, *overrides) as process:
        await_event(folder / "runs" / name, process, StepFinished)
        _await_answers(folder / "runs" / name, num_groups=2)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=300)
    assert "groups of the next step are written" in finished(folder, name, process).output
    resumed = _goes_on_to_the_same_end(folder, name, whole, *overrides)
    assert any("groups of the step are kept from before" in text for text in _notes(resumed))
    assert not (resumed.folder / "open_step").exists()
    # One that is killed has no time to write: its answers are written as they come.
    name = "killed_in_a_step"
    with started(folder, name, *overrides) as process:
        await_event(folder / "runs" / name, process, StepFinished)
        _await_written(folder / "runs" / name)
        kill(process)
    resumed = _goes_on_to_the_same_end(folder, name, whole, *overrides)
    assert any("groups of the step are kept from before" in text for text in _notes(resumed))


@pytest.mark.slow
def test_a_run_goes_on_with_other_prompts_only_when_told(folder: Path, tmp_path: Path) -> None:
    make_arithmetic(tmp_path / "other", num_train=12, num_sft=16, num_eval=16, seed=5)
    first = run(folder, "other_data", *STEPS, "run.steps=1")
    assert first.exit_code == 0, first.output
    other = (*STEPS, f"data.train=[{tmp_path}/other/train.parquet]")

    refused = run(folder, "other_data", *other)
    assert refused.exit_code == 4, refused.output
    assert "--allow-data-change" in refused.output

    allowed = run(folder, "other_data", *other, options=["--allow-data-change"])
    assert allowed.exit_code == 0, allowed.output
    assert read_state(allowed.folder / "checkpoints" / "latest").ledger.num_trained == 24


def _goes_on_to_the_same_end(folder: Path, name: str, whole: Run, *overrides: str) -> Run:
    resumed = run(folder, name, *(overrides or (*STEPS, *EVERY_STEP)))
    assert resumed.exit_code == 0, resumed.output
    assert resumed.tensors(4) == whole.tensors(4)
    assert list((resumed.folder / "checkpoints").glob("*.tmp")) == []
    return resumed


def _await_answers(run_folder: Path, *, num_groups: int, timeout_s: float = 600) -> None:
    """Wait until so many groups of a step are answered."""
    events = [record.event for record in read_events(run_folder / EVENTS_FILE)]
    url = str(next(event.metrics_url for event in events if isinstance(event, RunStarted)))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        lines = httpx.get(url).text.splitlines()
        values = [float(line.split()[-1]) for line in lines if line.startswith(f"megarl_{QUEUE.name}{{")]
        if sum(values) >= num_groups:
            return
        time.sleep(0.05)
    raise AssertionError(f"fewer than {num_groups} groups were answered within the deadline")


def _await_written(run_folder: Path, *, timeout_s: float = 600) -> None:
    """Wait until answers of the step under way are on disk."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        events = (record.event for record in read_events(run_folder / EVENTS_FILE))
        num_done = sum(isinstance(event, StepFinished) for event in events)
        parts = list((run_folder / "open_step").glob("*/part.json"))
        with suppress(OSError):
            if any(json.loads(part.read_bytes())["version"] == num_done for part in parts):
                return
        time.sleep(0.05)
    raise AssertionError("no answers were written within the deadline")


def _notes(done: Run) -> list[str]:
    return [event.text for event in done.events if isinstance(event, Noted)]
