"""Two rollout workers, one on each node: the cheapest proof of each promise. Their number is in test_worker_faults."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from aiohttp import web

from megarl.cluster.local_ray import private_ray
from megarl.config.model import read_model_shape
from megarl.config.recipe import EvaluationConfig, SampledEvaluationConfig
from megarl.data.evaluation_files import EvaluatedRollout, generations_file, write_generations
from megarl.data.packing import Packing
from megarl.data.rollout_files import SampledRollout, write_rollouts
from megarl.data.shares import Share, make_shares
from megarl.data.tokenizer import load_tokenizer
from megarl.engine.lifecycle import EngineState
from megarl.errors import FleetError, MachineError, RewardError
from megarl.observe.events import Noted
from megarl.observe.observer import Observer
from megarl.observe.summary import StepSummary, summarize_step
from megarl.results import UpdateResult
from megarl.run.evaluate import HeldOutAnswers
from megarl.types import PolicyVersion, Prompt, ScoredGroup, TrainSample
from tests.observe.samples import ListSink
from tests.reward.judges import Judge, chat_judge, completion
from tests.rollout.planes import (
    NUM_PROMPTS,
    NUM_ROLLOUTS,
    Plane,
    answer,
    answer_here,
    assert_same,
    lose_node,
    node_ids,
    plane,
    prompts,
    when_busy,
    when_lost,
    when_whole,
)
from tests.run.seeded_engine import SeededEngines

with private_ray():
    # Ray reads its environment when it is imported, here as in a run.
    import ray

    from megarl.cluster import stored
    from megarl.cluster.local_ray import LocalRay
    from megarl.cluster.stored import StoredContent, StoredResponses, cut_at_source, nodes_of
    from megarl.rollout import workers as workers_module
    from megarl.rollout.workers import RolloutWorkers


@pytest.fixture(scope="module")
def two(nodes: LocalRay, engines: SeededEngines, model: Path) -> Iterator[Plane]:
    first, second = node_ids()
    with plane(engines, model, [first, first, second, second], per_node=1) as two:
        yield two


async def answer_on_both(two: Plane) -> list[ScoredGroup]:
    await when_whole(two.workers)
    groups = await answer(two.workers)
    while len(set().union(*(nodes_of(each.group) for each in groups))) < 2:
        groups = await answer(two.workers)  # a worker that lives may not know yet that its engines do
    return groups


def forbidden(references: Sequence[object]) -> None:
    raise AssertionError(f"the driver loads {len(references)} deliveries")


def summary_of(groups: Sequence[ScoredGroup]) -> StepSummary:
    return summarize_step(
        step=1,
        groups=groups,
        samples=[each.sample for each in sampled(groups)],
        dropped_groups={},
        update=UpdateResult(version=PolicyVersion(1), stats=None),
        kl_coef=None,
        seconds=1.0,
    )


def test_groups_are_those_of_a_run_without_workers_and_their_arrays_stay_where_they_are(
    two: Plane, engines: SeededEngines, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, expected = two.run(answer_on_both(two)), answer_here(engines, model)
    with monkeypatch.context() as patch:
        patch.setattr(stored, "_get", forbidden)
        summary = summary_of(groups)
    assert summary.rollouts == summary_of(expected).rollouts
    assert summary.rollouts is not None
    contents = [rollout.content for scored in groups for rollout in scored.group.rollouts]
    assert all(isinstance(content, StoredContent) and content.stored.arrays is None for content in contents)
    assert_same(groups, expected)


def shares_of(groups: Sequence[ScoredGroup], *, number: int) -> list[Share]:
    packing = Packing(
        data_parallel=number,
        tokens_per_micro_batch=256,
        samples_per_update=None,
        pad_multiple=1,
        micro_batch_multiple=1,
    )
    return list(make_shares([each.sample for each in sampled(groups)], packing, temperature=1.0))


def sampled(groups: Sequence[ScoredGroup]) -> list[SampledRollout]:
    """All rollouts, with numbers that need no response to be loaded."""
    return [
        SampledRollout(
            group=scored,
            index=index,
            sample=TrainSample(
                prompt_ids=scored.group.prompt.token_ids,
                rollout=rollout,
                advantages=np.linspace(0, 1, rollout.num_tokens, dtype=np.float32),
            ),
            trainer_logprobs=np.full(rollout.num_tokens, -0.5, np.float32),
        )
        for scored in groups
        for index, rollout in enumerate(scored.group.rollouts)
    ]


def stored_in(shares: Sequence[Share]) -> list[StoredResponses]:
    return [source for share in shares for source in share.sources if isinstance(source, StoredResponses)]


def assert_same_shares(found: Sequence[Share], expected: Sequence[Share]) -> None:
    for one, other in zip(found, expected, strict=True):
        mine, theirs = one.load(), other.load()
        assert mine.keys() == theirs.keys()
        for row_id, sample in mine.items():
            assert sample.content.text == theirs[row_id].content.text
            np.testing.assert_array_equal(sample.content.token_ids, theirs[row_id].content.token_ids)
            np.testing.assert_array_equal(sample.content.logprobs, theirs[row_id].content.logprobs)


def test_a_share_takes_only_its_own_responses_from_other_nodes(two: Plane) -> None:
    async def run() -> None:
        first, second = node_ids()
        groups = await answer_on_both(two)
        shares = shares_of(groups, number=3)
        cut = await cut_at_source(shares, {first, second}, timeout_s=120)
        assert_same_shares(cut, shares)
        arrays = [ray.get(source.reference) for source in stored_in(cut)]
        num_tokens = sum(one.num_tokens for each in groups for one in each.group.rollouts)
        num_moved = sum(len(each.columns.arrays.get("token_ids", ())) for each in arrays)
        assert num_moved == num_tokens, "each response is moved once"
        # On the only node that trains, shared memory has them already.
        here = await cut_at_source(shares, {first}, timeout_s=120)
        kept = [source for source in stored_in(here) if source in stored_in(shares)]
        assert {source.node for source in kept} == {first}
        assert kept == [source for source in stored_in(shares) if source.node == first]

    two.run(run())


def test_kept_rollouts_are_written_by_the_workers_as_the_driver_would_write_them(
    two: Plane, engines: SeededEngines, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = two.run(answer_on_both(two))
    path = tmp_path / "rollouts" / "step_000001.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(stored, "_get", forbidden)
        two.run(two.workers.write(path, sampled(groups)))
    expected = tmp_path / "expected.parquet"
    decode = load_tokenizer(model, vocab=read_model_shape(model).vocab).decode
    write_rollouts(expected, sampled(answer_here(engines, model)), decode=decode)
    assert pq.read_table(path).equals(pq.read_table(expected))
    assert [each.name for each in path.parent.iterdir()] == [path.name]

    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    with pytest.raises(MachineError, match=r"^\S+step_000002\.parquet: cannot be written: File exists$"):
        two.run(two.workers.write(blocked / "step_000002.parquet", sampled(groups)))


@dataclass(frozen=True)
class Answers:
    """Groups that are there already."""

    groups: Sequence[ScoredGroup]

    async def answer(self, prompt: Prompt) -> ScoredGroup:
        return self.groups[prompt.position]


def first_only(scored: ScoredGroup) -> ScoredGroup:
    group = replace(scored.group, rollouts=scored.group.rollouts[:1])
    return replace(scored, group=group, scores=scored.scores[:1])


def evaluator_of(
    groups: Sequence[ScoredGroup], write: Callable[[Path, Sequence[EvaluatedRollout]], Awaitable[None]], folder: Path
) -> HeldOutAnswers:
    return HeldOutAnswers(
        config=EvaluationConfig(sampled=SampledEvaluationConfig(rollouts_per_prompt=NUM_ROLLOUTS)),
        prompts=prompts(),
        greedy=Answers([first_only(scored) for scored in groups]).answer,
        sampled=Answers(groups).answer,
        write=write,
        run_folder=folder,
    )


def test_an_evaluation_is_graded_and_written_without_its_tokens_in_the_driver(
    two: Plane, engines: SeededEngines, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, expected = two.run(answer_on_both(two)), answer_here(engines, model)
    decode = load_tokenizer(model, vocab=read_model_shape(model).vocab).decode

    async def write(path: Path, kept: Sequence[EvaluatedRollout]) -> None:
        write_generations(path, (answer.line(decode) for answer in kept))

    with monkeypatch.context() as patch:
        patch.setattr(stored, "_get", forbidden)
        evaluated = two.run(evaluator_of(groups, two.workers.write_answers, tmp_path / "there").evaluate(1))
    here = two.run(evaluator_of(expected, write, tmp_path / "here").evaluate(1))
    assert evaluated == here
    files = [generations_file(tmp_path / folder, 1).read_bytes() for folder in ("there", "here")]
    assert files[0] == files[1]
    assert files[0].count(b"\n") == NUM_PROMPTS * (1 + NUM_ROLLOUTS)


def test_a_cancelled_prompt_ends_its_requests(two: Plane, engines: SeededEngines) -> None:
    async def run() -> None:
        await when_whole(two.workers)
        engines.is_held = True
        asked = asyncio.ensure_future(answer(two.workers, 2))
        await when_busy(engines)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        while engines.num_open:
            await asyncio.sleep(0.05)
        engines.is_held = False

    two.run(run())


def test_what_happens_to_an_engine_reaches_the_driver_and_comes_back(
    two: Plane, engines: SeededEngines, model: Path
) -> None:
    expected = answer_here(engines, model)

    async def run() -> None:
        fleet, causes = two.fleet, two.counts.causes
        await when_whole(two.workers)
        engines.broken = {1: lambda _: web.Response(status=500, text="out of memory")}
        asked = asyncio.ensure_future(answer(two.workers))
        while not causes["EngineError"]:
            await asyncio.sleep(0.005)
        engines.broken = {}
        assert_same(await asked, expected)
        # The driver examined it: the engine's health is fine.
        assert fleet.engines[1].status.num_doubts > 0
        while fleet.engines[1].state is not EngineState.HEALTHY:
            await asyncio.sleep(0.05)
        # A new version: the workers know it before they send a request.
        engines.version = "1"
        await fleet.committed(PolicyVersion(1), fleet.engines)
        await two.workers.announce()
        num_stale = causes["WrongVersionError"]
        groups = await answer(two.workers)
        assert {int(version) for each in groups for one in each.group.rollouts for version in one.versions} == {1}
        assert causes["WrongVersionError"] == num_stale

    two.run(run())


def test_the_model_of_a_judge_is_recorded_once_and_ends_the_run_where_workers_have_different_ones(
    nodes: LocalRay, engines: SeededEngines, model: Path
) -> None:
    server, sink = Judge(), ListSink()
    server.replies = [(200, completion('{"answer": "yes"}', version="v7"))]
    observer, (first, second) = Observer((sink,)), node_ids()
    reward = chat_judge(server)
    try:
        with plane(engines, model, [first, first, second, second], per_node=1, reward=reward, observer=observer) as two:
            groups = two.run(answer_on_both(two))
            assert {score.value for each in groups for score in each.scores} == {1.0}
            assert sink.events == [Noted(text=f"the judge judge at {server.url} is judge-1, version v7")]
            # A worker that is gone had answers of another model.
            observer.judges.insert(0, (f"judge at {server.url}", "judge-0", ""))
            with pytest.raises(RewardError, match="the judge was judge-0 and is now judge-1"):
                two.run(answer(two.workers))
    finally:
        server.close()


def test_a_mistake_beside_a_worker_ends_those_who_wait(
    nodes: LocalRay, engines: SeededEngines, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: a run that hears of nothing would wait for ever."""

    async def mistaken(workers: RolloutWorkers, worker: object) -> None:
        raise ZeroDivisionError("an odd delivery")

    monkeypatch.setattr(RolloutWorkers, "_serve", mistaken)
    monkeypatch.setattr(workers_module, "_MAX_FAILURES", 1)
    with (
        plane(engines, model, [node_ids()[0]] * 2, per_node=1) as one,
        pytest.raises(FleetError, match=r"no rollout worker is left .* ZeroDivisionError\('an odd delivery'\)"),
    ):
        one.run(answer(one.workers, 2))


