"""Whole runs with images: rows of images and of text, published at each update, resumed and exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from megarl.cli.main import run as command
from megarl.observe.events import RunStarted
from megarl.tools.quickstart.arithmetic import make_arithmetic
from megarl.tools.quickstart.squares import make_squares
from tests.engine.template import EngineTemplate
from tests.run.runs import Run, run
from tests.run.test_family_runs import (
    ONE_RANK,
    RESUMED,
    STEPS,
    TENSOR,
    TOLERANCE,
    before_last_step,
    check_agrees,
    tensors_of,
)
from tests.tiny_models import is_read, write_tiny_model

OTHERS = {"qwen2_5_vl": TENSOR, "qwen3_vl": "{pool: train, pipeline: 2, first_stage_layers: 2}"}
LAYERS = 3


@pytest.fixture(scope="module")
def folder(whole_run: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    make_squares(path / "squares", num_train=64, num_sft=16, num_eval=16)
    make_arithmetic(path / "arithmetic", num_train=32, num_sft=16, num_eval=16)
    return path


def common(folder: Path, model: Path) -> tuple[str, ...]:
    """Return the settings of a run that asks about images and about sums."""
    files = {kind: [str(folder / task / f"{kind}.parquet") for task in ("squares", "arithmetic")] for kind in DATA}
    return (
        f"model.path={model}",
        f"run.steps={STEPS}",
        *(f"data.{kind}={json.dumps(paths)}" for kind, paths in files.items()),
        "data.max_prompt_tokens=40",
        "checkpoint={save_every_steps: 1, keep_last: 4}",
        "roles.rollout={pool: rollout, workers: 1, canary_every: 1}",
    )


DATA = ("train", "eval")


def test_a_run_learns_from_images_and_sums(folder: Path, engine_template: EngineTemplate) -> None:
    settings = common(folder, folder / "squares" / "model")
    done = run(folder, "squares_once", *settings, *ONE_RANK, engines=engine_template)
    check_agrees(done, "qwen2_5_vl")
    assert list(done.evaluations) == [0, STEPS]
    # Each image is kept once, whatever asks about it.
    assert len(list((done.folder / "images").iterdir())) == 64 + 16


def model_of(family: str, folder: Path) -> Path:
    """Write a random model with the tokenizer and the numbered tokens of the quickstart."""
    made, model = folder / "squares" / "model", folder / family
    sizes = json.loads((made / "config.json").read_text())
    write_tiny_model(model, family, vocab=sizes["text_config"]["vocab_size"], layers=LAYERS, seed=1)
    config = json.loads((model / "config.json").read_text())
    config |= {name: value for name, value in sizes.items() if name.endswith("token_id")}
    config["text_config"] |= {name: sizes[name] for name in ("eos_token_id", "pad_token_id")}
    (model / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(made / name, model / name)
    processor = json.loads((model / "preprocessor_config.json").read_text())
    processor |= {"min_pixels": 56 * 56, "max_pixels": 84 * 84}
    (model / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_a_run_with_images_is_resumed_and_exported(family: str, folder: Path, engine_template: EngineTemplate) -> None:
    model = model_of(family, folder)
    settings = common(folder, model)
    done = run(folder, f"{family}_once", *settings, *ONE_RANK, engines=engine_template)
    check_agrees(done, family)
    check_same_bits(done, *settings, *ONE_RANK, engines=engine_template)

    again = before_last_step(done, f"{family}_again")
    resumed = run(folder, again.name, *settings, f"roles.actor={OTHERS[family]}", engines=engine_template)
    check_agrees(resumed, family)
    expected, found = tensors_of(done.model), tensors_of(resumed.model)
    assert expected.keys() == found.keys() == tensors_of(model).keys()
    for name, tensor in expected.items():
        assert (tensor - found[name]).abs().max() < TOLERANCE, name
    check_exported(resumed, model, folder / f"{family}_exported")


def check_same_bits(done: Run, *settings: str, engines: EngineTemplate) -> None:
    """Whether a run that is resumed before its last step ends with the same weights and evaluation."""
    again = before_last_step(done, f"{done.folder.name}_bits")
    resumed = run(done.folder.parent.parent, again.name, *settings, engines=engines)
    assert [event.resumed_step for event in resumed.events if isinstance(event, RunStarted)] == [0, RESUMED]
    assert resumed.weights == done.weights
    assert resumed.evaluations[STEPS].accuracy == done.evaluations[STEPS].accuracy


def check_exported(done: Run, model: Path, exported: Path) -> None:
    """Export writes a whole model, whose tower is that of the first one."""
    assert command(["export", str(done.folder), str(exported)]) == 0
    first, found = tensors_of(model), tensors_of(exported)
    still = {name for name, tensor in first.items() if torch.equal(found[name], tensor)}
    assert still == {name for name in first if not is_read(name)}
    assert (exported / "preprocessor_config.json").read_bytes() == (model / "preprocessor_config.json").read_bytes()
    _, loading = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert {kind: names for kind, names in loading.items() if names} == {}
