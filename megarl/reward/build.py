"""Builds the scorer of the recipe's `reward` section, also one of several parts; checks the section, and tries the
reward on ground truths before a run starts anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np

from megarl.config.algorithm import AlgorithmNeeds
from megarl.config.reward import (
    BySourceRewardConfig,
    CodeTestsRewardConfig,
    ComposedRewardConfig,
    EngineJudgeRewardConfig,
    ExactRewardConfig,
    FrozenRewardConfig,
    FunctionRewardConfig,
    HttpRewardConfig,
    JudgeRewardConfig,
    RewardConfig,
    RewardModelRewardConfig,
    ScorerRewardConfig,
    SingleRewardConfig,
    WorkerRewardConfig,
    frozen_role,
    single_rewards,
)
from megarl.config.section import GIB, MIB
from megarl.errors import ConfigError, DataError, Problem, RewardError
from megarl.observe.observer import Observer
from megarl.reward.judge import ChatJudge, EngineJudgeBackend, FrozenModel, HttpJudge, RewardModelBackend, read_key
from megarl.reward.pool import PROGRAM, ScoringTask, WorkerPool
from megarl.reward.protocol import WorkerTask
from megarl.reward.remote_scorer import RemoteScorer, ScoringBackend
from megarl.reward.sandbox import Limits, Sandbox, SandboxError
from megarl.reward.scorer import ClosableScorer, ExactScorer
from megarl.stages import Scorer
from megarl.system.foreign import finite32
from megarl.system.user_code import describe_error, load_code
from megarl.system.user_process import START_TIMEOUT_S, UserLoadError, try_loading
from megarl.tokens import Content
from megarl.types import FinishReason, Prompt, Rollout, RolloutGroup, Score, ScoredGroup

_SCORERS = Path(__file__).parent / "scorers"
_FUNCTION = "compute_score"
_SANDBOX_GRACE_S = 20.0
"""The sandbox enforces the deadline itself; a worker that is this much later is broken."""


OpenPool: TypeAlias = Callable[[ScoringTask], ScoringBackend]
_MAX_TRIED = 64
"""Data sources whose reward is tried before a run."""


def build_scorer(
    config: RewardConfig | None,
    *,
    observer: Observer | None = None,
    open_pool: OpenPool = WorkerPool,
    frozen: Mapping[str, FrozenModel] | None = None,
) -> ClosableScorer:
    """Return the scorer of a recipe; `open_pool` starts the processes of a reward function.

    `frozen` has the models on engines, by their key below `roles`. Without a `config` groups are scored later.
    """
    if config is None:
        return Unscored()
    return _Builder(observer or Observer(()), open_pool, frozen or {}).build(config)


class _Builder:
    def __init__(self, observer: Observer, open_pool: OpenPool, frozen: Mapping[str, FrozenModel]) -> None:
        self._observer = observer
        self._open_pool = open_pool
        self._frozen = frozen

    def build(self, config: RewardConfig) -> ClosableScorer:
        match config:
            case BySourceRewardConfig():
                return BySourceScorer({name: self.build(each) for name, each in config.sources.items()})
            case ComposedRewardConfig():
                return ComposedScorer(config, {name: self.build(part.reward) for name, part in config.parts.items()})
            case ExactRewardConfig():
                return ExactScorer(self._observer)
            case ScorerRewardConfig():
                return UserScorer(config.code)
            case HttpRewardConfig() | JudgeRewardConfig() | RewardModelRewardConfig() | EngineJudgeRewardConfig():
                name, backend = self._remote(config)
                return RemoteScorer(backend, self._observer, name=name, config=config)
            case _:
                name = f"{config.path} {config.name}" if isinstance(config, FunctionRewardConfig) else config.kind
                return RemoteScorer(self._open_pool(scoring_task(config)), self._observer, name=name, config=config)

    def _remote(
        self, config: HttpRewardConfig | JudgeRewardConfig | RewardModelRewardConfig | EngineJudgeRewardConfig
    ) -> tuple[str, ScoringBackend]:
        """Return the name of the reward in messages, and what scores."""
        if isinstance(config, HttpRewardConfig):
            return config.url, HttpJudge(config)
        if isinstance(config, JudgeRewardConfig):
            return config.url, ChatJudge(config, self._observer)
        kind = "reward_model" if isinstance(config, RewardModelRewardConfig) else "judge"
        role = frozen_role(config, [key.partition(".")[2] for key in self._frozen if key.startswith(f"{kind}.")])
        if role is None:
            missing = f"reward {config.kind} needs the engines of roles.{kind}, which only a run starts"
            raise RewardError(f"{missing}; name engines that run already in its endpoints")
        if isinstance(config, RewardModelRewardConfig):
            return role, RewardModelBackend(config, self._frozen[role], self._observer)
        return role, EngineJudgeBackend(config, self._frozen[role], self._observer)


def check_reward(config: RewardConfig, *, timeout_s: float = START_TIMEOUT_S) -> list[Problem]:
    """Return every problem of the section: files, imports, the function's arguments, the sandbox.

    Starts its own event loop.
    """
    return [
        replace(problem, key=problem.key.replace("reward.", f"{key}.", 1))
        for key, single in single_rewards(config)
        for problem in _check(single, timeout_s=timeout_s)
    ]


def _check(config: SingleRewardConfig, *, timeout_s: float) -> Iterator[Problem]:
    match config:
        case ExactRewardConfig() | RewardModelRewardConfig() | EngineJudgeRewardConfig():
            return
        case ScorerRewardConfig():
            yield from _check_scorer(config.code)
        case HttpRewardConfig() | JudgeRewardConfig():
            if config.api_key_file is not None:
                try:
                    read_key(config.api_key_file)
                except RewardError as error:
                    yield Problem(key="reward.api_key_file", message=str(error))
        case FunctionRewardConfig() if not config.path.is_file():
            yield Problem(key="reward.path", message=f"{config.path} is not a file; name your Python file")
        case CodeTestsRewardConfig():
            try:
                Sandbox(config.sandbox, _limits(config), python=_python(config))
            except SandboxError as error:
                yield Problem(key="reward.sandbox", message=str(error))
        case _:
            problem = asyncio.run(_try_import(config, timeout_s=timeout_s))
            if problem is not None:
                yield problem


async def _try_import(config: WorkerRewardConfig, *, timeout_s: float) -> Problem | None:
    task = cast("Mapping[str, object]", scoring_task(config).worker_task)
    try:
        await try_loading(PROGRAM, task, section="reward", timeout_s=timeout_s)
    except UserLoadError as error:
        return error.problem
    return None


def _check_scorer(code: str) -> tuple[Problem, ...]:
    try:
        UserScorer(code)
    except ConfigError as error:
        return error.problems
    return ()


def scoring_task(config: WorkerRewardConfig) -> ScoringTask:
    """Return the function that the workers run, with its options and limits."""
    if isinstance(config, CodeTestsRewardConfig):
        return _code_tests_task(config)
    if isinstance(config, FunctionRewardConfig):
        path, name, options, weights, late_score = config.path.resolve(), config.name, {}, config.weights, None
        scores_groups = config.scores_groups
    else:
        path, name, weights, scores_groups = _SCORERS / f"{config.kind}.py", _FUNCTION, None, False
        options, late_score = config.options, config.late_score
    return ScoringTask(
        worker_task=WorkerTask(
            path=str(path),
            name=name,
            options=options,
            weights=weights,
            scores_groups=scores_groups,
            memory_bytes=None if config.memory_gib is None else int(config.memory_gib * GIB),
            cpu_s=config.cpu_s,
        ),
        workers=config.workers,
        deadline_s=config.deadline_s,
        samples_per_worker=config.samples_per_worker,
        late_score=late_score,
    )


def _code_tests_task(config: CodeTestsRewardConfig) -> ScoringTask:
    """The limits apply to the sandbox: the worker itself runs no code of the model."""
    options = {
        "sandbox": config.sandbox,
        "python": _python(config),
        "gives_partial_credit": config.gives_partial_credit,
        "deadline_s": config.deadline_s,
        **asdict(_limits(config)),
    }
    return ScoringTask(
        worker_task=WorkerTask(
            path=str(_SCORERS / "code_tests.py"),
            name=_FUNCTION,
            options=options,
            weights=None,
            memory_bytes=None,
            cpu_s=None,
        ),
        workers=config.workers,
        deadline_s=config.deadline_s + _SANDBOX_GRACE_S,
        samples_per_worker=config.samples_per_worker,
    )


def _limits(config: CodeTestsRewardConfig) -> Limits:
    return Limits(
        memory_bytes=int(config.memory_gib * GIB),
        disk_bytes=config.disk_mib * MIB,
        max_processes=config.max_processes,
        max_output_bytes=config.max_output_bytes,
    )


def _python(config: CodeTestsRewardConfig) -> str | None:
    return None if config.python is None else str(config.python.absolute())


class Unscored:
    """Marks all rollouts as rollouts without a score."""

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        nothing = Score(value=0.0, components={}, is_masked=True)
        return ScoredGroup(group=group, scores=(nothing,) * len(group.rollouts))

    def close(self) -> None:
        """Nothing to close."""


class BySourceScorer:
    """Scores each group with the scorer of its data source."""

    def __init__(self, scorers: Mapping[str, ClosableScorer]) -> None:
        self._scorers = scorers

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        source = group.prompt.data_source
        if source not in self._scorers:
            known = ", ".join(self._scorers)
            raise RewardError(
                f"reward.sources has no scorer for data_source {source}, prompt {group.prompt.uid}; it has {known}"
            )
        return await self._scorers[source].score(group)

    def close(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()


class UserScorer:
    """A user's own `stages.Scorer`."""

    def __init__(self, code: str) -> None:
        self._code = code
        inner = load_code(code, key="reward.code")()
        if not hasattr(inner, "score"):
            message = f"{code} gives a {type(inner).__name__} without a method score"
            raise ConfigError("recipe", (Problem(key="reward.code", message=message),))
        self._inner: Scorer = inner

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        try:
            scored = await self._inner.score(group)
        except Exception as error:
            raise RewardError(f"reward {self._code}: prompt {group.prompt.uid}: {describe_error(error)}") from error
        if not isinstance(scored, ScoredGroup):
            raise RewardError(f"reward {self._code}: returned a {type(scored).__name__}, not a ScoredGroup")
        for score in scored.scores:
            numbers = (score.value, *score.components.values(), *(score.tokens or ()), *(score.turns or ()))
            if any(finite32(number) is None for number in numbers):
                raise RewardError(f"reward {self._code}: prompt {group.prompt.uid}: a score in {score} is not finite")
        return scored

    def close(self) -> None:
        """Nothing to close."""


