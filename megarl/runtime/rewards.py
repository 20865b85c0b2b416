"""Reward workers on every node of a run: one pool of processes per node, each response scored where least waits.

On the driver's own node the pool is in this process, elsewhere in a Ray actor. A node that is lost takes no response
with it: they are scored on other nodes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.config.reward import RewardConfig
from megarl.errors import MegarlError, RewardError
from megarl.observe.observer import Observer
from megarl.reward.build import build_scorer
from megarl.reward.pool import ScoringTask, WorkerPool
from megarl.reward.protocol import Request
from megarl.reward.scorer import ClosableScorer, ScoringBackend
from megarl.types import Score

logger = logging.getLogger(__name__)

_LOG_FILE = "reward.log"
_MAX_WAITING = 65_536
"""Responses that one node holds, waiting or being scored."""
_REST_S = 30.0
"""How long a node that failed gets no response; Ray may start its pool again meanwhile."""


def build_spread_scorer(
    config: RewardConfig, nodes: Sequence[str], *, run_folder: Path, observer: Observer
) -> ClosableScorer:
    """Return the scorer of a recipe, with worker processes on each of the nodes, given by Ray's ids."""
    open_pool = partial(SpreadPool, nodes=nodes, run_folder=run_folder)
    return build_scorer(config, observer=observer, open_pool=open_pool)


class RewardHost:
    """The pool of one node, in a process of its own there."""

    def __init__(self, task: ScoringTask, log_path: Path) -> None:
        self._pool = WorkerPool(task, log_path=log_path)

    async def score(self, request: Request) -> Score:
        return await self._pool.score(request)


class _RemotePool:
    """The driver's side of a RewardHost."""

    def __init__(self, task: ScoringTask, node: str, *, log_path: Path) -> None:
        remote = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=_MAX_WAITING)(RewardHost)
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        self._host: ActorHandle = remote.options(scheduling_strategy=strategy).remote(task, log_path)

    async def score(self, request: Request) -> Score:
        try:
            score: Score = await self._host.score.remote(request)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, MegarlError):
                raise error.cause from None
            raise
        return score

    def close(self) -> None:
        # Its worker processes notice that their channel is closed, and end.
        ray.kill(self._host, no_restart=True)


@dataclass(slots=True, kw_only=True)
class _Node:
    name: str
    pool: ScoringBackend
    num_waiting: int = 0
    rests_until: float = 0.0
    """On the clock of time.monotonic."""


class SpreadPool:
    """A `ScoringBackend` with `task.workers` processes on every node."""

    def __init__(self, task: ScoringTask, *, nodes: Sequence[str], run_folder: Path) -> None:
        own = str(ray.get_runtime_context().get_node_id())
        self._nodes: list[_Node] = []
        for node in nodes or [own]:
            is_own = node == own
            log_path = run_folder.absolute() / (_LOG_FILE if is_own else f"reward_{node[:8]}.log")
            pool: ScoringBackend = (
                WorkerPool(task, log_path=log_path) if is_own else _RemotePool(task, node, log_path=log_path)
            )
            self._nodes.append(_Node(name=node, pool=pool))

    async def score(self, request: Request) -> Score:
        """Score on the node where the fewest responses wait; on another one if the node fails."""
        tried: list[_Node] = []
        while True:
            now = time.monotonic()
            left = [node for node in self._nodes if node not in tried]
            if not left:
                raise RewardError(
                    f"no node can score: {', '.join(node.name for node in tried)} failed; see reward*.log"
                )
            node = min(left, key=lambda each: (each.rests_until > now, each.num_waiting))
            node.num_waiting += 1
            try:
                return await node.pool.score(request)
            except ray.exceptions.RayError as error:
                logger.warning("node=%s its reward workers are lost: %s", node.name, str(error).splitlines()[0])
                node.rests_until = now + _REST_S
                tried.append(node)
            finally:
                node.num_waiting -= 1

    def close(self) -> None:
        for node in self._nodes:
            node.pool.close()
