"""Time of a step: arithmetic, memory and links at the rates that runs reach, and fixed times between phases."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from megarl.config.algorithm import AlgorithmConfig, KlConfig, KlRewardConfig, OfflineConfig, PolicyGradientConfig
from megarl.config.recipe import SamplingConfig, TrainConfig
from megarl.config.roles import CriticConfig
from megarl.planner.deployment import Deployment, Placement
from megarl.planner.hardware import DISK_GB_PER_S_PER_NODE, HOST_GB_PER_S, SWITCH_S
from megarl.planner.ledger import kl_config, offload_of
from megarl.planner.rollout_time import RolloutTime
from megarl.planner.training_time import TrainingTime
from megarl.planner.workload import StepWorkload


class PhaseName(StrEnum):
    ROLLOUT = "rollout"
    OLD = "old log-probabilities"
    REFERENCE = "reference log-probabilities"
    TEACHER = "teacher log-probabilities"
    VALUES = "values"
    UPDATE = "update"
    CRITIC_UPDATE = "critic update"
    PUBLISH = "publish"
    SWITCH = "change of hands"
    """In a shared pool: engines go to sleep and wake up, trainers leave their memory and take it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    name: PhaseName
    seconds: float
    is_waited_for: bool
    """False if another pool works longer at the same time."""
    is_longest: bool = True
    """False if another pool trains or scores longer at the same time, whatever generating takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    phases: tuple[PhaseTime, ...]
    """The phases that the step has, in their order."""
    copy_s: float
    """Time that training waits for the copy to host memory before a checkpoint is written; not part of a step."""
    save_s: float
    """Time of writing the checkpoint, during which training continues."""
    bubble: float
    """Share of the actor's update in which a pipeline stage waits for other stages."""
    num_micro_batches: int
    """Micro-batches per rank and update of the actor."""
    running_requests: int
    """Requests that run per engine, limited by its cache and `max_running_requests`."""
    trained_tokens: int

    @property
    def step_s(self) -> float:
        return sum(phase.seconds for phase in self.phases if phase.is_waited_for)

    def seconds(self, name: PhaseName) -> float:
        return sum(phase.seconds for phase in self.phases if phase.name is name)


def estimate(
    deployment: Deployment,
    workload: StepWorkload,
    *,
    algorithm: AlgorithmConfig,
    train: TrainConfig,
    sampling: SamplingConfig,
    snapshots: Mapping[str, Sequence[int]],
    publish_s: float,
) -> Timing:
    """Return the time of a step: generating and training alternate, or with `max_staleness` above 0 run concurrently
    except for the publish. `snapshots` are the bytes per rank of each stage that a checkpoint copies, by role."""
    is_offline = isinstance(algorithm, OfflineConfig)
    # A row of pairs has two answers.
    per_prompt = {"sft": 1, "dpo": 2, "reward_model": 2}.get(algorithm.kind, sampling.rollouts_per_prompt)
    sequences = train.prompts_per_step * per_prompt
    models = {
        role: TrainingTime(
            model,
            deployment.gpu,
            workload,
            num_sequences=sequences,
            tokens_per_micro_batch=train.tokens_per_micro_batch,
            num_mini_batches=_mini_batches(train, deployment.roles.critic if role == "critic" else None),
        )
        for role, model in deployment.models.items()
    }
    running, rollout = 0, list[PhaseTime]()
    if deployment.engine is not None and not is_offline:
        num_rounds, num_prompts = generated_prompts(algorithm, train, workload)
        # Prompts of so many steps are under way at once, and only the last of them waits for its longest response.
        num_steps = max(1, train.max_staleness)
        num_sequences = num_steps * num_prompts * sampling.rollouts_per_prompt
        engines = RolloutTime(deployment, workload, num_sequences=num_sequences)
        running = engines.num_running
        seconds = num_rounds * engines.seconds(num_prompts=num_steps * num_prompts) / num_steps
        rollout = [PhaseTime(name=PhaseName.ROLLOUT, seconds=seconds, is_waited_for=True)]
    publish = [PhaseTime(name=PhaseName.PUBLISH, seconds=publish_s, is_waited_for=True)] if deployment.engine else []
    scoring, learning = _work(deployment, models, train, kl_config(algorithm))
    pools = deployment.roles.used_pools
    training = [*_side_by_side(scoring, pools), *_side_by_side(learning, pools)]
    if train.max_staleness > 0:
        rollout, training = _overlapped(rollout, training)
    actor = models["actor"]
    return Timing(
        phases=(*rollout, *training, *publish, *_switch(deployment)),
        copy_s=max(max(sizes) for sizes in snapshots.values()) / (HOST_GB_PER_S * 1e9),
        save_s=_save_s(deployment.placement, snapshots),
        bubble=actor.bubble / (1 + actor.bubble),
        num_micro_batches=actor.num_micro_batches,
        running_requests=running,
        trained_tokens=sequences * workload.sequence_tokens,
    )


