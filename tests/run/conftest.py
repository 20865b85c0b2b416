"""Fixtures that the whole runs of several files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.tools.quickstart.arithmetic import make_arithmetic


@pytest.fixture(scope="module")
def folder(whole_run: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with more prompts than a run draws."""
    path = tmp_path_factory.mktemp("runs")
    make_arithmetic(path / "arithmetic", num_train=128, num_sft=16, num_eval=16)
    return path
