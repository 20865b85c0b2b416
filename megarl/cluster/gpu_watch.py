"""The health of all GPUs of a run, asked of every node once a minute: metrics, and a warning for each problem."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.cluster import RAY_FAILURES, address_of
from megarl.cluster.tasks import beside
from megarl.observe.observer import Observer
from megarl.system.gpu_health import NodeHealth, read_health

_EVERY_S = 60.0
_ANSWER_S = 45.0

logger = logging.getLogger(__name__)


class GpuWatch:
    """Says each problem once, and counts the driver's messages that came after the first look."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._told: set[str] = set()
        self._seen: dict[str, int] = {}
        """The number of the last message of each node's kernel log."""
        self._num_xids = 0

    def note(self, nodes: Mapping[str, NodeHealth]) -> None:
        """Report the health of nodes, by their addresses."""
        for address, health in nodes.items():
            problems = [(f"GPU {gpu.index}", text) for gpu in health.gpus for text in gpu.problems()]
            for name, text in problems:
                self._tell(f"{name} of node {address} {text}", key=f"{address} {name} {text.split()[:2]}")
            first = address not in self._seen
            new = [(number, text) for number, text in health.xids if first or number > self._seen[address]]
            self._seen[address] = max((number for number, _ in health.xids), default=self._seen.get(address, -1))
            if not first:
                self._num_xids += len(new)
                for number, text in new:
                    self._tell(f"node {address}: {text}", key=f"{address} {number}")
        gpus = [gpu for health in nodes.values() for gpu in health.gpus]
        if gpus:
            self._observer.gpus_checked(gpus, num_xids=self._num_xids)

    def _tell(self, text: str, *, key: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._observer.warned(text)


@asynccontextmanager
async def watched_gpus(nodes: Sequence[str], observer: Observer, *, every_s: float = _EVERY_S) -> AsyncIterator[None]:
    """Ask these nodes for the health of their GPUs inside the block; `nodes` are Ray's ids."""
    watch = GpuWatch(observer)

    async def look() -> None:
        while nodes:
            watch.note(await _ask(nodes))
            await asyncio.sleep(every_s)

    async with beside(look):
        yield


async def _ask(nodes: Sequence[str]) -> dict[str, NodeHealth]:
    """Return the health of the nodes that answer; a lost one is noticed elsewhere."""
    task = ray.remote(num_cpus=0, max_retries=0)(read_health)
    try:
        started = {
            await asyncio.to_thread(address_of, node): task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote()
            for node in nodes
        }
    except RAY_FAILURES as error:
        logger.info("GPUs not looked at: %s", error)
        return {}

    async def answer(reference: ray.ObjectRef) -> NodeHealth | None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                health: NodeHealth = await reference
                return health
        except (TimeoutError, *RAY_FAILURES):
            return None

    answers = await asyncio.gather(*map(answer, started.values()))
    return {address: health for address, health in zip(started, answers, strict=True) if health is not None}
