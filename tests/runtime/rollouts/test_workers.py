"""Rollout workers on a real Ray of two nodes on this machine, with engines that have no model."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from megarl.config.model import read_model_shape
from megarl.config.reward import ExactRewardConfig
from megarl.data.packing import Packing
from megarl.data.shares import Share, make_shares
from megarl.data.tokenizer import load_tokenizer
from megarl.observe.observer import Observer
from megarl.reward.build import build_scorer
from megarl.rollout.dispatch import divide_engines
from megarl.rollout.fleet import Fleet
from megarl.rollout.generator import Sampling, Vocabulary
from megarl.rollout.lifecycle import EngineState
from megarl.rollout.worker import Answering, RolloutTask, RolloutWorker
from megarl.runtime.local_ray import private_ray
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from megarl.types import PolicyVersion, Prompt, ScoredGroup, TrainSample
from tests.runtime.seeded_engine import SeededEngines, seeded_engines

with private_ray():
    # Ray reads its environment when it is imported, here as in a run.
    import ray

    from megarl.runtime.build import TaskGroups
    from megarl.runtime.local_ray import LocalRay, local_ray
    from megarl.runtime.rollouts.host import WorkerSetup
    from megarl.runtime.rollouts.stored import StoredContent, StoredResponses, cut_at_source, nodes_of
    from megarl.runtime.rollouts.workers import RolloutWorkers

NUM_ROLLOUTS = 4
TASK = RolloutTask(
    sampling=Sampling(num_rollouts=NUM_ROLLOUTS, temperature=1.0, top_p=1.0, top_k=None, max_response_tokens=40),
    seed=7,
)
NUM_PROMPTS = 12
START_S = 400.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRay]:
    with ExitStack() as stack:
        stack.enter_context(private_ray())
        nodes = LocalRay(device="cpu", log_folder=tmp_path_factory.mktemp("nodes"), has_several_nodes=True)
        stack.enter_context(local_ray(nodes, num_slots=1))
        nodes.start_node(num_slots=1)
        nodes.wait_started()
        ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
        stack.callback(ray.shutdown)
        yield nodes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, TinyShape(), seed=1)
    return folder


@pytest.fixture
def engines() -> Iterator[SeededEngines]:
    with seeded_engines(4) as engines:
        yield engines


class Counts:
    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()

    def request_retried(self, cause: str) -> None:
        self.causes[cause] += 1


def prompts(number: int = NUM_PROMPTS) -> list[Prompt]:
    return [
        Prompt(
            uid=f"row-{place}",
            position=place,
            epoch=0,
            token_ids=np.arange(3, 8, dtype=np.int32),
            data_source="test",
            ground_truth="",
            extra_info={},
        )
        for place in range(number)
    ]


def node_ids() -> list[str]:
    """The driver's node first."""
    own = str(ray.get_runtime_context().get_node_id())
    return sorted((str(node["NodeID"]) for node in ray.nodes() if node["Alive"]), key=lambda node: node != own)


@asynccontextmanager
async def running(
    engines: SeededEngines,
    model: Path,
    engine_nodes: Sequence[str],
    *,
    per_node: int,
    silence_timeout_s: float = 60,
) -> AsyncIterator[tuple[RolloutWorkers, Fleet]]:
    fleet = Fleet(engines.clients(), max_outstanding=8, publish_timeout_s=120)
    fleet.requests = Counts()
    shares = divide_engines(engine_nodes, per_node=per_node)
    setups = [
        WorkerSetup(
            index=index,
            node=node,
            own=own,
            model_folder=model,
            shape=read_model_shape(model),
            reward=ExactRewardConfig(kind="exact"),
            num_on_node=per_node,
            num_workers=len(shares),
            log_path=model / f"reward_{index}.log",
            episodes=None,
            max_outstanding=8,
            max_attempts=3,
            publish_timeout_s=120,
            request_timeout_s=120,
            silence_timeout_s=silence_timeout_s,
        )
        for index, (node, own) in enumerate(shares)
    ]
    workers = RolloutWorkers(
        fleet,
        setups,
        observer=Observer(()),
        rollouts_per_prompt=NUM_ROLLOUTS,
    )
    async with workers.running(), asyncio.timeout(START_S):
        await workers.processes()  # else the first one may answer all prompts
        yield workers, fleet
    await fleet.close()


async def answer(workers: Answering, number: int = NUM_PROMPTS) -> list[ScoredGroup]:
    answered = await asyncio.gather(*(workers.answer(prompt, TASK) for prompt in prompts(number)))
    return [each.scored for each in answered]


