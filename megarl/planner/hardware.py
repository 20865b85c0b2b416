"""Peak rates of GPUs and their links, and the share of them that a run reaches. Stated figures, not measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megarl.errors import ConfigError, Problem

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    name: str
    memory_gib: float
    """Memory that the driver leaves to programs."""
    tflops: float
    """Dense bfloat16."""
    memory_gb_per_s: float
    node_gb_per_s: float
    """Rate to another GPU of the node, in one direction."""
    network_gb_per_s: float
    """Rate to a GPU of another node, in one direction, per GPU."""

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def flops(self) -> float:
        return self.tflops * 1e12


GPUS: Mapping[str, GpuModel] = {
    "a100": GpuModel(
        name="a100", memory_gib=79.1, tflops=312, memory_gb_per_s=2039, node_gb_per_s=300, network_gb_per_s=25
    ),
    "h100": GpuModel(
        name="h100", memory_gib=79.1, tflops=989, memory_gb_per_s=3350, node_gb_per_s=450, network_gb_per_s=50
    ),
    "h200": GpuModel(
        name="h200", memory_gib=139.8, tflops=989, memory_gb_per_s=4800, node_gb_per_s=450, network_gb_per_s=50
    ),
}
"""SXM modules; eight to a node, one 200 or 400 Gb/s port per GPU."""

TRAIN_EFFICIENCY = 0.45
PREFILL_EFFICIENCY = 0.5
DECODE_EFFICIENCY = 0.6
"""Share of the memory bandwidth."""
LINK_EFFICIENCY = 0.8
HOST_GB_PER_S = 25.0
"""Rate between a GPU and pinned host memory, in one direction."""
DISK_GB_PER_S_PER_NODE = 2.0

_CUSTOM = ("memory_gib", "tflops", "memory_gb_per_s", "node_gb_per_s", "network_gb_per_s")


def parse_gpu(text: str) -> GpuModel:
    """Return the GPU named like `h100`, or one with other figures like `h100,memory_gib=94,network_gb_per_s=25`."""
    name, *changes = text.split(",")
    if name not in GPUS:
        raise _error(text, f"unknown {name!r}; one of {', '.join(GPUS)}")
    gpu = GPUS[name]
    for change in changes:
        key, _, value = change.partition("=")
        if key not in _CUSTOM:
            raise _error(text, f"unknown figure {key!r}; one of {', '.join(_CUSTOM)}")
        gpu = replace(gpu, name="custom", **{key: _positive(text, value)})
    return gpu


def _positive(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise _error(text, f"{value!r} is not a positive number")
    return number


def _error(text: str, message: str) -> ConfigError:
    return ConfigError("--gpu", (Problem(key=text, message=message),))
