"""The class that an engine serves, found without the import of all models that SGLang has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.engine.plain_classes.served import served_classes
from megarl.env import engine_environment
from megarl.families import FAMILIES

PROGRAM = """
import json, sys
from megarl.engine.cpu import install
install()
from megarl.engine.plain_classes.served import served_classes
from sglang.srt.models.registry import ModelRegistry
one = [list(ModelRegistry.models), "sglang.srt.models.mixtral" in sys.modules]
served = {each.__name__: each for each in served_classes(["--model-path", sys.argv.pop()])}
known = ModelRegistry.get_supported_archs() and ModelRegistry.models
print(json.dumps({"one": one, "same": [name for name, each in served.items() if known[name] is each]}))
"""


def write_config(folder: Path, *architectures: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": architectures}))
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("real_engines")
def test_every_family_is_served_by_the_class_that_sglang_would_find(tmp_path: Path) -> None:
    architectures = [family.architecture for family in FAMILIES]
    one, every = write_config(tmp_path / "one", "Qwen2ForCausalLM"), write_config(tmp_path / "all", *architectures)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--model-path", one, every],
        env={**os.environ, **engine_environment(device="cpu", tensor=1, interface=None)},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {"one": [["Qwen2ForCausalLM"], False], "same": architectures}


def test_a_model_of_no_family_is_left_to_sglang(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", "TransformersForCausalLM")
    assert not list(served_classes(["--model-path", str(folder)]))
