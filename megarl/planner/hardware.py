"""Peak rates of GPUs and their links, and the share of them that a run reaches. Stated figures, not measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megarl.config.recipe import ClusterConfig
from megarl.config.section import GpuName
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


_GPUS: Mapping[GpuName, tuple[float, float, float, float, float]] = {
    "a100": (79.1, 312, 2039, 300, 25),
    "a100-40g": (39.4, 312, 1555, 300, 25),
    "h20": (95.6, 148, 4000, 450, 50),
    "h100": (79.1, 989, 3350, 450, 50),
    "h200": (139.8, 989, 4800, 450, 50),
    "b200": (178.4, 2250, 7700, 900, 50),
    "b300": (267.7, 2250, 7700, 900, 100),
    "gb200": (184.0, 2500, 7700, 900, 50),
    "l40s": (44.4, 362, 864, 32, 25),
}

GPUS: Mapping[str, GpuModel] = {
    name: GpuModel(
        name=name,
        memory_gib=memory_gib,
        tflops=tflops,
        memory_gb_per_s=memory_gb_per_s,
        node_gb_per_s=node_gb_per_s,
        network_gb_per_s=network_gb_per_s,
    )
    for name, (memory_gib, tflops, memory_gb_per_s, node_gb_per_s, network_gb_per_s) in _GPUS.items()
}
"""SXM modules (the L40S is a PCIe card); eight to a node, one 200, 400 or 800 Gb/s port per GPU."""

DEFAULT_GPU: GpuName = "h100"

TRAIN_EFFICIENCY = 0.45
PREFILL_EFFICIENCY = 0.5
DECODE_EFFICIENCY = 0.6
"""Share of the memory bandwidth."""
LINK_EFFICIENCY = 0.8
HOST_GB_PER_S = 25.0
"""Rate between a GPU and pinned host memory, in one direction."""
DISK_GB_PER_S_PER_NODE = 2.0

_CUSTOM = ("memory_gib", "tflops", "memory_gb_per_s", "node_gb_per_s", "network_gb_per_s")


def gpu_of(cluster: ClusterConfig, accelerators: Iterable[str] = ()) -> GpuModel:
    """Return the GPU that the recipe names, or the smallest of those that Ray reports (`H100`, `A100-80G`)."""
    if cluster.gpu is not None:
        return GPUS[cluster.gpu]
    names = (accelerator.lower().removesuffix("-80g") for accelerator in accelerators)
    known = [GPUS[name] for name in names if name in GPUS]
    return min(known, key=lambda gpu: gpu.memory_gib, default=GPUS[DEFAULT_GPU])


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
