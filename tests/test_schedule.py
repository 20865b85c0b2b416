"""A test whose process is lost: Ray may end it, and nothing else may."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LOST = """
import os
from pathlib import Path

def test_before(): pass

def test_lost():
    losses = Path({file!r})
    count = int(losses.read_text()) if losses.exists() else 0
    losses.write_text(str(count + 1))
    if count < {losses}:
        os._exit(1)

def test_after(): pass
"""


@pytest.mark.parametrize(
    ("path", "losses", "failed"),
    [
        ("tests/tools/doctor/test_cluster.py", 1, 0),
        ("tests/tools/doctor/test_cluster.py", 2, 1),
        ("tests/algorithms/test_losses.py", 1, 1),
    ],
)
def test_a_test_that_joins_ray_may_lose_its_process_once(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, path: str, losses: int, failed: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = pytester.path / path
    file.parent.mkdir(parents=True)
    file.write_text(LOST.format(file=str(pytester.path / "losses"), losses=losses))
    done = pytester.runpytest_subprocess("-p", "tests.schedule", "-p", "no:cacheprovider", "-n", "2", path)
    counted = done.parseoutcomes()
    assert (counted["passed"], counted.get("failed", 0)) == (3, failed)
    assert done.ret == (pytest.ExitCode.TESTS_FAILED if failed else pytest.ExitCode.OK)
    assert ("it ran again: " + path in done.stdout.str()) == path.startswith("tests/tools")
