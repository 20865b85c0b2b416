"""Rates that the plan counts on, and what is said of GPUs, links and disks that do not reach them. Pure.

Every threshold follows from `cluster.gpu` or another figure of the recipe by the shares that the planner assumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megarl.planner.hardware import DECODE_EFFICIENCY, LINK_EFFICIENCY, GpuModel
from megarl.tools.doctor import Check, CheckStatus

AREA = "cluster"
_FINE = 0.75
"""Share of the planned rate from which on a rate is fine: the planner's own figures are that exact."""
_POOR = 0.4
"""Share below which the plan is of no use."""
_SLOW = 0.85
"""Share of the median below which one GPU, which all others wait for, is named."""


_PRODUCTS = 0.75
"""Share of the datasheet's rate that products alone reach, 0.77 on an H200; of what training reaches, half of a GPU's
clock would be enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRates:
    """GB/s and TFLOP/s that the planner assumes; None on CPUs, whose rates are shown and not judged."""

    gpu: GpuModel | None

    @property
    def memory(self) -> float | None:
        return None if self.gpu is None else self.gpu.memory_gb_per_s * DECODE_EFFICIENCY

    @property
    def products(self) -> float | None:
        return None if self.gpu is None else self.gpu.tflops * _PRODUCTS * self.gpu.reached

    def reduce(self, *, num_nodes: int, gpus_per_node: int) -> float | None:
        """Rate of a ring's busiest link: inside a node, or over all ports of a node at once."""
        if self.gpu is None:
            return None
        inside = self.gpu.node_gb_per_s
        ports = self.gpu.network_gb_per_s * gpus_per_node
        return LINK_EFFICIENCY * (inside if num_nodes == 1 else min(inside, ports))


def bus_rate(num_ranks: int, num_bytes: int, seconds: float) -> float:
    """Return GB/s on the busiest link of an all-reduce, which sends each byte 2 (n - 1) / n times."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / seconds / 1e9


def check_rates(name: str, rates: Mapping[str, float], planned: float | None, *, unit: str, remedy: str) -> Check:
    """Judge the lowest rate by the planned one, and name all that are below it."""
    lowest = min(rates, key=lambda each: rates[each])
    among = f"{len(rates)} of them, " if len(rates) > 1 else ""
    text = f"{among}lowest {rates[lowest]:.3g} {unit} ({lowest})"
    if planned is None:
        return Check(area=AREA, name=name, found=f"{text}; not judged on CPUs", status=CheckStatus.OK)
    poor = [each for each, rate in rates.items() if rate < _FINE * planned]
    found = f"{text}; planned {planned:.3g}"
    if not poor:
        return Check(area=AREA, name=name, found=found, status=CheckStatus.OK)
    status = CheckStatus.ERROR if rates[lowest] < _POOR * planned else CheckStatus.WARNING
    return Check(area=AREA, name=name, found=f"{found}; too low: {_listed(poor)}", status=status, remedy=remedy)


def check_stragglers(name: str, rates: Mapping[str, float], *, unit: str) -> Check | None:
    """Return a warning if one GPU is slower than the others; all ranks wait for it in every step."""
    middle = median(rates.values())
    slow = [each for each, rate in rates.items() if rate < _SLOW * middle]
    if not slow:
        return None
    found = f"{_listed(slow)} below {_SLOW:.0%} of the median {middle:.3g} {unit}"
    remedy = "every step waits for the slowest: look at clocks, power and cooling there, or leave the node out"
    return Check(area=AREA, name=name, found=found, status=CheckStatus.WARNING, remedy=remedy)


def neighbours(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return rounds of pairs of nodes that can be tried at once; every node meets the one before and after it.

    A bad node is in two bad pairs, a bad link in one.
    """
    if len(nodes) < 2:
        return []
    rounds = [list(zip(nodes[::2], nodes[1::2], strict=False)), list(zip(nodes[1::2], nodes[2::2], strict=False))]
    return [pairs for pairs in rounds if pairs]


def check_network(used: Mapping[str, Sequence[str]], *, num_adapters: Mapping[str, int], is_gpu: bool) -> Check:
    """Judge which network NCCL used between nodes, by the lines of its log on each node: `NET/IB/0/GDRDMA`."""
    name = "network of NCCL"
    if not is_gpu:
        return Check(area=AREA, name=name, found="gloo over TCP, on CPUs", status=CheckStatus.NOTE)
    kinds = {kind for ways in used.values() for kind in ways}
    if not kinds:
        return Check(area=AREA, name=name, found="one node, none is used", status=CheckStatus.NOTE)
    found = ", ".join(sorted(kinds))
    on_sockets = [node for node, ways in used.items() if any("Socket" in way for way in ways)]
    if on_sockets:
        with_adapter = [node for node in on_sockets if num_adapters.get(node)]
        where = f"sockets on {_listed(on_sockets)}"
        remedy = "no node has an RDMA adapter: the plan's network is several times faster"
        if with_adapter:
            remedy = (
                "adapters are there and unused: see rdma, libibverbs and locked memory above; NCCL_IB_HCA names them"
            )
        return Check(area=AREA, name=name, found=where, status=CheckStatus.ERROR, remedy=remedy)
    indirect = [node for node, ways in used.items() if any("GDRDMA" not in way for way in ways)]
    if indirect:
        remedy = "bytes pass through host memory: load nvidia_peermem (or a kernel with DMA-BUF), turn ACS off"
        where = f"{found}, without GPUDirect on {_listed(indirect)}"
        return Check(area=AREA, name=name, found=where, status=CheckStatus.WARNING, remedy=remedy)
    return Check(area=AREA, name=name, found=f"{found}, with GPUDirect", status=CheckStatus.OK)


def merge_nodes(checks: Mapping[str, Sequence[Check]]) -> list[Check]:
    """Return one row for what all nodes agree about, and a row per node that differs or has a problem."""
    merged: list[Check] = []
    names = dict.fromkeys(check.name for each in checks.values() for check in each)
    for name in names:
        found = {node: check for node, each in checks.items() for check in each if check.name == name}
        fine = {node: check for node, check in found.items() if check.status in (CheckStatus.OK, CheckStatus.NOTE)}
        if fine:
            texts = list(dict.fromkeys(check.found for check in fine.values()))
            text = texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"
            merged.append(
                Check(
                    area=AREA,
                    name=name,
                    found=f"{text}, on {len(fine)} of {len(checks)} node(s)",
                    status=next(iter(fine.values())).status,
                )
            )
        for node, check in found.items():
            if node not in fine:
                merged.append(
                    Check(
                        area=AREA, name=name, found=f"{node}: {check.found}", status=check.status, remedy=check.remedy
                    )
                )
    return merged


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