async def answer_here(engines: SeededEngines, model: Path) -> list[ScoredGroup]:
    """A worker in the driver's process does the same."""
    shape = read_model_shape(model)
    fleet = Fleet(engines.clients(), max_outstanding=8, publish_timeout_s=120)
    worker = RolloutWorker(
        fleet,
        vocabulary=Vocabulary.of(shape, load_tokenizer(model, vocab=shape.vocab)),
        scorer=build_scorer(ExactRewardConfig(kind="exact")),
        max_attempts=3,
    )
    try:
        return await answer(worker)
    finally:
        await fleet.close()


def assert_same(groups: Sequence[ScoredGroup], expected: Sequence[ScoredGroup]) -> None:
    assert [scored.group.prompt.uid for scored in groups] == [scored.group.prompt.uid for scored in expected]
    for one, other in zip(groups, expected, strict=True):
        assert one.scores == other.scores
        for found, wanted in zip(one.group.rollouts, other.group.rollouts, strict=True):
            assert found.num_tokens == wanted.num_tokens
            assert found.finish_reason is wanted.finish_reason
            assert found.text == wanted.text
            for name in ("token_ids", "logprobs", "versions", "loss_mask"):
                np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))


def test_groups_do_not_depend_on_the_number_of_workers(nodes: LocalRay, engines: SeededEngines, model: Path) -> None:
    async def run() -> None:
        expected = await answer_here(engines, model)
        first, second = node_ids()
        for engine_nodes, per_node in (([first] * 4, 1), ([first, first, second, second], 1), ([first] * 4, 4)):
            async with running(engines, model, engine_nodes, per_node=per_node) as (workers, _):
                groups = await answer(workers)
                contents = [rollout.content for scored in groups for rollout in scored.group.rollouts]
                assert all(isinstance(content, StoredContent) and content.stored.arrays is None for content in contents)
                assert_same(groups, expected)

    asyncio.run(run())


def shares_of(groups: Sequence[ScoredGroup], *, number: int) -> list[Share]:
    samples = [
        TrainSample(prompt_ids=scored.group.prompt.token_ids, rollout=rollout, advantages=rollout.logprobs)
        for scored in groups
        for rollout in scored.group.rollouts
    ]
    packing = Packing(
        data_parallel=number,
        tokens_per_micro_batch=256,
        samples_per_update=None,
        pad_multiple=1,
        micro_batch_multiple=1,
    )
    return list(make_shares(samples, packing, temperature=1.0))


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


def test_a_share_takes_only_its_own_responses_from_other_nodes(
    nodes: LocalRay, engines: SeededEngines, model: Path
) -> None:
    async def run() -> None:
        first, second = node_ids()
        async with running(engines, model, [first, first, second, second], per_node=1) as (workers, _):
            groups = await answer(workers)
            while len(set().union(*(nodes_of(each.group) for each in groups))) < 2:
                groups = await answer(workers)  # a worker that lives may not know yet that its engines do
            shares = shares_of(groups, number=3)
            cut = await cut_at_source(shares, {first, second}, timeout_s=120)
            assert_same_shares(cut, shares)
            arrays = [ray.get(source.reference) for source in stored_in(cut)]
            num_tokens = sum(one.num_tokens for each in groups for one in each.group.rollouts)
            assert sum(len(each.token_ids) for each in arrays) == num_tokens, "each response is moved once"
            # On the only node that trains, shared memory has them already.
            here = await cut_at_source(shares, {first}, timeout_s=120)
            kept = [source for source in stored_in(here) if source in stored_in(shares)]
            assert {source.node for source in kept} == {first}
            assert kept == [source for source in stored_in(shares) if source.node == first]
        # The workers are gone, their deliveries are not.
        assert_same_shares(await cut_at_source(shares, {first, second}, timeout_s=120), shares)

    asyncio.run(run())


async def _when_busy(engines: SeededEngines) -> None:
    while not engines.num_open:
        await asyncio.sleep(0.02)


async def _when_lost(fleet: Fleet) -> None:
    """Return when prompts of a lost worker are asked again."""
    assert isinstance(fleet.requests, Counts)
    while not fleet.requests.causes["worker_lost"]:
        await asyncio.sleep(0.02)


async def _accident(
    engines: SeededEngines, model: Path, kind: signal.Signals, *, silence_timeout_s: float
) -> tuple[list[ScoredGroup], list[ScoredGroup], Counter[str]]:
    """Signal one of two workers while it works; return the groups under way, later groups, and the retries."""
    first, _ = node_ids()
    engines.is_held = True
    async with running(engines, model, [first] * 4, per_node=2, silence_timeout_s=silence_timeout_s) as (
        workers,
        fleet,
    ):
        asked = asyncio.ensure_future(answer(workers))
        await _when_busy(engines)
        process = next(worker.process for worker in workers._workers if worker.num_outstanding and worker.process)
        os.kill(process.pid, kind)
        await _when_lost(fleet)
        engines.is_held = False
        groups = await asked
        while not all(worker.is_live for worker in workers._workers):
            await asyncio.sleep(0.1)
        again = [worker.process for worker in workers._workers]
        assert process not in again
        assert isinstance(fleet.requests, Counts)
        return groups, await answer(workers), fleet.requests.causes


