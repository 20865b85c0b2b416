"""Heavy tests say so by their fixtures; one whose process is lost runs again if Ray may have ended it."""

from __future__ import annotations

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


@pytest.fixture
def scheduled(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # imports take most of the time
    pytester.makeini("[pytest]\nmarkers = heavy")
    return pytester


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


def test_a_test_is_heavy_by_its_fixtures_and_a_light_one_starts_no_engine(scheduled: pytest.Pytester) -> None:
    scheduled.makepyfile(FIXTURES + STARTING)
    words = ("-p", "tests.schedule", "-p", "no:cacheprovider")
    assert scheduled.runpytest_subprocess(*words, "-m", "heavy").parseoutcomes() == {"passed": 1, "deselected": 1}
    done = scheduled.runpytest_subprocess(*words, "-m", "not heavy")
    assert done.parseoutcomes() == {"failed": 1, "deselected": 1}
    assert "test_by_itself starts megarl.engine.cpu; one of the fixtures " in done.stdout.str()
