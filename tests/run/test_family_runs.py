"""Whole runs of families with layers, tensors or files of their own: published at each update, resumed elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.cli.main import run as command
from megarl.observe.events import RunStarted, Warned
from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.engine.template import EngineTemplate
from tests.run.runs import Run, run
from tests.tiny_models import is_read, load_adapted, write_tiny_model

LAYERS = 3
STEPS = 3
RESUMED = 2
COMMON = (
    f"run.steps={STEPS}",
    "checkpoint={save_every_steps: 1, keep_last: 4}",
    "roles.rollout={pool: rollout, workers: 1, canary_every: 1}",
    "sampling.max_response_tokens=12",
    "algorithm={kind: grpo}",
    "evaluation=null",
    "data.eval=[]",
)
ONE_RANK = ("roles.actor={pool: train}", "pools.train.gpus_per_node=1")
TENSOR = "{pool: train, tensor: 2}"
OTHERS = {
    "mistral": TENSOR,
    "phi3": TENSOR,
    "glm4_moe": "{pool: train, tensor: 2, is_sequence_parallel: true}",
    "deepseek_v2": "{pool: train, expert: 2}",
    "deepseek_v3": "{pool: train, pipeline: 2, first_stage_layers: 1}",
    "gpt_oss": "{pool: train, expert: 2}",
    "gemma3_text": TENSOR,
    "qwen3_next": "{pool: train, tensor: 2, is_sequence_parallel: true, expert: 2, expert_tensor: 1}",
    "qwen3_5": TENSOR,
    "qwen3_5_moe": "{pool: train, expert: 2}",
    "qwen3_5_moe_text": "{pool: train, pipeline: 2, first_stage_layers: 1}",
    "qwen3_5_text": "{pool: train, pipeline: 2, first_stage_layers: 1}",
}
"""The layout in which each family goes on."""
MIXTURES = {
    "glm4_moe": (1, 2),
    "deepseek_v2": (1, 2),
    "deepseek_v3": (1, 2),
    **dict.fromkeys(("gpt_oss", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"), (0, 1, 2)),
}
"""The layers with a router."""
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(whole_run: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    make_arithmetic(path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    return path


def model_of(family: str, folder: Path, *, name: str | None = None) -> Path:
    """Write a random model with the tokenizer of the quickstart."""
    tokenizer, model = folder / "arithmetic" / "model", folder / (name or family)
    sizes = json.loads((tokenizer / "config.json").read_text())
    write_tiny_model(model, family, vocab=sizes["vocab_size"], layers=LAYERS, seed=1)
    config = json.loads((model / "config.json").read_text())
    config |= {name: sizes[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (model / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tokenizer / name, model / name)
    return model


def check_agrees(done: Run, family: str) -> None:
    """Engine and trainer compute the same after every publish, by the same experts."""
    assert done.exit_code == 0, done.output
    assert [event.text for event in done.events if isinstance(event, Warned)] == []
    updates = [event.summary.update for event in done.steps]
    assert len(updates) >= STEPS
    for update in updates:
        assert update is not None
        assert update.grad_norm > 0
        # Engines have sinks in bfloat16, and an update moves the trainer's between its numbers.
        assert update.mismatch_max < (2e-3 if family == "gpt_oss" else TOLERANCE)
        if family in MIXTURES:
            assert update.replayed_fraction == 1.0
            assert update.routing_disagreement == {str(layer): 0.0 for layer in MIXTURES[family]}


def tensors_of(model: Path) -> dict[str, Tensor]:
    return {name: tensor for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}


def tensors_read(model: Path) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors_of(model).items() if is_read(name)}


def before_last_step(done: Run, name: str) -> Path:
    """Copy a run as it was before its last step."""
    again = done.folder.with_name(name)
    shutil.copytree(done.folder, again, symlinks=True)
    shutil.rmtree(again / "checkpoints" / f"step_{STEPS:06d}")
    (again / "checkpoints" / "latest").unlink()
    (again / "checkpoints" / "latest").symlink_to(f"step_{RESUMED:06d}")
    return again


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_delta_nets_go_on_with_the_same_bits(family: str, folder: Path, engine_template: EngineTemplate) -> None:
    model = model_of(family, folder, name=f"{family}_bits")
    settings = (f"model.path={model}", *COMMON, *ONE_RANK)
    done = run(folder, f"{family}_bits_once", *settings, engines=engine_template)
    again = before_last_step(done, f"{family}_bits_again")
    resumed = run(folder, again.name, *settings, engines=engine_template)
    check_agrees(resumed, family)
    assert [event.resumed_step for event in resumed.events if isinstance(event, RunStarted)] == [0, RESUMED]
    expected, found = tensors_of(done.model), tensors_of(resumed.model)
    assert expected.keys() == found.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_a_family_is_trained_saved_resumed_in_another_layout_and_exported(
    family: str, folder: Path, engine_template: EngineTemplate
) -> None:
    model = model_of(family, folder)
    settings = (f"model.path={model}", *COMMON)
    done = run(folder, f"{family}_once", *settings, *ONE_RANK, engines=engine_template)
    check_agrees(done, family)

    again = before_last_step(done, f"{family}_again")
    resumed = run(folder, again.name, *settings, f"roles.actor={OTHERS[family]}", engines=engine_template)
    check_agrees(resumed, family)
    assert [event.resumed_step for event in resumed.events if isinstance(event, RunStarted)] == [0, RESUMED]
    expected, found = tensors_of(done.model), tensors_of(resumed.model)
    assert expected.keys() == found.keys() == tensors_read(model).keys()
    for name, tensor in expected.items():
        assert (tensor - found[name]).abs().max() < TOLERANCE, name
    check_exported(resumed, model, folder / f"{family}_exported")


def check_exported(done: Run, model: Path, exported: Path) -> None:
    """Export writes the checkpoint's model, and transformers reads it as it reads the first one."""
    assert command(["export", str(done.folder), str(exported)]) == 0
    expected, first, found = tensors_of(done.model), tensors_read(model), tensors_of(exported)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    # All but buffers have moved.
    still = {name for name, tensor in first.items() if torch.equal(found[name], tensor)}
    assert still == {name for name in first if name.endswith("e_score_correction_bias")}
    config = json.loads((exported / "config.json").read_text())
    assert config.get("language_model_only", False) == (tensors_of(model).keys() != first.keys())
    _, loading = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, output_loading_info=True)
    assert {kind: names for kind, names in loading.items() if names} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "modules"),
    [("mistral", "[q_proj, v_proj, gate_proj, up_proj]"), ("glm4_moe", "[q_proj, k_proj, v_proj, o_proj]")],
)
def test_a_family_is_trained_by_an_adapter_which_peft_loads(
    family: str, modules: str, folder: Path, engine_template: EngineTemplate
) -> None:
    model = model_of(family, folder, name=f"{family}_base")
    lora = f"model.lora={{rank: 8, alpha: 16, modules: {modules}}}"
    name = f"{family}_lora"
    done = run(folder, name, f"model.path={model}", lora, *COMMON, *ONE_RANK, engines=engine_template)
    check_agrees(done, family)
    adapted, ids = load_adapted(model, done.model), torch.arange(1, 20)[None]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits
        assert (adapted(ids).logits - base).abs().max() > 1e-4


@pytest.mark.slow
def test_an_adapter_reaches_engines_that_take_turns_with_the_trainer(
    folder: Path, engine_template: EngineTemplate
) -> None:
    model = model_of("mistral", folder, name="turns_base")
    settings = (f"model.path={model}", "model.lora={rank: 8, alpha: 16}", "pools={all: {gpus_per_node: 1}}")
    roles = "roles={actor: {pool: all}, rollout: {pool: all, workers: 1, canary_every: 1, release: kv_cache}}"
    without_roles = (word for word in COMMON if not word.startswith("roles."))
    check_agrees(run(folder, "turns", *settings, roles, *without_roles, engines=engine_template), "mistral")
