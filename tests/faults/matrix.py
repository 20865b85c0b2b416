"""The table of faults in docs/faults.md, made from the results of the tests that cause them.

A test says what it breaks and what is promised with `@pytest.mark.fault("kill -9 of ...", "noticed within 2 s, ...")`,
and what it saw with `record_property("seen", "0.4 s")`. `make faults` runs them all and writes the table; where only
some run, the rows of the others stay as they were.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

OPTION = "--fault-table"
BEGIN, END = "<!-- faults: made by `make faults` -->", "<!-- end of faults -->"

_SECTIONS = {
    "tests/run/test_fleet": "engines",
    "tests/serving/test_fleet": "engines",
    "tests/engine": "engines",
    "tests/rollout/test_worker": "the run",
    "tests/rollout": "engines",
    "tests/weights": "publish",
    "tests/faults/test_trainers": "trainer ranks",
    "tests/faults": "the run",
    "tests/reward": "rewards",
    "tests/episodes": "episodes",
    "tests/checkpoint": "saves",
    "tests/run": "the run",
    "tests/serving": "the run",
    "tests/cluster": "the run",
    "tests/ranks": "the run",
    "tests/observe": "the run",
    "tests/system": "the run",
    "tests/tools": "the run",
    "tests/simulation": "the run",
}
"""By the beginning of a test's file; the first that fits."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One fault, with every test that causes it."""

    fault: str
    promise: str
    section: str
    tests: list[str] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    is_slow: bool = False


class Recorder:
    """Sees every marked test that runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, Row] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        mark = item.get_closest_marker("fault")
        if mark is not None and (call.when == "call" or call.excinfo is not None):
            self._record(item, report, *mark.args)
        return report

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Also those that will not run."""
        mark = item.get_closest_marker("fault")
        if mark is not None:
            row = self._row(item, *mark.args)
            name = item.nodeid.partition("[")[0].rpartition("::")[2]
            if name not in row.tests:
                row.tests.append(name)
            row.is_slow = row.is_slow or item.get_closest_marker("slow") is not None

    def _record(self, item: pytest.Item, report: pytest.TestReport, fault: str, promise: str) -> None:
        row = self._row(item, fault, promise)
        row.outcomes.append(report.outcome)
        row.seen += [str(value) for key, value in report.user_properties if key == "seen"]

    def _row(self, item: pytest.Item, fault: str, promise: str) -> Row:
        return self._rows.setdefault(fault, Row(fault=fault, promise=promise, section=section_of(item.nodeid)))

    def pytest_sessionfinish(self) -> None:
        write_table(self._path, list(self._rows.values()), made=datetime.now(UTC))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, default=None, metavar="FILE", help="Write the results of fault tests here.")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption(OPTION)
    if path is not None:
        config.pluginmanager.register(Recorder(path))


def section_of(nodeid: str) -> str:
    return next(section for prefix, section in _SECTIONS.items() if nodeid.startswith(prefix))


def write_table(path: Path, rows: Sequence[Row], *, made: datetime) -> None:
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    known = {match.group(1): match.group(0) for match in _ROW.finditer(old)}
    lines = known | {row.fault: _line(row, made) for row in rows if row.outcomes or row.fault not in known}
    order = {row.fault: list(_SECTIONS.values()).index(row.section) for row in rows}
    # Rows of other sessions keep their place.
    faults = [*known, *(fault for fault in sorted(order, key=lambda fault: order[fault]) if fault not in known)]
    table = "\n".join([*_HEAD, *(lines[fault] for fault in faults)])
    path.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")


_HEAD = ("| fault | promise | result | seen | test |", "|---|---|---|---|---|")
_ROW = re.compile(r"^\| (?!fault \|)([^|\n]*?) \|.*$", flags=re.MULTILINE)


def _line(row: Row, made: datetime) -> str:
    tests = ", ".join(f"`{name}`" for name in row.tests) + (" (slow)" if row.is_slow else "")
    result = f"{_result(row.outcomes)}, {made:%Y-%m-%d}" if row.outcomes else "not run yet"
    return f"| {' | '.join((row.fault, row.promise, result, '; '.join(dict.fromkeys(row.seen)), tests))} |"


def _result(outcomes: Sequence[str]) -> str:
    num_passed = sum(outcome == "passed" for outcome in outcomes)
    if num_passed < len(outcomes):
        return f"**{len(outcomes) - num_passed} of {len(outcomes)} failed**"
    return "passed" if len(outcomes) == 1 else f"{num_passed} passed"


def faults_in(text: str) -> set[str]:
    """The faults that a table has."""
    _, _, rest = text.partition(BEGIN)
    found, _, _ = rest.partition(END)
    return {match.group(1) for match in _ROW.finditer(found)}
