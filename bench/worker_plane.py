"""Cost of a step's tokens with rollout workers: what is left to the driver, and what all processes need together.

Two workers on a Ray of this machine, one server instead of all engines. From the prompt to a share that a rank could
load; the server, Ray's own processes and the loading itself are not counted.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from bench.dataplane import VOCAB, Load, PlaneFigure, fleet_of, prompt_at, resident_bytes, sampling_of
from bench.instant_engine import instant_engine, reply_content
from megarl.algo.algorithm import build_algorithm
from megarl.cluster.local_ray import private_ray
from megarl.config.algorithm import GrpoConfig
from megarl.config.model import read_model_shape
from megarl.config.reward import ExactRewardConfig
from megarl.data.packing import Packing
from megarl.data.shares import make_shares
from megarl.observe.observer import Observer
from megarl.rollout.task import RolloutSource, RolloutTask
from megarl.run.buffer import Buffer
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from megarl.types import Estimates

if TYPE_CHECKING:
    from ray import ObjectRef

_NUM_WORKERS = 2
_SILENCE_S = 60.0
_NUM_OPEN = 64
"""Requests that an engine computes at once."""
_DATA_PARALLEL = 8
_ROUNDS = 8
"""Answers that an engine of the large fleet gives one after another: more requests are sent to it if there are many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    driver_s: float
    workers_s: float
    wall_s: float
    num_bytes: int
    """By which the driver became larger."""


def measure_workers(load: Load) -> list[PlaneFigure]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megarl-bench-")))
        write_tiny_model(folder, TinyShape(), seed=1)
        stack.enter_context(private_ray())
        import ray

        from megarl.cluster.local_ray import LocalRay, local_ray

        nodes = LocalRay(device="cpu", log_folder=folder)
        stack.enter_context(local_ray(nodes, num_slots=1))
        nodes.wait_started()
        ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
        stack.callback(ray.shutdown)
        return [*_whole_groups(load, folder), *_many_requests(load, folder)]


def _whole_groups(load: Load, folder: Path) -> list[PlaneFigure]:
    """Measure a whole step in one piece."""
    content = reply_content(load.num_tokens, vocab=VOCAB, is_flat=True)
    step = replace(load, num_prompts=load.num_step_prompts)
    with instant_engine(content, num_ports=8) as ports:
        cost = asyncio.run(_cost(step, folder, ports, num_open=_NUM_OPEN))
    num_tokens = step.num_prompts * step.num_rollouts * step.num_tokens
    sizes = f"{step.num_prompts} x {step.num_rollouts} rollouts, {_NUM_WORKERS} rollout workers"
    return [
        PlaneFigure(
            name=f"{sizes}: from prompts to shares, driver",
            value=cost.driver_s * 1e6 / num_tokens,
            unit="us/token",
            goal=0.005,
        ),
        PlaneFigure(
            name="the same, driver and workers",
            value=(cost.driver_s + cost.workers_s) * 1e6 / num_tokens,
            unit="us/token",
            goal=0.25,
        ),
        PlaneFigure(
            name=f"the same, memory of the driver for these {num_tokens / 1e6:.0f}M tokens",
            value=cost.num_bytes / 1e9,
            unit="GB",
            goal=2.0,
        ),
    ]