@pytest.mark.fault("kill -9 of a rollout worker", "its prompts are asked again by another; it is replaced")
def test_a_killed_worker_loses_no_prompt(nodes: LocalRay, engines: SeededEngines, model: Path) -> None:
    groups, later, causes = asyncio.run(_accident(engines, model, signal.SIGKILL, silence_timeout_s=60))
    expected = asyncio.run(answer_here(engines, model))
    assert_same(groups, expected)
    assert_same(later, expected)
    assert causes["worker_lost"] > 0


@pytest.mark.fault("SIGSTOP of a rollout worker", "replaced when it is silent; its prompts are asked again by another")
def test_a_frozen_worker_is_replaced(nodes: LocalRay, engines: SeededEngines, model: Path) -> None:
    groups, later, causes = asyncio.run(_accident(engines, model, signal.SIGSTOP, silence_timeout_s=5))
    expected = asyncio.run(answer_here(engines, model))
    assert_same(groups, expected)
    assert_same(later, expected)
    assert causes["worker_lost"] > 0


def test_groups_outlive_the_worker_that_made_them(nodes: LocalRay, engines: SeededEngines, model: Path) -> None:
    async def run() -> None:
        first, _ = node_ids()
        async with running(engines, model, [first] * 4, per_node=1) as (workers, _):
            groups = await answer(workers)
        # Its process is gone.
        assert_same(groups, await answer_here(engines, model))

    asyncio.run(run())


def test_what_happens_to_an_engine_reaches_the_driver_and_comes_back(
    nodes: LocalRay, engines: SeededEngines, model: Path
) -> None:
    async def run() -> None:
        expected = await answer_here(engines, model)
        first, _ = node_ids()
        async with running(engines, model, [first] * 4, per_node=2) as (workers, fleet):
            engines.broken = {1}
            asked = asyncio.ensure_future(answer(workers))
            assert isinstance(fleet.requests, Counts)
            while not fleet.requests.causes["EngineError"]:
                await asyncio.sleep(0.005)
            engines.broken = set()
            assert_same(await asked, expected)
            # The driver examined it: the engine's health is fine.
            assert fleet.engines[1].life.num_doubts > 0
            while fleet.engines[1].state is not EngineState.HEALTHY:
                await asyncio.sleep(0.05)
            # A new version: the workers know it before they send a request.
            engines.version = "1"
            await fleet.committed(PolicyVersion(1), fleet.engines)
            await workers.announce()
            num_stale = fleet.requests.causes["WrongVersionError"]
            groups = await answer(workers)
            assert {int(version) for each in groups for one in each.group.rollouts for version in one.versions} == {1}
            assert fleet.requests.causes["WrongVersionError"] == num_stale

    asyncio.run(run())


def test_a_cancelled_prompt_ends_its_requests(nodes: LocalRay, engines: SeededEngines, model: Path) -> None:
    async def run() -> None:
        first, _ = node_ids()
        async with running(engines, model, [first] * 4, per_node=1) as (workers, _):
            await answer(workers, 1)
            engines.is_held = True
            asked = asyncio.ensure_future(answer(workers, 2))
            await _when_busy(engines)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            while engines.num_open:
                await asyncio.sleep(0.05)
            engines.is_held = False

    asyncio.run(run())


@pytest.mark.fault(
    "loss of a node with rollout workers",
    "their prompts, and those of finished groups that were stored there, are asked again on other nodes",
)
def test_a_lost_node_loses_no_prompt(nodes: LocalRay, engines: SeededEngines, model: Path) -> None:
    """Last: the node does not come back."""

    async def run() -> None:
        expected = await answer_here(engines, model)
        first, second = node_ids()
        addresses = {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in ray.nodes()}
        async with running(engines, model, [first, first, second, second], per_node=1) as (workers, fleet):
            await answer(workers, 2)
            while not all(worker.is_live for worker in workers._workers):
                await asyncio.sleep(0.1)
            stored_there: list[int] = []
            while not stored_there:  # a worker that lives may not know yet that its engines do
                finished = await answer(workers)
                stored_there = [place for place, each in enumerate(finished) if nodes_of(each.group) == {second}]
            assert len(stored_there) < len(finished)
            assert await workers.lost(finished) == []
            engines.is_held = True
            asked = asyncio.ensure_future(answer(workers))
            await _when_busy(engines)
            await asyncio.to_thread(nodes.kill_node, addresses[second])
            await _when_lost(fleet)
            engines.is_held = False
            assert_same(await asked, expected)
            while await workers.lost(finished) != stored_there:  # Ray notices the loss of a node later
                await asyncio.sleep(0.2)
            assert_same(await TaskGroups(workers, TASK).restore(finished), expected)

    asyncio.run(run())
