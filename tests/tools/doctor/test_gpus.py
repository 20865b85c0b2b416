from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.tools.doctor import CheckStatus
from megarl.tools.doctor.gpus import Gpu, check_gpus, check_links, parse_gpus

# As driver 580 prints them on an H200.
QUERIED = "0, NVIDIA H200, 580.159.04, 143771, 0, 390, 1980, Not Active, Not Active, 0\n"
ALONE = """\
\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \t0-15\t0\t\tN/A

Legend:

  X    = Self
"""
NVLINKED = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tPXB\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t0-47\t0\t\tN/A
NIC0\tPXB\tSYS\t X \t\t\t\t
"""

GPU = parse_gpus(QUERIED)[0]


def verdicts(*gpus: Gpu, needed: int = 0) -> dict[str, CheckStatus]:
    return {check.name: check.status for check in check_gpus(list(gpus), needed=needed, topology=None)}


def test_what_nvidia_smi_prints_is_read() -> None:
    assert (
        Gpu(
            index=0,
            name="NVIDIA H200",
            driver="580.159.04",
            memory_mib=143771,
            used_mib=0,
            sm_mhz=390,
            max_sm_mhz=1980,
            is_slowed=False,
            num_errors=0,
        )
        == GPU
    )


def test_a_gpu_without_error_counts_has_none() -> None:
    (gpu,) = parse_gpus(QUERIED.replace(", 0\n", ", [N/A]\n"))
    assert gpu.num_errors == 0


def test_healthy_gpus_are_fine() -> None:
    assert set(verdicts(GPU, replace(GPU, index=1), needed=2).values()) == {CheckStatus.OK}


@pytest.mark.parametrize(
    ("changes", "name", "verdict"),
    [
        ({"driver": "570.86"}, "driver", CheckStatus.ERROR),
        ({"used_mib": 60_000}, "gpu memory", CheckStatus.WARNING),
        ({"is_slowed": True}, "gpu clocks", CheckStatus.WARNING),
        ({"num_errors": 2}, "memory errors", CheckStatus.ERROR),
    ],
)
def test_what_is_wrong_with_a_gpu_is_said(changes: dict[str, object], name: str, verdict: CheckStatus) -> None:
    found = verdicts(replace(GPU, **changes))  # type: ignore[arg-type]
    assert found.pop(name) is verdict
    assert set(found.values()) == {CheckStatus.OK}


def test_mixed_gpus_are_a_warning_and_too_few_an_error() -> None:
    assert verdicts(GPU, replace(GPU, name="NVIDIA H100"))["gpus"] is CheckStatus.WARNING
    assert verdicts(GPU, needed=2)["gpus"] is CheckStatus.ERROR


@pytest.mark.parametrize(("needed", "verdict"), [(0, CheckStatus.NOTE), (1, CheckStatus.ERROR)])
def test_no_driver_matters_where_a_gpu_is_needed(needed: int, verdict: CheckStatus) -> None:
    (found,) = check_gpus(None, needed=needed, topology=None)
    assert (found.found, found.status) == ("nvidia-smi not found", verdict)


def test_links_between_gpus_are_read_and_those_of_network_cards_left_out() -> None:
    assert (check_links(NVLINKED).found, check_links(NVLINKED).status) == ("NV18", CheckStatus.OK)
    pcie = NVLINKED.replace("NV18", "SYS")
    assert (check_links(pcie).found, check_links(pcie).status) == ("SYS", CheckStatus.WARNING)
    assert check_links(ALONE).found == ""
