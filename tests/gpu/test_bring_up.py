"""`megarl doctor --cluster` on one card: the GPU and its disk, NCCL ranks that are hosts of their own, an update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from megarl.cluster.local_ray import LocalRay, local_ray, private_ray
from megarl.env import ONE_CARD, RAY_ADDRESS, RAY_AUTH_TOKEN_PATH
from tests.repository import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TIMEOUT_S = 240
MAIN = "from megarl.cli.main import main; main()"
RECIPE = """\
run: {name: card, steps: 2, folder: FOLDER/runs}
model: {path: models/Qwen2.5-0.5B}
data: {train: [train.parquet], max_prompt_tokens: 32}
pools: {gpu: {nodes: 1, gpus_per_node: 1}}
roles:
  actor: {pool: gpu}
  rollout:
    pool: gpu
    memory_fraction: 0.3
    max_cached_tokens: 20000
    max_running_requests: 32
    sglang: {attention_backend: triton, sampling_backend: pytorch, grammar_backend: none, disable_cuda_graph: true}
algorithm: {kind: grpo, loss: {kind: ppo}, correction: {kind: tis}}
sampling: {rollouts_per_prompt: 4, max_response_tokens: 32}
train: {prompts_per_step: 8, tokens_per_micro_batch: 4096}
"""


def doctor(folder: Path, *words: str, environment: Mapping[str, str] | None = None) -> dict[str, dict[str, str]]:
    """Return the rows of a bring-up by name; print them for whoever reads the log."""
    (folder / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(folder)))
    command = [sys.executable, "-c", MAIN, "doctor", str(folder / "recipe.yaml"), "--cluster", "--json", *words]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    sys.stdout.write(f"{done.stderr}\n{done.stdout}\n")
    assert done.returncode in (0, 5), done.stderr[-3000:]
    return {row["name"]: row for row in json.loads(done.stdout)["checks"]}


def stages(*names: str) -> list[str]:
    return [word for name in names for word in ("--stage", name)]


def test_the_memory_the_products_and_the_disk_of_a_card_are_tried(tmp_path: Path) -> None:
    rows = doctor(tmp_path, *stages("nodes", "devices", "node links", "storage"))
    assert rows["memory test"]["found"].endswith(" GiB of each kept all bits")
    for name in ("memory test", "memory rate", "products"):
        assert rows[name]["status"] == "ok", rows[name]
    assert "planned" in rows["file system, write"]["found"]
    assert rows["all-reduce, inside a node"]["status"] == "note", "there is one GPU"


def test_ranks_that_talk_over_sockets_are_found_to_be_slow(tmp_path: Path) -> None:
    """Two nodes with two GPUs each, all of them the same card; each process is a host to NCCL, which uses sockets."""
    nodes = LocalRay(device="cuda", log_folder=tmp_path, has_several_nodes=True)
    with private_ray(), local_ray(nodes, num_slots=8, num_gpus=2):
        nodes.start_node(num_slots=8, num_gpus=2)
        nodes.wait_started()
        environment = {
            ONE_CARD.name: "1",
            RAY_ADDRESS.name: nodes.address,
            RAY_AUTH_TOKEN_PATH.name: os.environ[RAY_AUTH_TOKEN_PATH.name],
        }
        pool = ("--set", "pools.gpu={nodes: 2, gpus_per_node: 2}")
        rows = doctor(tmp_path, *pool, *stages("node links", "node pairs", "network"), environment=environment)
    for name in ("all-reduce, inside a node", "all-reduce, pairs of nodes"):
        assert rows[name]["status"] == "error", rows[name]
        assert "too low: 127." in rows[name]["found"]
    assert rows["network of NCCL"]["status"] == "error"
    assert rows["network of NCCL"]["found"].startswith("sockets on 127.")


def test_a_publish_and_an_update_with_random_weights_are_right(tmp_path: Path) -> None:
    rows = doctor(tmp_path, *stages("update"))
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(
        ("publish", "update", "same policy"), "ok"
    )
