from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.env import FAULTS
from megarl.system import fault_points
from megarl.system.fault_points import POINTS
from megarl.system.faults import planned_faults, reach, step_in


@pytest.fixture(autouse=True)
def _unplanned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(FAULTS.name, raising=False)
    planned_faults.cache_clear()
    yield
    planned_faults.cache_clear()


def plan(monkeypatch: pytest.MonkeyPatch, *planned: dict[str, object]) -> None:
    monkeypatch.setenv(FAULTS.name, json.dumps(planned))


def test_nothing_happens_by_itself() -> None:
    assert reach("renamed", step=4) is None


@pytest.mark.parametrize("fault", [{"rank": 1}, {"step": 4}, {"rank": 1, "step": 4}, {"of": "critic"}, {}])
def test_a_fault_happens_where_it_is_meant(monkeypatch: pytest.MonkeyPatch, fault: dict[str, object]) -> None:
    plan(monkeypatch, {"point": "forward", "kind": "ENOSPC", **fault})
    with pytest.raises(OSError, match="No space left on device") as caught:
        reach("forward", step=4, rank=1, of="critic")
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    "fault", [{"rank": 0}, {"step": 5}, {"rank": 1, "step": 40}, {"point": "renamed"}, {"of": "actor"}, {"engine": 0}]
)
def test_and_nowhere_else(monkeypatch: pytest.MonkeyPatch, fault: dict[str, object]) -> None:
    plan(monkeypatch, {"point": "forward", "kind": "kill", **fault})
    assert reach("forward", step=4, rank=1, of="critic") is None


def test_a_fault_that_happens_once_leaves_whoever_comes_again_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan(monkeypatch, {"point": "forward", "kind": "EIO", "once": str(tmp_path / "happened")})
    with pytest.raises(OSError, match="Input/output error"):
        reach("forward")
    assert reach("forward") is None


def test_a_value_is_spoiled_by_who_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan(monkeypatch, {"point": "gradients", "kind": "nan"}, {"point": "bucket_packed", "kind": "corrupt"})
    assert (reach("gradients"), reach("bucket_packed"), reach("forward")) == ("nan", "corrupt", None)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ({"point": "forwards", "kind": "kill"}, "no point forwards"),
        ({"point": "forward", "kind": "nan"}, "no nan at forward"),
        ({"point": "forward", "kind": "ENOTHING"}, "no ENOTHING at forward"),
    ],
)
def test_a_plan_that_means_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, fault: dict[str, object], line: str
) -> None:
    plan(monkeypatch, fault)
    with pytest.raises(AssertionError, match=f"{FAULTS.name}: {line}"):
        reach("updated")


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_a_process_is_killed_or_frozen(kind: str, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from megarl.system.faults import reach; reach('updated', rank=1)"],
        env={**os.environ, FAULTS.name: json.dumps([{"point": "updated", "kind": kind, "rank": 1}])},
    )
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert (os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.WTERMSIG(status)) == number
    finally:
        if kind == "stop":
            process.kill()
            process.wait()


def test_a_frozen_thread_does_not_pass_the_point() -> None:
    program = (
        "import os, threading, time\n"
        "from megarl.system.faults import reach\n"
        "def pass_it(): reach('updated'); os.write(1, b'passed')\n"
        "threading.Thread(target=pass_it).start()\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, FAULTS.name: json.dumps([{"point": "updated", "kind": "stop"}])}
    processes = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE) for _ in range(3)
    ]
    try:
        for process in processes:
            os.waitpid(process.pid, os.WUNTRACED)
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            assert process.stdout.read() is None
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("path", "step"),
    [("checkpoints/step_000004.tmp/model", 4), ("checkpoints/step_000040", 40), ("checkpoints/latest", None)],
)
def test_the_step_of_a_path(path: str, step: int | None) -> None:
    assert step_in(Path(path)) == step


def test_points_cost_nothing_that_shows() -> None:
    began = time.perf_counter()
    for _ in range(10_000):
        reach("forward", step=4, rank=1, of="actor")
    assert (time.perf_counter() - began) / 10_000 < 50e-6


def test_every_point_is_explained() -> None:
    explained = re.findall(r"^    (\w+) +(?:driver|rank|engine|worker)\b", fault_points.__doc__ or "", re.MULTILINE)
    assert tuple(explained) == POINTS
