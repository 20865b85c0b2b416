from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from megarl.env import KERNEL_CACHES, NCCL_VARIABLES, ONE_CARD, engine_environment, kernel_caches, visible_gpus


def test_a_process_sees_the_gpus_it_is_given() -> None:
    assert visible_gpus(["2", "3"])["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "NCCL_HOSTID" not in visible_gpus(["2"])


def test_on_one_card_every_process_sees_the_first_gpu_and_is_a_host_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONE_CARD.name, "1")
    first, second = visible_gpus(["2"]), visible_gpus(["3"])
    assert first["CUDA_VISIBLE_DEVICES"] == second["CUDA_VISIBLE_DEVICES"] == "0"
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]


@pytest.fixture
def node_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in KERNEL_CACHES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_kernels_are_compiled_on_the_nodes_own_disk(node_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/scratch/mine")
    caches = kernel_caches()
    folder = node_disk / f"megarl-kernels-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert set(caches) == set(KERNEL_CACHES) - {"TRITON_CACHE_DIR"}
    assert all(Path(path).parent == folder for path in caches.values())
    engine = engine_environment(device="cuda", tensor=1, interface=None)
    assert engine["TRITON_CACHE_DIR"] == "/scratch/mine"
    assert engine["FLASHINFER_WORKSPACE_BASE"] == caches["FLASHINFER_WORKSPACE_BASE"]
    assert "FLASHINFER_WORKSPACE_BASE" not in engine_environment(device="cpu", tensor=1, interface=None)


def test_a_folder_that_others_can_write_is_not_used_for_kernels(node_disk: Path) -> None:
    folder = node_disk / f"megarl-kernels-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert kernel_caches() == {}
    folder.rmdir()
    folder.symlink_to(node_disk)
    assert kernel_caches() == {}


def test_engines_have_the_nccl_of_trainer_ranks_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in NCCL_VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    environment = engine_environment(device="cuda", tensor=1, interface=None)
    assert {variable.name: environment[variable.name] for variable in NCCL_VARIABLES} == {
        "NCCL_DEBUG": "WARN",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
    }
    for variable in NCCL_VARIABLES:
        monkeypatch.setenv(variable.name, "INFO")
    environment = engine_environment(device="cuda", tensor=1, interface=None)
    assert {environment[variable.name] for variable in NCCL_VARIABLES} == {"INFO"}


def test_nccl_meets_on_the_interface_of_the_engines_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert engine_environment(device="cuda", tensor=1, interface="eth1")["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert "NCCL_SOCKET_IFNAME" not in engine_environment(device="cuda", tensor=1, interface=None)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert engine_environment(device="cuda", tensor=1, interface="eth1")["NCCL_SOCKET_IFNAME"] == "ib0"
