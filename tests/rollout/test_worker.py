"""A rollout worker's own fleet follows the driver's, and its reports reach the driver's."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import httpx
import pytest

from megarl.engine.client import EngineClient, EngineEndpoint
from megarl.engine.dispatch import Throughput
from megarl.engine.fleet import Fleet, Served
from megarl.engine.lifecycle import Doubted, EngineState, EngineStatus
from megarl.errors import EngineLostError, FleetError
from megarl.observe.observer import Observer
from megarl.rollout.following import EngineProbe, EngineView, FollowingFleet, RequestCounts, apply_report
from megarl.rollout.task import WithGreedyRollout, WithGreedyScore
from megarl.rollout.workers import divide_engines, lent_engines
from megarl.types import ONE_POLICY, PolicyVersion, Prompt, RolloutGroup, Score, ScoredGroup
from tests.algo.groups import scored_group
from tests.engine.engines import scripted_client
from tests.rollout.endpoints import ENDPOINTS, connect


def following(lent: frozenset[int] = frozenset()) -> FollowingFleet:
    return FollowingFleet(ENDPOINTS, connect=connect, lent=lent, max_outstanding=2, publish_timeout_s=60)


def view(
    index: int,
    state: EngineState,
    *,
    number: int,
    version: int = 0,
    num_pauses: int = 0,
    adapter: str | None = None,
) -> EngineView:
    return EngineView(
        endpoint=ENDPOINTS[index],
        served={ONE_POLICY: Served(version=PolicyVersion(version), adapter=adapter)},
        status=replace(
            EngineStatus.begin(0.0), state=state, reason="" if state is EngineState.HEALTHY else "the driver says so"
        ),
        num_pauses=num_pauses,
        number=number,
    )


async def test_views_change_state_version_and_pauses_and_late_ones_are_ignored() -> None:
    worker = following()
    engine = worker.fleet.engines[1]
    await worker.follow([view(1, EngineState.STALE, number=4, version=3, num_pauses=2)])
    assert (engine.state, engine.version, engine.num_pauses) == (EngineState.STALE, 3, 2)
    await worker.follow([view(1, EngineState.HEALTHY, number=3)])
    assert engine.state is EngineState.STALE
    # Following is no news to the driver.
    assert not (await worker.report(within_s=0.01)).complaints


async def test_a_death_that_the_driver_knows_of_ends_the_requests_of_the_worker() -> None:
    worker = following()

    async def wait() -> None:
        async with worker.fleet.lease():
            await asyncio.sleep(600)

    waiting = [asyncio.ensure_future(wait()) for _ in range(3)]
    await asyncio.sleep(0.01)
    await worker.follow([view(0, EngineState.DEAD, number=1)])
    done, pending = await asyncio.wait(waiting, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert [type(task.exception()) for task in done] == [EngineLostError]
    for task in pending:
        task.cancel()


async def test_lent_engines_are_used_when_the_own_ones_are_lost() -> None:
    worker = following(lent=frozenset({1, 2}))
    for _ in range(2):
        async with worker.fleet.lease() as engine:
            assert engine.index == 0
    async with worker.fleet.lease(avoid={0}) as engine:
        assert engine.index in {1, 2}
    await worker.follow([view(0, EngineState.DEAD, number=1)])
    async with worker.fleet.lease() as engine:
        assert engine.index in {1, 2}


async def test_a_report_tells_the_driver_what_failed_and_what_answered() -> None:
    worker = following()
    mine = worker.fleet.engines
    await worker.fleet.doubt(mine[0], "status 500")
    await worker.fleet.mark_stale(mine[1], "serves version 9")
    worker.fleet._clock = lambda: mine[2].status.last_answer + 1.0
    throughput = Throughput(num_requests=2, num_tokens=10, seconds=3.0)
    worker.fleet.answered(mine[2], throughput)
    worker.fleet.requests.request_retried("EngineError")
    worker.fleet.requests.prompt_read(100, num_cached=75)
    worker.fleet.requests.draft_checked(50, num_passes=20)
    worker.scores.scored(0.5)
    worker.scores.judge_answered("fair at http://judge", "judge-1", "")
    # At once: an engine failed.
    report = await asyncio.wait_for(worker.report(within_s=600), timeout=60)
    assert (report.answered, report.retries, report.score_seconds) == ({2: throughput}, {"EngineError": 1}, (0.5,))
    assert (report.num_drafted_tokens, report.num_draft_passes) == (50, 20)
    assert report.judges == (("fair at http://judge", "judge-1", ""),)
    again = await worker.report(within_s=0.01)
    assert (again.complaints, again.answered, again.retries, again.score_seconds) == ((), {}, {}, ())
    assert (again.num_prompt_tokens, again.num_cached_tokens) == (0, 0)

    healthy = [scripted_client(lambda _: httpx.Response(200), index=index) for index in range(3)]
    fleet = Fleet(healthy, max_outstanding=2, publish_timeout_s=60)
    counts = RequestCounts()
    fleet.requests = counts
    states: list[tuple[int, EngineState]] = []
    fleet.listen(lambda engine, _: states.append((engine.index, engine.state)))
    await apply_report(report, fleet, Observer(()))
    # Nobody supervises this fleet: the engine in doubt is asked, and answers.
    assert states == [(0, EngineState.SUSPECT), (0, EngineState.HEALTHY), (1, EngineState.STALE)]
    assert counts == RequestCounts(
        causes=Counter({"EngineError": 1}),
        num_prompt_tokens=100,
        num_cached_tokens=75,
        num_drafted_tokens=50,
        num_draft_passes=20,
    )


async def test_a_complaint_about_an_engine_that_was_restarted_or_filled_since_is_ignored() -> None:
    worker = following()
    await worker.fleet.mark_stale(worker.fleet.engines[0], "serves version 9")
    await worker.fleet.doubt(worker.fleet.engines[1], "status 500")
    report = await worker.report(within_s=60)
    fleet = Fleet([connect(endpoint) for endpoint in ENDPOINTS], max_outstanding=2, publish_timeout_s=60)
    await fleet.committed(PolicyVersion(1), fleet.engines)
    moved = replace(ENDPOINTS[1], port=40_000)
    fleet.replace_client(fleet.engines[1], EngineClient(moved, request_timeout_s=60))
    await apply_report(report, fleet, Observer(()))
    assert all(engine.is_live for engine in fleet.engines)
    await fleet.close()


def probed(
    version: int, served: str | None, *, expected: int | None = 1, is_syncing: bool = False
) -> list[EngineState]:
    """The states of an engine of `version` after a worker's probe of version 1 was answered."""

    async def run() -> list[EngineState]:
        fleet = Fleet([connect(endpoint) for endpoint in ENDPOINTS], max_outstanding=2, publish_timeout_s=60)
        await fleet.committed(PolicyVersion(version), fleet.engines)
        engine = fleet.engines[0]
        fleet.report(engine, Doubted(reason="status 500"))
        engine.is_syncing = is_syncing
        worker = following()
        probe = EngineProbe(
            endpoint=ENDPOINTS[0], expected=None if expected is None else PolicyVersion(expected), served=served
        )
        report = replace(await worker.report(within_s=0.01), probes=(probe,))
        states: list[EngineState] = []
        fleet.listen(lambda engine, _: states.append(engine.state))
        await apply_report(report, fleet, Observer(()))
        return states

    return asyncio.run(run())


