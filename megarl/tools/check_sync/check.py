"""Load, publish, read back, compare: a recipe's layouts with tiny shapes, for real and in rehearsal, and taken down.

For real: Megatron ranks load a folder and publish it to SGLang engines that serve another one; what these then have is
compared with what SGLang's own loading of the first folder leaves there. In rehearsal: the recipe's own layouts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.errors import WeightSyncError
from megarl.observe.observer import Observer
from megarl.rollout.commands import dump_file
from megarl.rollout.control import EngineControl
from megarl.rollout.fleet import Fleet
from megarl.runtime.cluster import open_cluster, own_address
from megarl.runtime.engines.serving import Roles, connect, reserve_pools, start_rollout, transfer_spec
from megarl.runtime.tasks import task_group
from megarl.runtime.trainers.start import start_trainers
from megarl.tools.check_sync.comparison import ClassVerdict, compare_holding, summed
from megarl.tools.check_sync.random_model import random_tensors, write_random_model
from megarl.tools.check_sync.rehearsal import rehearse
from megarl.tools.check_sync.small_sync import SmallSync, rehearsed
from megarl.types import PolicyVersion
from megarl.weights.layouts.transfer_spec import TransferSpec

_SEED = 1
_OTHER_SEED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCheck:
    """What was compared in one of the two ways."""

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
    """The recipe's own layouts on a tiny shape, in this process."""
    recipe, tiny = rehearsed(recipe, shape)
    rollout = recipe.roles.rollout
    assert rollout is not None, "a rehearsal without engines"
    transfer = transfer_spec(recipe, rollout, tiny, num_engines=recipe.num_engines)
    return _checked(transfer, rehearse(transfer.plan(), random_tensors(tiny, seed=_SEED)))


def check_for_real(small: SmallSync, *, ray_address: str | None) -> SyncCheck:
    """Starts everything in `small`, and takes it down."""
    folder = small.recipe.model.path
    write_random_model(folder, small.shape, seed=_SEED)
    other = folder.with_name("other")
    write_random_model(other, small.shape, seed=_OTHER_SEED)
    return asyncio.run(_check(small, other, ray_address))


async def _check(small: SmallSync, other: Path, ray_address: str | None) -> SyncCheck:
    recipe, rollout = small.recipe, small.recipe.roles.rollout
    assert rollout is not None, "a check without engines"
    run_folder = recipe.run_folder.absolute()
    run_folder.mkdir(parents=True, exist_ok=True)
    with open_cluster(recipe, address=ray_address) as cluster:
        async with AsyncExitStack() as stack:
            pools, observer = reserve_pools(recipe, cluster), Observer(())
            async with task_group() as tasks:
                starting = tasks.create_task(start_trainers(recipe, small.shape, pools, stack, resume=None))
                generating = tasks.create_task(start_rollout(recipe, small.shape, pools, stack, observer=observer))
            roles = await connect(recipe, starting.result(), generating.result(), stack, observer=observer)
            fleet = roles.fleet
            assert fleet is not None, "roles without engines"
            transfer = transfer_spec(recipe, rollout, small.shape, num_engines=len(fleet.engines))
            control = EngineControl(fleet, timeout_s=rollout.publish_timeout_s, host=own_address(recipe.network.bind))
            verdicts = await _publish_and_compare(roles, fleet, control, transfer, recipe.model.path, other, run_folder)
            return _checked(transfer, summed(verdicts))


async def _publish_and_compare(
    roles: Roles,
    fleet: Fleet,
    control: EngineControl,
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
        await engine.client.load_weights_from_disk(folder.absolute(), version=PolicyVersion(0), timeout_s=600)


def _compare(transfer: TransferSpec, found: Path, expected: Path) -> Iterator[ClassVerdict]:
    for holding in transfer.engine_layout().holdings:
        engine, tp_rank = divmod(holding.rank, transfer.tensor)
        name = dump_file(engine=engine, tp_rank=tp_rank)
        holder = f"engine {engine}, TP rank {tp_rank}"
        yield from compare_holding(holding, load_file(found / name), load_file(expected / name), holder=holder)


def _refuse_unmoved(transfer: TransferSpec, before: Path, after: Path) -> None:
    """A tensor that was right before the publish would say nothing about it."""
    differing = {
        name for verdict in _compare(transfer, before, after) if not verdict.is_equal for name in verdict.tensors
    }
    same = sorted(set(transfer.engine_layout().canonical) - differing)
    if same:
        raise WeightSyncError(f"{same[0]} is the same in both models: the check would say nothing about it")


def _checked(transfer: TransferSpec, verdicts: list[ClassVerdict]) -> SyncCheck:
    plan = transfer.plan()
    return SyncCheck(
        verdicts=tuple(verdicts),
        num_sources=len(plan.source.holdings),
        num_targets=len(plan.target.holdings),
        moved_bytes=sum(plan.bytes_by_link.values()),
        shape=transfer.shape,
        dtype=transfer.engine_dtype,
    )
