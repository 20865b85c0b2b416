"""Texts of nvidia-smi and the kernel about GPUs; the run warns once per problem and exports the sums."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cluster.gpu_watch import GpuWatch
from megarl.observe import catalogue as names
from megarl.observe.events import Warned
from megarl.observe.metrics import Meter
from megarl.observe.observer import Observer
from megarl.system.gpu_health import GpuHealth, NodeHealth, find_bus_id, find_xids, names_of_driver, parse_health
from tests.observe.samples import ListSink

TEXT = """\
0, 0, No, No, Not Active, Not Active, 41, 118.20
1, 2, Yes, No, Active, Not Active, 88, 699.10
2, [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A]
Unable to determine the device handle for GPU3: Unknown Error
"""
KERNEL = [
    "6,1200,1000000,-;usb 1-1: new device",
    "3,1201,2000000,-;NVRM: Xid (PCI:0000:19:00): 79, pid=1234, GPU has fallen off the bus.",
]


def test_the_answer_of_nvidia_smi_is_read() -> None:
    good, bad, silent = parse_health(TEXT)
    assert good == GpuHealth(
        index=0, uncorrected_errors=0, needs_reset=False, is_throttled=False, celsius=41, watts=118.2
    )
    assert good.problems() == silent.problems() == []
    assert bad.problems() == [
        "has 2 memory errors that ECC could not correct",
        "needs a reset: rows of its memory are to be replaced",
        "is slowed down by heat or power (88 C, 699 W)",
    ]


def test_the_driver_names_the_gpus_of_a_machine(tmp_path: Path) -> None:
    for bus, text in (("0000:19:00.0", "Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\n"), ("0000:3b:00.0", "IRQ: 19\n")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(text)
    assert names_of_driver(tmp_path) == ["NVIDIA H200"]
    assert names_of_driver(tmp_path / "none") == []


def test_messages_of_the_driver_are_found_in_the_kernels_log() -> None:
    ((number, text),) = find_xids(KERNEL)
    assert number == 1201
    assert text.startswith("NVRM: Xid (PCI:0000:19:00): 79, ")


def test_a_run_warns_once_and_exports_what_is_worst() -> None:
    sink, meter = ListSink(), Meter("run")
    watch = GpuWatch(Observer([sink], meter=meter))
    healthy, broken, _ = parse_health(TEXT)
    before = NodeHealth(gpus=(healthy,), xids=((7, "of an earlier job"),))
    watch.note({"10.0.0.1": before})
    after = NodeHealth(gpus=(healthy, broken), xids=(*before.xids, (8, "NVRM: Xid 79")))
    for _ in range(2):
        watch.note({"10.0.0.1": after, "10.0.0.2": replace(before, xids=())})
    warnings = [event.text for event in sink.events if isinstance(event, Warned)]
    assert warnings == [
        *(f"GPU 1 of node 10.0.0.1 {problem}" for problem in broken.problems()),
        "node 10.0.0.1: NVRM: Xid 79",
    ]

    def value(metric: names.Metric) -> float | None:
        return meter.registry.get_sample_value(metric.full_name, {names.RUN_LABEL: "run"})

    assert [value(metric) for metric in (names.GPU_ERRORS, names.GPU_RESETS, names.GPU_THROTTLED)] == [2, 1, 1]
    assert value(names.GPU_XIDS) == 1
    assert value(names.GPU_CELSIUS) == 88


def test_the_address_of_the_visible_gpu_is_that_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$4" = 3 ] && echo 00000000:D8:00.0 || echo 00000001:19:00.0\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    assert find_bus_id() == "0000:d8:00.0"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert find_bus_id() == "0001:19:00.0"
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert find_bus_id() is None
