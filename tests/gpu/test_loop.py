"""recipes/gpu_rehearsal.yaml: a loop of several ranks and engines on two nodes, all of them on one card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megarl.cluster.local_ray import LocalRay, local_ray, private_ray
from megarl.env import ONE_CARD, RAY_ADDRESS, RAY_AUTH_TOKEN_PATH
from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import EngineChanged, Evaluated, Restarted, StepFinished

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "runs/quickstart_sft/checkpoints/latest/model"
TIMEOUT_S = 400
MAIN = "from megarl.cli.main import main; main()"


def rehearse(name: str, folder: Path, *settings: str, rollout_gpus: Sequence[int] = (2,)) -> list[object]:
    """Run the recipe on Ray nodes for the trainer and for the engines; return the events of the run."""
    if not MODEL.exists():
        pytest.skip(f"{MODEL} does not exist: `make quickstart` makes it")
    nodes = LocalRay(device="cuda", log_folder=folder, has_several_nodes=True)
    command = [sys.executable, "-c", MAIN, "train", "recipes/gpu_rehearsal.yaml", "--set", f"run.name={name}"]
    with private_ray(), local_ray(nodes, num_slots=8, num_gpus=4):
        for num_gpus in rollout_gpus:
            nodes.start_node(num_slots=8, num_gpus=num_gpus)
        nodes.wait_started()
        environment = {
            **os.environ,
            ONE_CARD.name: "1",
            RAY_ADDRESS.name: nodes.address,
            RAY_AUTH_TOKEN_PATH.name: os.environ[RAY_AUTH_TOKEN_PATH.name],
        }
        done = subprocess.run(
            [*command, *(word for setting in settings for word in ("--set", setting))],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return [record.event for record in read_events(ROOT / "runs" / name / EVENTS_FILE)]


def check_learned(events: list[object], steps: int) -> None:
    assert [event.summary.step for event in events if isinstance(event, StepFinished)][-1] == steps
    scores = [event.result.accuracy for event in events if isinstance(event, Evaluated)]
    assert scores[-1] > scores[0] + 0.03, scores


def test_a_cluster_on_one_card_learns_though_an_engine_and_a_rank_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[dict[str, object]] = [
        {"point": "bucket_received", "of": "publish", "rank": 1, "step": 3, "kind": "kill"},
        {"point": "updated", "of": "actor", "rank": 2, "step": 7, "kind": "kill"},
    ]
    for fault in faults:
        fault["once"] = str(tmp_path / str(fault["point"]))
    monkeypatch.setenv("MEGARL_FAULTS", json.dumps(faults))
    # Long enough for the engine to start again before the end.
    events = rehearse("gpu_rehearsal_faults", tmp_path, "run.steps=30", "evaluation.every_steps=15")
    check_learned(events, 30)
    assert any(isinstance(event, Restarted) and event.role == "trainers" for event in events)
    lost = [event for event in events if isinstance(event, EngineChanged) and event.state == "dead"]
    assert lost, "no engine was lost"
    back = [event for event in events if isinstance(event, EngineChanged) and event.index == lost[0].index]
    assert back[-1].is_serving, back[-1]


def test_data_parallel_ranks_publish_to_an_engine_over_two_nodes(tmp_path: Path) -> None:
    """SGLang refuses two TP ranks of a node on one GPU, but not of two nodes."""
    settings = (
        "roles.actor.pipeline=1",
        "pools.rollout={nodes: 2, gpus_per_node: 1}",
        "roles.rollout.tensor=2",
        "roles.rollout.sglang.disable_custom_all_reduce=true",
    )
    check_learned(rehearse("gpu_rehearsal_dp2", tmp_path, *settings, rollout_gpus=(1, 1)), 10)
