"""Checks of GPUs from the output of nvidia-smi: driver, memory, clocks, errors, links."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from megarl.tools.doctor import Check, CheckStatus

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
    broken = [gpu.index for gpu in gpus if gpu.num_errors]
    yield Check(
        area="gpus",
        name="memory errors",
        found=f"uncorrected on GPU {_list(broken)}" if broken else "none",
        status=CheckStatus.ERROR if broken else CheckStatus.OK,
        remedy="drain the node and reset or replace these GPUs" if broken else "",
    )
    if topology is not None and len(gpus) > 1:
        yield check_links(topology)


def _count(gpus: list[Gpu], *, needed: int) -> Check:
    kinds = sorted({gpu.name for gpu in gpus})
    found = f"{len(gpus)} x {' and '.join(kinds)}"
    if len(gpus) < needed:
        remedy = f"the recipe's pools need {needed} GPUs on this machine; shrink the pools or use a larger machine"
        return Check(area="gpus", name="gpus", found=found, status=CheckStatus.ERROR, remedy=remedy)
    is_mixed = len(kinds) > 1
    return Check(
        area="gpus",
        name="gpus",
        found=found,
        status=CheckStatus.WARNING if is_mixed else CheckStatus.OK,
        remedy="a step waits for the slowest GPU: use GPUs of one kind" if is_mixed else "",
    )


def _driver(version: str) -> Check:
    is_new_enough = int(version.partition(".")[0]) >= MIN_DRIVER
    return Check(
        area="gpus",
        name="driver",
        found=version,
        status=CheckStatus.OK if is_new_enough else CheckStatus.ERROR,
        remedy="" if is_new_enough else f"CUDA 13 needs driver {MIN_DRIVER} or newer",
    )


def _memory(gpus: list[Gpu]) -> Check:
    busy = [gpu.index for gpu in gpus if gpu.used_mib > _BUSY_MIB]
    total = f"{min(gpu.memory_mib for gpu in gpus) / 1024:.0f} GiB each"
    return Check(
        area="gpus",
        name="gpu memory",
        found=f"{total}, in use on GPU {_list(busy)}" if busy else total,
        status=CheckStatus.WARNING if busy else CheckStatus.OK,
        remedy="stop the processes that use them; `nvidia-smi` lists them" if busy else "",
    )


def _clocks(gpus: list[Gpu]) -> Check:
    slowed = [gpu.index for gpu in gpus if gpu.is_slowed]
    fastest = max(gpu.max_sm_mhz for gpu in gpus)
    return Check(
        area="gpus",
        name="gpu clocks",
        found=f"slowed down on GPU {_list(slowed)}" if slowed else f"up to {fastest} MHz",
        status=CheckStatus.WARNING if slowed else CheckStatus.OK,
        remedy="a step waits for the slowest GPU: check cooling and power caps" if slowed else "",
    )


def ask_topology() -> str | None:
    return _run_nvidia_smi("topo", "-m")


def check_links(topology: str) -> Check:
    """Return a warning where a pair of GPUs is not joined by NVLink (such as `NV18`): its traffic goes over PCIe."""
    rows = [re.sub(r"\x1b\[\d*m", "", line).split() for line in topology.splitlines()]
    gpu_rows = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    links = {word for row in gpu_rows for word in row[1 : len(gpu_rows) + 1]} - {"X"}
    slow = sorted(link for link in links if not link.startswith("NV"))
    return Check(
        area="gpus",
        name="gpu links",
        found=", ".join(sorted(links)),
        status=CheckStatus.WARNING if slow else CheckStatus.OK,
        remedy="some pairs have no NVLink: keep tensor-parallel ranks on pairs that have it, or set tensor: 1"
        if slow
        else "",
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
