"""All checks of a machine and of a recipe, and those of limits, ports, CPUs, sandbox and disk."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config.checks.recipe import check_recipe
from megarl.config.kernels import check_packages
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import CheckpointConfig, Recipe
from megarl.config.reward import CodeTestsRewardConfig, RewardConfig, single_rewards
from megarl.config.section import GIB, MIB
from megarl.env import SLURM_CPUS_ON_NODE, SLURM_JOB_ID
from megarl.errors import ConfigError
from megarl.reward.sandbox import Limits, Sandbox, SandboxError
from megarl.system.network import LOOPBACK
from megarl.tools.doctor import Check, CheckStatus
from megarl.tools.doctor.gpus import ask_topology, check_gpus, find_gpus
from megarl.tools.doctor.packages import check_patches, check_torch, check_versions
from megarl.weights.layouts.canonical import num_parameters

_MIN_SHM_BYTES = GIB
_MIN_OPEN_FILES = 8192
_MIN_PROCESSES = 4096
_MIN_PORTS = 10_000
_MIN_CPUS = 4
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written to
_PROBE_LIMITS = Limits(memory_bytes=2 * GIB, disk_bytes=MIB, max_processes=16, max_output_bytes=1 << 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpus:
    """The CPUs of the machine, those that this process may use, and those that Slurm gave the job."""

    visible: int
    allowed: int
    slurm: int | None
    """None outside a job."""


def examine_machine(recipe: Recipe | None, *, is_joined: bool) -> Iterator[Check]:
    """Return the checks of this machine; with `is_joined` the recipe runs on a cluster, and its GPUs are elsewhere."""
    gpus = find_gpus()
    wants_gpu = recipe is not None and recipe.run.device == "cuda" and not is_joined
    yield from check_versions(has_gpu=bool(gpus))
    yield from check_torch(has_gpu=bool(gpus))
    yield from check_patches()
    needed = sum(pool.gpus for pool in recipe.pools.values()) if recipe is not None and wants_gpu else 0
    yield from check_gpus(gpus, needed=needed, topology=ask_topology() if gpus else None)
    yield from check_machine()


def examine_recipe(recipe: Recipe) -> Iterator[Check]:
    problems = [*check_recipe(recipe), *check_packages(recipe.roles, device=recipe.run.device)]
    for problem in problems:
        yield Check(
            area="recipe", name=problem.key, found="cannot run", status=CheckStatus.ERROR, remedy=problem.message
        )
    if not problems:
        yield Check(area="recipe", name="recipe", found=f"{recipe.algorithm.kind}, no problem", status=CheckStatus.OK)
    if recipe.observe.metrics_port:
        yield check_metrics_port(recipe.observe.metrics_port)
    if _runs_code(recipe.reward):
        yield check_sandbox(is_needed=True)
    critic = recipe.roles.critic
    folders = [recipe.model.path, *(() if critic is None else (critic.path or recipe.model.path,))]
    try:
        shapes = [read_model_shape(folder) for folder in folders]
    except ConfigError:
        return  # check_recipe has reported it
    bytes_each = checkpoint_bytes(recipe.checkpoint.contents, shapes, dtype=recipe.run.dtype)
    yield check_disk(recipe.run_folder.absolute(), recipe.checkpoint, bytes_each=bytes_each)


def _runs_code(reward: RewardConfig) -> bool:
    parts = (part for _, part in single_rewards(reward))
    return any(isinstance(part, CodeTestsRewardConfig) and part.sandbox == "bubblewrap" for part in parts)


def check_machine() -> Iterator[Check]:
    """Return the checks that matter to every recipe."""
    yield check_shared_memory(shutil.disk_usage(_SHM).total if _SHM.is_dir() else 0)
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_processes(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    yield check_ports()
    yield check_cpus(_cpus())
    yield check_sandbox(is_needed=False)


def check_shared_memory(num_bytes: int) -> Check:
    is_enough = num_bytes >= _MIN_SHM_BYTES
    return Check(
        area="machine",
        name=str(_SHM),
        found=f"{num_bytes / GIB:.2f} GiB",
        status=CheckStatus.OK if is_enough else CheckStatus.ERROR,
        remedy="" if is_enough else "Ray and NCCL share memory there: give a container --shm-size 16g, or remount it",
    )


def check_open_files(limits: tuple[int, int]) -> Check:
    soft, hard = limits
    is_enough = soft == resource.RLIM_INFINITY or soft >= _MIN_OPEN_FILES
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    return Check(
        area="machine",
        name="open files",
        found="unlimited" if soft == resource.RLIM_INFINITY else str(soft),
        status=CheckStatus.OK if is_enough else CheckStatus.WARNING,
        remedy="" if is_enough else f"every request and Ray worker opens some: `ulimit -n 65536` (at most {most} here)",
    )


def check_processes(soft: int) -> Check:
    # Threads count as processes, and every library of every rank starts one per core.
    is_enough = soft == resource.RLIM_INFINITY or soft >= _MIN_PROCESSES
    return Check(
        area="machine",
        name="processes",
        found="unlimited" if soft == resource.RLIM_INFINITY else str(soft),
        status=CheckStatus.OK if is_enough else CheckStatus.ERROR,
        remedy="" if is_enough else f"the raylet dies when it cannot start a thread: `ulimit -u {_MIN_PROCESSES}`",
    )


def check_ports() -> Check:
    low, high = (int(word) for word in _PORT_RANGE.read_text().split()) if _PORT_RANGE.is_file() else (1024, 65535)
    try:
        with socket.create_server((LOOPBACK, 0)):
            pass
    except OSError as error:
        remedy = f"ranks and engines must be able to listen on {LOOPBACK}: {error.strerror}"
        return Check(area="machine", name="ports", found="none", status=CheckStatus.ERROR, remedy=remedy)
    is_wide = high - low >= _MIN_PORTS
    return Check(
        area="machine",
        name="ports",
        found=f"{low} to {high}",
        status=CheckStatus.OK if is_wide else CheckStatus.WARNING,
        remedy="" if is_wide else "too few for ranks, engines and Ray: widen net.ipv4.ip_local_port_range",
    )


def _cpus() -> Cpus:
    is_job = bool(SLURM_JOB_ID.read())
    given = SLURM_CPUS_ON_NODE.read()
    return Cpus(
        visible=os.cpu_count() or 1,
        allowed=len(os.sched_getaffinity(0)),
        slurm=int(given) if is_job and given.isdecimal() else None,
    )


def check_cpus(cpus: Cpus) -> Check:
    """Return an error or a warning where Ray would count more cores than it gets: its workers would time out."""
    given = cpus.allowed if cpus.slurm is None else min(cpus.allowed, cpus.slurm)
    found = f"{given} of {cpus.visible}" if given < cpus.visible else str(given)
    if cpus.slurm is not None and given < _MIN_CPUS and given < cpus.visible:
        return Check(
            area="machine",
            name="cpus",
            found=f"{found}, by Slurm",
            status=CheckStatus.ERROR,
            remedy=f"too few for Ray's own processes: --cpus-per-task {max(_MIN_CPUS, cpus.visible // 2)}",
        )
    if given < cpus.visible:
        return Check(
            area="machine",
            name="cpus",
            found=found,
            status=CheckStatus.WARNING,
            remedy=f"start Ray with --num-cpus {given}, as `megarl launch slurm` does; else it counts {cpus.visible}",
        )
    return Check(area="machine", name="cpus", found=found, status=CheckStatus.OK)


def check_sandbox(*, is_needed: bool) -> Check:
    try:
        Sandbox("bubblewrap", _PROBE_LIMITS)
    except SandboxError as error:
        return Check(
            area="machine",
            name="sandbox",
            found="does not work",
            status=CheckStatus.ERROR if is_needed else CheckStatus.NOTE,
            remedy=str(error) if is_needed else f"only `reward: {{kind: code_tests}}` needs it: {error}",
        )
    return Check(area="machine", name="sandbox", found="bubblewrap works", status=CheckStatus.OK)


def check_metrics_port(port: int) -> Check:
    try:
        with socket.create_server((LOOPBACK, port)):
            status, found, remedy = CheckStatus.OK, f"{port} is free", ""
    except OSError as error:
        status, found = CheckStatus.ERROR, f"{port}: {error.strerror}"
        remedy = "observe.metrics_port: 0 takes any free one"
    return Check(area="recipe", name="metrics port", found=found, status=status, remedy=remedy)


def checkpoint_bytes(contents: str, shapes: Sequence[ModelShape], *, dtype: str) -> int:
    """Return the size of weights, and with `everything` of two moments and, where weights are bf16, the fp32 master."""
    weights, optimizer = (4, 8) if dtype == "float32" else (2, 12)
    per_parameter = weights + (optimizer if contents == "everything" else 0)
    return per_parameter * sum(num_parameters(shape) for shape in shapes)


def check_disk(folder: Path, config: CheckpointConfig, *, bytes_each: int) -> Check:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    # A save is complete before an old one is removed.
    num_checkpoints = config.keep_last + 1 + (config.keep_best is not None)
    is_enough = free >= num_checkpoints * bytes_each
    return Check(
        area="recipe",
        name="disk",
        found=f"{_size(free)} free; {num_checkpoints} checkpoints of {_size(bytes_each)}",
        status=CheckStatus.OK if is_enough else CheckStatus.ERROR,
        remedy="" if is_enough else f"make room at {existing}, or choose another run.folder",
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"
