"""Refusals of `megarl rehearse` before anything starts; tests/tools/rehearse has whole rehearsals."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cli.main import run
from tests.repository import ROOT

RECIPE = str(ROOT / "recipes" / "dapo_32b.yaml")


def test_a_folder_with_a_rehearsal_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    assert run(["rehearse", RECIPE, "--out", str(tmp_path)]) == 5
    assert capsys.readouterr().err == (f"megarl: {tmp_path} has a rehearsal already; name another folder with --out\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_tensor_parallel_group_over_parts_of_nodes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pools = "pools={all: {nodes: 3, gpus_per_node: 8}}"
    overrides = [pools, "roles.actor.tensor=3", "roles.actor.pipeline=8"]
    assert run(["rehearse", RECIPE, *(word for override in overrides for word in ("--set", override))]) == 2
    message = "roles.actor.tensor: 3 and the 8 gpus of a node of pool all do not divide one another; "
    assert message in capsys.readouterr().err
