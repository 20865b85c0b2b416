"""Reads a recipe from a YAML file and `--set` overrides, reports every problem at once, and explains each value.

What the schema refuses is reported in the words of a recipe: the key, the value, the way out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, get_args, get_origin

from pydantic import BaseModel, ValidationError

from megarl.config.checks.recipe import check_recipe
from megarl.config.document import Document, Key, Tree, ValueOrigin, leaves, override, read_document
from megarl.config.hub import with_local_models
from megarl.config.recipe import POLICIES_FOLDER, Recipe
from megarl.errors import ConfigError, Problem

_Location: TypeAlias = tuple[str | int, ...]

_MAX_PROBLEMS = 100
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 3800
"""Below Linux's 4,096, for what a run adds."""
_FILE = re.compile(r"\S.*(\.py:[A-Za-z_]\w*|\.jinja)", re.DOTALL)
"""A text that names a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRecipe:
    """A recipe that obeys the schema, and the files it was read from."""

    recipe: Recipe
    document: Document


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRecipe:
    """A recipe that obeys the schema, and what else is wrong with it."""

    recipe: Recipe
    problems: tuple[Problem, ...]
    not_cached: tuple[Problem, ...]
    """Models that are named as on the Hugging Face hub, and are not in its local cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One value of a recipe; without an origin it is the default."""

    key: str
    value: str
    origin: ValueOrigin | None


def load_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    checks: Sequence[Callable[[Recipe], list[Problem]]] = (check_recipe,),
    downloads: bool = False,
) -> Recipe:
    """Read, override, validate and cross-check; raise ConfigError with every problem.

    Names of the Hugging Face hub become folders of its local cache; with `downloads` they are fetched first.
    """
    checked = inspect_recipe(path, overrides, checks=checks, downloads=downloads)
    if problems := (*checked.not_cached, *checked.problems):
        raise ConfigError(str(path), problems)
    return checked.recipe


def inspect_recipe(
    path: Path,
    overrides: Sequence[str],
    *,
    checks: Sequence[Callable[[Recipe], list[Problem]]],
    downloads: bool = False,
) -> CheckedRecipe:
    """Do as `load_recipe`, and return the problems with the recipe; raise ConfigError for what the schema refuses."""
    document = _overridden(path, overrides)
    try:
        read = validated(document, source=str(path))
    except ConfigError as error:
        further = _further_problems(document, error.problems, checks)
        raise ConfigError(str(path), (*error.problems, *further)) from None
    return _checked(read, checks, downloads=downloads)


def _checked(
    read: ReadRecipe, checks: Sequence[Callable[[Recipe], list[Problem]]], *, downloads: bool
) -> CheckedRecipe:
    recipe, missing = with_local_models(read.recipe, downloads=downloads)
    problems = [problem for check in checks for problem in check(recipe)]
    others = [problem for problem in problems if problem.key not in {each.key for each in missing}]
    return CheckedRecipe(recipe=recipe, problems=tuple(others), not_cached=tuple(missing))


def _further_problems(
    document: Document, refused: Sequence[Problem], checks: Sequence[Callable[[Recipe], list[Problem]]]
) -> list[Problem]:
    """Return what the checks say of the recipe without the values that the schema refuses.

    Left out are problems that name a section of those values, or of the keys that were meant: they may be no problems.
    """
    tree, in_doubt = document.tree, set[str]()
    for problem in refused:
        tree = _without(tree, problem.key.split("."))
        meant = re.search(r"did you mean ([\w.<>]+)\?", problem.message)
        in_doubt |= {problem.key.rpartition(".")[0] or problem.key}
        in_doubt |= {meant[1].rpartition(".")[0] or meant[1]} if meant else set()
    try:
        read = ReadRecipe(recipe=Recipe.model_validate(tree), document=document)
    except ValidationError:
        return []
    checked = _checked(read, checks, downloads=False)
    problems = (*checked.not_cached, *checked.problems)
    doubted = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, in_doubt))})(?=\.|: )")
    return [problem for problem in problems if not doubted.search(str(problem))]


def _without(tree: dict[str, Tree], key: Sequence[str]) -> dict[str, Tree]:
    """Return the tree without one value; a list goes as a whole."""
    first, *rest = key
    inner = tree.get(first)
    if rest and isinstance(inner, dict):
        return {**tree, first: _without(inner, rest)}
    return {name: value for name, value in tree.items() if name != first}


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> ReadRecipe:
    """Read, override and validate; needs neither the model's folder nor the data."""
    return validated(_overridden(path, overrides), source=str(path))


