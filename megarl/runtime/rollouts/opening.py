"""Which rollout workers a run has: actors on the nodes of its engines, or one in the driver's process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import ray

from megarl.config.reward import RewardConfig
from megarl.episodes.play import EpisodeSetup
from megarl.observe.observer import Observer
from megarl.reward.build import build_scorer
from megarl.reward.pool import WorkerPool
from megarl.rollout.dispatch import divide_engines
from megarl.rollout.fleet import Fleet
from megarl.rollout.frozen import FrozenEngines
from megarl.rollout.generator import Vocabulary
from megarl.rollout.worker import Answering, RolloutWorker, cache_sizes
from megarl.runtime.engines.frozen import FrozenRole, models_of, open_access
from megarl.runtime.engines.serving import ExternalServing, ManagedServing
from megarl.runtime.inputs import Inputs
from megarl.runtime.rollouts.host import WorkerSetup
from megarl.runtime.rollouts.workers import RolloutWorkers
from megarl.stages import Scorer

_PER_NODE = 1  # by default, in runs of several nodes


async def open_workers(
    serving: ExternalServing | ManagedServing,
    inputs: Inputs,
    stack: AsyncExitStack,
    reward: RewardConfig | None,
    frozen: Mapping[str, FrozenRole],
    *,
    episodes: EpisodeSetup | None,
    rollouts_per_prompt: int,
    run_folder: Path,
    observer: Observer,
) -> Answering:
    """Return the rollout workers of a run: actors, or one in this process. None as `reward`: they score nothing."""
    config, fleet = serving.config, serving.fleet
    own_node = str(ray.get_runtime_context().get_node_id())
    nodes = serving.nodes if isinstance(serving, ManagedServing) else (own_node,) * len(fleet.engines)
    default = 0 if len(set(nodes)) == 1 else _PER_NODE
    per_node = default if config.workers is None else config.workers
    if per_node == 0:
        open_pool = partial(WorkerPool, log_path=run_folder / "reward.log")
        models = models_of(frozen)
        scorer = build_scorer(reward, observer=observer, open_pool=open_pool, frozen=models)
        stack.callback(scorer.close)
        log_path = run_folder / "environment.log"
        worker = _local_worker(fleet, inputs, scorer, models, config.max_attempts, episodes, log_path)
        stack.push_async_callback(worker.close)
        return worker
    shares, access = divide_engines(nodes, per_node=per_node), open_access(frozen, stack)
    setups = [
        WorkerSetup(
            index=index,
            node=node,
            own=own,
            model_folder=inputs.tokenizer.folder.absolute(),
            shape=inputs.shape,
            reward=reward,
            frozen=access,
            num_on_node=sum(other == node for other, _ in shares),
            num_workers=len(shares),
            log_path=run_folder.absolute() / f"reward_{index}.log",
            episodes=episodes,
            max_outstanding=config.max_running_requests,
            max_attempts=config.max_attempts,
            publish_timeout_s=fleet.publish_timeout_s,
            request_timeout_s=fleet.engines[0].client.request_timeout_s,
            silence_timeout_s=config.silence_timeout_s,
        )
        for index, (node, own) in enumerate(shares)
    ]
    workers = RolloutWorkers(fleet, setups, observer=observer, rollouts_per_prompt=rollouts_per_prompt)
    await stack.enter_async_context(workers.running())
    return workers


def _local_worker(
    fleet: Fleet,
    inputs: Inputs,
    scorer: Scorer,
    models: Mapping[str, FrozenEngines],
    max_attempts: int,
    episodes: EpisodeSetup | None,
    log_path: Path,
) -> RolloutWorker:
    """Return a worker in this process, which uses the fleet of the run."""
    open_player = None
    if episodes is not None:
        open_player = episodes.opener(
            inputs.tokenizer,
            cache_sizes=partial(cache_sizes, fleet.engines),
            retried=lambda cause: fleet.requests.request_retried(cause),
            log_path=log_path,
        )
    vocabulary = Vocabulary.of(inputs.shape, inputs.tokenizer)
    return RolloutWorker(
        fleet, vocabulary=vocabulary, scorer=scorer, max_attempts=max_attempts, open_player=open_player, teachers=models
    )
