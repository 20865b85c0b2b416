"""The cores and network adapters next to a GPU, by the kernel's view of the PCI tree.

A rank on cores of the other socket copies through the link between sockets, and its pinned memory is there. With the
cores bound, the kernel takes memory from the same side. NCCL finds the adapter next to a GPU by itself; it is noted
here because a container that hides it makes NCCL use another one.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.system.gpu_health import find_bus_id

logger = logging.getLogger(__name__)

_SYS = Path("/sys")
_TASKS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlace:
    """Where a GPU is in its node."""

    numa_node: int | None
    """None where the kernel does not say, as in many virtual machines."""
    cpus: frozenset[int]
    """Cores of that side; empty where the kernel does not say."""
    adapters: tuple[str, ...]
    """RDMA adapters that share the most bridges with the GPU."""

    def __str__(self) -> str:
        cpus = f"{min(self.cpus)}-{max(self.cpus)} ({len(self.cpus)})" if self.cpus else "unknown"
        return f"numa={self.numa_node} cpus={cpus} adapters={','.join(self.adapters) or 'none'}"


def bind_to_gpu() -> None:
    """Run on the cores next to this process's GPU, and log them and the adapters there."""
    if (bus_id := find_bus_id()) is not None:
        place = place_of(bus_id)
        logger.info("gpu=%s %s bound_cpus=%d", bus_id, place, len(bind_process(place.cpus)))


def place_of(bus_id: str, sys: Path = _SYS) -> DevicePlace:
    """Return the place of the device with this PCI address, such as 0000:19:00.0."""
    device = sys / "bus" / "pci" / "devices" / bus_id.lower()
    node = _read(device / "numa_node")
    is_known = node.lstrip("-").isdecimal() and int(node) >= 0
    return DevicePlace(
        numa_node=int(node) if is_known else None,
        cpus=parse_cpus(_read(device / "local_cpulist")) if is_known else frozenset(),
        adapters=_nearest(device.resolve(), sys / "class" / "infiniband"),
    )


def parse_cpus(text: str) -> frozenset[int]:
    """Return the cores of a list such as 0-3,8."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def bind_process(cpus: frozenset[int]) -> frozenset[int]:
    """Let all threads of this process run on these cores only; return those that it may use, none if it stays free.

    A scheduler may have given the process other cores: if it has none of these it stays where it is.
    """
    allowed = cpus & os.sched_getaffinity(0)
    if not allowed:
        return frozenset()
    for task in _TASKS.iterdir():
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(task.name), allowed)
    return frozenset(allowed)


def _nearest(device: Path, adapters: Path) -> tuple[str, ...]:
    shared: dict[str, int] = {}
    for adapter in sorted(adapters.glob("*")):
        other = (adapter / "device").resolve()
        shared[adapter.name] = len(Path(os.path.commonpath([device, other])).parts)
    most = max(shared.values(), default=0)
    return tuple(name for name, count in shared.items() if count == most)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