def _many_requests(load: Load, folder: Path) -> list[PlaneFigure]:
    content = reply_content(16, vocab=VOCAB, is_flat=True)
    many = Load(num_tokens=16, num_prompts=load.num_requests // 16, num_rollouts=16)
    num_open = max(load.num_open, -(-load.num_requests // (_ROUNDS * load.num_engines)))
    with instant_engine(content, num_ports=load.num_engines, delay_s=load.delay_s) as ports:
        cost = asyncio.run(_cost(many, folder, ports, num_open=num_open))
    return [
        PlaneFigure(
            name=f"share of a core, driver: {load.num_requests} requests, {load.num_engines} engines",
            value=100 * cost.driver_s / cost.wall_s,
            unit="%",
            goal=30.0,
        ),
        PlaneFigure(
            name="the same, CPU of the driver per request",
            value=cost.driver_s / load.num_requests * 1e6,
            unit="us",
        ),
    ]


async def _cost(load: Load, folder: Path, ports: Sequence[int], *, num_open: int) -> Cost:
    from megarl.run.rank_sets import COLLECT_EVERY

    task = RolloutTask(sampling=sampling_of(num_rollouts=load.num_rollouts, num_tokens=load.num_tokens), seed=1)
    async with _workers(folder, ports, num_open=num_open, num_rollouts=load.num_rollouts) as (workers, processes):
        await _take_step(replace(load, num_prompts=2 * _NUM_WORKERS), workers, task)
        gc.collect()
        gc.freeze()  # this and the next as a run does before its first step
        gc.set_threshold(COLLECT_EVERY)
        bytes_before = resident_bytes()
        others_before = sum(_cpu_s(process) for process in processes)
        cpu_began, began = time.process_time(), time.monotonic()
        shares = await _take_step(load, workers, task)
        wall_s, driver_s = time.monotonic() - began, time.process_time() - cpu_began
        workers_s = sum(_cpu_s(process) for process in processes) - others_before
        gc.collect()
        num_bytes = resident_bytes() - bytes_before
        assert len(shares) == _DATA_PARALLEL, "they are alive until here"
        return Cost(driver_s=driver_s, workers_s=workers_s, wall_s=wall_s, num_bytes=num_bytes)


async def _take_step(load: Load, workers: RolloutSource, task: RolloutTask) -> list[ObjectRef]:
    """Return the stored shares of a step, one per data-parallel rank."""
    import ray

    buffer = Buffer(prompts_per_step=load.num_prompts, max_staleness=0)
    await asyncio.gather(*(_produce(buffer, workers, task, place) for place in range(load.num_prompts)))
    groups = await buffer.take_step()
    algorithm = build_algorithm(GrpoConfig(kind="grpo"), max_response_tokens=load.num_tokens)
    packing = Packing(
        data_parallel=_DATA_PARALLEL,
        tokens_per_micro_batch=4 * load.num_tokens + 1024,
        samples_per_update=None,
        pad_multiple=1,
        micro_batch_multiple=1,
    )
    samples = algorithm.assign(groups, Estimates())
    return [ray.put(share) for share in make_shares(samples, packing, temperature=1.0)]


async def _produce(buffer: Buffer, workers: RolloutSource, task: RolloutTask, place: int) -> None:
    ticket = await buffer.reserve()
    await buffer.put(ticket, (await workers.answer(prompt_at(place), task)).scored)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@asynccontextmanager
async def _workers(
    folder: Path, ports: Sequence[int], *, num_open: int, num_rollouts: int
) -> AsyncIterator[tuple[RolloutSource, list[psutil.Process]]]:
    import ray

    from megarl.rollout.host import WorkerSetup
    from megarl.rollout.workers import RolloutWorkers, divide_engines

    fleet = fleet_of(ports, max_outstanding=num_open)
    node = str(ray.get_runtime_context().get_node_id())
    setups = [
        WorkerSetup(
            index=index,
            node=node,
            own=own,
            model_folder=folder,
            shape=replace(read_model_shape(folder), max_context_tokens=1 << 20),
            reward=ExactRewardConfig(kind="exact"),
            num_on_node=_NUM_WORKERS,
            num_workers=_NUM_WORKERS,
            log_path=folder / "reward.log",
            episodes=None,
            max_outstanding=num_open,
            max_attempts=3,
            publish_timeout_s=60,
            request_timeout_s=fleet.engines[0].client.request_timeout_s,
            silence_timeout_s=_SILENCE_S,
        )
        for index, (_, own) in enumerate(divide_engines([node] * len(ports), per_node=_NUM_WORKERS))
    ]
    workers = RolloutWorkers(fleet, setups, observer=Observer(()), rollouts_per_prompt=num_rollouts)
    async with workers.running():
        processes = [psutil.Process(process.pid) for process in await workers.processes()]
        yield workers, processes
    await fleet.close()
