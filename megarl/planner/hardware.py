"""Peak rates of GPUs and their links, and the share of them that a run reaches. Stated figures, not measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megarl.config.recipe import ClusterConfig
from megarl.config.roles import Scaling
from megarl.config.section import GIB, GpuName
from megarl.errors import ConfigError, Problem


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
    reached: float = 1.0
    """Share of the efficiencies below that runs reach on this GPU: its software is younger, or its host slower."""

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

_BLACKWELL_REACHED = 0.57
"""Fitted to the published GB200 runs."""

GPUS: Mapping[str, GpuModel] = {
    name: GpuModel(
        name=name,
        memory_gib=memory_gib,
        tflops=tflops,
        memory_gb_per_s=memory_gb_per_s,
        node_gb_per_s=node_gb_per_s,
        network_gb_per_s=network_gb_per_s,
        reached=_BLACKWELL_REACHED if "b" in name else 1.0,
    )
    for name, (memory_gib, tflops, memory_gb_per_s, node_gb_per_s, network_gb_per_s) in _GPUS.items()
}
"""SXM modules (the L40S is a PCIe card); eight to a node, one 200, 400 or 800 Gb/s port per GPU."""

DEFAULT_GPU: GpuName = "h100"

# Shares of the peak rates and times that a run reaches, fitted to published runs: docs/planning.md has the comparison.
DENSE_EFFICIENCY = 0.4
"""Share of the arithmetic rate in matrices that every token is multiplied with."""
EXPERT_EFFICIENCY = 0.08
"""The same in experts: small matrices, and experts that wait for the fullest one."""
ATTENTION_EFFICIENCY = 0.3
FP8_SPEEDUP: Mapping[Scaling, float] = {"tensorwise": 1.6, "blockwise": 1.37, "delayed": 1.66}
"""Rate of the products of linear layers in FP8, relative to bfloat16; from steps of a 7B shape on an H200. Experts have
none: four layers of a 30B-A3B shape, two of them in FP8, took 279 ms there, and 208 in bfloat16."""
FLOAT32_SLOWDOWN = 15.0
"""Time of products in float32 without TF32, relative to bfloat16: the ratio of an H100's rates, 989 to 67 TFLOP/s."""
PREFILL_EFFICIENCY = 0.5
DECODE_EFFICIENCY = 0.8
"""Share of the memory bandwidth in a decoding step; the rest of the step is in the times below."""
DECODE_STEP_S = 1.5e-3
"""Scheduling and sampling of a decoding step."""
DECODE_LAYER_S = 3e-5
"""Small kernels of one layer in a decoding step."""
DECODE_REQUEST_S = 2e-5
"""Work of scheduler and tokenizer per running request in a decoding step."""
NODE_ALL_REDUCE_S = 1e-5
NETWORK_ALL_REDUCE_S = 6e-5
"""Latency of one small all-reduce between the GPUs of a node, and of several nodes."""
DETERMINISTIC_SLOWDOWN = 1.35
"""Factor of decoding with `is_deterministic`: the mean that SGLang's authors report for batch-invariant kernels."""
LAYER_START_S = 1.4e-3
"""Time of the host to start one layer's forward and backward pass: a micro-batch of a 135M model with 30 layers took
58, 100 and 167 ms with 8k, 32k and 64k tokens on an H200, of which 42 ms are independent of its tokens."""
PASS_S = 2.0
"""Time of a pass over a step's sequences before and after the arithmetic: packing, sending, collecting."""
SWITCH_S = 5.0
"""Time per step in which a shared pool changes hands, without the copies to and from host memory."""
LINK_EFFICIENCY = 0.8
ALL_TO_ALL_EFFICIENCY = 0.6
GLOO_GB_PER_S = 1.5
"""Rate of one process over TCP, with the copies to and from host memory. Not measured between machines."""
ROUND_S = 5e-4
"""Time of a round of a publish beside its bytes: its receiver polls this often."""
HOST_GB_PER_S = 25.0
"""Rate between a GPU and pinned host memory, in one direction."""
START_S = 88.0
"""Time until ranks and engines run, beside reading weights; measured with a 7B model and its engine on one H200."""

_CUSTOM = ("memory_gib", "tflops", "memory_gb_per_s", "node_gb_per_s", "network_gb_per_s")


def gpu_of(cluster: ClusterConfig, accelerators: Iterable[str] = ()) -> GpuModel:
    """Return the GPU that the recipe names, else the one that Ray reports, else the default."""
    if cluster.gpu is not None:
        return GPUS[cluster.gpu]
    return reported_gpu(accelerators) or GPUS[DEFAULT_GPU]


def other_gpu(cluster: ClusterConfig, accelerators: Iterable[str]) -> str | None:
    """Return a warning if Ray reports a smaller GPU than the recipe names: the plan does not hold there."""
    reported = reported_gpu(accelerators)
    if cluster.gpu is None or reported is None or reported.memory_gib >= GPUS[cluster.gpu].memory_gib:
        return None
    return f"cluster.gpu is {cluster.gpu}, but Ray reports {reported.name}, which is smaller; name it and plan again"


def gpu_named(driver_name: str) -> GpuModel | None:
    """Return the GPU that its driver calls `NVIDIA H200`; None for one that is not in the table."""
    words = driver_name.lower()
    # The longest name counts: an H200 is no H20.
    return next((GPUS[name] for name in sorted(GPUS, key=len, reverse=True) if name in words), None)


def reported_gpu(accelerators: Iterable[str]) -> GpuModel | None:
    """Return the smallest GPU of those that Ray reports (`H100`, `A100-80G`); None where it reports none that is
    known."""
    names = (accelerator.lower().removesuffix("-80g") for accelerator in accelerators)
    return min((GPUS[name] for name in names if name in GPUS), key=lambda gpu: gpu.memory_gib, default=None)


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
