"""The health of a node's GPUs: what nvidia-smi says about memory errors, heat and power, and the driver's Xid messages.

`parse_health` and `find_xids` are pure. Needs no CUDA: a GPU that a process cannot use any more is read as well.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.env import VISIBLE_GPUS

QUERY = (
    "index",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "clocks_event_reasons.hw_slowdown",
    "clocks_event_reasons.sw_thermal_slowdown",
    "temperature.gpu",
    "power.draw",
)
_KERNEL_LOG = Path("/dev/kmsg")
_DRIVER = Path("/proc/driver/nvidia/gpus")
_XID = re.compile(r"^\d+,(\d+),.*?;.*(NVRM: Xid .*)$")
_TIMEOUT_S = 30.0
_LINE_BYTES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """One GPU; a number that it does not report is 0."""

    index: int
    uncorrected_errors: int
    """Memory errors since the driver was loaded."""
    needs_reset: bool
    """Rows of memory wait for a reset to be replaced, or could not be replaced."""
    is_throttled: bool
    """Slowed down by heat or by its power supply."""
    celsius: float
    watts: float

    def problems(self) -> list[str]:
        """Return what is wrong, as ends of sentences."""
        found = {
            f"has {self.uncorrected_errors} memory errors that ECC could not correct": self.uncorrected_errors > 0,
            "needs a reset: rows of its memory are to be replaced": self.needs_reset,
            f"is slowed down by heat or power ({self.celsius:.0f} C, {self.watts:.0f} W)": self.is_throttled,
        }
        return [text for text, holds in found.items() if holds]


def names_of_driver(folder: Path = _DRIVER) -> list[str]:
    """Return what the driver calls the GPUs of this machine, such as `NVIDIA H200`; none where it does not say."""
    names = []
    for path in sorted(folder.glob("*/information")):
        with suppress(OSError):
            fields = dict(line.partition(":")[::2] for line in path.read_text().splitlines())
            names += [fields["Model"].strip()] if "Model" in fields else []
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    gpus: tuple[GpuHealth, ...]
    xids: tuple[tuple[int, str], ...]
    """The driver's messages in the kernel's log by their number there; empty where it cannot be read."""


def read_health() -> NodeHealth:
    """Return the health of this machine's GPUs; nothing where there is no nvidia-smi, or it does not answer."""
    return NodeHealth(gpus=parse_health(_ask(QUERY)), xids=find_xids(_kernel_lines()))


def find_bus_id() -> str | None:
    """Return the PCI address of this process's first GPU as the kernel writes it, such as 0000:19:00.0."""
    first = VISIBLE_GPUS.read().partition(",")[0]
    answer = _ask(("pci.bus_id",), *(("--id", first) if first else ())).strip().splitlines()
    # nvidia-smi writes the domain with eight digits.
    found = re.fullmatch(r"[0-9A-Fa-f]*([0-9A-Fa-f]{4}(:[0-9A-Fa-f]{2}){2}\.\d)", answer[0]) if answer else None
    return None if found is None else found[1].lower()


def _ask(fields: Sequence[str], *options: str) -> str:
    """Return nvidia-smi's answer; nothing where it is missing or does not answer."""
    words = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *options]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(  # noqa: S603 - our own words
            words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        return done.stdout
    return ""


def parse_health(text: str) -> tuple[GpuHealth, ...]:
    """Return the GPUs in nvidia-smi's answer to QUERY; lines of another form are left out."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(QUERY) or not fields[0].isdecimal():
            continue
        index, errors, pending, failed, slowed, hot, celsius, watts = fields
        gpus.append(
            GpuHealth(
                index=int(index),
                uncorrected_errors=int(_number(errors)),
                needs_reset="Yes" in (pending, failed) or _number(pending) + _number(failed) > 0,
                is_throttled="Active" in (slowed, hot),
                celsius=_number(celsius),
                watts=_number(watts),
            )
        )
    return tuple(gpus)


def find_xids(lines: list[str]) -> tuple[tuple[int, str], ...]:
    found = (_XID.match(line) for line in lines)
    return tuple((int(match[1]), match[2].strip()) for match in found if match is not None)


def _kernel_lines() -> list[str]:
    """Return the kernel's log, a record per line; nothing where it may not be read, as in most containers."""
    lines: list[str] = []
    with suppress(OSError):  # also the end of the log: nothing more to read now
        file = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while record := os.read(file, _LINE_BYTES):
                lines.append(record.decode(errors="replace").splitlines()[0])
        finally:
            os.close(file)
    return lines


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0  # [N/A]
