"""The quickstarts as a new user runs them: each learns to add."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.observe.events import EVENTS_FILE, Evaluated, read_events

RECIPES = Path(__file__).parents[2] / "recipes"
MEGARL = Path(sys.executable).with_name("megarl")
MAX_SECONDS = 8 * 60.0

pytestmark = pytest.mark.slow


def megarl(folder: Path, *words: str) -> None:
    done = subprocess.run([str(MEGARL), *words], cwd=folder, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the warm start has run."""
    path = tmp_path_factory.mktemp("quickstart")
    megarl(path, "data", "make", "arithmetic", "--out", "data/arithmetic")
    megarl(path, "train", str(RECIPES / "quickstart_sft.yaml"))
    return path


@pytest.mark.parametrize("name", ["quickstart", "quickstart_ppo", "quickstart_dapo", "quickstart_rloo"])
def test_a_quickstart_learns_to_add(name: str, folder: Path) -> None:
    began = time.monotonic()
    megarl(folder, "train", str(RECIPES / f"{name}.yaml"))
    seconds = time.monotonic() - began
    events = [record.event for record in read_events(folder / "runs" / name / EVENTS_FILE)]
    accuracies = [event.result.accuracy for event in events if isinstance(event, Evaluated)]
    assert accuracies[0] < 0.5
    assert accuracies[-1] >= 0.8
    assert seconds < MAX_SECONDS
