"""Small checkpoints with the files of real ones; files that are not tensors have random bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from megarl.checkpoint.folder import begin, checkpoint_folder, commit, step_of
from megarl.checkpoint.manifest import FORMAT, Contents, Manifest, digest_file
from megarl.checkpoint.resume import Best, Ledger, RunState, TrainerState, write_state
from megarl.checkpoint.tensor_files import write_tensor_file
from megarl.config.recipe import Recipe
from megarl.results import MonitorState

DATA_DIGEST = "of the data"

_FILES = (
    "model/config.json",
    "model/tokenizer.json",
    "model/model.safetensors.index.json",
    "model/model-00001-of-00001.safetensors",
    "optimizer/exp_avg/model-00001-of-00001.safetensors",
    "optimizer/exp_avg_sq/model-00001-of-00001.safetensors",
    "critic/model/model-00001-of-00001.safetensors",
)


def make_recipe(**sections: object) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "sample", "steps": 2},
            "model": {"path": "model"},
            "data": {"train": ["train.parquet"]},
            "pools": {"train": {"gpus_per_node": 1}},
            "roles": {"actor": {"pool": "train"}},
            "algorithm": {"kind": "sft"},
            "train": {"prompts_per_step": 8},
            **sections,
        }
    )


def run_state(step: int) -> RunState:
    return RunState(
        trainer=TrainerState(
            num_steps=step, num_updates=2 * step, monitor=MonitorState(baseline_sum=0.1 * step, num_baseline_steps=step)
        ),
        prompt_cursor=8 * step,
        ledger=Ledger(num_trained=6 * step, num_dropped=2 * step),
        best=Best(metric="accuracy", value=0.5, step=1),
        seed=1,
        data_digest=DATA_DIGEST,
    )


def write_checkpoint(
    parent: Path, step: int, *, contents: Contents = "everything", recipe: Recipe | None = None
) -> Path:
    folder = checkpoint_folder(parent, step)
    partial = begin(folder, num_bytes=1000)
    source = random.Random(step)
    for name in _FILES:
        path = partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            _write_tensors(path, source)
        elif path.name == "model.safetensors.index.json":
            file = "model-00001-of-00001.safetensors"
            path.write_text(json.dumps({"weight_map": dict.fromkeys(("a.weight", "a.bias", "b"), file)}))
        else:
            path.write_bytes(source.randbytes(source.randrange(50, 300)))
    write_state(partial, run_state(step))
    commit_files(partial, folder, recipe=(recipe or make_recipe()).model_dump(mode="json"), contents=contents)
    return folder


def commit_files(
    partial: Path, folder: Path, *, recipe: Mapping[str, JsonValue], contents: Contents = "weights"
) -> None:
    """Make what is in `partial` the checkpoint `folder`."""
    step = step_of(folder)
    assert step is not None
    manifest = Manifest(
        format=FORMAT,
        megarl_version="0.0.0",
        step=step,
        contents=contents,
        recipe=recipe,
        recipe_digest="",
        files={
            path.relative_to(partial).as_posix(): digest_file(path) for path in partial.rglob("*") if path.is_file()
        },
    )
    commit(partial, folder, manifest)


def _write_tensors(path: Path, source: random.Random) -> None:
    shapes = {"a.weight": (source.randrange(3, 9), 5), "a.bias": (source.randrange(3, 9),), "b": (7,)}
    specs = {name: ("F32" if name == "b" else "BF16", shape) for name, shape in shapes.items()}
    write_tensor_file(path, specs, lambda entry: [source.randbytes(entry.num_bytes)])
