"""Whether frozen models can have their pools, are of the right kind and are used, and teachers know the tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.config.checks.files import check_model_folder, shape_or_problem
from megarl.config.checks.roles import check_role_split
from megarl.config.checks.splits import check_engine_split, check_head
from megarl.config.reward import (
    EngineJudgeRewardConfig,
    RewardConfig,
    RewardModelRewardConfig,
    frozen_role,
    single_rewards,
)
from megarl.config.roles import EngineRoleConfig, RolesConfig, TeacherRanksConfig
from megarl.config.section import Device
from megarl.errors import Problem
from megarl.families.shape import ModelShape

_DEFAULT_LABELS = 2
"""Outputs of a classifier whose config.json names none, in transformers."""
_TOKENIZER = "tokenizer.json"


def check_frozen(
    roles: RolesConfig, reward: RewardConfig, *, device: Device, max_staleness: int, has_environment: bool
) -> Iterator[Problem]:
    """Yield shared pools that cannot be used in turns, models that no reward uses, and rewards without their model."""
    turns = roles.frozen_in_turns
    for role, pool in turns.items():
        yield from _sharing(role, pool, roles, device=device, max_staleness=max_staleness)
    if len(set(turns.values())) > 1:
        pools = ", ".join(sorted(set(turns.values())))
        message = f"pools {pools} have frozen models beside other roles; only one pool may"
        yield Problem(key=f"roles.{next(iter(turns))}.pool", message=message)
    if roles.scores_after_generation and has_environment:
        message = "scores episodes as they end, but a frozen model has the pool of rollout; give it another"
        yield Problem(key="environment", message=message)
    used: set[str | None] = set()
    for key, single in single_rewards(reward):
        if not isinstance(single, RewardModelRewardConfig | EngineJudgeRewardConfig):
            continue
        kind, names = (
            ("reward_model", roles.reward_model)
            if isinstance(single, RewardModelRewardConfig)
            else ("judge", roles.judge)
        )
        scoring = frozen_role(single, names)
        used.add(scoring)
        if scoring is None:
            remedy = f"roles.{kind} has {', '.join(names)}" if names else f"add roles.{kind}"
            wrong = "is missing" if single.role is None else f"{single.role} is not there"
            yield Problem(key=f"{key}.role", message=f"{wrong}; {remedy}")
        if isinstance(single, RewardModelRewardConfig) and single.clip is not None and single.clip[0] >= single.clip[1]:
            low, high = single.clip
            yield Problem(key=f"{key}.clip", message=f"{low:g} is not below {high:g}; swap them")
        if isinstance(single, EngineJudgeRewardConfig):
            yield from _judge(single, key)
    for unused in (role for role in roles.frozen if role not in {*used, *roles.teachers}):
        yield Problem(key=f"roles.{unused}", message="no reward uses it; remove it, or name it in the reward")


def _sharing(role: str, pool: str, roles: RolesConfig, *, device: Device, max_staleness: int) -> Iterator[Problem]:
    if role.startswith("teacher."):
        message = f"pool {pool} has another role; a teacher is asked while responses are generated: give it its own"
        yield Problem(key=f"roles.{role}.pool", message=message)
        return
    others = [other for other, used in roles.used_pools.items() if used == pool and other not in roles.frozen]
    if not others:
        message = f"pool {pool} has only frozen models, which would always be awake; give each a pool of its own"
        yield Problem(key=f"roles.{role}.pool", message=message)
        return
    if max_staleness and "rollout" not in others:
        message = f"{max_staleness} scores while {others[0]} works, but {role} has its pool {pool}; set it to 0"
        yield Problem(key="train.max_staleness", message=message)
    if device == "cuda" and roles.frozen[role].max_cached_tokens is None:
        message = f"missing; pool {pool} is shared, and its memory has to be divided; see `megarl plan`"
        yield Problem(key=f"roles.{role}.max_cached_tokens", message=message)


def _judge(config: EngineJudgeRewardConfig, key: str) -> Iterator[Problem]:
    if config.max_tokens is not None and config.is_expected:
        yield Problem(key=f"{key}.is_expected", message="a judge that writes gives one answer; remove it or max_tokens")
    if config.max_tokens is None and config.max_reasoning_chars:
        message = "the judge writes nothing; set max_tokens, the limit of its whole reply"
        yield Problem(key=f"{key}.max_reasoning_chars", message=message)


def check_frozen_models(roles: RolesConfig, *, device: Device) -> Iterator[Problem]:
    """Yield folders that are no model of the kind that the role needs."""
    for role, config in roles.frozen.items():
        if role in roles.teachers:
            continue  # `check_teachers`
        key = f"roles.{role}.model"
        shape = shape_or_problem(config.model, key)
        if isinstance(shape, Problem):
            yield shape
            continue
        for problem in check_model_folder(config.model, needs_template=True):
            yield Problem(key=key, message=problem.message)
        yield from _kind(role, config.model, shape)
        if config.pool is not None:
            yield from _served(shape, config, role=role, device=device)


def _served(shape: ModelShape, config: EngineRoleConfig, *, role: str, device: Device) -> Iterator[Problem]:
    """Yield what keeps engines from serving the model."""
    prefix = f"roles.{role}."
    yield from check_head(shape, key=f"{prefix}model")
    yield from check_engine_split(
        shape, tensor=config.tensor, expert=config.expert, pads_vocabulary=device == "cpu", prefix=prefix
    )


def _kind(role: str, folder: Path, shape: ModelShape) -> Iterator[Problem]:
    needs_classifier, key = role.startswith("reward_model."), f"roles.{role}.model"
    if shape.has_value_head is not needs_classifier:
        actual = "a sequence classifier" if shape.has_value_head else "a language model"
        needed = "a ...ForSequenceClassification folder" if needs_classifier else "a language model"
        yield Problem(key=key, message=f"{folder} is {actual}; name {needed}")
    elif needs_classifier and (num_labels := _num_labels(folder)) != 1:
        message = f"{folder} has {num_labels} labels; a reward model has one output (num_labels 1)"
        yield Problem(key=key, message=message)


def _num_labels(folder: Path) -> int:
    raw = json.loads((folder / "config.json").read_text())
    labels = raw.get("id2label")
    return len(labels) if labels else int(raw.get("num_labels", _DEFAULT_LABELS))


def check_teachers(
    roles: RolesConfig,
    policy_folder: Path,
    policy: ModelShape,
    *,
    num_top: int,
    max_context_tokens: int,
    device: Device,
) -> Iterator[Problem]:
    """Yield what keeps the model of a teacher from scoring the tokens of the policy, and `num_top` at each place."""
    if num_top > policy.vocab:
        message = f"{num_top} is more than the {policy.vocab} tokens of the vocabulary"
        yield Problem(key="algorithm.distillation.top_k", message=message)
    for role, config in roles.teachers.items():
        key = f"roles.{role}.model"
        shape = shape_or_problem(config.model, key)
        if isinstance(shape, Problem):
            yield shape
            continue
        for problem in check_model_folder(config.model, needs_template=False):
            yield Problem(key=key, message=problem.message)
        if shape.has_value_head:
            yield Problem(key=key, message=f"{config.model} is a sequence classifier; name a language model")
            continue
        num_tokens = max_context_tokens
        if isinstance(config, TeacherRanksConfig):
            yield from check_role_split(shape, config, role=role)
        else:
            num_tokens += 1  # SGLang wants room for one more
            if config.pool is not None:
                yield from _served(shape, config, role=role, device=device)
        if num_tokens > shape.max_context_tokens:
            message = f"its context of {shape.max_context_tokens} tokens is below the {num_tokens} of prompt + response"
            yield Problem(key=key, message=f"{message}; lower sampling.max_response_tokens, or name another model")
        difference = vocabulary_difference(config.model, policy_folder, shape, policy)
        if difference is not None:
            message = f"{difference}; a teacher scores the policy's tokens: name a model with the same tokenizer"
            yield Problem(key=key, message=message)


def vocabulary_difference(teacher: Path, policy: Path, shape: ModelShape, policy_shape: ModelShape) -> str | None:
    """Return how two vocabularies differ; None if the tokens are the same, whatever the padding of their heads."""
    files = [folder / _TOKENIZER for folder in (teacher, policy)]
    if not all(file.is_file() for file in files):
        sizes = f"its vocabulary has {shape.vocab} tokens, that of model.path {policy_shape.vocab}"
        return None if shape.vocab == policy_shape.vocab else sizes
    contents = [file.read_bytes() for file in files]
    if contents[0] != contents[1]:
        own, expected = (_tokens(json.loads(content)) for content in contents)
        for token_id in sorted(own.keys() | expected.keys()):
            pair = own.get(token_id), expected.get(token_id)
            if pair[0] != pair[1]:
                return f"its token {token_id} is {_shown(pair[0])}, that of model.path {_shown(pair[1])}"
    return None


def _tokens(tokenizer: Mapping[str, object]) -> dict[int, str]:
    """Return the tokens of a tokenizer.json by their ids."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # of a unigram model: pairs of a token and its score
        tokens = {index: str(pair[0]) for index, pair in enumerate(vocabulary)}
    else:
        tokens = {int(index): token for token, index in (vocabulary or {}).items()}
    return tokens | {int(each["id"]): str(each["content"]) for each in (added if isinstance(added, list) else ())}


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token)
