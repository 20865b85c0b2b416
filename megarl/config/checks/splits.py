"""The divisibility rules of Megatron and SGLang, stated once: a recipe is checked with them, and weight layouts refuse
what they refuse. Pure functions of sizes; `prefix` is what comes before the names of the keys in a recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from megarl.errors import Problem
from megarl.families import family_of, uniform_shapes
from megarl.families.shape import ModelShape

ENGINE_VOCAB_STEP = 64
"""SGLang pads the vocabulary to a multiple of this before it divides it."""


class MegatronSplit(Protocol):
    """The sizes by which Megatron splits a model: those of a role in the recipe, or of a layout."""

    @property
    def tensor(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def pipeline(self) -> int: ...
    @property
    def virtual_pipeline(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def ranks_per_expert(self) -> int: ...
    @property
    def first_stage_layers(self) -> int | None: ...
    @property
    def last_stage_layers(self) -> int | None: ...


def check_stages(split: MegatronSplit, *, prefix: str = "") -> Iterator[Problem]:
    """Yield what is wrong with the stages of any model."""
    if split.virtual_pipeline > 1 and split.pipeline == 1:
        yield Problem(key=f"{prefix}virtual_pipeline", message="needs pipeline > 1; set it to 1")
    uneven = {"first_stage_layers": split.first_stage_layers, "last_stage_layers": split.last_stage_layers}
    for name, layers in uneven.items():
        if layers is not None and (split.pipeline == 1 or split.virtual_pipeline > 1):
            yield Problem(key=f"{prefix}{name}", message="needs pipeline > 1 and virtual_pipeline 1; remove it")


def check_expert_ranks(split: MegatronSplit, *, stage_ranks: int, prefix: str = "") -> Iterator[Problem]:
    """Yield a problem unless the ranks of a stage hold every expert equally often."""
    num_ranks = split.expert * split.ranks_per_expert
    if stage_ranks % num_ranks:
        yield Problem(
            key=f"{prefix}expert",
            message=f"expert {split.expert} * expert_tensor {split.ranks_per_expert} = {num_ranks} "
            f"does not divide the {stage_ranks} gpus of a pipeline stage",
        )


def check_megatron_split(shape: ModelShape, split: MegatronSplit, *, prefix: str = "") -> Iterator[Problem]:
    """Yield each size by which Megatron cannot split a model of this shape."""
    yield from _heads(shape, split.tensor, key=f"{prefix}tensor")
    yield from _latent(shape, split.tensor, key=f"{prefix}tensor")
    yield from _delta(shape, split.tensor * split.context, key=f"{prefix}tensor", what=_times_context(split))
    if shape.has_biases and shape.experts is not None and split.ranks_per_expert > 1:
        message = f"{split.ranks_per_expert} ranks of an expert would each add its bias; set it to 1"
        yield Problem(key=f"{prefix}expert_tensor", message=message)
    for each, _ in uniform_shapes(shape):
        if each.experts is None:
            yield from _feed_forward(each, split.tensor, key=f"{prefix}tensor")
            continue
        yield from _shared_expert(each, split.tensor, key=f"{prefix}tensor")
        yield from _feed_forward(each, split.ranks_per_expert, key=f"{prefix}expert_tensor")
        yield from check_experts(each, split.expert, prefix=prefix)
    yield from _layers(shape.num_layers, split, key=f"{prefix}pipeline")


def check_deep_layers(shape: ModelShape, split: MegatronSplit, *, prefix: str) -> Iterator[Problem]:
    """Yield a problem unless the first stage has all layers that outputs of a tower are added behind."""
    num_deep = 0 if shape.vision is None else len(shape.vision.deep_layers)
    num_chunks = split.pipeline * split.virtual_pipeline
    num_first = split.first_stage_layers or shape.num_layers // num_chunks
    if num_first < num_deep:
        message = (
            f"the first stage has {num_first} layers, and outputs for images are added behind the first {num_deep}"
        )
        yield Problem(key=f"{prefix}pipeline", message=f"{message}; choose fewer stages or set first_stage_layers")


def check_engine_experts(*, tensor: int, expert: int, prefix: str = "") -> Iterator[Problem]:
    if tensor % expert:
        message = f"{expert} does not divide the {tensor} gpus of an engine (roles.rollout.tensor)"
        yield Problem(key=f"{prefix}expert", message=message)


def check_engine_split(
    shape: ModelShape, *, tensor: int, expert: int, pads_vocabulary: bool, prefix: str = ""
) -> Iterator[Problem]:
    """Yield each size by which SGLang cannot split a model of this shape; on a CPU it pads any vocabulary."""
    key = f"{prefix}tensor"
    yield from _heads(shape, tensor, key=key)
    yield from _delta(shape, tensor, key=key)
    for each, _ in uniform_shapes(shape):
        if tensor % expert == 0:
            yield from _feed_forward(each, tensor // expert if each.experts else tensor, key=key)
    yield from _shared_expert(shape, tensor, key=key)
    yield from check_experts(shape, expert, prefix=prefix)
    padded = -(-shape.vocab // ENGINE_VOCAB_STEP) * ENGINE_VOCAB_STEP
    if not pads_vocabulary and padded % tensor:
        message = f"{tensor} does not divide the model's vocabulary of {shape.vocab}, padded to {padded}"
        yield Problem(key=key, message=message)


def check_head(shape: ModelShape, *, key: str) -> Iterator[Problem]:
    """Yield what keeps engines from serving a model that has no head of its own."""
    if shape.has_tied_embeddings and not family_of(shape).engine.ties_head:
        message = (
            "tie_word_embeddings: SGLang serves this family with a head of its own, which nobody would set; untie it"
        )
        yield Problem(key=key, message=message)


def check_experts(shape: ModelShape, expert: int, *, prefix: str = "") -> Iterator[Problem]:
    if shape.experts is not None and shape.experts.num % expert:
        yield _indivisible(f"{prefix}expert", expert, "experts", shape.experts.num)


def _heads(shape: ModelShape, tensor: int, *, key: str) -> Iterator[Problem]:
    if shape.num_heads % tensor:
        yield _indivisible(key, tensor, "attention heads", shape.num_heads)
    elif shape.num_kv_heads % tensor and tensor % shape.num_kv_heads:
        # A multiple is fine: then several ranks share a head.
        yield Problem(
            key=key,
            message=f"{tensor} is neither a divisor nor a multiple of the model's {shape.num_kv_heads} key/value heads",
        )


def _latent(shape: ModelShape, tensor: int, *, key: str) -> Iterator[Problem]:
    widths = shape.latent
    if widths is not None:
        for what, size in (("queries", widths.query_rank or tensor), ("keys", widths.key_rank + widths.rotary)):
            if size % tensor:
                yield _indivisible(key, tensor, f"elements of the vector of {what}", size)


def _delta(shape: ModelShape, num_ranks: int, *, key: str, what: str = "") -> Iterator[Problem]:
    if shape.delta is not None and shape.delta.key_heads % num_ranks:
        count = shape.delta.key_heads
        message = f"{num_ranks}{what} does not divide the {count} key heads of the model's delta nets"
        yield Problem(key=key, message=f"{message}; choose one of {_divisors(count)}")


def _times_context(split: MegatronSplit) -> str:
    return f" (tensor {split.tensor} * context {split.context})" if split.context > 1 else ""


def _feed_forward(shape: ModelShape, num_ranks: int, *, key: str) -> Iterator[Problem]:
    if shape.ffn_hidden % num_ranks:
        yield _indivisible(key, num_ranks, "intermediate size", shape.ffn_hidden)


def _shared_expert(shape: ModelShape, num_ranks: int, *, key: str) -> Iterator[Problem]:
    if shape.experts is not None and shape.experts.shared % num_ranks:
        yield _indivisible(key, num_ranks, "intermediate size of the shared expert", shape.experts.shared)


def _layers(num_layers: int, split: MegatronSplit, *, key: str) -> Iterator[Problem]:
    uneven = [layers for layers in (split.first_stage_layers, split.last_stage_layers) if layers is not None]
    if uneven:
        stages, layers = split.pipeline - len(uneven), num_layers - sum(uneven)
        if (layers % stages if stages else layers) or layers < stages:
            numbers = " and ".join(str(number) for number in uneven)
            yield Problem(
                key=key,
                message=f"with {numbers} of the model's {num_layers} layers given, {stages} other stages "
                f"cannot have {layers} in equal parts",
            )
        return
    chunks = split.pipeline * split.virtual_pipeline
    if num_layers % chunks:
        yield Problem(
            key=key,
            message=f"pipeline {split.pipeline} * virtual_pipeline {split.virtual_pipeline} = {chunks} "
            f"does not divide the model's {num_layers} layers; choose one of {_divisors(num_layers)}, "
            "or set first_stage_layers or last_stage_layers",
        )


def _indivisible(key: str, size: int, what: str, count: int) -> Problem:
    message = f"{size} does not divide the model's {count} {what}; choose one of {_divisors(count)}"
    return Problem(key=key, message=message)


def _divisors(count: int) -> str:
    return ", ".join(str(number) for number in range(1, min(count, 64) + 1) if count % number == 0)
