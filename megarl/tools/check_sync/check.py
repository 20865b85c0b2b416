"""Check that a publish delivers the right weights, once with real processes and once in memory.

With processes: Megatron ranks load one folder and publish it to SGLang engines that serve another one. Afterwards the
engines' tensors are compared with those that SGLang's own loading of the first folder leaves there. In memory: the
recipe's own layouts, with a tiny shape. Import this module inside `private_ray`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megarl.compare.small_recipe import SmallRecipe, tiny_for_layouts
from megarl.config.model import TRAITS, ModelShape, YarnScaling
from megarl.config.recipe import Recipe
from megarl.errors import WeightSyncError
from megarl.rollout.fleet import Fleet
from megarl.rollout.tool_commands import dump_file
from megarl.rollout.tool_control import ToolControl
from megarl.runtime.engines.serving import ManagedServing, Roles, started_roles, transfer_spec
from megarl.tools.check_sync.comparison import ClassVerdict, compare_holding, rehearse, sum_by_class
from megarl.types import PolicyVersion
from megarl.weights.executors.tensors import torch_dtype
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.transfer_spec import TransferSpec

_STD = 0.05
"""Neighbouring elements differ, also in norms and biases, so that a misplaced one is seen."""
_SEED = 1
_OTHER_SEED = 2
_LOAD_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCheck:
    """The outcome of one of the two checks."""

    verdicts: tuple[ClassVerdict, ...]
    num_sources: int
    num_targets: int
    moved_bytes: int
    shape: ModelShape
    dtype: str

    @property
    def is_equal(self) -> bool:
        return all(verdict.is_equal for verdict in self.verdicts)


def rehearse_layouts(recipe: Recipe, shape: ModelShape) -> SyncCheck:
    """Check the recipe's own layouts with a tiny shape, in this process."""
    roles, tiny = tiny_for_layouts(recipe.roles, shape)
    assert roles.rollout is not None, "a rehearsal without engines"
    recipe = recipe.model_copy(update={"roles": roles})
    transfer = transfer_spec(recipe, roles.rollout, tiny, num_engines=recipe.num_engines)
    return _sync_check(transfer, rehearse(transfer.plan(), random_tensors(tiny, seed=_SEED)))


def check_processes(small: SmallRecipe, shape: ModelShape, *, ray_address: str | None) -> SyncCheck:
    """Start the roles of `small`, publish a random model of `shape`, and compare what the engines hold then."""
    folder = small.recipe.model.path
    write_random_model(folder, shape, seed=_SEED)
    other = folder.with_name("other")
    write_random_model(other, shape, seed=_OTHER_SEED)
    return asyncio.run(_check(small, shape, other, ray_address))


async def _check(small: SmallRecipe, shape: ModelShape, other: Path, ray_address: str | None) -> SyncCheck:
    recipe, rollout = small.recipe, small.recipe.roles.rollout
    assert rollout is not None, "a check without engines"
    async with started_roles(recipe, shape, ray_address=ray_address) as roles:
        serving = roles.serving
        assert isinstance(serving, ManagedServing), "a check without engines"
        fleet = serving.fleet
        transfer = transfer_spec(recipe, rollout, shape, num_engines=len(fleet.engines))
        control = ToolControl(fleet, timeout_s=rollout.publish_timeout_s, host=serving.host)
        run_folder = recipe.run_folder.absolute()
        verdicts = await _publish_and_compare(roles, fleet, control, transfer, recipe.model.path, other, run_folder)
        return _sync_check(transfer, sum_by_class(verdicts))


async def _publish_and_compare(
    roles: Roles,
    fleet: Fleet,
    control: ToolControl,
    transfer: TransferSpec,
    model: Path,
    other: Path,
    run_folder: Path,
) -> list[ClassVerdict]:
    loaded, before, published = (run_folder / name for name in ("loaded", "before", "published"))
    await _load(fleet, model)
    await control.dump(loaded)
    await _load(fleet, other)
    await control.dump(before)
    await roles.publisher.publish(PolicyVersion(0))
    await control.dump(published)
    _refuse_unmoved(transfer, before, loaded)
    return list(_compare(transfer, published, loaded))


async def _load(fleet: Fleet, folder: Path) -> None:
    for engine in fleet.engines:
        await engine.client.load_weights_from_disk(
            folder.absolute(), version=PolicyVersion(0), timeout_s=_LOAD_TIMEOUT_S
        )


def _compare(transfer: TransferSpec, actual: Path, expected: Path) -> Iterator[ClassVerdict]:
    for holding in transfer.engine_layout().holdings:
        engine, tp_rank = divmod(holding.rank, transfer.tensor)
        name = dump_file(engine=engine, tp_rank=tp_rank)
        holder = f"engine {engine}, TP rank {tp_rank}"
        yield from compare_holding(holding, load_file(actual / name), load_file(expected / name), holder=holder)


def _refuse_unmoved(transfer: TransferSpec, before: Path, after: Path) -> None:
    """Raise where a tensor had its expected value before the publish: it could not show whether it was published."""
    verdicts = _compare(transfer, before, after)
    differing = {name for verdict in verdicts if not verdict.is_equal for name in verdict.tensors}
    same = sorted(set(transfer.engine_layout().canonical) - differing)
    if same:
        raise WeightSyncError(f"{same[0]} is equal in both models; the check cannot see whether it is published")


def _sync_check(transfer: TransferSpec, verdicts: list[ClassVerdict]) -> SyncCheck:
    plan = transfer.plan()
    return SyncCheck(
        verdicts=tuple(verdicts),
        num_sources=len(plan.source.holdings),
        num_targets=len(plan.target.holdings),
        moved_bytes=sum(plan.traffic.bytes_by_link.values()),
        shape=transfer.shape,
        dtype=transfer.engine_dtype,
    )


def write_random_model(folder: Path, shape: ModelShape, *, seed: int) -> None:
    """Write config.json and model.safetensors; an engine that gets token ids needs no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2) + "\n")
    save_file(random_tensors(shape, seed=seed), folder / "model.safetensors", metadata={"format": "pt"})


def random_tensors(shape: ModelShape, *, seed: int) -> dict[str, torch.Tensor]:
    """Return every canonical tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.empty(spec.shape)
        .normal_(1.0 if "norm" in name else 0.0, _STD, generator=generator)
        .to(torch_dtype(spec.dtype))
        for name, spec in canonical_tensors(shape).items()
    }


def config_of(shape: ModelShape) -> dict[str, object]:
    """Return the content of `config.json`."""
    config: dict[str, object] = {
        "architectures": [TRAITS[shape.family].architecture],
        "model_type": shape.family.value,
        "dtype": shape.dtype,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn_hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_context_tokens,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": _rope(shape),
        "tie_word_embeddings": shape.has_tied_embeddings,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    if shape.experts is not None:
        config |= {
            "moe_intermediate_size": shape.ffn_hidden,
            "num_experts": shape.experts.num,
            "num_experts_per_tok": shape.experts.per_token,
            "norm_topk_prob": shape.experts.is_normalized,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        if shape.experts.shared:
            config["shared_expert_intermediate_size"] = shape.experts.shared
    return config


def _rope(shape: ModelShape) -> dict[str, object]:
    if shape.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": shape.rope_theta}
    scaling = {name: value for name, value in asdict(shape.rope_scaling).items() if value is not None}
    scaling["original_max_position_embeddings"] = scaling.pop("original_max_position")
    kind = "yarn" if isinstance(shape.rope_scaling, YarnScaling) else "llama3"
    return {"rope_type": kind, "rope_theta": shape.rope_theta, **scaling}