def test_a_worker_probes_for_the_driver() -> None:
    assert probed(1, "1") == [EngineState.HEALTHY]
    assert probed(1, "0") == [EngineState.HEALTHY, EngineState.STALE]
    # Published since the worker asked.
    assert probed(2, "1") == [EngineState.HEALTHY]
    # It had no weights when the worker asked, and has some since.
    assert probed(0, "none", expected=None) == [EngineState.HEALTHY]
    # The server alone answers: that counts only while weights arrive.
    assert probed(1, None) == []
    assert probed(1, None, is_syncing=True) == [EngineState.HEALTHY]


async def test_a_worker_probes_its_own_engines_unless_they_have_just_answered() -> None:
    asked: list[tuple[int, str]] = []

    def answering(endpoint: EngineEndpoint) -> EngineClient:
        def handle(request: httpx.Request) -> httpx.Response:
            asked.append((endpoint.index, request.url.path))
            return httpx.Response(200, json={"weight_version": "0"})

        return scripted_client(handle, index=endpoint.index)

    worker = FollowingFleet(ENDPOINTS, connect=answering, lent=frozenset({2}), max_outstanding=2, publish_timeout_s=60)
    await worker.follow([view(0, EngineState.SUSPECT, number=1)])
    worker.fleet._clock = lambda: worker.fleet.engines[1].status.last_answer + 0.01
    probing = asyncio.create_task(worker.probe(every_s=5.0, timeout_s=60))
    while len(asked) < 3:
        await asyncio.sleep(0.01)
    probing.cancel()
    assert {index for index, _ in asked} == {0}
    (probe,) = (await worker.report(within_s=0.01)).probes
    assert (probe.endpoint.index, probe.served) == (0, "0")


