"""Which tests run in one process when there are several (`pytest -n 2`), and which start first.

A file is never divided, so that fixtures of a module are made once. Files that share engines stay together. What takes
longest comes first; the light rest fills the gaps. `heavy` marks what `make test-quick` leaves out.

Ray ends a process that has joined it, without an exception, if its node or its head is gone or it cannot leave in time.
Here that is a whole process of tests. xdist then gives its unfinished tests to another one; the test that was running
fails only if its process is lost twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

_HEAVY: dict[str, tuple[str, ...]] = {
    "runs": ("tests/run/test_run.py",),
    "engines": (
        "tests/engine/test_c",
        "tests/engine/test_exported.py",
        "tests/rollout/test_generator.py",
        "tests/serving/test_in_flight.py",
        "tests/engine/test_p",
        "tests/serving/test_canary.py",
        "tests/serving/test_file_publisher.py",
        "tests/tools/test_mismatch.py",
    ),
    "rehearsals": ("tests/tools/test_rehearsal.py",),
    "trainer faults": ("tests/faults/test_trainers.py", "tests/faults/test_s"),
    "engine faults": ("tests/serving/test_fleet_faults.py",),
    "Ray": (
        "tests/serving/test_processes.py",
        "tests/rollout/test_workers.py",
        "tests/cluster/test_lease_actor.py",
        "tests/cluster/test_local_ray.py",
        "tests/cluster/test_worker_group.py",
        "tests/tools/doctor/test_cluster.py",
    ),
}
"""Beginnings of the files of each group."""
_JOINS_RAY = (
    *(f"tests/{folder}/" for folder in ("run", "serving", "cluster", "ranks", "rollout", "tools/doctor")),
    "tests/tools/test_rehearsal.py",
)
"""Folders with tests that join a Ray in their own process."""
_RUN_AGAIN = "run again"
"""The outcome of a test whose process was lost."""
_RANKS = "tests/train/"
"""Files of Megatron ranks share nothing that takes long to make."""


def group_of(nodeid: str) -> str:
    """The name of the group whose tests run in one process, in their order."""
    for name, beginnings in _HEAVY.items():
        if nodeid.startswith(beginnings):
            return name
    return nodeid.partition("::")[0]


def is_heavy(nodeid: str) -> bool:
    return group_of(nodeid) in _HEAVY or nodeid.startswith(_RANKS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_heavy(item.nodeid):
            item.add_marker("heavy")
    if hasattr(config, "workerinput"):
        order = [*_HEAVY, True, False]
        items.sort(key=lambda item: order.index(_class_of(item.nodeid)))


def _class_of(nodeid: str) -> str | bool:
    name = group_of(nodeid)
    return name if name in _HEAVY else is_heavy(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


class Losses:
    """The tests whose processes were lost."""

    def __init__(self) -> None:
        self._once: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        if crashitem.startswith(_JOINS_RAY) and crashitem not in self._once:
            self._once.add(crashitem)
            # Not the type's business: pytest shows and counts any word.
            vars(report)["outcome"] = _RUN_AGAIN

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return (_RUN_AGAIN, "R", _RUN_AGAIN.upper()) if str(report.outcome) == _RUN_AGAIN else None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid in sorted(self._once):
            terminalreporter.write_line(f"its process was lost, and it ran again: {nodeid}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Losses())
