"""Heavy packages are imported only where they are needed: they cost seconds of a command and memory of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.repository import ROOT

ABSENT_AFTER = {
    "import megarl": "torch ray pyarrow pydantic",
    "from megarl.cli.main import run; assert run(['validate', '--quick', sys.argv[1]]) == 0": (
        "torch ray matplotlib megatron sglang transformers"
    ),
    "import megarl.data.tokenizer, megarl.data.prompts": "torch transformers",
    # Ray reads its environment when it is imported, and a run sets it after its checks.
    "import megarl.run.launch": "ray torch",
    # The actor of an engine, of which a node has several.
    "import megarl.serving.processes": "torch megatron transformers",
    # A run whose command was killed is back when the next one has imported everything.
    "import megarl.run.run": "megatron mcp transformers pandas matplotlib",
}
"""Packages that no statement up to this one has imported: one process runs them all, in this order."""


@pytest.mark.patient
def test_what_is_imported_is_needed(tmp_path: Path) -> None:
    make_arithmetic(tmp_path / "data" / "arithmetic", num_train=8, num_sft=8, num_eval=8)
    recipe = ROOT / "recipes" / "quickstart_sft.yaml"
    lines = ["import sys"]
    for statement, names in ABSENT_AFTER.items():
        lines += [statement, f"found = set({names.split()}) & set(sys.modules)"]
        lines.append(f"assert not found, (found, {statement!r})")
    command = [sys.executable, "-c", "\n".join(lines), str(recipe)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
