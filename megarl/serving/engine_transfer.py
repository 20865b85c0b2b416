"""The transfer of a recipe from trainer ranks to engines: its layouts, and where both ends are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megarl.cluster.cluster import Place, Pool, gpu_numbers
from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.config.roles import RolloutRoleConfig
from megarl.serving.processes import Engines
from megarl.weights.algebra.routing import nearest_order
from megarl.weights.layouts.megatron import MegatronParallel
from megarl.weights.layouts.transfer_spec import TransferSpec


def transfer_spec(recipe: Recipe, config: RolloutRoleConfig, shape: ModelShape, *, num_engines: int) -> TransferSpec:
    is_shared = config.pool == recipe.roles.actor.pool
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
        # Ranks that offload everything free their memory, and the engines of a shared pool are given back that of FP8
        # tensors.
        keeps_open=recipe.roles.actor.offload != "everything" and (config.fp8_keep is None or not is_shared),
        fp8_keep=config.fp8_keep,
    )


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