@pytest.mark.parametrize(
    ("nodes", "per_node", "shares"),
    [
        ("aabb", 1, [("a", (0, 1)), ("b", (2, 3))]),
        ("aabb", 2, [("a", (0,)), ("a", (1,)), ("b", (2,)), ("b", (3,))]),
        ("aaab", 2, [("a", (0, 2)), ("a", (1,)), ("b", (3,))]),
        ("a", 4, [("a", (0,))]),
    ],
)
def test_every_engine_has_one_worker_of_its_node(
    nodes: str, per_node: int, shares: list[tuple[str, tuple[int, ...]]]
) -> None:
    assert divide_engines(list(nodes), per_node=per_node) == shares


def test_engines_of_others_are_lent() -> None:
    assert lent_engines((0, 1), 4) == {2, 3}
    assert lent_engines((2, 3), 4) == {0, 1}
    assert lent_engines((3,), 4) == {0, 1}
    assert lent_engines((0, 2), 4) == {3, 1}
    assert lent_engines((0,), 1) == set()


class Answers:
    """A generator that answers with rollouts of given lengths, or not at all."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    async def generate(self, prompt: Prompt) -> RolloutGroup:
        await asyncio.sleep(0)
        if not self._lengths:
            raise FleetError("no engine is left")
        answers = scored_group(0, [0] * len(self._lengths), lengths=self._lengths).group.rollouts
        return RolloutGroup(prompt=prompt, rollouts=answers)


class LengthScorer:
    """Scores a rollout by its length."""

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        scores = tuple(Score(value=len(rollout.token_ids), components={}) for rollout in group.rollouts)
        return ScoredGroup(group=group, scores=scores)


PROMPT = scored_group(4, [0]).group.prompt


async def test_every_group_has_one_greedy_rollout_and_its_score() -> None:

    group = await WithGreedyRollout(Answers([3, 4]), Answers([7])).generate(PROMPT)
    scored = await WithGreedyScore(LengthScorer()).score(group)
    assert [score.value for score in scored.scores] == [3, 4]
    assert scored.baseline == Score(value=7, components={})
    assert scored.group.prompt is PROMPT
    assert [len(rollout.token_ids) for rollout in scored.group.rollouts] == [3, 4]


@pytest.mark.parametrize(("sampled", "greedy"), [([], [7]), ([3, 4], [])])
def test_a_failure_of_either_is_the_failure_of_the_group(sampled: list[int], greedy: list[int]) -> None:
    with pytest.raises(FleetError, match="no engine is left"):
        asyncio.run(WithGreedyRollout(Answers(sampled), Answers(greedy)).generate(PROMPT))


def test_a_group_without_a_greedy_rollout_is_a_bug() -> None:
    group = replace(scored_group(4, [0]).group, baseline=None)
    with pytest.raises(AssertionError, match=r"train\.parquet:4 has no greedy rollout"):
        asyncio.run(WithGreedyScore(LengthScorer()).score(group))
