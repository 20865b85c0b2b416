"""The inputs of a run, read before anything is started: the model's shape, its tokenizer, the prompts."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from megarl import __version__
from megarl.checkpoint.manifest import TENSOR_SUFFIX, read_header
from megarl.config.algorithm import RowKind
from megarl.config.model import read_model_shape
from megarl.config.recipe import Recipe
from megarl.data.images import ImageReader
from megarl.data.prompts import PromptReader, PromptSet
from megarl.data.tokenizer import Tokenizer, load_tokenizer, without_torch
from megarl.episodes.play import tools_of
from megarl.errors import CheckpointError, first_few
from megarl.families.shape import ModelShape
from megarl.system.user_code import digest_sources, source_of
from megarl.types import Prompt
from megarl.weights.layouts.canonical import VALUE_HEAD, canonical_tensors
from megarl.weights.layouts.stored import held_in, stored_tensors

logger = logging.getLogger(__name__)

_REFERENCE = re.compile(r"(\S.*\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")
"""A user's function as a recipe names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    shape: ModelShape
    tokenizer: Tokenizer
    train: PromptSet
    eval: tuple[Prompt, ...]
    eval_demonstrations: tuple[Prompt, ...] = ()
    eval_pairs: tuple[Prompt, ...] = ()
    code: str = ""
    """Digest of the user's Python files before any of them is imported."""

    @property
    def tools_digest(self) -> str | None:
        """Digest of the tools that prompts name, in their order; None without any."""
        tools = self.tokenizer.tools
        return hashlib.blake2b(json.dumps(tools).encode(), digest_size=16).hexdigest() if tools else None

    def answers_digest(self, recipe: str) -> str:
        """Return a digest of what answers to prompts and their scores depend on, beside the weights."""
        parts = (recipe, self.train.digest, self.tools_digest, self.code, __version__)
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def digest_code(recipe: Recipe) -> str:
    """Return a digest of the Python files that the recipe names, and of what they import from their folders."""
    return digest_sources(sorted(set(_code_files(recipe.model_dump()))))


def _code_files(value: object) -> Iterator[Path]:
    match value:
        case Path() if value.suffix == ".py":
            yield value.absolute()
        case str() if _REFERENCE.fullmatch(value) and (path := source_of(value)) is not None:
            yield path.absolute()
        case dict():
            for each in value.values():
                yield from _code_files(each)
        case list() | tuple():
            for each in value:
                yield from _code_files(each)


def read_shape(recipe: Recipe) -> ModelShape:
    """Return the shape of the trained model; a reward model has a head of one value."""
    shape = read_model_shape(recipe.model.path)
    return shape.as_critic() if recipe.algorithm.needs.is_scorer else shape


def read_inputs(recipe: Recipe, *, keeps_rows: bool = True) -> Inputs:
    """Read and check everything; raise a DataError or ConfigError that names the file.

    Without `keeps_rows` the prompts to train on are checked and counted, and only the first of each source is kept.
    """
    code = digest_code(recipe)
    shape = read_shape(recipe)
    is_scorer = recipe.algorithm.needs.is_scorer
    tools = () if recipe.environment is None else tools_of(recipe.environment)
    # A run goes on with this process, whose user code may want models; a check ends with it.
    with nullcontext() if keeps_rows else without_torch():
        tokenizer = load_tokenizer(
            recipe.model.path,
            vocab=shape.vocab,
            template=recipe.data.template,
            tools=[tool.as_function for tool in tools],
        )
    data, evaluation = recipe.data, recipe.evaluation
    reader = PromptReader(
        config=data,
        kind="prompts",
        max_response_tokens=recipe.sampling.max_response_tokens,
        as_chats=is_scorer,
        images=_image_reader(recipe, shape, is_kept=keeps_rows),
        keeps_all=keeps_rows,
    )
    train = replace(reader, kind=recipe.algorithm.needs.rows).read(data.train, tokenizer)
    inputs = Inputs(shape=shape, tokenizer=tokenizer, train=train, eval=(), code=code)
    if evaluation is None:
        return inputs
    reader = replace(reader, keeps_all=True)
    files: dict[RowKind, tuple[Path, ...]] = {
        "prompts": data.eval,
        "demonstrations": data.eval_demonstrations,
        "pairs": data.eval_pairs,
    }
    held_out = {
        kind: replace(reader, kind=kind).read(paths, tokenizer).prompts[: evaluation.max_prompts] if paths else ()
        for kind, paths in files.items()
    }
    return replace(
        inputs,
        eval=held_out["prompts"],
        eval_demonstrations=held_out["demonstrations"],
        eval_pairs=held_out["pairs"],
    )


def _image_reader(recipe: Recipe, shape: ModelShape, *, is_kept: bool) -> ImageReader | str:
    """Return how prompts get their images, or why they can have none."""
    if shape.vision is None:
        return f"the model, a {shape.family}, sees none"
    if recipe.environment is not None:
        return "environments take text alone"
    if recipe.algorithm.needs.is_scorer:
        return "a reward model takes text alone"
    if recipe.roles.frozen:
        return f"roles.{next(iter(recipe.roles.frozen))} takes text alone"
    return ImageReader(
        model=recipe.model.path.absolute(),
        vision=shape.vision,
        max_pixels=recipe.data.max_image_pixels,
        store=recipe.images_folder if is_kept else None,
    )


def check_weights(folder: Path, shape: ModelShape) -> None:
    """Raise a CheckpointError where the headers of the weights differ from `config.json`; reads no weights.

    Tensors that are no part of the policy, such as those that see images, are logged: a saved model has none of them.
    """
    index = folder / "model.safetensors.index.json"
    try:
        named = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
    except FileNotFoundError:
        named = set(folder.glob(f"*{TENSOR_SUFFIX}"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors files: {type(error).__name__}") from None
    entries = (entry for path in sorted(named) for entry in read_header(path).entries)
    stored = stored_tensors({entry.name: (entry.dtype, entry.shape) for entry in entries})
    others = dict.fromkeys(stored)
    for name, spec in canonical_tensors(shape).items():
        found = held_in(name, stored)
        if found is not None:
            others.pop(found.tensor.name, None)
        if found is None and name != VALUE_HEAD:
            raise CheckpointError(f"{folder}: tensor {name} is in none of its {len(named)} safetensors file(s)")
        if found is not None and found.shape != spec.shape:
            text = f"{list(found.shape)}, config.json says {list(spec.shape)}"
            raise CheckpointError(f"{folder}: tensor {name} has shape {text}; do these files belong together?")
    if others:
        logger.info("not read folder=%s tensors=%d such_as=%s", folder, len(others), first_few([*others]))
