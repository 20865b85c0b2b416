"""This machine: limits, shared memory, ports, disk, sandbox, and what a scheduler has left us of it."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.config.model import ModelShape
from megarl.config.recipe import Recipe
from megarl.env import SLURM_CPUS_ON_NODE, SLURM_JOB_ID
from megarl.reward.sandbox import Limits, Sandbox, SandboxError
from megarl.system.network import LOOPBACK
from megarl.tools.doctor.checks import Check, CheckStatus
from megarl.weights.layouts.canonical import num_parameters

_GIB = 1 << 30
_MIN_SHM_BYTES = _GIB
_MIN_OPEN_FILES = 8192
_MIN_PROCESSES = 4096
_MIN_PORTS = 10_000
_MIN_CPUS = 4
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written to
_PROBE_LIMITS = Limits(memory_bytes=2 * _GIB, disk_bytes=1 << 20, max_processes=16, max_output_bytes=1 << 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpus:
    """What the kernel shows, what this process may use, and what Slurm says it gave."""

    visible: int
    allowed: int
    slurm: int | None
    """None outside of a job."""


def check_machine() -> Iterator[Check]:
    """What matters to every recipe."""
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
        found=f"{num_bytes / _GIB:.2f} GiB",
        verdict=CheckStatus.OK if is_enough else CheckStatus.ERROR,
        remedy="" if is_enough else "Ray and NCCL share memory there: --shm-size 16g for a container, or remount it",
    )


def check_open_files(limits: tuple[int, int]) -> Check:
    soft, hard = limits
    is_enough = soft == resource.RLIM_INFINITY or soft >= _MIN_OPEN_FILES
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    return Check(
        area="machine",
        name="open files",
        found="unlimited" if soft == resource.RLIM_INFINITY else str(soft),
        verdict=CheckStatus.OK if is_enough else CheckStatus.WARNING,
        remedy="" if is_enough else f"every request and Ray worker takes some: `ulimit -n 65536` (at most {most} here)",
    )


def check_processes(soft: int) -> Check:
    """Threads count as processes, and every library of every rank starts one per core."""
    is_enough = soft == resource.RLIM_INFINITY or soft >= _MIN_PROCESSES
    return Check(
        area="machine",
        name="processes",
        found="unlimited" if soft == resource.RLIM_INFINITY else str(soft),
        verdict=CheckStatus.OK if is_enough else CheckStatus.ERROR,
        remedy="" if is_enough else f"the raylet dies where it cannot start a thread: `ulimit -u {_MIN_PROCESSES}`",
    )


def check_ports() -> Check:
    low, high = (int(word) for word in _PORT_RANGE.read_text().split()) if _PORT_RANGE.is_file() else (1024, 65535)
    try:
        with socket.create_server((LOOPBACK, 0)):
            pass
    except OSError as error:
        remedy = f"{LOOPBACK} must be open to bind: {error.strerror}"
        return Check(area="machine", name="ports", found="none", verdict=CheckStatus.ERROR, remedy=remedy)
    is_wide = high - low >= _MIN_PORTS
    return Check(
        area="machine",
        name="ports",
        found=f"{low} to {high} free to choose from",
        verdict=CheckStatus.OK if is_wide else CheckStatus.WARNING,
        remedy="" if is_wide else "ranks, engines and Ray take free ones: widen net.ipv4.ip_local_port_range",
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
    """Ray counts the cores it sees; where a job has fewer, it starts more workers than may run, and they time out."""
    given = cpus.allowed if cpus.slurm is None else min(cpus.allowed, cpus.slurm)
    found = f"{given} of {cpus.visible}" if given < cpus.visible else str(given)
    if cpus.slurm is not None and given < _MIN_CPUS and given < cpus.visible:
        return Check(
            area="machine",
            name="cpus",
            found=f"{found}, by Slurm",
            verdict=CheckStatus.ERROR,
            remedy=f"the raylet and its agents starve on {given}: --cpus-per-task {max(_MIN_CPUS, cpus.visible // 2)}",
        )
    if given < cpus.visible:
        return Check(
            area="machine",
            name="cpus",
            found=found,
            verdict=CheckStatus.WARNING,
            remedy=f"start Ray with --num-cpus {given}, as `megarl launch slurm` does: it would count {cpus.visible}",
        )
    return Check(area="machine", name="cpus", found=found, verdict=CheckStatus.OK)


def check_sandbox(*, is_needed: bool) -> Check:
    try:
        Sandbox("bubblewrap", _PROBE_LIMITS)
    except SandboxError as error:
        return Check(
            area="machine",
            name="sandbox",
            found="does not work",
            verdict=CheckStatus.ERROR if is_needed else CheckStatus.NOTE,
            remedy=f"{error}" if is_needed else f"only `reward: {{kind: code_tests}}` needs it: {error}",
        )
    return Check(area="machine", name="sandbox", found="bubblewrap works", verdict=CheckStatus.OK)


def check_metrics_port(recipe: Recipe) -> Iterator[Check]:
    port = recipe.observe.metrics_port
    if not port:
        return
    try:
        with socket.create_server((LOOPBACK, port)):
            verdict, found, remedy = CheckStatus.OK, f"{port} is free", ""
    except OSError as error:
        verdict, found = CheckStatus.ERROR, f"{port}: {error.strerror}"
        remedy = "observe.metrics_port: 0 takes any free one"
    yield Check(area="recipe", name="metrics port", found=found, verdict=verdict, remedy=remedy)


def checkpoint_bytes(recipe: Recipe, shape: ModelShape, critic: ModelShape | None) -> int:
    """Weights, and with `contents: everything` two moments and, where weights are bf16, the fp32 master."""
    weights, optimizer = (4, 8) if recipe.run.dtype == "float32" else (2, 12)
    per_parameter = weights + (optimizer if recipe.checkpoint.contents == "everything" else 0)
    return per_parameter * (num_parameters(shape) + (num_parameters(critic) if critic is not None else 0))


def check_disk(recipe: Recipe, shape: ModelShape, critic: ModelShape | None) -> Check:
    """A save is complete before an old one goes: one more than are kept."""
    folder = recipe.run_folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    num_kept = recipe.checkpoint.keep_last + 1 + (recipe.checkpoint.keep_best is not None)
    each = checkpoint_bytes(recipe, shape, critic)
    is_enough = free >= num_kept * each
    return Check(
        area="recipe",
        name="disk",
        found=f"{_size(free)} free; {num_kept} checkpoints of {_size(each)}",
        verdict=CheckStatus.OK if is_enough else CheckStatus.ERROR,
        remedy="" if is_enough else f"make room at {existing}, or choose another run.folder",
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / (1 << 20):.1f} MiB"
