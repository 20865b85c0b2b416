"""Rollout workers on a real Ray of two nodes on this machine, with engines that have no model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from megarl.cluster.local_ray import private_ray
from megarl.config.model import read_model_shape
from megarl.config.reward import ExactRewardConfig, RewardConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.engine.fleet import Fleet
from megarl.observe.observer import Observer
from megarl.reward.build import build_scorer
from megarl.rollout.task import RolloutSource, RolloutTask, Sampling, Vocabulary
from megarl.rollout.worker import RolloutWorker
from megarl.types import PolicyVersion, Prompt, ScoredGroup
from tests.cluster.worker_setup import quick_ray
from tests.run.seeded_engine import SeededEngines

with private_ray():
    # Ray reads its environment when it is imported, here as in a run.
    import ray

    from megarl.cluster.local_ray import LocalRay, local_ray
    from megarl.cluster.stored import nodes_of
    from megarl.rollout.groups import SampledGroups
    from megarl.rollout.host import WorkerSetup
    from megarl.rollout.workers import RolloutWorkers, divide_engines

NUM_ENGINES = 4
NUM_ROLLOUTS = 4
TASK = RolloutTask(
    sampling=Sampling(num_rollouts=NUM_ROLLOUTS, temperature=1.0, top_p=1.0, top_k=None, max_response_tokens=40),
    seed=7,
)
EXACT = ExactRewardConfig(kind="exact")
NUM_PROMPTS = 12
DEADLINE_S = 400.0

_Result = TypeVar("_Result")


class Counts:
    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()

        self.num_cached = 0

    def request_retried(self, cause: str) -> None:
        self.causes[cause] += 1

    def prompt_read(self, num_tokens: int, *, num_cached: int) -> None:
        assert num_cached <= num_tokens
        self.num_cached += num_cached

    def draft_checked(self, num_tokens: int, *, num_passes: int) -> None:
        assert num_tokens == num_passes == 0, "no engine here drafts"


@dataclass(frozen=True, kw_only=True)
class Plane:
    """Running workers and their fleet, with the event loop they live in."""

    runner: asyncio.Runner
    workers: RolloutWorkers
    fleet: Fleet
    counts: Counts

    def run(self, task: Coroutine[None, None, _Result]) -> _Result:
        return self.runner.run(_bounded(task))


async def _bounded(task: Coroutine[None, None, _Result]) -> _Result:
    async with asyncio.timeout(DEADLINE_S):
        return await task


@contextmanager
def two_nodes(log_folder: Path) -> Iterator[LocalRay]:
    with ExitStack() as stack:
        stack.enter_context(private_ray())
        stack.enter_context(quick_ray())
        nodes = LocalRay(device="cpu", log_folder=log_folder, has_several_nodes=True)
        stack.enter_context(local_ray(nodes, num_slots=1))
        nodes.start_node(num_slots=1)
        nodes.wait_started()
        ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
        stack.callback(ray.shutdown)
        yield nodes


def node_ids() -> list[str]:
    """The driver's node first."""
    own = str(ray.get_runtime_context().get_node_id())
    return sorted((str(node["NodeID"]) for node in ray.nodes() if node["Alive"]), key=lambda node: node != own)


@contextmanager
def plane(
    engines: SeededEngines,
    model: Path,
    engine_nodes: Sequence[str],
    *,
    per_node: int,
    silence_timeout_s: float = 60,
    reward: RewardConfig = EXACT,
    observer: Observer | None = None,
) -> Iterator[Plane]:
    """Workers for engines on these nodes, all of which have started."""
    with asyncio.Runner() as runner:
        opened = running(
            engines,
            model,
            engine_nodes,
            per_node=per_node,
            silence_timeout_s=silence_timeout_s,
            reward=reward,
            observer=observer or Observer(()),
        )
        workers, fleet, counts = runner.run(_bounded(opened.__aenter__()))
        try:
            yield Plane(runner=runner, workers=workers, fleet=fleet, counts=counts)
        finally:
            runner.run(_bounded(opened.__aexit__(None, None, None)))


@asynccontextmanager
async def running(
    engines: SeededEngines,
    model: Path,
    engine_nodes: Sequence[str],
    *,
    per_node: int,
    silence_timeout_s: float,
    reward: RewardConfig,
    observer: Observer,
) -> AsyncIterator[tuple[RolloutWorkers, Fleet, Counts]]:
    fleet = Fleet(engines.clients(), max_outstanding=8, publish_timeout_s=120)
    fleet.requests = counts = Counts()
    await fleet.committed(PolicyVersion(int(engines.version)), fleet.engines)  # what an earlier test left them at
    shares = divide_engines(engine_nodes, per_node=per_node)
    setups = [
        WorkerSetup(
            index=index,
            node=node,
            own=own,
            model_folder=model,
            shape=read_model_shape(model),
            reward=reward,
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
    workers = RolloutWorkers(fleet, setups, observer=observer, rollouts_per_prompt=NUM_ROLLOUTS)
    async with workers.running():
        await workers.processes()  # else the first one may answer all prompts
        yield workers, fleet, counts
    await fleet.close()


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


async def answer(workers: RolloutSource, number: int = NUM_PROMPTS) -> list[ScoredGroup]:
    answered = await asyncio.gather(*(workers.answer(prompt, TASK) for prompt in prompts(number)))
    return [each.scored for each in answered]


def answer_here(engines: SeededEngines, model: Path) -> list[ScoredGroup]:
    """A worker in this process does the same."""

    async def run() -> list[ScoredGroup]:
        shape = read_model_shape(model)
        fleet = Fleet(engines.clients(), max_outstanding=8, publish_timeout_s=120)
        await fleet.committed(PolicyVersion(int(engines.version)), fleet.engines)
        worker = RolloutWorker(
            fleet,
            vocabulary=Vocabulary.of(shape, load_tokenizer(model, vocab=shape.vocab)),
            scorer=build_scorer(EXACT),
            max_attempts=3,
        )
        try:
            return await answer(worker)
        finally:
            await fleet.close()

    return asyncio.run(run())


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


async def when_busy(engines: SeededEngines) -> None:
    while not engines.num_open:
        await asyncio.sleep(0.02)


async def when_lost(counts: Counts) -> None:
    """Return when prompts of a lost worker are asked again."""
    while not counts.causes["worker_lost"]:
        await asyncio.sleep(0.02)


async def when_whole(workers: RolloutWorkers) -> None:
    while not all(worker.is_live for worker in workers._workers):
        await asyncio.sleep(0.1)


async def lose_node(
    each: Plane,
    nodes: LocalRay,
    node: str,
    engines: SeededEngines,
    finished: Sequence[ScoredGroup],
    expected: Sequence[ScoredGroup],
) -> None:
    """Kill a node while its workers have requests; what they had, and finished groups stored there, are asked again."""
    address = next(str(entry["NodeManagerAddress"]) for entry in ray.nodes() if entry["NodeID"] == node)
    stored_there = [place for place, scored in enumerate(finished) if nodes_of(scored.group) == {node}]
    engines.is_held = True
    asked = asyncio.ensure_future(answer(each.workers))
    await when_busy(engines)
    await asyncio.to_thread(nodes.kill_node, address)
    await when_lost(each.counts)
    engines.is_held = False
    assert_same(await asked, expected)
    while await each.workers.lost(finished) != stored_there:  # Ray notices the loss of a node later
        await asyncio.sleep(0.2)
    assert_same(await SampledGroups(each.workers, TASK, Observer(())).replace_lost(finished), expected)
