"""The start parameters of engines, from a recipe."""

from __future__ import annotations

from megarl.cluster.cluster import accelerators
from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.config.roles import RolloutRoleConfig
from megarl.engine.client import EngineKeys
from megarl.engine.process import EngineAdapters, EngineSpec
from megarl.planner.hardware import gpu_of
from megarl.planner.memory import adapter_slots, planned_cached_tokens
from megarl.weights.layouts.fp8 import quantization_config


def rollout_engine(
    recipe: Recipe, config: RolloutRoleConfig, shape: ModelShape, *, shares_devices: bool, start_timeout_s: float
) -> EngineSpec:
    """Return the spec of the first engine of rollout; the others differ by their index."""
    lora = recipe.model.lora
    num_adapters = adapter_slots(recipe.train.max_staleness)
    adapters = None
    if lora is not None:
        adapters = EngineAdapters(rank=lora.rank, modules=lora.served_modules(shape), num_loaded=num_adapters)
    cached_tokens = None
    if shares_devices and recipe.run.device == "cuda":
        # What trainers leave of the memory is not known when the engine starts.
        gpu = gpu_of(recipe.cluster, accelerators())
        cached_tokens = planned_cached_tokens(shape, config, gpu, lora=lora, num_adapters=num_adapters)
    return EngineSpec(
        index=0,
        model_folder=recipe.model.path.absolute(),
        config=config,
        device=recipe.run.device,
        seed=recipe.run.seed,
        run_folder=recipe.run_folder.absolute(),
        keys=EngineKeys.fresh(),
        start_timeout_s=start_timeout_s,
        loads_weights=lora is not None,  # the base of adapters is loaded from its folder, and stays
        adapters=adapters,
        has_float32_head=recipe.model.has_float32_head,
        quantization=quantization_config(shape, config.fp8_keep),
        returns_routes=recipe.replays_routing(shape),
        shares_devices=shares_devices,
        cached_tokens=cached_tokens,
        bind=recipe.network.bind,
    )