def _overridden(path: Path, overrides: Sequence[str]) -> Document:
    document = read_document(path)
    for assignment in overrides:
        document = override(document, assignment)
    return document


def validated(document: Document, *, source: str) -> ReadRecipe:
    """Return the recipe of a document; raise a ConfigError with everything that the schema refuses."""
    problems = list(misplaced_booleans(document.tree, Recipe))
    try:
        recipe = Recipe.model_validate(document.tree)
        problems += _impossible_paths(recipe.model_dump(), ())
        for name in recipe.policies:
            problems += _policy_problems(recipe.policy_tree(name), f"{POLICIES_FOLDER}.{name}")
    except ValidationError as error:
        problems += schema_problems(error, Recipe)
    if problems:
        raise ConfigError(source, _first_per_key(problems))
    return ReadRecipe(recipe=recipe, document=document)


def _policy_problems(tree: dict[str, Tree], policy: str) -> Iterator[Problem]:
    """Yield what the schema refuses in the recipe of a policy."""
    for problem in misplaced_booleans(tree, Recipe):
        yield replace(problem, key=f"{policy}.{problem.key}")
    try:
        Recipe.model_validate(tree)
    except ValidationError as error:
        for problem in schema_problems(error, Recipe):
            yield replace(problem, key=f"{policy}.{problem.key}")


def _impossible_paths(value: object, key: Key) -> Iterator[Problem]:
    """Yield the paths that no disk has: looking for them would be an error and not an answer."""
    match value:
        case dict():
            for name, child in value.items():
                yield from _impossible_paths(child, (*key, str(name)))
        case list() | tuple():
            for place, child in enumerate(value):
                yield from _impossible_paths(child, (*key, str(place)))
        case Path() | str() if isinstance(value, Path) or _FILE.fullmatch(value):
            path = str(value)
            if "\0" in path or any(len(part.encode(errors="replace")) > _MAX_NAME_BYTES for part in path.split("/")):
                yield Problem(key=".".join(key), message=f"{_quoted(path)}: no file has such a name")
            elif len(path.encode(errors="replace")) > _MAX_PATH_BYTES:
                yield Problem(
                    key=".".join(key), message=f"longer than {_MAX_PATH_BYTES} bytes; no file has such a path"
                )


def _first_per_key(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    by_key: dict[str, Problem] = {}
    for problem in problems:
        by_key.setdefault(problem.key, problem)
    return tuple(by_key.values())


def explain(read: ReadRecipe) -> list[Explained]:
    """Every value of the recipe, in the order of the schema."""
    return [
        Explained(key=".".join(key), value=value, origin=read.document.origin(key))
        for key, value in _values(read.recipe, ())
    ]


def _values(value: object, key: Key) -> Iterator[tuple[Key, str]]:
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _values(getattr(value, name), (*key, name))
    elif isinstance(value, dict) and value:
        for name, child in value.items():
            yield from _values(child, (*key, str(name)))
    else:
        yield key, _as_yaml(value)


def _as_yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(_as_yaml(item) for item in value)}]"
    return str(value)


def schema_problems(error: ValidationError, root: type[BaseModel]) -> tuple[Problem, ...]:
    """Return one problem per value that the schema `root` refuses; of very many the first ones and their number."""
    refused = error.errors()
    problems = tuple(_problem(details, root) for details in refused[:_MAX_PROBLEMS])
    if len(refused) == len(problems):
        return problems
    return (*problems, Problem(key="", message=f"and {len(refused) - len(problems)} more; is this file a recipe?"))


def misplaced_booleans(tree: dict[str, Tree], root: type[BaseModel]) -> Iterator[Problem]:
    """Yield each `true` and `false` in place of a number: pydantic would read `metrics_port: false` as port 0."""
    for key, value in leaves(tree):
        if not isinstance(value, bool):
            continue
        fields = [model.model_fields.get(key[-1]) for model in _models_at(key[:-1], root)]
        if any(field is not None and not _takes_bool(field.annotation) for field in fields):
            yield Problem(key=".".join(key), message=f"{_quoted(value)}: not a truth value; write the value itself")