class ComposedScorer:
    """Adds up the scores of several scorers. A rollout that one of them cannot score has no score."""

    def __init__(self, config: ComposedRewardConfig, scorers: Mapping[str, ClosableScorer]) -> None:
        self._config = config
        self._scorers = scorers

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        tasks = [asyncio.create_task(_scores(scorer, group)) for scorer in self._scorers.values()]
        try:
            by_part = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        per_rollout = (dict(zip(self._scorers, scores, strict=True)) for scores in zip(*by_part, strict=True))
        uid = group.prompt.uid
        return ScoredGroup(group=group, scores=tuple(self._compose(scores, uid) for scores in per_rollout))

    def _compose(self, scores: Mapping[str, Score], uid: str) -> Score:
        """Return the score of one rollout; its components are the parts' scores and, as `part.name`, their own."""
        total, is_open = 0.0, True
        components: dict[str, float] = {}
        for name, score in scores.items():
            part = self._config.parts[name]
            total += part.weight * part.scaled(score.value)
            is_open &= part.gate_from is None or score.value >= part.gate_from
            components |= {name: score.value, **{f"{name}.{key}": item for key, item in score.components.items()}}
        if any(score.is_masked for score in scores.values()) or finite32(total) is None:
            return Score(value=0.0, components={}, is_masked=True)
        predictions = (score.prediction for score in scores.values() if score.prediction is not None)
        prediction = next(predictions, None)
        if not is_open:
            return Score(value=self._config.closed_score, components=components, prediction=prediction)
        return Score(value=total, components=components, prediction=prediction, tokens=self._token_rewards(scores, uid))

    def _token_rewards(self, scores: Mapping[str, Score], uid: str) -> tuple[float, ...] | None:
        """Return the weighted sum of the parts' rewards of single tokens; None if no part gives any."""
        by_part = {name: score.tokens for name, score in scores.items() if score.tokens is not None}
        if not by_part:
            return None
        if len(set(map(len, by_part.values()))) > 1:
            counts = ", ".join(f"{name} {len(rewards)}" for name, rewards in by_part.items())
            raise RewardError(
                f"prompt {uid}: the parts of reward.parts give `tokens` of different lengths ({counts}): "
                "return one number for each token in all of them"
            )
        weighted = ([self._config.parts[name].weight * each for each in rewards] for name, rewards in by_part.items())
        return tuple(map(sum, zip(*weighted, strict=True)))

    def close(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()


async def _scores(scorer: Scorer, group: RolloutGroup) -> tuple[Score, ...]:
    return (await scorer.score(group)).scores


async def try_reward(config: RewardConfig, needs: AlgorithmNeeds, prompts: Sequence[Prompt]) -> None:
    """Score the ground truth of the first prompt of each source; raise a DataError if a score or a part is missing."""
    if any(isinstance(single, FrozenRewardConfig) for _, single in single_rewards(config)):
        return  # its engines do not run yet
    firsts: dict[str, Prompt] = {}
    for prompt in prompts:
        firsts.setdefault(prompt.data_source, prompt)
    scorer = build_scorer(config)
    try:
        for prompt in islice(firsts.values(), _MAX_TRIED):
            scored = await scorer.score(_ground_truth(prompt))
            for key, name in needs.components:
                if not scored.scores[0].is_masked and name not in scored.scores[0].components:
                    names = ", ".join(scored.scores[0].components) or "none"
                    raise DataError(
                        f"{key}: the reward of prompt {prompt.uid} has no component {name}; it has {names}: return it "
                        "from the reward function or change the recipe"
                    )
    finally:
        scorer.close()


def _ground_truth(prompt: Prompt) -> RolloutGroup:
    """Return a group with one response: the ground truth."""
    nothing = np.zeros(1, dtype=np.int32)
    rollout = Rollout(
        content=Content(token_ids=nothing, logprobs=nothing.astype(np.float32), text=prompt.ground_truth),
        versions=nothing,
        loss_mask=nothing.astype(np.bool_),
        finish_reason=FinishReason.STOP,
    )
    return RolloutGroup(prompt=prompt, rollouts=(rollout,))
