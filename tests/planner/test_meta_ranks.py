"""Every rank of every large recipe, built by Megatron without memory, against layouts, shards and the planner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.families import FAMILIES, PUBLIC_MODELS
from tests.planner.recipes import large_recipes
from tests.repository import ROOT

LARGE = [ROOT / "recipes" / f"{name}.yaml" for name in large_recipes()]
SMALLEST = [min(family.models, key=lambda name: PUBLIC_MODELS[name].hidden) for family in FAMILIES if family.models]
INTERLEAVED = """
extends: {recipe}
roles: {{actor: {{pipeline: 4, virtual_pipeline: 5}}}}
"""


def found(what: str, subject: Path | str) -> list[dict[str, object]]:
    """Return what was found of each trained model, by a process of its own."""
    words = [sys.executable, "-m", "tests.planner.meta_ranks", what, str(subject)]
    # What Megatron compiles would read tensors without memory.
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=7200)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No recipe that is shipped interleaves its stages."""
    path = tmp_path_factory.mktemp("recipes") / "grpo_70b_interleaved.yaml"
    path.write_text(INTERLEAVED.format(recipe=ROOT / "recipes" / "grpo_70b.yaml"))
    return path


def check_layouts(recipe: Path) -> None:
    models = found("layouts", recipe)
    assert models
    for model in models:
        assert model["ranks"]
        wrong = {key: value for key, value in model.items() if key.startswith("wrong") and value}
        assert wrong == {}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", LARGE, ids=lambda path: path.stem)
def test_every_rank_is_laid_out_sharded_and_saved_as_planned(real_ranks: None, recipe: Path) -> None:
    """Names, shapes and dtypes of weights and adapters; bytes of buffers; shards that hold every element of a weight
    once, and their boxes in a checkpoint."""
    check_layouts(recipe)


@pytest.mark.slow
def test_every_rank_of_interleaved_stages_is_as_planned(real_ranks: None, interleaved: Path) -> None:
    check_layouts(interleaved)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", LARGE, ids=lambda path: path.stem)
def test_a_micro_batch_of_the_real_shape_keeps_what_is_planned(real_ranks: None, recipe: Path) -> None:
    check_activations("activations", recipe)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_layers_of_every_family_keep_what_is_planned(real_ranks: None, name: str) -> None:
    check_activations("layers", name)


def check_activations(what: str, subject: Path | str) -> None:
    models = found(what, subject)
    assert models
    for model in models:
        kept, planned = model["kept_bytes"], model["planned_bytes"]
        assert isinstance(kept, int)
        assert kept == pytest.approx(planned, rel=0.1), model["role"]
