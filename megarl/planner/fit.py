"""Which single changes make a recipe fit, the cheapest first: fewest GPUs, then shortest step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pydantic import ValidationError

from megarl.config.checks.recipe import check_without_files
from megarl.config.document import Document, override
from megarl.config.recipe import Recipe
from megarl.config.roles import TrainedModelConfig
from megarl.planner.hardware import GpuModel
from megarl.planner.placement import place
from megarl.planner.run_plan import size
from megarl.planner.shapes import RoleShapes
from megarl.planner.timing import StepWorkload

NUM_PROPOSALS = 3
_MAX_GROWTH = 4
_RECOMPUTE = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
_FRACTIONS = (0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2)

_Change: TypeAlias = tuple[str, ...]
"""Assignments that belong together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Changes that make the recipe fit."""

    assignments: _Change
    num_gpus: int
    margin_bytes: int
    step_s: float


def proposals(recipe: Recipe, shapes: RoleShapes, gpu: GpuModel, workload: StepWorkload) -> list[Proposal]:
    """At most three, each enough by itself; pairs of changes where no single one is."""
    singles = list(_changes(recipe))
    found = list(_fitting(recipe, shapes, gpu, workload, singles))
    if not found:
        pairs = [a + b for index, a in enumerate(singles) for b in singles[index + 1 :] if _keys(a) != _keys(b)]
        found = list(_fitting(recipe, shapes, gpu, workload, pairs))
    return _best_per_keys(found)[:NUM_PROPOSALS]


def _best_per_keys(found: list[Proposal]) -> list[Proposal]:
    """Of several values for the same keys only the cheapest is worth saying."""
    best: dict[tuple[str, ...], Proposal] = {}
    # Stable: of equally cheap ones the smallest change, which was tried first.
    for proposal in sorted(found, key=lambda item: (item.num_gpus, item.step_s)):
        best.setdefault(_keys(proposal.assignments), proposal)
    return list(best.values())


def _fitting(
    recipe: Recipe, shapes: RoleShapes, gpu: GpuModel, workload: StepWorkload, candidates: Sequence[_Change]
) -> Iterator[Proposal]:
    for assignments in candidates:
        changed = _changed(recipe, assignments)
        if changed is None or check_without_files(changed, shapes.policy, critic=shapes.critic):
            continue
        sizes = size(changed, shapes, gpu, workload, publish_s=0.0)
        worst = sizes.worst
        if sizes.fits and worst is not None and worst.margin_bytes is not None and sizes.timing is not None:
            yield Proposal(
                assignments=assignments,
                num_gpus=place(changed).num_gpus,
                margin_bytes=worst.margin_bytes,
                step_s=sizes.timing.step_s,
            )


def _changes(recipe: Recipe) -> Iterator[_Change]:
    """What a person would try, none of which changes what is learned."""
    tokens = recipe.train.tokens_per_micro_batch
    smaller = {max(recipe.max_context_tokens, tokens // factor) for factor in (2, 4)} - {tokens}
    yield from ((f"train.tokens_per_micro_batch={number}",) for number in sorted(smaller, reverse=True))
    for role, split in recipe.roles.megatron_roles.items():
        key = f"roles.{role}"
        if split.tensor > 1 and not split.is_sequence_parallel:
            yield (f"{key}.is_sequence_parallel=true",)
        if isinstance(split, TrainedModelConfig) and split.offload == "nothing":
            yield (f"{key}.offload=optimizer",)
        if role != "reference" and "recompute_granularity" not in split.megatron:
            yield tuple(f"{key}.megatron.{option}" for option in _RECOMPUTE)
        for factor in (2, _MAX_GROWTH):
            yield (f"{key}.tensor={split.tensor * factor}",)
            yield (f"{key}.pipeline={split.pipeline * factor}",)
            yield (f"{key}.expert={split.expert * factor}",)
    for name, pool in recipe.pools.items():
        yield from ((f"pools.{name}.nodes={pool.nodes * factor}",) for factor in (2, _MAX_GROWTH))
    rollout = recipe.roles.rollout
    if rollout is not None:
        smaller_shares = [fraction for fraction in _FRACTIONS if fraction < rollout.memory_fraction]
        yield from ((f"roles.rollout.memory_fraction={fraction}",) for fraction in smaller_shares)
        yield from ((f"roles.rollout.tensor={rollout.tensor * factor}",) for factor in (2, _MAX_GROWTH))


def _changed(recipe: Recipe, assignments: _Change) -> Recipe | None:
    # As it was written: some keys are refused where they have no use, whatever their value.
    document = Document(tree=recipe.model_dump(mode="json", exclude_unset=True), origins={})
    for assignment in assignments:
        document = override(document, assignment)
    try:
        return Recipe.model_validate(document.tree)
    except ValidationError:
        return None


def _keys(change: _Change) -> _Change:
    return tuple(assignment.partition("=")[0] for assignment in change)
