"""Which tests are heavy, which of them share a process when there are several (`pytest -n 2`), and which start first.

A test says by its fixtures what it starts: `real_engines`, `real_ranks`, `real_ray` and `whole_run` start nothing
themselves, and every test or fixture that does asks for one of them. A test with one of them is `heavy`, which
`make test-quick` leaves out; a test without is stopped where it would start one. A test that needs a browser is heavy
as well.

A file is not divided, so that fixtures of a module are made once, except that tests which share engines and tests which
join a Ray are together across files. What takes longest comes first; the light rest fills the gaps.

Ray ends a process that has joined it, without an exception, if its node or its head is gone or it cannot leave in time.
Here that is a whole process of tests. xdist then gives its unfinished tests to another one; the test that was running
fails only if its process is lost twice.
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

import pytest

from tests import processes

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from _pytest.mark import ParameterSet
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

HEAVY = ("whole_run", "real_engines", "real_ray", "real_ranks")
"""The fixtures that make a test heavy, those of the longest tests first."""
_SHARED = {"qwen2_tp1": "engines", "qwen3_tp2": "engines", "real_ray": "ray"}
"""Fixtures whose tests are one group, and its name."""
_HEAVY_PROGRAMS = ("megarl.engine.cpu", "megarl.engine.server", "/raylet", "/gcs_server")
"""Ends of words in command lines that start an engine or a Ray."""
_RUN_AGAIN = "run again"
"""The outcome of a test whose process was lost."""


def slow(*cases: object) -> list[ParameterSet]:
    """Return cases of a parametrised test that are slow: others of the same test see the same faults in `make test`."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def slow_except(kept: Sequence[object], cases: Iterable[object]) -> list[ParameterSet]:
    """Return all cases; those that are not kept are slow."""
    others = [case for case in cases if case not in kept]
    return [*map(pytest.param, kept), *slow(*others)]


def fixtures_of(item: pytest.Item) -> list[str]:
    """Return the names of all fixtures that a test uses, directly or through others."""
    return list(getattr(item, "fixturenames", ()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        names = fixtures_of(item)
        if not set(HEAVY).isdisjoint(names) or any("chromium" in mark.args for mark in item.iter_markers("needs")):
            item.add_marker("heavy")
        group = next((_SHARED[name] for name in names if name in _SHARED), None)
        if group is not None and hasattr(config, "workerinput"):
            # The process that schedules knows nothing of a test but its name. xdist's own way of adding a group to it
            # (`xdist_group`) has no effect: pytest 9 keeps the name elsewhere.
            item._id = type(item._id).parse(f"{item.nodeid}@{group}")
    if hasattr(config, "workerinput"):
        # The place of a file or a group is that of its longest test.
        places: dict[str, int] = {}
        for item in items:
            group = group_of(item.nodeid)
            places[group] = min(places.get(group, len(HEAVY)), _place_of(item))
        items.sort(key=lambda item: places[group_of(item.nodeid)])


def group_of(nodeid: str) -> str:
    """Return the name of the group whose tests run in one process, in their order."""
    _, _, group = nodeid.rpartition("@")
    return group if group in _SHARED.values() else nodeid.partition("::")[0]


def plain(nodeid: str) -> str:
    """Return the name of a test without that of its group, as pytest takes it on its command line."""
    words, _, group = nodeid.rpartition("@")
    return words if group in _SHARED.values() else nodeid


def _place_of(item: pytest.Item) -> int:
    return next((place for place, name in enumerate(HEAVY) if name in fixtures_of(item)), len(HEAVY))


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay for good: they are no garbage to look for


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Replace halves of characters in what a test printed: xdist cannot send them to the process that schedules."""
    report = yield
    report.sections = [(title, content.encode(errors="replace").decode()) for title, content in report.sections]
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


class Watch:
    """Stops a light test where it would start an engine, a Ray or ranks in this process."""

    def __init__(self) -> None:
        self._light: str | None = None
        sys.addaudithook(self._hear)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        is_light = set(HEAVY).isdisjoint(fixtures_of(item)) and item.get_closest_marker("gpu") is None
        self._light = item.nodeid if is_light else None
        try:
            return (yield)
        finally:
            self._light = None

    def refuse(self, what: str) -> None:
        if self._light is not None:
            raise AssertionError(f"{self._light} starts {what}; one of the fixtures {', '.join(HEAVY)} is missing")

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "subprocess.Popen" and self._light is not None:
            words = arguments[1] if isinstance(arguments[1], list | tuple) else ()
            program = next((str(word) for word in words if str(word).endswith(_HEAVY_PROGRAMS)), None)
            if program is not None:
                self.refuse(program)


class Controller:
    """In the process that schedules: names tests as pytest knows them, and counts those whose processes were lost.

    It has the templates from which all processes of tests fork engines, Rays and other processes.
    """

    def __init__(self) -> None:
        self._once: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        node.workerinput["templates"] = processes.TEMPLATES

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        report.nodeid = plain(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        if crashitem.endswith("@ray") and crashitem not in self._once:
            self._once.add(crashitem)
            # Not the type's business: pytest shows and counts any word.
            vars(report)["outcome"] = _RUN_AGAIN

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return (_RUN_AGAIN, "R", _RUN_AGAIN.upper()) if str(report.outcome) == _RUN_AGAIN else None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid in sorted(map(plain, self._once)):
            terminalreporter.write_line(f"its process was lost, and it ran again: {nodeid}")


WATCH = Watch()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        processes.TEMPLATES.update(config.workerinput["templates"])
    else:
        config.pluginmanager.register(Controller())
    processes.join_fork_server()
    config.pluginmanager.register(WATCH)
