"""Whole runs that learn from teachers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megarl.engine.process import EngineProcess
from megarl.observe.events import Restarted, StepFinished
from megarl.results import UpdateStats
from megarl.tools.quickstart.arithmetic import make_arithmetic
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from tests.engine.engines import engine_spec
from tests.run.runs import Run, await_event, finished, run, started
from tests.run.test_frozen_runs import server_of
from tests.tiny_models import answer_logprob

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("whole_run")]

KINDS = ["{kind: reverse_kl}", "{kind: forward_topk, top_k: 4}"]
ON_ENGINES = (
    "pools.teachers={gpus_per_node: 1}",
    "algorithm={kind: distill}",
    "sampling.rollouts_per_prompt=1",
    "evaluation=null",
    "data.eval=[]",
)


def updates(done: Run) -> list[UpdateStats]:
    assert done.exit_code == 0, done.output
    found = [event.summary.update for event in done.steps]
    return [update for update in found if update is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_equals_its_teacher_is_at_distance_zero_until_it_has_learnt(kind: str, tmp_path: Path) -> None:
    """Beside a reward, which moves the policy away; the teacher shares the actor's pool and its split."""
    files = make_arithmetic(tmp_path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    done = run(
        tmp_path,
        "taught",
        f"roles.teacher.first={{kind: ranks, pool: train, tensor: 2, model: {files.model}}}",
        f"algorithm={{kind: grpo, distillation: {kind}}}",
        "sampling.temperature=0.7",
    )
    first, second = updates(done)
    assert first.teacher_kl == 0.0
    assert second.teacher_kl is not None
    assert abs(second.teacher_kl) > 1e-6


def test_a_policy_that_equals_its_teacher_on_an_engine_that_runs_already_is_at_distance_zero(tmp_path: Path) -> None:
    files = make_arithmetic(tmp_path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    process = EngineProcess(engine_spec(files.model, tmp_path / "served"))
    process.start()
    try:
        asyncio.run(process.wait_ready())
        (tmp_path / "key").write_text(process.endpoint.keys.api)
        endpoint = f"{{url: '{process.endpoint.url}', api_key_file: {tmp_path / 'key'}}}"
        without_pool = [word for word in ON_ENGINES if not word.startswith("pools.")]
        given = f"roles.teacher.first={{kind: engines, endpoints: [{endpoint}], model: {files.model}}}"
        (found,) = updates(run(tmp_path, "given", *without_pool, given, "run.steps=1"))
    finally:
        process.stop()
    assert found.teacher_kl == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(("kind", "num_workers"), [(KINDS[0], 0), (KINDS[1], 1)])
def test_a_teacher_teaches_the_same_on_engines_as_on_ranks(kind: str, num_workers: int, tmp_path: Path) -> None:
    """Through a rollout worker of its own as well, whose arrays never pass the driver, at another temperature."""
    make_arithmetic(tmp_path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    write_tiny_model(tmp_path / "other", TinyShape(), seed=11)
    learnt = {}
    for place in ("ranks", "engines"):
        done = run(
            tmp_path,
            place,
            *ON_ENGINES,
            f"algorithm.distillation={kind}",
            f"roles.teacher.other={{kind: {place}, pool: teachers, model: {tmp_path / 'other'}}}",
            f"roles.rollout.workers={num_workers}",
            f"sampling.temperature={1 - 0.3 * num_workers}",
        )
        learnt[place] = updates(done)
    assert len(learnt["ranks"]) == 2
    for ranks, engines in zip(learnt["ranks"], learnt["engines"], strict=True):
        assert ranks.teacher_kl is not None
        assert abs(ranks.teacher_kl) > 1e-3, "a test of equal models shows nothing"
        assert engines.teacher_kl == pytest.approx(ranks.teacher_kl, abs=1e-5)
        assert engines.loss == pytest.approx(ranks.loss, abs=1e-5)
        assert engines.grad_norm == pytest.approx(ranks.grad_norm, abs=1e-5)


@pytest.mark.fault("kill -9 of a teacher's engine in a step", "started again; the right numbers are learnt from")
def test_a_teacher_that_is_killed_in_a_step_teaches_no_wrong_number(tmp_path: Path) -> None:
    """The distance of every step is that of transformers for the rollouts that were kept, all of the step."""
    make_arithmetic(tmp_path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    other = tmp_path / "other"
    write_tiny_model(other, TinyShape(), seed=11)
    overrides = (
        *ON_ENGINES,
        "run.steps=3",
        f"roles.teacher.other={{kind: engines, pool: teachers, model: {other}}}",
        "observe.rollouts.groups_per_step=8",
    )
    with started(tmp_path, "killed", *overrides) as driver:
        await_event(tmp_path / "runs" / "killed", driver, StepFinished)
        os.kill(server_of(other, driver.pid).pid, signal.SIGKILL)
        driver.wait(timeout=1200)
    done = finished(tmp_path, "killed", driver)
    restarts = [event for event in done.events if isinstance(event, Restarted)]
    assert [restart.role for restart in restarts] == ["teacher.other"], restarts
    learnt, kept = updates(done), sorted((done.folder / "rollouts").glob("*.parquet"))
    assert len(learnt) == len(kept) == 3
    for update, path in zip(learnt, kept, strict=True):
        assert update.teacher_kl == pytest.approx(distance_of(path, other), abs=1e-5)


def distance_of(rollouts: Path, teacher: Path) -> float:
    """Return the mean over all tokens of log p_policy - log p_teacher, by transformers for the teacher."""
    rows = pq.read_table(rollouts).to_pylist()
    assert len(rows) == 8
    chosen = sum(sum(row["rollout_logprobs"]) for row in rows)
    taught = sum(answer_logprob(teacher, row["prompt_ids"], row["token_ids"]) for row in rows)
    num_tokens: int = sum(row["num_tokens"] for row in rows)
    return float(chosen - taught) / num_tokens


def test_each_source_has_its_teacher_and_a_source_without_one_ends_the_run_in_a_sentence(tmp_path: Path) -> None:
    files = make_arithmetic(tmp_path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    teacher = f"kind: ranks, pool: teachers, model: {files.model}"
    both = f"roles.teacher={{sums: {{{teacher}, sources: [arithmetic]}}, rest: {{{teacher}}}}}"
    assert len(updates(run(tmp_path, "two", *ON_ENGINES, both))) == 2
    other = run(tmp_path, "none", *ON_ENGINES, f"roles.teacher.code={{{teacher}, sources: [code]}}")
    assert other.exit_code == 3, other.output
    assert "no teacher for prompts of source arithmetic" in other.output
