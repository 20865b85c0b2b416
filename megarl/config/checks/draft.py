"""Whether engines can draft tokens and keep the policy's probabilities, and whether a draft knows its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.config.checks.files import shape_or_problem
from megarl.config.checks.frozen import vocabulary_difference
from megarl.config.checks.roles import check_optimizer, check_role_split
from megarl.config.checks.splits import check_engine_split
from megarl.config.draft import DraftConfig, EagleDraftConfig, ModelDraftConfig
from megarl.config.model import read_eagle_head
from megarl.config.recipe import Recipe
from megarl.config.roles import DrafterConfig, RolloutRoleConfig
from megarl.errors import ConfigError, Problem
from megarl.families.shape import ModelShape

_KEY = "roles.rollout.draft"


def check_draft(recipe: Recipe) -> Iterator[Problem]:
    """Yield keys with which drafted tokens would not be the policy's, or SGLang drafts none, whatever the model."""
    rollout = recipe.roles.rollout
    if recipe.roles.drafter is not None:
        yield from _drafter(recipe, recipe.roles.drafter, None if rollout is None else rollout.draft)
    if rollout is None or rollout.draft is None:
        return
    if recipe.run.device == "cpu" and rollout.draft.kind != "model":
        message = f"on a CPU engines check drafts of kind model, and none of {rollout.draft.kind}; remove it"
        yield Problem(key=f"{_KEY}.kind", message=message)
    elif recipe.run.device == "cpu" and rollout.draft.tokens > 1:
        message = "on a CPU SGLang computes one token of a draft before each pass; set it to 1"
        yield Problem(key=f"{_KEY}.num_tokens", message=message)
    if rollout.is_deterministic:
        message = "a pass over drafted tokens rounds in another order than one over single tokens; remove one of both"
        yield Problem(key="roles.rollout.is_deterministic", message=message)
    if recipe.model.served_lora is not None:
        message = (
            "a draft checks against one set of weights, and model.lora serves several; remove it, or merge adapters"
        )
        yield Problem(key=_KEY, message=message)
    if rollout.in_flight in ("retract", "in_place"):
        message = (
            f"with {rollout.in_flight} the tokens of a whole draft could count for the version after theirs; set it to "
            "abort, or remove the draft"
        )
        yield Problem(key="roles.rollout.in_flight", message=message)
    if rollout.fp8_keep is not None and rollout.draft.kind != "ngram":
        message = "SGLang would read the draft's weights as FP8 too; use kind ngram, or roles.rollout.precision bf16"
        yield Problem(key=f"{_KEY}.kind", message=message)
    yield from _cuts(recipe)


def _drafter(recipe: Recipe, drafter: DrafterConfig, draft: DraftConfig | None) -> Iterator[Problem]:
    """Yield what leaves a drafter without a draft to teach, or without responses to teach it."""
    key, steps = "roles.drafter", recipe.run.max_steps
    if draft is None:
        yield Problem(key=key, message=f"trains {_KEY}, and there is none; add one of kind model, or remove it")
    elif draft.kind != "model":
        whose = "has no weights" if draft.kind == "ngram" else "reads the policy's hidden states, which no response has"
        yield Problem(key=f"{_KEY}.kind", message=f"{draft.kind} {whose}; use kind model, or remove {key}")
    if not recipe.algorithm.needs.has_engines:
        message = f"learns responses of engines, and {recipe.algorithm.kind} trains on those of the data; remove it"
        yield Problem(key=key, message=message)
    if recipe.policies:
        yield Problem(key=key, message="teaches a draft what one policy answers; train one at a time")
    if drafter.every_steps > steps:
        message = f"{drafter.every_steps} is more than run.steps {steps}: it would never learn; lower it"
        yield Problem(key=f"{key}.every_steps", message=message)
    yield from check_optimizer(drafter.optimizer, max(1, steps // drafter.every_steps), key=f"{key}.optimizer")


def _cuts(recipe: Recipe) -> Iterator[Problem]:
    sampled = None if recipe.evaluation is None else recipe.evaluation.sampled
    for name, sampling in (("sampling", recipe.sampling), ("evaluation.sampled", sampled)):
        if sampling is not None and sampling.top_k is not None and sampling.top_p < 1:
            message = (
                "SGLang cuts drafted tokens by top_k, then what is left by top_p, and others by both at once; remove "
                "one of both, or roles.rollout.draft"
            )
            yield Problem(key=f"{name}.top_k", message=message)


def check_drafted_model(recipe: Recipe, shape: ModelShape) -> Iterator[Problem]:
    """Yield why SGLang drafts nothing for a model of this shape, or not with this draft."""
    rollout = recipe.roles.rollout
    if rollout is None or rollout.draft is None:
        return
    if recipe.replays_routing(shape):
        message = "engines lose the experts of drafted tokens; set train.routing: live, or remove it"
        yield Problem(key=_KEY, message=message)
    for is_there, what in (
        (shape.delta is not None, "gated delta nets, whose states would have to go back to the last token kept"),
        (shape.window is not None or shape.has_sinks, "windows or sinks"),
        (shape.vision is not None, "images"),
    ):
        if is_there:
            yield Problem(key=_KEY, message=f"drafts were not tried for models with {what}; remove it")
    match rollout.draft:
        case ModelDraftConfig(path=path):
            yield from _model(path, recipe.model.path, shape, rollout, recipe.roles.drafter)
        case EagleDraftConfig(path=path):
            yield from _head(path, shape)


def _model(
    path: Path, policy: Path, policy_shape: ModelShape, rollout: RolloutRoleConfig, drafter: DrafterConfig | None
) -> Iterator[Problem]:
    key = f"{_KEY}.path"
    shape = shape_or_problem(path, key)
    if isinstance(shape, Problem):
        yield shape
        return
    if shape.has_value_head or shape.delta is not None:
        what = "has gated delta nets" if shape.delta is not None else "is a sequence classifier"
        yield Problem(key=key, message=f"{path} {what}; name a language model that only attends")
        return
    difference = vocabulary_difference(path, policy, shape, policy_shape)
    if difference is None and shape.vocab != policy_shape.vocab:  # SGLang compares the heads, padding included
        difference = f"its head has {shape.vocab} rows, that of model.path {policy_shape.vocab}"
    if difference is not None:
        yield Problem(key=key, message=f"{difference}; name a draft with the same tokenizer and the same head")
    expert = rollout.expert if shape.experts is not None else 1
    for problem in check_engine_split(shape, tensor=rollout.tensor, expert=expert, pads_vocabulary=False):
        yield Problem(key=key, message=f"engines of {rollout.tensor} gpus split it as well: {problem.message}")
    if drafter is not None:
        yield from check_role_split(shape, drafter, role="drafter")


def _head(path: Path, policy: ModelShape) -> Iterator[Problem]:
    key = f"{_KEY}.path"
    try:
        head = read_eagle_head(path)
    except ConfigError as error:
        yield Problem(key=key, message=error.problems[0].message.replace("model.path", key))
        return
    for name, own, expected in (
        ("hidden size", head.target_hidden, policy.hidden),
        ("vocabulary", head.vocab, policy.vocab),
    ):
        if own != expected:
            yield Problem(key=key, message=f"its {name} is {own}, that of model.path {expected}; name its own head")
