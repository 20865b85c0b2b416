"""Faults that keep NCCL from the adapters of a machine."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from megarl.tools.doctor import Check, CheckStatus
from megarl.tools.doctor.rdma import check_rdma


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    for number, state in enumerate(("4: ACTIVE", "1: DOWN")):
        port = tmp_path / "infiniband" / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    return tmp_path / "infiniband"


def statuses(checks: list[Check]) -> dict[str, CheckStatus]:
    return {check.name: check.status for check in checks}


def test_a_machine_without_adapters_is_told_so(tmp_path: Path) -> None:
    (check,) = check_rdma(tmp_path)
    assert (check.found, check.status) == ("no adapter", CheckStatus.NOTE)


def test_everything_that_makes_nccl_use_sockets_is_a_warning(adapters: Path, tmp_path: Path) -> None:
    checks = list(check_rdma(adapters, tmp_path / "none", library="libmissing.so.9", locked=65536))
    assert statuses(checks) == {
        "rdma": CheckStatus.OK,
        "libibverbs": CheckStatus.WARNING,
        "rdma devices": CheckStatus.WARNING,
        "locked memory": CheckStatus.WARNING,
    }
    assert checks[0].found == "1 of 2 adapters active"
    assert "ibverbs-providers" in checks[1].remedy
    assert checks[3].found == "65,536 bytes"


def test_a_machine_that_has_all_is_right(adapters: Path, tmp_path: Path) -> None:
    (tmp_path / "uverbs0").touch()
    checks = list(check_rdma(adapters, tmp_path, library="libc.so.6", locked=resource.RLIM_INFINITY))
    assert set(statuses(checks).values()) == {CheckStatus.OK}
