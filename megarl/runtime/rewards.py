"""Reward workers on every node of a run: one pool of processes per node, each response scored where least waits.

On the driver's own node the pool is in this process, elsewhere in a Ray actor. A node that is lost takes no response
with it: they are scored on other nodes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
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
from megarl.reward.pool import ScoringTask, WorkerPool, score_of
from megarl.reward.protocol import Answer, Request
from megarl.reward.scorer import ClosableScorer
from megarl.types import Score

logger = logging.getLogger(__name__)

_LOG_FILE = "reward.log"
_MAX_WAITING = 65_536
"""Responses that one node holds, waiting or being scored."""
_REST_S = 30.0
"""How long a node that failed gets no response: Ray may start its pool again. Nodes are looked up as often."""


def build_spread_scorer(
    config: RewardConfig, find_nodes: Callable[[], Sequence[str]], *, run_folder: Path, observer: Observer
) -> ClosableScorer:
    """Return the scorer of a recipe, with worker processes on each node that `find_nodes` returns, by Ray's ids."""
    open_pool = partial(SpreadPool, find_nodes=find_nodes, run_folder=run_folder)
    return build_scorer(config, observer=observer, open_pool=open_pool)


class RewardHost:
    """The pool of one node, in a process of its own there."""

    def __init__(self, task: ScoringTask, log_path: Path) -> None:
        self._pool = WorkerPool(task, log_path=log_path)

    async def answers(self, requests: Sequence[Request]) -> list[Answer]:
        return await self._pool.answers(requests)


class _RemotePool:
    """The driver's side of a RewardHost."""

    def __init__(self, task: ScoringTask, node: str, *, log_path: Path) -> None:
        remote = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=_MAX_WAITING)(RewardHost)
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        self._host: ActorHandle = remote.options(scheduling_strategy=strategy).remote(task, log_path)

    async def answers(self, requests: Sequence[Request]) -> list[Answer]:
        try:
            answers: list[Answer] = await self._host.answers.remote(requests)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, MegarlError):
                raise error.cause from None
            raise
        return answers

    def close(self) -> None:
        # Its worker processes notice that their channel is closed, and end.
        ray.kill(self._host, no_restart=True)


@dataclass(slots=True, kw_only=True)
class _Node:
    name: str
    pool: WorkerPool | _RemotePool
    num_waiting: int = 0
    rests_until: float = 0.0
    """On the clock of time.monotonic."""


class SpreadPool:
    """A `ScoringBackend` with `task.workers` processes on every node."""

    def __init__(self, task: ScoringTask, *, find_nodes: Callable[[], Sequence[str]], run_folder: Path) -> None:
        self._task = task
        self._find_nodes = find_nodes
        self._run_folder = run_folder.absolute()
        self._nodes: dict[str, _Node] = {}
        self._looks_again = 0.0
        self._look()

    def _look(self) -> None:
        """Open a pool on each node that is new; close those of nodes that were replaced."""
        self._looks_again = time.monotonic() + _REST_S
        own = str(ray.get_runtime_context().get_node_id())
        names = self._find_nodes() or [own]
        for name in self._nodes.keys() - set(names):
            if not self._nodes[name].num_waiting:
                self._nodes.pop(name).pool.close()
        for name in names:
            if name not in self._nodes:
                self._nodes[name] = _Node(name=name, pool=self._open(name, is_own=name == own))

    def _open(self, node: str, *, is_own: bool) -> WorkerPool | _RemotePool:
        if is_own:
            return WorkerPool(self._task, log_path=self._run_folder / _LOG_FILE)
        return _RemotePool(self._task, node, log_path=self._run_folder / f"reward_{node[:8]}.log")

    async def score(self, request: Request) -> Score:
        (answer,) = await self.answers([request])
        return score_of(answer)

    async def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """Score on the node where the fewest responses wait; on another one if the node fails."""
        tried: set[str] = set()
        while True:
            now = time.monotonic()
            if now > self._looks_again:
                self._look()
            left = [node for name, node in self._nodes.items() if name not in tried]
            if not left:
                raise RewardError("no node is left that scores: the reward workers of all of them are lost")
            node = min(left, key=lambda each: (each.rests_until > now, each.num_waiting))
            node.num_waiting += 1
            try:
                return await node.pool.answers(requests)
            except ray.exceptions.RayError as error:
                logger.warning("node=%s its reward workers are lost: %s", node.name, str(error).splitlines()[0])
                node.rests_until = now + _REST_S
                tried.add(node.name)
            finally:
                node.num_waiting -= 1

    def close(self) -> None:
        for node in self._nodes.values():
            node.pool.close()
