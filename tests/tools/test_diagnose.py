"""`megarl diagnose mismatch` as a user starts it, with everything it starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.checkpoint.folder import begin, checkpoint_folder, commit
from megarl.checkpoint.manifest import FORMAT, MODEL_FOLDER, Manifest, digest_file
from megarl.config.load import read_recipe
from megarl.errors import ConfigError
from megarl.tools.diagnose.run import diagnose_recipe
from megarl.tools.quickstart.arithmetic import make_arithmetic
from megarl.tools.small_recipe import SmallRecipe
from tests.run.runs import write_recipe
from tests.tiny_models import write_tiny_model


def write_checkpoint(parent: Path, model: Path) -> Path:
    """With nothing but weights."""
    folder = checkpoint_folder(parent, 1)
    partial = begin(folder, num_bytes=1000)
    shutil.copytree(model, partial / MODEL_FOLDER)
    manifest = Manifest(
        format=FORMAT,
        megarl_version="0.0.0",
        step=1,
        contents="weights",
        recipe={},
        recipe_digest="",
        files={f"{MODEL_FOLDER}/{path.name}": digest_file(path) for path in model.iterdir()},
    )
    commit(partial, folder, manifest)
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("whole_run")
def test_a_healthy_checkpoint_has_no_mismatch(tmp_path: Path) -> None:
    files = make_arithmetic(tmp_path / "arithmetic", num_sft=1)
    checkpoint = write_checkpoint(tmp_path / "checkpoints", files.model)
    recipe = write_recipe(tmp_path, "one")
    megarl = str(Path(sys.executable).with_name("megarl"))
    command = [megarl, "diagnose", "mismatch", str(recipe), "--row", "2", "--checkpoint", str(checkpoint), "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False)
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
    assert str(checkpoint / MODEL_FOLDER) in (folder / "engines" / "engine_0.log").read_text()


def test_a_mixture_of_experts_is_refused_before_anything_starts(tmp_path: Path) -> None:
    make_arithmetic(tmp_path / "arithmetic", num_train=4, num_sft=4, num_eval=4)
    write_tiny_model(tmp_path / "mixture", "qwen3_moe", tied=False)
    path = write_recipe(tmp_path, "mixture")
    recipe = read_recipe(path, [f"model.path={tmp_path / 'mixture'}"]).recipe
    started: list[SmallRecipe] = []
    with pytest.raises(ConfigError) as raised:
        diagnose_recipe(recipe, question=0, checkpoint=None, ray_address=None, on_start=started.append)
    assert "cannot be compared module by module" in str(raised.value.problems[0])
    assert not started
