"""Heavy tests say so by their fixtures; a test that failed runs once more, alone."""

from __future__ import annotations

import sys

import pytest

from tests.repository import ROOT

FIXTURES = """
import os
import subprocess
import sys
from pathlib import Path

import pytest

@pytest.fixture(scope="session")
def real_ray(): pass

@pytest.fixture(scope="session")
def real_engines(): pass
"""

LOST = """
def test_before(): pass

def test_lost({fixture}):
    losses = Path({file!r})
    count = int(losses.read_text()) if losses.exists() else 0
    losses.write_text(str(count + 1))
    if count < {losses}:
        os._exit(1)

def test_after(): pass
"""

STARTING = """
@pytest.fixture
def engine(real_engines):
    return start()

def start():
    return subprocess.run([sys.executable, "-c", "", "-m", "megarl.engine.cpu"], check=True)

def test_by_fixture(engine): pass

def test_by_itself():
    start()
"""


UNSTEADY = """
def test_steady(): pass

def test_unsteady(real_ray):
    first = Path("first")
    if not first.exists():
        first.write_text("")
        raise AssertionError

@pytest.mark.parametrize("number", range({broken}))
def test_broken(number):
    raise AssertionError
"""


@pytest.fixture
def scheduled(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # imports take most of the time
    pytester.makeini("[pytest]\nmarkers = heavy")
    return pytester


@pytest.mark.patient
@pytest.mark.parametrize(("fixture", "losses", "failed"), [("real_ray", 1, 0), ("real_ray", 2, 1), ("", 1, 1)])
def test_a_test_that_joins_ray_may_lose_its_process_once(
    scheduled: pytest.Pytester, fixture: str, losses: int, failed: int
) -> None:
    file = str(scheduled.path / "losses")
    scheduled.makepyfile(FIXTURES + LOST.format(file=file, fixture=fixture, losses=losses))
    words = ("-p", "xdist", "-p", "tests.schedule", "-p", "no:cacheprovider", "-n", "2")
    done = scheduled.runpytest_subprocess(*words)
    counted = done.parseoutcomes()
    assert (counted["passed"], counted.get("failed", 0)) == (3, failed)
    assert done.ret == (pytest.ExitCode.TESTS_FAILED if failed else pytest.ExitCode.OK)
    assert ("it ran again: " in done.stdout.str()) == bool(fixture)


@pytest.mark.patient
def test_a_test_is_heavy_by_its_fixtures_and_a_light_one_starts_no_engine(scheduled: pytest.Pytester) -> None:
    scheduled.makepyfile(FIXTURES + STARTING)
    words = ("-p", "tests.schedule", "-p", "no:cacheprovider")
    assert scheduled.runpytest_subprocess(*words, "-m", "heavy").parseoutcomes() == {"passed": 1, "deselected": 1}
    done = scheduled.runpytest_subprocess(*words, "-m", "not heavy")
    assert done.parseoutcomes() == {"failed": 1, "deselected": 1}
    assert "test_by_itself starts megarl.engine.cpu; one of the fixtures " in done.stdout.str()


@pytest.mark.patient
@pytest.mark.parametrize("broken", [0, 1, 10])
def test_make_test_runs_what_failed_once_more_alone(
    scheduled: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """A test that passes then is named, one that fails twice fails the suite, and more than ten are not run again."""
    scheduled.makepyfile(test_it=FIXTURES + UNSTEADY.format(broken=broken))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist -p tests.schedule")
    words = ("-f", str(ROOT / "Makefile"), "-o", "setup", "-o", "packages", f"VENV={sys.prefix}", "WORKERS=2", "test")
    done = scheduled.run("make", *words)
    counted_again = {0: {"passed": 1}, 1: {"passed": 1, "failed": 1}, 10: {}}
    assert done.parseoutcomes() == counted_again[broken]
    assert ("UNSTEADY: failed, and passed alone: test_it.py::test_unsteady" in done.outlines) == (broken < 10)
    assert ("ERROR: 11 tests failed, more than 10: they do not run again" in done.errlines) == (broken == 10)
    assert (done.ret == 0) == (broken == 0)
