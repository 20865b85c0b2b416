"""The quickstarts as a new user runs them: each learns to add."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import Evaluated, StepFinished
from tests.repository import ROOT

RECIPES = ROOT / "recipes"
MEGARL = Path(sys.executable).with_name("megarl")
MAX_SECONDS = 8 * 60.0

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("whole_run")]


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


def accuracies_of(run: Path) -> list[float]:
    events = [record.event for record in read_events(run / EVENTS_FILE)]
    return [event.result.accuracy for event in events if isinstance(event, Evaluated)]


NAMES = ["quickstart", "quickstart_ppo", "quickstart_dapo", "quickstart_rloo", "quickstart_lora", "quickstart_distill"]


@pytest.mark.parametrize("name", NAMES)
def test_a_quickstart_learns_to_add(name: str, folder: Path) -> None:
    if name == "quickstart_distill" and not (folder / "runs" / "quickstart").exists():
        megarl(folder, "train", str(RECIPES / "quickstart.yaml"))  # the teacher
    began = time.monotonic()
    megarl(folder, "train", str(RECIPES / f"{name}.yaml"))
    seconds = time.monotonic() - began
    accuracies = accuracies_of(folder / "runs" / name)
    assert accuracies[0] < 0.5
    assert accuracies[-1] >= 0.8
    assert seconds < MAX_SECONDS


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_the_quickstart_learns_to_add_from_what_earlier_policies_chose(max_staleness: int, folder: Path) -> None:
    name = f"staleness_{max_staleness}"
    changes = (f"run.name={name}", f"train.max_staleness={max_staleness}")
    megarl(folder, "train", str(RECIPES / "quickstart_async.yaml"), *(w for c in changes for w in ("--set", c)))
    run = folder / "runs" / name
    accuracies = accuracies_of(run)
    assert accuracies[0] < 0.5
    assert accuracies[-1] >= 0.8
    events = [record.event for record in read_events(run / EVENTS_FILE)]
    flows = [event.summary.flow for event in events if isinstance(event, StepFinished)]
    # How far ahead engines get is a matter of timing.
    assert 1 <= max(flow.age_max for flow in flows if flow is not None) <= max_staleness


def test_an_unmodified_agent_learns_to_call_its_tool(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    megarl(tmp_path, "data", "make", "calculator", "--out", "data/calculator")
    for name in ("quickstart_tools_sft", "quickstart_agent"):
        megarl(tmp_path, "train", str(RECIPES / f"{name}.yaml"))
    accuracies = accuracies_of(tmp_path / "runs" / "quickstart_agent")
    assert accuracies[0] < 0.5
    assert accuracies[-1] >= 0.8


def test_a_model_learns_to_see(tmp_path: Path) -> None:
    megarl(tmp_path, "data", "make", "squares", "--out", "data/squares")
    for name in ("quickstart_images_sft", "quickstart_images"):
        megarl(tmp_path, "train", str(RECIPES / f"{name}.yaml"))
    accuracies = accuracies_of(tmp_path / "runs" / "quickstart_images")
    assert accuracies[0] < 0.5
    assert accuracies[-1] >= 0.8