def generated_prompts(algorithm: AlgorithmConfig, train: TrainConfig, workload: StepWorkload) -> tuple[float, int]:
    """Return how many rounds a step generates in, and the prompts of a round.

    Dropped groups are replaced in a further round, unless oversampling has replaced them already. With `max_staleness`
    prompts are replaced at once.
    """
    filtering = algorithm.filter if isinstance(algorithm, PolicyGradientConfig) else None
    oversampling = 1.0 if filtering is None else filtering.oversampling
    at_once = train.prompts_per_step * oversampling
    kept_share = workload.kept_share if filtering is not None else None
    needed = at_once if kept_share is None else train.prompts_per_step / max(kept_share, 0.01)
    num_rounds = 1.0 if train.max_staleness else max(1.0, needed / at_once)
    return num_rounds, math.ceil(needed / num_rounds)


def _switch(deployment: Deployment) -> Iterator[PhaseTime]:
    """Yield the time in which a shared pool changes hands: offloaded weights go over the host link, twice a step."""
    if not deployment.placement.is_shared or deployment.engine is None:
        return
    rollout = deployment.roles.used_pools["rollout"]
    models = [model for model in deployment.models.values() if model.pool == rollout]
    leaving = [model for model in models if offload_of(model) == "everything"]
    copied = sum(max(stage.weight_bytes for stage in model.stages) for model in leaving)
    seconds = SWITCH_S + 2 * copied / (HOST_GB_PER_S * 1e9)
    yield PhaseTime(name=PhaseName.SWITCH, seconds=seconds, is_waited_for=True)


_Work: TypeAlias = dict[PhaseName, tuple[str, float]]
"""The role that does the work, and its seconds."""


def _work(
    deployment: Deployment, models: Mapping[str, TrainingTime], train: TrainConfig, kl: KlConfig | None
) -> tuple[_Work, _Work]:
    """Return the work before and after credit is assigned."""
    actor, critic = models["actor"], deployment.roles.critic
    scoring: _Work = {}
    learning: _Work = {}
    if isinstance(kl, KlRewardConfig):
        scoring[PhaseName.OLD] = ("actor", actor.forward_s)
    elif train.updates_per_step > 1:
        # With a single update its own forward pass gives the old log-probabilities.
        learning[PhaseName.OLD] = ("actor", actor.forward_s)
    if kl is not None and "reference" in models:
        scoring[PhaseName.REFERENCE] = ("reference", models["reference"].forward_s)
    elif deployment.keeps_reference:
        scoring[PhaseName.REFERENCE] = ("actor", actor.forward_s + actor.exchange_s)
    teachers = deployment.roles.teacher_ranks
    if teachers:
        # Pools of several teachers work side by side; how prompts divide among them is not known here.
        slowest = max(teachers, key=lambda role: models[role].forward_s)
        scoring[PhaseName.TEACHER] = (slowest, models[slowest].forward_s)
    learning[PhaseName.UPDATE] = ("actor", train.epochs * actor.update_s)
    if critic is not None:
        values = models["critic"]
        # A critic that is a language model compares itself with the weights that it started from.
        compared_s = values.forward_s + values.exchange_s if deployment.has_reference("critic") else 0.0
        scoring[PhaseName.VALUES] = ("critic", values.forward_s + compared_s)
        learning[PhaseName.CRITIC_UPDATE] = ("critic", critic.epochs * models["critic"].update_s)
    return scoring, learning


def _side_by_side(work: _Work, pools: Mapping[str, str]) -> Iterator[PhaseTime]:
    """Yield the phases: pools work concurrently, models of a pool in turn; the step waits for the slowest pool."""
    by_pool: defaultdict[str, float] = defaultdict(float)
    for role, seconds in work.values():
        by_pool[pools[role]] += seconds
    longest = max(by_pool, key=lambda pool: by_pool[pool], default=None)
    for name, (role, seconds) in work.items():
        is_longest = pools[role] == longest
        yield PhaseTime(name=name, seconds=seconds, is_waited_for=is_longest, is_longest=is_longest)


def _overlapped(rollout: Sequence[PhaseTime], training: Sequence[PhaseTime]) -> tuple[list[PhaseTime], list[PhaseTime]]:
    """Return both sides with only the longer one waited for."""
    generating_s = sum(phase.seconds for phase in rollout if phase.is_waited_for)
    training_s = sum(phase.seconds for phase in training if phase.is_waited_for)
    shorter = training if generating_s > training_s else rollout
    meanwhile = [replace(phase, is_waited_for=False) for phase in shorter]
    return (list(rollout), meanwhile) if shorter is training else (meanwhile, list(training))


def _save_s(placement: Placement, snapshots: Mapping[str, Sequence[int]]) -> float:
    """Return the time of writing all snapshots, each node to its own disk."""
    ranks = [(role, rank) for role in snapshots for rank in placement.models[role].ranks]
    num_bytes = sum(snapshots[role][rank.pipeline] for role, rank in ranks)
    nodes = {rank.place.node for _, rank in ranks}
    return num_bytes / (DISK_GB_PER_S_PER_NODE * 1e9 * len(nodes))


def _mini_batches(train: TrainConfig, critic: CriticConfig | None) -> int:
    """Return the updates per epoch of the actor, or of the critic."""
    own = critic.prompts_per_update if critic is not None else None
    return train.prompts_per_step // (own or train.prompts_per_update or train.prompts_per_step)
