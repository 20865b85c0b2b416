"""Programs that some tests need and pip does not have: `@pytest.mark.needs("chromium")`.

Where a need is not met its tests are skipped, and the last line of pytest's summary lists what was not run and how to
get it. With CI=true they fail instead: CI must not pass without them.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest

from megarl.reward.sandbox import Limits, Sandbox, SandboxError
from tests.slow_disk import lacks_fuse

INSTALL = "scripts/install_debian_packages.sh"
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
"""Daemons are in folders that only root searches."""

_PROPERTY = "unmet_need"


def program(name: str) -> str:
    """The path of a program that a test needs."""
    path = shutil.which(name, path=PATH)
    assert path is not None, f"{name} is missing: mark the test with @pytest.mark.needs"
    return path


def _lacks_programs(*names: str) -> Callable[[], str]:
    def reason() -> str:
        missing = [name for name in names if shutil.which(name, path=PATH) is None]
        return f"no {', '.join(missing)}" if missing else ""

    return reason


def _lacks_sandbox() -> str:
    try:
        Sandbox("bubblewrap", Limits(memory_bytes=1 << 29, disk_bytes=1 << 20, max_processes=16, max_output_bytes=1000))
    except SandboxError as error:
        return str(error)
    return ""


NEEDS: dict[str, Callable[[], str]] = {
    "bubblewrap": _lacks_sandbox,
    "chromium": _lacks_programs("chromium"),
    "fuse": lacks_fuse,
    "iproute2": _lacks_programs("ip"),
    "patch": _lacks_programs("patch"),
    "prometheus": _lacks_programs("prometheus", "promtool"),
    "root": lambda: "" if os.geteuid() == 0 else "not root",
    "shellcheck": _lacks_programs("shellcheck"),
    "slurm": _lacks_programs("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "sinfo"),
}
"""Each returns why the need is not met, or nothing."""


@cache
def unmet(need: str) -> str:
    return NEEDS[need]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    needs = [need for mark in item.iter_markers("needs") for need in mark.args]
    for need in needs:
        reason = unmet(need)
        if not reason:
            continue
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(f"needs {need}: {reason}; run {INSTALL}", pytrace=False)
        item.user_properties.append((_PROPERTY, need))
        pytest.skip(f"needs {need}: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.getreports("skipped")
    counts = Counter(str(value) for report in skipped for key, value in report.user_properties if key == _PROPERTY)
    if counts:
        terminalreporter.write_line(closing_line(counts), yellow=True)


def closing_line(counts: Counter[str]) -> str:
    lacks = ", ".join(f"{need} ({count})" for need, count in sorted(counts.items()))
    ways = [f"run {INSTALL} as root"] if set(counts) - {"root"} else []
    ways += ["run the tests as root"] if "root" in counts else []
    return f"NOT RUN: {counts.total()} tests need what this machine lacks: {lacks}; to run them, {' and '.join(ways)}"
