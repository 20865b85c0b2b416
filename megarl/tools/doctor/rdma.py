"""RDMA on this machine: adapters, the library through which NCCL uses them, their devices, and locked memory.

Where one of them is missing NCCL uses sockets, without a word: everything works, several times slower.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from pathlib import Path

from megarl.tools.doctor import Check, CheckStatus

_ADAPTERS = Path("/sys/class/infiniband")
_DEVICES = Path("/dev/infiniband")
_LIBRARY = "libibverbs.so.1"


def check_rdma(
    adapters: Path = _ADAPTERS, devices: Path = _DEVICES, *, library: str = _LIBRARY, locked: int | None = None
) -> Iterator[Check]:
    """Return a note on a machine without adapters, else what keeps NCCL from using them."""
    names = sorted(path.name for path in adapters.glob("*"))
    if not names:
        yield Check(area="machine", name="rdma", found="no adapter", status=CheckStatus.NOTE)
        return
    active = [name for name in names if _is_active(adapters / name)]
    yield _check(
        "rdma", f"{len(active)} of {len(names)} adapters active", bool(active), "ask for the link: ibv_devinfo"
    )
    remedy = "install libibverbs1, ibverbs-providers and librdmacm1, or use the image of the Dockerfile"
    yield _check("libibverbs", library, _loads(library), remedy)
    has_devices = any(devices.glob("uverbs*"))
    remedy = "give the container the devices: --device=/dev/infiniband, or a resource of the device plugin"
    yield _check("rdma devices", str(devices), has_devices, remedy)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if locked is None else locked
    is_free = limit == resource.RLIM_INFINITY
    found = "unlimited" if is_free else f"{limit:,} bytes"
    remedy = "RDMA locks the memory of its buffers: `ulimit -l unlimited`, IPC_LOCK in a container"
    yield _check("locked memory", found, is_free, remedy)


def _check(name: str, found: str, is_ok: bool, remedy: str) -> Check:
    return Check.of("machine", name, found, is_ok=is_ok, remedy=remedy, otherwise=CheckStatus.WARNING)


def _is_active(adapter: Path) -> bool:
    """Whether a port of the adapter is up: its state reads `4: ACTIVE`."""
    return any("ACTIVE" in state.read_text() for state in adapter.glob("ports/*/state"))


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
