"""`megarl diagnose mismatch` as a user starts it, with everything it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from megarl.data.arithmetic import make_arithmetic
from tests.runtime.runs import write_recipe


def test_a_healthy_recipe_has_no_mismatch(tmp_path: Path) -> None:
    make_arithmetic(tmp_path / "arithmetic", num_sft=1)
    recipe = write_recipe(tmp_path, "one")
    megarl = str(Path(sys.executable).with_name("megarl"))
    command = [megarl, "diagnose", "mismatch", str(recipe), "--row", "2", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["verdict"] == "nothing differs"
    assert found["differing_tensors"] == []
    assert max(module["error"] for module in found["modules"]) < 1e-5
    folder = tmp_path / "runs" / "one" / "diagnose"
    assert {path.name for path in folder.glob("*.safetensors")} == {
        "engine_0.safetensors",
        "trainer_0.safetensors",
        "trainer_1.safetensors",
    }
