"""Clusters as their nodes describe them; one of them real, on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cluster.local_ray import private_ray
from megarl.config.load import read_recipe
from megarl.tools.doctor import STAGES, UPDATE, Check, CheckStatus
from megarl.tools.doctor.bring_up import bring_up
from megarl.tools.doctor.cluster import NodeAnswer, NodeReport, check_nodes, describe_node
from tests.cluster.worker_setup import quick_ray

REPORT = NodeReport(versions={"torch": "2.13.0"}, missing_files=(), can_write=True, clock_s=100.5)
NODE = NodeAnswer(node="n0 (10.0.0.1)", report=REPORT, asked_at=100.0, answered_at=101.0)

RECIPE = """\
run: {name: sample, steps: 2, device: cpu, folder: FOLDER/runs}
model: {path: FOLDER/model}
data: {train: [train.parquet]}
pools: {shared: {gpus_per_node: 2}}
roles: {actor: {pool: shared, tensor: 2}, rollout: {pool: shared}}
algorithm: {kind: grpo}
train: {prompts_per_step: 8}
"""


def problems(*nodes: NodeAnswer) -> list[Check]:
    return [check for check in check_nodes(nodes) if check.status is not CheckStatus.OK]


def test_nodes_that_agree_are_fine() -> None:
    assert problems(NODE, replace(NODE, node="n1 (10.0.0.2)")) == []


@pytest.mark.parametrize(
    ("report", "found"),
    [
        (replace(REPORT, versions={"torch": "2.11.0"}), "2.11.0 on n1, 2.13.0 on n0 (10.0.0.1)"),
        (replace(REPORT, missing_files=("/m/config.json",)), "/m/config.json cannot be read on n1"),
        (replace(REPORT, can_write=False), "the run's folder cannot be written on n1"),
        (replace(REPORT, clock_s=107.5), "n1 is 6.5 s off"),
    ],
)
def test_what_a_node_has_otherwise_is_said(report: NodeReport, found: str) -> None:
    (check,) = problems(NODE, replace(NODE, node="n1", report=report))
    assert check.found == found
    assert check.remedy


def test_a_node_that_does_not_answer_is_an_error() -> None:
    (node,) = problems(NODE, replace(NODE, node="n1", report=None, error="No module named 'megarl'"))
    assert (node.found, node.status) == ("n1 does not answer", CheckStatus.ERROR)


def test_a_file_that_no_node_has_is_one_warning() -> None:
    """A cluster is brought up before the model is there."""
    lacking = replace(NODE, report=replace(REPORT, missing_files=("/m/config.json",)))
    (check,) = problems(lacking, replace(lacking, node="n1"))
    assert (check.found, check.status) == ("/m/config.json is on no node", CheckStatus.WARNING)


def test_a_node_describes_itself(tmp_path: Path) -> None:
    report = describe_node([tmp_path, tmp_path / "not_there"], tmp_path / "runs" / "new")
    assert report.missing_files == (str(tmp_path / "not_there"),)
    assert report.can_write
    assert report.versions["python"].startswith("3.")


@pytest.mark.usefixtures("real_ray")
def test_every_stage_of_a_real_cluster_runs_and_says_what_cannot_be_shown(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("FOLDER", str(tmp_path)))
    said: list[str] = []
    with private_ray(), quick_ray():
        checks = [*bring_up(read_recipe(path).recipe, address=None, chosen=(), say=said.append)]
    found = {check.name: check for check in checks}
    assert found["files"].found == f"{tmp_path}/model/config.json is on no node"
    assert [check for check in checks if check.status is CheckStatus.ERROR] == []
    assert found["memory test"].found == "0.0156 GiB of each kept all bits"
    assert found["all-reduce, inside a node"].found.startswith("lowest ")
    assert found["all-reduce, pairs of nodes"].found == "not tried: the pools are on one node"
    assert found["network of NCCL"].status is CheckStatus.NOTE
    assert found["file system, read"].status is CheckStatus.OK
    assert list(tmp_path.glob("runs/sample/doctor/probe_*")) == []
    begun = [line.partition(":")[0] for line in said[1:]]
    assert tuple(dict.fromkeys(begun)) == tuple(stage for stage in STAGES if stage != UPDATE)


def test_a_cluster_that_cannot_be_joined_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("FOLDER", str(tmp_path)))
    (found,) = bring_up(read_recipe(path).recipe, address="127.0.0.1:1", chosen=(), say=lambda _: None)
    assert (found.found, found.status) == ("no answer from 127.0.0.1:1", CheckStatus.ERROR)
    assert found.remedy.startswith("Connection refused; ")
