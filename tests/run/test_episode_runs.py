"""A whole run from a recipe whose environment is a server of the Model Context Protocol."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megarl.data.rollout_files import list_rollouts
from megarl.data.rollout_reading import read_rollout
from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import RunStarted, StepFinished
from tests.episodes.chain_model import CALL_ADD, write_chain
from tests.episodes.servers import free_port, running

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("whole_run")]

MEGARL = Path(sys.executable).with_name("megarl")
NUM_STEPS = 2


def write_recipe(folder: Path, port: int) -> Path:
    write_chain(folder / "model", "qwen2.5", {CALL_ADD: 0.5, "7": 0.3, "eight": 0.2})
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{number}+{7 - number}="}],
            "reward_model": {"style": "rule", "ground_truth": "7"},
        }
        for number in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    recipe = {
        "run": {"name": "mcp", "folder": str(folder / "runs"), "steps": NUM_STEPS, "device": "cpu"},
        "model": {"path": str(folder / "model")},
        "data": {"train": [str(folder / "train.parquet")], "max_prompt_tokens": 1000},
        "pools": {"train": {"gpus_per_node": 1}, "rollout": {"gpus_per_node": 1}},
        "roles": {"actor": {"pool": "train"}, "rollout": {"pool": "rollout"}},
        "algorithm": {"kind": "grpo"},
        "sampling": {"rollouts_per_prompt": 4, "max_response_tokens": 400},
        "environment": {"kind": "mcp", "servers": {"numbers": f"http://127.0.0.1:{port}/mcp"}, "max_turns": 4},
        "reward": {"kind": "exact"},
        "train": {"prompts_per_step": 4, "tokens_per_micro_batch": 2048, "optimizer": {"learning_rate": 1e-4}},
        "checkpoint": {"save_every_steps": None},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_a_run_trains_on_episodes_with_tools_of_a_server(tmp_path: Path) -> None:
    port = free_port()
    with running("tests.episodes.mcp_server", port):
        command = [str(MEGARL), "train", str(write_recipe(tmp_path, port))]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "mcp"
    events = [record.event for record in read_events(run / EVENTS_FILE)]
    (started,) = (event for event in events if isinstance(event, RunStarted))
    assert started.tools_digest is not None
    steps = [event.summary for event in events if isinstance(event, StepFinished)]
    assert len(steps) == NUM_STEPS
    for step in steps:
        assert step.rollouts is not None
        assert step.rollouts.episodes is not None
        assert set(step.rollouts.episodes.endings) <= {"answered", "max_turns"}
        assert step.update is not None
        assert step.update.mismatch_max < 1e-3  # the trainer computes what the engine did, at every sampled token
    path = list_rollouts(run)[NUM_STEPS]
    texts = ["".join(read_rollout(path, row)["pieces"]) for row in range(4)]
    assert any("<tool_response>\n7\n</tool_response>" in text for text in texts)
