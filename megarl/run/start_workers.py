"""Starts what samples and scores: rollout workers as actors, or one in the driver's process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import ray

from megarl.config.recipe import Recipe
from megarl.config.reward import RewardConfig
from megarl.episodes.play import EpisodeSetup
from megarl.observe.observer import Observer
from megarl.reward.build import build_scorer
from megarl.reward.pool import WorkerPool
from megarl.rollout.frozen import FrozenAccess, FrozenEngines, FrozenRole, models_of, open_access
from megarl.rollout.host import WorkerSetup
from megarl.rollout.task import RolloutSource, Vocabulary
from megarl.rollout.worker import RolloutWorker, cache_sizes
from megarl.rollout.workers import RolloutWorkers, divide_engines
from megarl.run.inputs import Inputs
from megarl.serving.frozen import ScoredAfterGeneration, SleepingModels
from megarl.serving.phases import SharedPhases
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
    models = await asyncio.shield(frozen)
    starter = _Starter(recipe=recipe, inputs=inputs, serving=engines, stack=stack, observer=observer)
    if not recipe.roles.scores_after_generation:
        return await starter.workers(recipe.reward, models)
    beside = {role: model for role, model in models.items() if not model.is_shared}
    workers = await starter.workers(None, beside)
    assert isinstance(engines, ManagedServing), "rollout engines in a pool are started"
    assert isinstance(engines.phases, SharedPhases), "the pool is shared"
    scorer = starter.scorer(recipe.reward, models_of(models))
    scored = ScoredAfterGeneration(workers, scorer, phases=engines.phases, models=SleepingModels.of(models))
    stack.push_async_callback(scored.close)
    return scored


@dataclass(frozen=True, slots=True, kw_only=True)
class _Starter:
    recipe: Recipe
    inputs: Inputs
    serving: ExternalServing | ManagedServing
    stack: AsyncExitStack
    """Ends what is started."""
    observer: Observer

    async def workers(self, reward: RewardConfig | None, frozen: Mapping[str, FrozenRole]) -> RolloutSource:
        """Return the rollout workers: actors, or one in this process. None as `reward`: they score nothing."""
        config, fleet = self.serving.config, self.serving.fleet
        own_node = str(ray.get_runtime_context().get_node_id())
        nodes = self.serving.nodes if isinstance(self.serving, ManagedServing) else (own_node,) * len(fleet.engines)
        default = 0 if len(set(nodes)) == 1 else _PER_NODE
        per_node = default if config.workers is None else config.workers
        if per_node == 0:
            return self._local_worker(reward, models_of(frozen))
        workers = RolloutWorkers(
            fleet,
            self._setups(divide_engines(nodes, per_node=per_node), reward, open_access(frozen, self.stack)),
            observer=self.observer,
            rollouts_per_prompt=self.recipe.sampling.rollouts_per_prompt,
        )
        await self.stack.enter_async_context(workers.running())
        return workers

    def scorer(self, reward: RewardConfig | None, models: Mapping[str, FrozenEngines]) -> Scorer:
        """Return the scorer of a worker in this process."""
        open_pool = partial(WorkerPool, log_path=self.recipe.run_folder / "reward.log")
        scorer = build_scorer(reward, observer=self.observer, open_pool=open_pool, frozen=models)
        self.stack.callback(scorer.close)
        return scorer

    def _local_worker(self, reward: RewardConfig | None, models: Mapping[str, FrozenEngines]) -> RolloutWorker:
        """Return a worker in this process, which uses the fleet of the run."""
        inputs, fleet, episodes = self.inputs, self.serving.fleet, self._episodes()
        open_player = None
        if episodes is not None:
            open_player = episodes.opener(
                inputs.tokenizer,
                cache_sizes=partial(cache_sizes, fleet.engines),
                retried=lambda cause: fleet.requests.request_retried(cause),
                log_path=self.recipe.run_folder / "environment.log",
            )
        worker = RolloutWorker(
            fleet,
            vocabulary=Vocabulary.of(inputs.shape, inputs.tokenizer),
            scorer=self.scorer(reward, models),
            max_attempts=self.serving.config.max_attempts,
            open_player=open_player,
            teachers=models,
        )
        self.stack.push_async_callback(worker.close)
        return worker

    def _setups(
        self, divided: Sequence[tuple[str, tuple[int, ...]]], reward: RewardConfig | None, frozen: FrozenAccess | None
    ) -> list[WorkerSetup]:
        """Return the setups of workers in other processes; `divided` has the node and the engines of each."""
        config, fleet, inputs = self.serving.config, self.serving.fleet, self.inputs
        return [
            WorkerSetup(
                index=index,
                node=node,
                own=own,
                model_folder=inputs.tokenizer.folder.absolute(),
                shape=inputs.shape,
                reward=reward,
                frozen=frozen,
                num_on_node=sum(other == node for other, _ in divided),
                num_workers=len(divided),
                log_path=self.recipe.run_folder.absolute() / f"reward_{index}.log",
                episodes=self._episodes(),
                max_outstanding=config.outstanding_requests,
                max_attempts=config.max_attempts,
                publish_timeout_s=fleet.publish_timeout_s,
                request_timeout_s=fleet.engines[0].client.request_timeout_s,
                silence_timeout_s=config.silence_timeout_s,
            )
            for index, (node, own) in enumerate(divided)
        ]

    def _episodes(self) -> EpisodeSetup | None:
        environment, recipe = self.recipe.environment, self.recipe
        if environment is None:
            return None
        return EpisodeSetup.of(
            environment,
            self.inputs.tokenizer,
            self.serving.config,
            max_context_tokens=recipe.max_context_tokens,
            bind=recipe.network.bind,
        )
