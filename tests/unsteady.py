"""For the second run of `make test`: runs what failed in the first one again, alone and in one process.

A test that passes now is unsteady and named at the end; one that fails twice fails the suite. Where many tests failed,
the product is broken: none of them runs again.

    python -m pytest -p tests.unsteady --last-failed
"""

from __future__ import annotations

import pytest

MAX_TESTS = 10
"""Failures of a first run that may be those of unsteady tests."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if len(items) > MAX_TESTS:
        raise pytest.UsageError(f"{len(items)} tests failed, more than {MAX_TESTS}: they do not run again")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    twice = {report.nodeid for outcome in ("failed", "error") for report in terminalreporter.getreports(outcome)}
    passed = {report.nodeid for report in terminalreporter.getreports("passed")}
    for nodeid in sorted(passed - twice):
        terminalreporter.write_line(f"UNSTEADY: failed, and passed alone: {nodeid}", yellow=True)