@pytest.mark.fault("kill -9 of a rollout worker", "its prompts are asked again by another; it is replaced")
def test_a_killed_worker_loses_no_prompt_no_group_and_no_file(
    two: Plane, engines: SeededEngines, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "step_000001.parquet"

    async def run() -> tuple[list[ScoredGroup], list[ScoredGroup]]:
        finished = await answer_on_both(two)
        engines.is_held = True
        asked = asyncio.ensure_future(answer(two.workers))
        await when_busy(engines)
        process = next(each.process for each in two.workers._workers if each.num_outstanding and each.process)
        os.kill(process.pid, signal.SIGKILL)
        await two.workers.write(path, sampled(finished))  # nobody has noticed yet
        await when_lost(two.counts)
        engines.is_held = False
        groups = await asked
        await when_whole(two.workers)
        assert process not in [worker.process for worker in two.workers._workers]
        return finished, groups

    finished, groups = two.run(run())
    expected = answer_here(engines, model)
    assert_same(groups, expected)
    assert_same(finished, expected)
    assert pq.read_table(path)["token_ids"].to_pylist() == [
        each.sample.rollout.token_ids.tolist() for each in sampled(expected)
    ]


@pytest.mark.fault(
    "loss of a node with rollout workers",
    "their prompts, and those of finished groups that were stored there, are asked again on other nodes",
)
def test_a_lost_node_loses_no_prompt(two: Plane, nodes: LocalRay, engines: SeededEngines, model: Path) -> None:
    """Last: the node does not come back."""
    expected = answer_here(engines, model)

    async def run() -> None:
        _, second = node_ids()
        finished = await answer_on_both(two)
        assert 0 < sum(nodes_of(each.group) == {second} for each in finished) < len(finished)
        assert await two.workers.lost(finished) == []
        two.counts.causes.clear()
        await lose_node(two, nodes, second, engines, finished, expected)

    two.run(run())