def _takes_bool(annotation: object) -> bool:
    return annotation is bool or any(_takes_bool(argument) for argument in get_args(annotation))


def _problem(details: object, root: type[BaseModel]) -> Problem:
    assert isinstance(details, dict)
    location = tuple(details["loc"])
    key = ".".join(str(part) for part in _without_tags(location, root))
    match details["type"]:
        case "extra_forbidden":
            return Problem(key=key, message=f"unknown key; {_suggestion(location, root)}")
        case "missing":
            return Problem(key=key, message="missing; this key has no default")
        case "union_tag_not_found":
            kinds = ", ".join(_kinds(location, root))
            return Problem(key=f"{key}.kind", message=f"missing; one of {kinds}")
        case "union_tag_invalid":
            tag, expected = str(details["ctx"]["tag"]), str(details["ctx"]["expected_tags"])
            near = _nearest(tag, _kinds(location, root))
            hint = f"did you mean {near}?" if near else f"one of {expected}"
            return Problem(key=f"{key}.kind", message=f"unknown {tag!r}; {hint}")
        case "model_type" | "model_attributes_type" | "dict_type":
            return Problem(key=key, message=f"{_quoted(details['input'])}: a section belongs here; write its keys")
        case "tuple_type" | "list_type":
            return Problem(key=key, message=f"{_quoted(details['input'])}: a list belongs here; write [a, b]")
        case "too_short":
            return Problem(key=key, message="empty; at least one is needed")
        case _:
            message = str(details["msg"])
            sentence = message[0].lower() + message[1:]
            return Problem(key=key, message=f"{_quoted(details['input'])}: {sentence}")


def _suggestion(location: _Location, root: type[BaseModel]) -> str:
    """Return the key with this word in another section, else the nearest one, else the keys of the section."""
    word, siblings = str(location[-1]), _siblings(location, root)
    keys = list(keys_of(root))
    is_of_another_kind = tuple(map(str, _without_tags(location, root))) in keys
    if word in FOREIGN_WORDS:
        return f"did you mean {FOREIGN_WORDS[word]}?"
    same: list[Key] = [] if is_of_another_kind else [key for key in keys if key[-1] == word]
    near = None if same else _nearest(word, siblings)
    if near is None and not same and not is_of_another_kind:
        nearest = _nearest(word, [key[-1] for key in keys], cutoff=0.85)
        same = [key for key in keys if key[-1] == nearest]
    if same:
        near = ".".join(sorted(same, key=lambda key: (key[0] != location[0], len(key)))[0])
    return f"did you mean {near}?" if near else f"known are {', '.join(siblings)}"


