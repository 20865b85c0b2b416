"""Thresholds of the stages of a bring-up, by the planner's table of GPUs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megarl.planner.hardware import GPUS
from megarl.tools.doctor import Check, CheckStatus
from megarl.tools.doctor.probe import ways_between_nodes
from megarl.tools.doctor.rates import (
    PlannedRates,
    bus_rate,
    check_network,
    check_rates,
    check_stragglers,
    merge_nodes,
    neighbours,
)

H100 = PlannedRates(gpu=GPUS["h100"])


@pytest.mark.parametrize(
    ("rate", "status"), [(360.0, CheckStatus.OK), (250.0, CheckStatus.WARNING), (40.0, CheckStatus.ERROR)]
)
def test_a_rate_is_judged_by_what_the_plan_counts_on(rate: float, status: CheckStatus) -> None:
    planned = H100.reduce(num_nodes=1, gpus_per_node=8)
    assert planned == pytest.approx(360)
    check = check_rates("all-reduce", {"n0": 360.0, "n1": rate}, planned, unit="GB/s", remedy="look at NVLink")
    assert check.status is status
    assert bool(check.remedy) is (status is not CheckStatus.OK)
    assert f"lowest {rate:.3g} GB/s (n1)" in check.found or status is CheckStatus.OK


@pytest.mark.parametrize(
    ("rate", "status"), [(768.0, CheckStatus.OK), (400.0, CheckStatus.WARNING), (250.0, CheckStatus.ERROR)]
)
def test_a_gpu_at_half_of_its_clock_is_told_even_where_it_is_the_only_one(rate: float, status: CheckStatus) -> None:
    """An H200 was seen at 768 TFLOP/s."""
    planned = PlannedRates(gpu=GPUS["h200"]).products
    assert check_rates("products", {"n0 GPU 0": rate}, planned, unit="TFLOP/s", remedy="clocks").status is status


def test_between_nodes_all_ports_of_a_node_count_up_to_its_nvlink() -> None:
    assert H100.reduce(num_nodes=2, gpus_per_node=8) == pytest.approx(0.8 * 400)
    assert H100.reduce(num_nodes=2, gpus_per_node=1) == pytest.approx(0.8 * 50)
    assert PlannedRates(gpu=GPUS["b300"]).reduce(num_nodes=16, gpus_per_node=8) == pytest.approx(0.8 * 800)


def test_rates_of_cpus_are_shown_and_not_judged() -> None:
    none = PlannedRates(gpu=None)
    assert none.reduce(num_nodes=2, gpus_per_node=1) is None
    check = check_rates("products", {"n0": 0.01}, none.products, unit="TFLOP/s", remedy="")
    assert check.status is CheckStatus.OK
    assert check.found.endswith("not judged on CPUs")


def test_a_ring_sends_each_byte_nearly_twice() -> None:
    assert bus_rate(8, 1 << 30, 0.005) == pytest.approx(2 * 7 / 8 * (1 << 30) / 0.005 / 1e9)


def test_one_slow_gpu_is_named() -> None:
    rates = {f"n0 GPU {index}": 700.0 for index in range(8)}
    assert check_stragglers("products", rates, unit="TFLOP/s") is None
    rates["n0 GPU 3"] = 500.0
    check = check_stragglers("products", rates, unit="TFLOP/s")
    assert check is not None
    assert check.found.startswith("n0 GPU 3 below")


@pytest.mark.parametrize("number", [2, 3, 4, 16])
def test_every_node_meets_its_neighbours_in_two_rounds(number: int) -> None:
    nodes = [f"n{index}" for index in range(number)]
    rounds = neighbours(nodes)
    assert len(rounds) <= 2
    for pairs in rounds:
        met = [node for pair in pairs for node in pair]
        assert len(met) == len(set(met)), "a node is in one pair at a time"
    assert {pair for pairs in rounds for pair in pairs} == set(pairwise(nodes))


LINES = [
    "n0:12:34 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA",
    "n0:12:34 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
    "n0:12:34 [0] NCCL INFO Channel 01/0 : 9[1] -> 1[1] [receive] via NET/IB/1",
    "n0:12:34 [0] NCCL INFO Channel 01 : 9[1] -> 1[1] [receive] via NET/Socket/0",
]


def test_the_network_is_read_from_nccls_own_lines() -> None:
    assert ways_between_nodes(LINES) == ("IB", "IB/GDRDMA", "Socket")
    assert ways_between_nodes(LINES[1:2]) == ()


@pytest.mark.parametrize(
    ("ways", "adapters", "status", "said"),
    [
        (("IB/GDRDMA",), 8, CheckStatus.OK, "with GPUDirect"),
        (("IB",), 8, CheckStatus.WARNING, "nvidia_peermem"),
        (("Socket",), 8, CheckStatus.ERROR, "adapters are there and unused"),
        (("Socket",), 0, CheckStatus.ERROR, "no node has an RDMA adapter"),
        ((), 8, CheckStatus.NOTE, "one node"),
    ],
)
def test_sockets_and_detours_through_host_memory_are_said(
    ways: tuple[str, ...], adapters: int, status: CheckStatus, said: str
) -> None:
    check = check_network({"n0": ways, "n1": ways}, num_adapters={"n0": adapters, "n1": adapters}, is_gpu=True)
    assert check.status is status
    assert said in check.found + check.remedy


def test_nodes_that_agree_are_one_row_and_others_are_named() -> None:
    fine = Check(area="machine", name="locked memory", found="unlimited", status=CheckStatus.OK)
    bad = Check(area="machine", name="locked memory", found="65,536 bytes", status=CheckStatus.WARNING, remedy="ulimit")
    merged = merge_nodes({"n0": [fine], "n1": [fine], "n2": [bad]})
    assert [check.found for check in merged] == ["unlimited, on 2 of 3 node(s)", "n2: 65,536 bytes"]
    assert merged[1].remedy == "ulimit"
