"""Checks of a machine."""

from __future__ import annotations

import resource
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.environment import HarborEnvironmentConfig
from megarl.config.load import load_recipe
from megarl.config.model import read_model_shape
from megarl.config.recipe import Recipe
from megarl.tools.doctor import CheckStatus
from megarl.tools.doctor.machine import (
    Cpus,
    Gpu,
    check_boxes,
    check_cpus,
    check_disk,
    check_gpus,
    check_links,
    check_machine,
    check_metrics_port,
    check_open_files,
    check_processes,
    check_sandbox,
    check_shared_memory,
    checkpoint_bytes,
    parse_gpus,
)
from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.run.runs import write_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("machine")
    make_arithmetic(folder / "arithmetic", num_train=8, num_sft=8, num_eval=8)
    return load_recipe(write_recipe(folder, "machine"))


def test_this_machine_has_no_error() -> None:
    assert [check for check in check_machine() if check.status is CheckStatus.ERROR] == []


def test_limits_that_are_too_low_are_said_with_the_command_that_raises_them() -> None:
    assert check_shared_memory(64 << 20).status is CheckStatus.ERROR
    assert "--shm-size" in check_shared_memory(64 << 20).remedy
    assert check_shared_memory(2 << 30).status is CheckStatus.OK
    assert "ulimit -n 65536` (at most 4096 here)" in check_open_files((1024, 4096)).remedy
    assert check_open_files((resource.RLIM_INFINITY, resource.RLIM_INFINITY)).status is CheckStatus.OK
    assert check_processes(512).status is CheckStatus.ERROR
    assert check_processes(resource.RLIM_INFINITY).status is CheckStatus.OK


@pytest.mark.parametrize(
    ("cpus", "verdict", "remedy"),
    [
        (Cpus(visible=64, allowed=64, slurm=None), CheckStatus.OK, ""),
        (Cpus(visible=64, allowed=64, slurm=64), CheckStatus.OK, ""),
        (Cpus(visible=64, allowed=16, slurm=16), CheckStatus.WARNING, "--num-cpus 16"),
        (Cpus(visible=64, allowed=64, slurm=16), CheckStatus.WARNING, "--num-cpus 16"),
        (Cpus(visible=64, allowed=1, slurm=1), CheckStatus.ERROR, "--cpus-per-task 32"),
        (Cpus(visible=2, allowed=2, slurm=2), CheckStatus.OK, ""),
    ],
)
def test_fewer_cores_than_ray_would_count_are_said(cpus: Cpus, verdict: CheckStatus, remedy: str) -> None:
    found = check_cpus(cpus)
    assert found.status is verdict
    assert remedy in found.remedy


def test_a_metrics_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        found = check_metrics_port(port)
    assert found.status is CheckStatus.ERROR
    assert found.remedy == "observe.metrics_port: 0 takes any free one"


def test_a_sandbox_that_does_not_work_matters_where_code_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert check_sandbox(is_needed=True).status is CheckStatus.ERROR
    assert check_sandbox(is_needed=False).status is CheckStatus.NOTE


@pytest.mark.parametrize("sandbox", ["docker", "bubblewrap"])
def test_boxes_that_cannot_be_opened_are_said_with_a_remedy(
    sandbox: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    values = {"kind": "harbor", "tasks": tmp_path, "sandbox": sandbox, "cache": tmp_path}
    found = check_boxes(HarborEnvironmentConfig.model_validate(values))
    assert found.status is CheckStatus.ERROR
    assert found.remedy.startswith(f"{sandbox} cannot be used here: ")
    assert found.remedy.endswith("set bubblewrap" if sandbox == "docker" else "use docker or podman")


@pytest.mark.needs("bubblewrap")
def test_boxes_that_can_be_opened_are_fine(tmp_path: Path) -> None:
    values = {"kind": "harbor", "tasks": tmp_path, "sandbox": "bubblewrap", "cache": tmp_path}
    assert check_boxes(HarborEnvironmentConfig.model_validate(values)).status is CheckStatus.OK


def test_a_disk_that_cannot_hold_the_checkpoints_is_an_error(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    each = checkpoint_bytes("everything", [read_model_shape(recipe.model.path)], dtype="float32")
    assert check_disk(recipe.run_folder, recipe.checkpoint, bytes_each=each).status is CheckStatus.OK

    class Usage:
        free = 3 * each - 1

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage)
    found = check_disk(recipe.run_folder, recipe.checkpoint, bytes_each=each)
    assert found.status is CheckStatus.ERROR
    assert found.found.endswith(f"3 checkpoints of {each / (1 << 20):.1f} MiB")


def test_the_size_of_a_checkpoint_is_that_of_its_tensors(recipe: Recipe) -> None:
    """On a CPU all of it is float32: weights and two moments."""
    shape = read_model_shape(recipe.model.path)
    weights = (Path(recipe.model.path) / "model.safetensors").stat().st_size
    everything = checkpoint_bytes("everything", [shape], dtype="float32")
    assert everything == pytest.approx(3 * weights, rel=0.02)
    assert checkpoint_bytes("weights", [shape], dtype="float32") * 3 == everything
    assert checkpoint_bytes("everything", [shape, shape], dtype="float32") == 2 * everything


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