def _nearest(word: str, words: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    lowered = word.lower().replace("-", "_")
    if lowered in words:
        return lowered
    near = difflib.get_close_matches(lowered, [each for each in words if each != word], n=1, cutoff=cutoff)
    foreign = _FOREIGN_KINDS.get(lowered)
    return foreign if foreign in words else (near[0] if near else None)


def keys_of(model: type[BaseModel], path: Key = ()) -> Iterator[Key]:
    """Yield every key below a section; `<name>` stands for a name that the user chooses."""
    for name, field in model.model_fields.items():
        yield (*path, name)
        inner = (*path, name, "<name>") if get_origin(field.annotation) is dict else (*path, name)
        for section in _sections_in(field.annotation):
            yield from keys_of(section, inner)


FOREIGN_WORDS = {
    # Words of verl and TRL, by the key that means the same.
    "adv_estimator": "algorithm.kind",
    "beta": "algorithm.kl.coef",
    "clip_ratio": "algorithm.loss.clip_low",
    "clip_ratio_high": "algorithm.loss.clip_high",
    "clip_ratio_low": "algorithm.loss.clip_low",
    "entropy_coeff": "algorithm.entropy_coef",
    "epsilon": "algorithm.loss.clip_low",
    "epsilon_high": "algorithm.loss.clip_high",
    "eval_steps": "evaluation.every_steps",
    "experiment_name": "run.name",
    "gpu_memory_utilization": "roles.rollout.memory_fraction",
    "grad_clip": "train.optimizer.clip_grad_norm",
    "kl_coef": "algorithm.kl.coef",
    "kl_loss_coef": "algorithm.kl.coef",
    "lr": "train.optimizer.learning_rate",
    "max_completion_length": "sampling.max_response_tokens",
    "max_grad_norm": "train.optimizer.clip_grad_norm",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "sampling.max_response_tokens",
    "max_steps": "run.steps",
    "n": "sampling.rollouts_per_prompt",
    "n_gpus_per_node": "pools.<name>.gpus_per_node",
    "nnodes": "pools.<name>.nodes",
    "norm_adv_by_std_in_grpo": "algorithm.normalize_std",
    "num_generations": "sampling.rollouts_per_prompt",
    "output_dir": "run.folder",
    "ppo_epochs": "train.epochs",
    "ppo_max_token_len_per_gpu": "train.tokens_per_micro_batch",
    "ppo_mini_batch_size": "train.prompts_per_update",
    "project_name": "observe.wandb.project",
    "save_freq": "checkpoint.save_every_steps",
    "save_steps": "checkpoint.save_every_steps",
    "scale_rewards": "algorithm.normalize_std",
    "tensor_model_parallel_size": "roles.actor.tensor",
    "test_freq": "evaluation.every_steps",
    "total_training_steps": "run.steps",
    "train_batch_size": "train.prompts_per_step",
    "train_files": "data.train",
    "val_files": "data.eval",
}
_FOREIGN_KINDS = {
    "ppo": "gae",
    "dapo": "grpo",
    "dr_grpo": "grpo",
    "reinforce++": "reinforce_pp",
    "reinforce_plus_plus": "reinforce_pp",
}


def _quoted(value: object) -> str:
    return _as_yaml(value) if value is None or isinstance(value, bool) else repr(value)


def _without_tags(location: _Location, root: type[BaseModel]) -> list[str | int]:
    """Return the path without the tags and types of unions, which pydantic puts into it (`algorithm.grpo.clip_low`)."""
    return [part for part, is_tag, _ in _walk(location, root) if not is_tag]


def _is_mapping(models: list[type[BaseModel]], part: str | int) -> bool:
    """Whether the next part of the path is a name that the user chose; it may equal a kind."""
    fields = (model.model_fields.get(str(part)) for model in models)
    return any(field is not None and get_origin(field.annotation) is dict for field in fields)


def _siblings(location: _Location, root: type[BaseModel]) -> list[str]:
    return sorted({name for model in _models_at(location[:-1], root) for name in model.model_fields})


def _kinds(location: _Location, root: type[BaseModel]) -> list[str]:
    return [str(tag) for model in _models_at(location, root) for tag in _tags(model)]


def _models_at(location: _Location, root: type[BaseModel]) -> list[type[BaseModel]]:
    return [models for _, _, models in _walk(location, root)][-1] if location else [root]


def _walk(location: _Location, root: type[BaseModel]) -> Iterator[tuple[str | int, bool, list[type[BaseModel]]]]:
    """Yield each part of a path, whether it is the tag or type of a union, and the sections that may be there."""
    models = [root]
    is_name = False
    for part in location:
        tagged = [] if is_name else _tagged(models, part)
        is_type = str(part).startswith("literal[") or part in {model.__name__ for model in models}
        is_name = not is_name and _is_mapping(models, part)
        models = tagged or _children(models, part) or models
        yield part, bool(tagged) or is_type, models


def _tagged(models: list[type[BaseModel]], part: str | int) -> list[type[BaseModel]]:
    return [model for model in models if len(models) > 1 and part in _tags(model)]


def _tags(model: type[BaseModel]) -> tuple[object, ...]:
    kind = model.model_fields.get("kind")
    return get_args(kind.annotation) if kind else ()


def _children(models: Iterable[type[BaseModel]], part: str | int) -> list[type[BaseModel]]:
    fields = [model.model_fields[str(part)] for model in models if part in model.model_fields]
    return [section for field in fields for section in _sections_in(field.annotation)]


def _sections_in(annotation: object) -> list[type[BaseModel]]:
    """Return the sections that a value of this type may be or hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _sections_in(argument)]
