"""The system calls that a program in the sandbox may not use, as a filter of the kernel (seccomp). Pure.

Denied are memory that no limit counts (memfd, System V), namespaces and mounts, sockets other than Unix and Internet
ones, and interfaces of the kernel that a program of a model has no use for. A denied call fails; it does not end the
program.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterator, Mapping

_ARCHITECTURES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's numbers of machines."""

# Numbers on x86_64 and on aarch64; calls since Linux 5.1 have the same number everywhere.
_DENIED: Mapping[str, tuple[int, int]] = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "semget": (64, 190),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
}
_CLONE, _SOCKET = (56, 220), (41, 198)
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020000
"""The flags of clone that make a namespace."""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
_FIRST_X32 = 0x40000000
"""Numbers of x86_64's second set of system calls."""

_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16
"""Offsets of what the kernel shows a filter; of an argument the lower half."""


def filter_program(machine: str | None = None) -> bytes:
    """Return the filter for a machine, this one by default; raise KeyError for one whose numbers are not known."""
    name = machine or platform.machine()
    column = list(_ARCHITECTURES).index(name) if name in _ARCHITECTURES else -1
    architecture = _ARCHITECTURES[name]
    return b"".join(struct.pack("=HBBI", *step) for step in _steps(architecture, column))


def _steps(architecture: int, column: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield instructions: operation, how many to skip if true, how many if false, operand."""
    yield _LOAD, 0, 0, _MACHINE
    yield _EQUAL, 1, 0, architecture
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    yield _AT_LEAST, 0, 1, _FIRST_X32
    yield _RETURN, 0, 0, _FAIL | errno.EPERM
    for numbers in _DENIED.values():
        yield _EQUAL, 0, 1, numbers[column]
        yield _RETURN, 0, 0, _FAIL | errno.EPERM
    # Its flags are behind a pointer, which a filter cannot follow; the C library then uses clone.
    yield _EQUAL, 0, 1, _CLONE3
    yield _RETURN, 0, 0, _FAIL | errno.ENOSYS
    yield _EQUAL, 0, 4, _CLONE[column]
    yield _LOAD, 0, 0, _ARGUMENT
    yield _HAS_BITS, 0, 1, _NEW_NAMESPACES
    yield _RETURN, 0, 0, _FAIL | errno.EPERM
    yield _RETURN, 0, 0, _ALLOW
    yield _EQUAL, 0, len(_FAMILIES) + 2, _SOCKET[column]
    yield _LOAD, 0, 0, _ARGUMENT
    for place, family in enumerate(_FAMILIES):
        yield _EQUAL, len(_FAMILIES) - place, 0, family
    yield _RETURN, 0, 0, _FAIL | errno.EAFNOSUPPORT
    yield _RETURN, 0, 0, _ALLOW
