"""Clusters as their nodes describe them; one of them real, on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cluster.local_ray import private_ray
from megarl.config.load import read_recipe
from megarl.tools.doctor import Check, CheckStatus
from megarl.tools.doctor.cluster import (
    GroupReport,
    NodeAnswer,
    NodeReport,
    check_cluster,
    check_group,
    check_nodes,
    describe_node,
)
from tests.cluster.worker_setup import quick_ray

REPORT = NodeReport(versions={"torch": "2.13.0"}, missing_files=(), can_write=True, clock_s=100.5)
NODE = NodeAnswer(node="n0 (10.0.0.1)", report=REPORT, asked_at=100.0, answered_at=101.0)
GROUP = GroupReport(name="train", num_ranks=16, backend="nccl", bytes_per_second=2e11)

RECIPE = """\
run: {name: sample, steps: 2, device: cpu, folder: FOLDER/runs}
model: {path: FOLDER/model}
data: {train: [train.parquet]}
pools: {shared: {gpus_per_node: 2}}
roles: {actor: {pool: shared, tensor: 2}, rollout: {pool: shared}}
algorithm: {kind: grpo}
train: {prompts_per_step: 8}
"""


def problems(*nodes: NodeAnswer, groups: tuple[GroupReport, ...] = (GROUP,)) -> list[Check]:
    checks = [*check_nodes(nodes), *map(check_group, groups)]
    return [check for check in checks if check.status is not CheckStatus.OK]


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


def test_a_node_that_does_not_answer_and_a_group_that_cannot_reduce_are_errors() -> None:
    silent = replace(NODE, node="n1", report=None, error="No module named 'megarl'")
    stuck = replace(GROUP, error="train rank(s) 8: reduce did not finish within 120 s")
    node, group = problems(NODE, silent, groups=(stuck,))
    assert (node.found, node.status) == ("n1 does not answer", CheckStatus.ERROR)
    assert (group.found, group.status) == ("16 ranks over nccl fail", CheckStatus.ERROR)
    assert "rank(s) 8" in group.remedy


def test_a_node_describes_itself(tmp_path: Path) -> None:
    report = describe_node([tmp_path, tmp_path / "not_there"], tmp_path / "runs" / "new")
    assert report.missing_files == (str(tmp_path / "not_there"),)
    assert report.can_write
    assert report.versions["python"].startswith("3.")


@pytest.mark.usefixtures("real_ray")
def test_the_pool_of_a_real_cluster_reduces_and_missing_files_are_found_on_its_nodes(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("FOLDER", str(tmp_path)))
    with private_ray(), quick_ray():
        found = {check.name: check for check in check_cluster(read_recipe(path).recipe, address=None)}
    assert found["files"].found.startswith(f"{tmp_path}/model/config.json cannot be read on ")
    assert found["files"].status is CheckStatus.ERROR
    assert found["all-reduce, shared"].status is CheckStatus.OK, found["all-reduce, shared"].remedy
    assert found["all-reduce, shared"].found.startswith("2 ranks over gloo, ")


def test_a_cluster_that_cannot_be_joined_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("FOLDER", str(tmp_path)))
    (found,) = check_cluster(read_recipe(path).recipe, address="127.0.0.1:1")
    assert (found.found, found.status) == ("no answer from 127.0.0.1:1", CheckStatus.ERROR)
    assert found.remedy.startswith("Connection refused; ")
