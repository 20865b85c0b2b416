"""The start parameters of engines, and the transfer of weights from trainer ranks to them, from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from megarl.cluster.cluster import Place, Pool, accelerators, gpu_numbers
from megarl.config.draft import ModelDraftConfig
from megarl.config.model import read_model_shape
from megarl.config.recipe import Recipe
from megarl.config.roles import RolloutRoleConfig
from megarl.engine.client import EngineKeys
from megarl.engine.process import EngineAdapters, EngineSpec, family_options, serves_text_alone
from megarl.families import family_of
from megarl.families.shape import ModelShape
from megarl.planner.hardware import gpu_of
from megarl.planner.memory import adapter_slots, planned_cached_tokens
from megarl.serving.processes import Engines
from megarl.weights.algebra.routing import nearest_order
from megarl.weights.layouts.fp8 import quantization_config
from megarl.weights.layouts.lora import LoraShape
from megarl.weights.layouts.megatron import MegatronParallel
from megarl.weights.layouts.transfer_spec import TransferSpec


def rollout_engine(
    recipe: Recipe, config: RolloutRoleConfig, shape: ModelShape, *, shares_devices: bool, start_timeout_s: float
) -> EngineSpec:
    """Return the spec of the first engine of rollout; the others differ by their index."""
    lora = recipe.model.served_lora
    num_adapters = adapter_slots(recipe)
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
        has_windows=shape.window is not None,
        shares_devices=shares_devices,
        cached_tokens=cached_tokens,
        bind=recipe.network.bind,
        options=family_options(shape, recipe.run.device),
        is_text_alone=serves_text_alone(shape),
        images=None if shape.vision is None else recipe.images_folder,
        is_dequantized=family_of(shape).engine.is_dequantized,
    )


def transfer_spec(recipe: Recipe, config: RolloutRoleConfig, shape: ModelShape, *, num_engines: int) -> TransferSpec:
    """Return the transfer of the policy: of its adapter, where engines serve one."""
    is_shared, lora = config.pool == recipe.roles.actor.pool, recipe.model.served_lora
    is_derived = config.fp8_keep is not None or (lora is None and recipe.model.lora is not None)
    return TransferSpec(
        shape=shape,
        parallel=MegatronParallel.of(recipe.roles.actor, data=recipe.data_parallel),
        trainer_dtype=recipe.run.dtype,
        num_engines=num_engines,
        tensor=config.tensor,
        engine_dtype=recipe.run.dtype,
        is_cpu_engine=recipe.run.device == "cpu",
        expert=config.expert,
        shares_devices=is_shared,
        relays=config.relays_weights,
        # Ranks that offload everything free their memory, and the engines of a shared pool are given back that of
        # tensors made to be sent.
        keeps_open=recipe.roles.actor.offload != "everything" and not (is_derived and is_shared),
        fp8_keep=config.fp8_keep if lora is None else None,
        lora=None if lora is None else LoraShape.of(lora),
    )


def draft_transfer(
    recipe: Recipe, config: RolloutRoleConfig, pools: Mapping[str, Pool], engines: Engines, *, num_engines: int
) -> Callable[[], TransferSpec] | None:
    """Return what gives the transfer of a draft that learns, as it is then; None where none does. SGLang splits a draft
    as the policy."""
    drafter, draft = recipe.roles.drafter, config.served_draft
    if drafter is None or not isinstance(draft, ModelDraftConfig):
        return None
    shape = read_model_shape(draft.path)
    transfer = TransferSpec(
        shape=shape,
        parallel=MegatronParallel.of(drafter, data=recipe.pools[drafter.pool].gpus // drafter.model_parallel),
        trainer_dtype=recipe.run.dtype,
        num_engines=num_engines,
        tensor=config.tensor,
        engine_dtype=recipe.run.dtype,
        is_cpu_engine=recipe.run.device == "cpu",
        expert=1 if shape.experts is None else config.expert,
        shares_devices=config.pool == drafter.pool,
        relays=config.relays_weights,
        keeps_open=drafter.offload != "everything",
    )
    return partial(located, transfer, pools[drafter.pool], engines)


def near_trainers(
    transfer: TransferSpec, trainer_places: Sequence[Place], engine_places: Sequence[Place]
) -> Sequence[Place]:
    """Return the places of the engines, in the order in which the engines take them.

    In a shared pool each engine is near the trainer ranks that hold most of its weights.
    """
    places = engine_places[: transfer.num_targets]
    if not transfer.shares_devices:
        return places
    one = replace(transfer, num_engines=1)
    order = nearest_order(one.trainer_layout(), one.engine_layout(), *gpu_numbers(trainer_places, places))
    return [places[index] for index in order]


def located(transfer: TransferSpec, trainers: Pool, engines: Engines) -> TransferSpec:
    """Return the transfer to the engines of now, where they and the trainer ranks are: nodes are lost and added."""
    trainer_gpus, engine_gpus = gpu_numbers(trainers.places, engines.places)
    if transfer.shares_devices and transfer.is_cpu_engine:
        # Host memory is one device: every engine rank of a node reads what any trainer rank there holds.
        trainer_gpus, engine_gpus = (tuple((node, 0) for node, _ in gpus) for gpus in (trainer_gpus, engine_gpus))
    num_engines = len(engine_gpus) // transfer.tensor
    return replace(transfer, num_engines=num_engines, trainer_gpus=trainer_gpus, engine_gpus=engine_gpus)
