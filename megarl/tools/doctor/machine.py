"""All checks of a machine and of a recipe: GPUs as nvidia-smi reports them, limits, ports, CPUs, sandbox and disk."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config.checks.recipe import check_recipe
from megarl.config.environment import HarborEnvironmentConfig
from megarl.config.kernels import check_packages
from megarl.config.model import read_model_shape
from megarl.config.recipe import CheckpointConfig, Recipe
from megarl.config.reward import CodeTestsRewardConfig, RewardConfig, single_rewards
from megarl.config.section import GIB, MIB
from megarl.env import SLURM_CPUS_ON_NODE, SLURM_JOB_ID
from megarl.episodes.harbor.build import try_box
from megarl.errors import ConfigError
from megarl.families.shape import ModelShape
from megarl.planner.hardware import gpu_named
from megarl.reward.sandbox import Limits, Sandbox, SandboxError
from megarl.system.network import LOOPBACK
from megarl.tools.doctor import Check, CheckStatus
from megarl.tools.doctor.packages import check_fused, check_patches, check_torch, check_versions
from megarl.tools.doctor.rdma import check_rdma
from megarl.weights.layouts.canonical import num_parameters

_MIN_SHM_BYTES = GIB
_MIN_OPEN_FILES = 8192
_MIN_PROCESSES = 4096
_MIN_PORTS = 10_000
_MIN_CPUS = 4
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written to
_PROBE_LIMITS = Limits(memory_bytes=2 * GIB, disk_bytes=MIB, max_processes=16, max_output_bytes=1 << 16)
QUERY = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_event_reasons.hw_slowdown",
    "clocks_event_reasons.sw_thermal_slowdown",
    "ecc.errors.uncorrected.volatile.total",
)
MIN_DRIVER = 580
"""The oldest driver of CUDA 13."""
_BUSY_MIB = 1024
_TIMEOUT_S = 30.0


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
    yield from check_fused(has_gpu=bool(gpus))
    yield from check_patches()
    needed = sum(pool.gpus for pool in recipe.pools.values()) if recipe is not None and wants_gpu else 0
    yield from check_gpus(gpus, needed=needed, topology=ask_topology() if gpus else None)
    yield from check_machine()


def examine_node(*, needed: int, kind: str | None) -> list[Check]:
    """Return what a node of a cluster must have: `needed` GPUs of a kind in the planner's table, limits, RDMA."""
    gpus = find_gpus()
    checks = [*check_gpus(gpus, needed=needed, topology=ask_topology() if gpus else None)]
    if gpus and kind is not None:
        checks.append(check_kind([gpu.name for gpu in gpus], kind))
    machine = check_shared_memory(shutil.disk_usage(_SHM).total if _SHM.is_dir() else 0)
    limits = check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE))
    processes = check_processes(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    return [*checks, machine, limits, processes, check_ports(), *check_rdma()]


def check_kind(names: Sequence[str], kind: str) -> Check:
    """Compare the driver's names with the kind that all thresholds and the plan are for."""
    found = sorted({name for name in names if (known := gpu_named(name)) is not None and known.name != kind})
    remedy = f"the plan is for {kind}: set cluster.gpu to what is there, and plan again"
    text = ", ".join(found or sorted(set(names)))
    return Check.of("gpus", "gpu kind", text, is_ok=not found, remedy=remedy)


def examine_recipe(recipe: Recipe) -> Iterator[Check]:
    problems = [*check_recipe(recipe), *check_packages(recipe.roles, device=recipe.run.device)]
    for problem in problems:
        yield Check.of("recipe", problem.key, "cannot run", is_ok=False, remedy=problem.message)
    if not problems:
        yield Check(area="recipe", name="recipe", found=f"{recipe.algorithm.kind}, no problem", status=CheckStatus.OK)
    if recipe.observe.metrics_port:
        yield check_metrics_port(recipe.observe.metrics_port)
    if _runs_code(recipe.reward):
        yield check_sandbox(is_needed=True)
    if isinstance(recipe.environment, HarborEnvironmentConfig):
        yield check_boxes(recipe.environment)
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
    yield from check_rdma()
    yield check_cpus(_cpus())
    yield check_sandbox(is_needed=False)


def check_shared_memory(num_bytes: int) -> Check:
    return Check.of(
        "machine",
        str(_SHM),
        f"{num_bytes / GIB:.2f} GiB",
        is_ok=num_bytes >= _MIN_SHM_BYTES,
        remedy="Ray and NCCL share memory there: give a container --shm-size 16g, or remount it",
    )


def check_open_files(limits: tuple[int, int]) -> Check:
    soft, hard = limits
    return Check.of(
        "machine",
        "open files",
        _limit(soft),
        is_ok=_allows(soft, _MIN_OPEN_FILES),
        remedy=f"every request and Ray worker opens some: `ulimit -n 65536` (at most {_limit(hard)} here)",
        otherwise=CheckStatus.WARNING,
    )


def check_processes(soft: int) -> Check:
    # Threads count as processes, and every library of every rank starts one per core.
    return Check.of(
        "machine",
        "processes",
        _limit(soft),
        is_ok=_allows(soft, _MIN_PROCESSES),
        remedy=f"the raylet dies when it cannot start a thread: `ulimit -u {_MIN_PROCESSES}`",
    )


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def _allows(limit: int, number: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= number


def check_ports() -> Check:
    low, high = (int(word) for word in _PORT_RANGE.read_text().split()) if _PORT_RANGE.is_file() else (1024, 65535)
    try:
        with socket.create_server((LOOPBACK, 0)):
            pass
    except OSError as error:
        remedy = f"ranks and engines must be able to listen on {LOOPBACK}: {error.strerror}"
        return Check(area="machine", name="ports", found="none", status=CheckStatus.ERROR, remedy=remedy)
    return Check.of(
        "machine",
        "ports",
        f"{low} to {high}",
        is_ok=high - low >= _MIN_PORTS,
        remedy="too few for ranks, engines and Ray: widen net.ipv4.ip_local_port_range",
        otherwise=CheckStatus.WARNING,
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
    usable = cpus.allowed if cpus.slurm is None else min(cpus.allowed, cpus.slurm)
    found = f"{usable} of {cpus.visible}" if usable < cpus.visible else str(usable)
    is_ok = usable >= cpus.visible
    if cpus.slurm is not None and usable < _MIN_CPUS and not is_ok:
        remedy = f"too few for Ray's own processes: --cpus-per-task {max(_MIN_CPUS, cpus.visible // 2)}"
        return Check.of("machine", "cpus", f"{found}, by Slurm", is_ok=False, remedy=remedy)
    remedy = f"start Ray with --num-cpus {usable}, as `megarl launch slurm` does; else it counts {cpus.visible}"
    return Check.of("machine", "cpus", found, is_ok=is_ok, remedy=remedy, otherwise=CheckStatus.WARNING)


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


def check_boxes(environment: HarborEnvironmentConfig) -> Check:
    """Return whether this machine, which stands for the nodes of rollout workers, can open a box."""
    try:
        asyncio.run(try_box(environment))
    except ConfigError as error:
        remedy = "; ".join(problem.message for problem in error.problems)
        return Check.of("recipe", "boxes", f"{environment.sandbox} does not work", is_ok=False, remedy=remedy)
    return Check(area="recipe", name="boxes", found=f"{environment.sandbox} works", status=CheckStatus.OK)


def check_metrics_port(port: int) -> Check:
    found, is_free = f"{port} is free", True
    try:
        with socket.create_server((LOOPBACK, port)):
            pass
    except OSError as error:
        found, is_free = f"{port}: {error.strerror}", False
    remedy = "observe.metrics_port: 0 takes any free one"
    return Check.of("recipe", "metrics port", found, is_ok=is_free, remedy=remedy)


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
    return Check.of(
        "recipe",
        "disk",
        f"{_size(free)} free; {num_checkpoints} checkpoints of {_size(bytes_each)}",
        is_ok=free >= num_checkpoints * bytes_each,
        remedy=f"make room at {existing}, or choose another run.folder",
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    index: int
    name: str
    driver: str
    memory_mib: int
    used_mib: int
    sm_mhz: int
    max_sm_mhz: int
    is_slowed: bool
    num_errors: int


def find_gpus() -> list[Gpu] | None:
    """Return None where there is no driver."""
    text = _run_nvidia_smi(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits")
    return None if text is None else parse_gpus(text)


def parse_gpus(text: str) -> list[Gpu]:
    return [_gpu([word.strip() for word in line.split(",")]) for line in text.splitlines() if line.strip()]


def _gpu(words: list[str]) -> Gpu:
    index, name, driver, total, used, sm, max_sm, hardware, thermal, errors = words
    return Gpu(
        index=int(index),
        name=name,
        driver=driver,
        memory_mib=_number(total),
        used_mib=_number(used),
        sm_mhz=_number(sm),
        max_sm_mhz=_number(max_sm),
        is_slowed="Active" in (hardware, thermal),
        num_errors=_number(errors),
    )


def _number(word: str) -> int:
    """Return 0 for a value that a GPU does not have, such as `[N/A]`."""
    return int(word) if word.isdecimal() else 0


def check_gpus(gpus: list[Gpu] | None, *, needed: int, topology: str | None) -> Iterator[Check]:
    """Return all checks of GPUs; the recipe needs `needed` of them on this machine."""
    if not gpus:
        is_needed = needed > 0
        yield Check(
            area="gpus",
            name="gpus",
            found="nvidia-smi not found" if gpus is None else "none",
            status=CheckStatus.ERROR if is_needed else CheckStatus.NOTE,
            remedy="install the NVIDIA driver, or set run.device: cpu" if is_needed else "",
        )
        return
    yield _count(gpus, needed=needed)
    yield _driver(gpus[0].driver)
    yield _memory(gpus)
    yield _clocks(gpus)
    broken = _list([gpu.index for gpu in gpus if gpu.num_errors])
    found = f"uncorrected on GPU {broken}" if broken else "none"
    remedy = "drain the node and reset or replace these GPUs"
    yield Check.of("gpus", "memory errors", found, is_ok=not broken, remedy=remedy)
    if topology is not None and len(gpus) > 1:
        yield check_links(topology)


def _count(gpus: list[Gpu], *, needed: int) -> Check:
    kinds = sorted({gpu.name for gpu in gpus})
    found = f"{len(gpus)} x {' and '.join(kinds)}"
    if len(gpus) < needed:
        remedy = f"the recipe's pools need {needed} GPUs on this machine; shrink the pools or use a larger machine"
        return Check.of("gpus", "gpus", found, is_ok=False, remedy=remedy)
    remedy = "a step waits for the slowest GPU: use GPUs of one kind"
    return Check.of("gpus", "gpus", found, is_ok=len(kinds) == 1, remedy=remedy, otherwise=CheckStatus.WARNING)


def _driver(version: str) -> Check:
    is_new_enough = int(version.partition(".")[0]) >= MIN_DRIVER
    return Check.of(
        "gpus", "driver", version, is_ok=is_new_enough, remedy=f"CUDA 13 needs driver {MIN_DRIVER} or newer"
    )


def _memory(gpus: list[Gpu]) -> Check:
    busy = _list([gpu.index for gpu in gpus if gpu.used_mib > _BUSY_MIB])
    total = f"{min(gpu.memory_mib for gpu in gpus) / 1024:.0f} GiB each"
    found = f"{total}, in use on GPU {busy}" if busy else total
    remedy = "stop the processes that use them; `nvidia-smi` lists them"
    return Check.of("gpus", "gpu memory", found, is_ok=not busy, remedy=remedy, otherwise=CheckStatus.WARNING)


def _clocks(gpus: list[Gpu]) -> Check:
    slowed = _list([gpu.index for gpu in gpus if gpu.is_slowed])
    found = f"slowed down on GPU {slowed}" if slowed else f"up to {max(gpu.max_sm_mhz for gpu in gpus)} MHz"
    remedy = "a step waits for the slowest GPU: check cooling and power caps"
    return Check.of("gpus", "gpu clocks", found, is_ok=not slowed, remedy=remedy, otherwise=CheckStatus.WARNING)


def ask_topology() -> str | None:
    return _run_nvidia_smi("topo", "-m")


def check_links(topology: str) -> Check:
    """Return a warning where a pair of GPUs is not joined by NVLink (such as `NV18`): its traffic goes over PCIe."""
    rows = [re.sub(r"\x1b\[\d*m", "", line).split() for line in topology.splitlines()]
    gpu_rows = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    links = {word for row in gpu_rows for word in row[1 : len(gpu_rows) + 1]} - {"X"}
    slow = sorted(link for link in links if not link.startswith("NV"))
    return Check.of(
        "gpus",
        "gpu links",
        ", ".join(sorted(links)),
        is_ok=not slow,
        remedy="some pairs have no NVLink: keep tensor-parallel ranks on pairs that have it, or set tensor: 1",
        otherwise=CheckStatus.WARNING,
    )


def _list(indices: list[int]) -> str:
    return ", ".join(map(str, indices))


def _run_nvidia_smi(*words: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    done = subprocess.run(  # noqa: S603 - the program was looked up, the words are ours
        [program, *words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    return done.stdout if done.returncode == 0 else None
