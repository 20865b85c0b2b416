"""Starts what samples and scores: rollout workers as actors, or one in the driver's process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import ray

from megarl.config.recipe import Recipe
from megarl.config.reward import RewardConfig
from megarl.engine.dispatch import divide_engines
from megarl.engine.fleet import Fleet
from megarl.episodes.play import EpisodeSetup
from megarl.observe.observer import Observer
from megarl.reward.build import build_scorer
from megarl.reward.pool import WorkerPool
from megarl.rollout.frozen import FrozenEngines
from megarl.rollout.generator import Vocabulary
from megarl.rollout.host import WorkerSetup
from megarl.rollout.worker import RolloutSource, RolloutWorker, cache_sizes
from megarl.rollout.workers import RolloutWorkers
from megarl.run.inputs import Inputs
from megarl.serving.frozen import FrozenRole, models_of, open_access
from megarl.serving.frozen_phases import score_after_generation
from megarl.serving.serving import ExternalServing, ManagedServing, NoServing, Serving
from megarl.stages import Scorer

_PER_NODE = 1
"""Workers of a node by default, in runs of several nodes."""


async def start_workers(
    recipe: Recipe,
    inputs: Inputs,
    serving: asyncio.Task[Serving],
    frozen: asyncio.Task[dict[str, FrozenRole]],
    stack: AsyncExitStack,
    observer: Observer,
) -> RolloutSource | None:
    """Return the rollout workers of a run when its engines and frozen models run; None without engines."""
    engines = await asyncio.shield(serving)
    if isinstance(engines, NoServing):
        return None
    environment, run_folder = recipe.environment, recipe.run_folder
    episodes = None
    if environment is not None:
        episodes = EpisodeSetup.of(
            environment, inputs.tokenizer, engines.config, max_context_tokens=recipe.max_context_tokens
        )
    models = await asyncio.shield(frozen)
    is_scored_later = recipe.roles.scores_after_generation
    workers = await open_workers(
        engines,
        inputs,
        stack,
        None if is_scored_later else recipe.reward,
        {role: model for role, model in models.items() if not (is_scored_later and model.is_shared)},
        episodes=episodes,
        rollouts_per_prompt=recipe.sampling.rollouts_per_prompt,
        run_folder=run_folder,
        observer=observer,
    )
    if not is_scored_later:
        return workers
    return score_after_generation(
        workers, recipe.reward, engines, models, stack, run_folder=run_folder, observer=observer
    )


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
) -> RolloutSource:
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
