"""Whole runs of a mixture: the trainer follows the experts that the engine chose."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.checkpoint.resume import read_state
from megarl.cli.main import run as command
from megarl.config.lora import ADAPTER_FILE
from megarl.observe.events import StepFinished
from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.run.runs import Run, await_event, finished, run, started
from tests.tiny_models import load_adapted, write_tiny_model

LAYERS = 3
MIXTURE = (
    "roles.actor={pool: train, expert: 2}",
    "roles.rollout.workers=1",
    "sampling.max_response_tokens=12",
    "evaluation=null",
    "data.eval=[]",
)


@pytest.fixture(scope="module")
def folder(whole_run: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    make_arithmetic(path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    dense = path / "arithmetic" / "model"
    sizes = json.loads((dense / "config.json").read_text())
    for mixture, family in ((path / "mixture", "qwen3_moe"), (path / "shared", "qwen2_moe")):
        write_tiny_model(mixture, family, vocab=sizes["vocab_size"], layers=LAYERS, seed=1)
        config = json.loads((mixture / "config.json").read_text())
        config |= {name: sizes[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        (mixture / "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(dense / name, mixture / name)
    return path


def check_replayed(done: Run, *, steps: int) -> None:
    """Float32 engines and trainers choose the same experts, so that replay changes nothing; and it reached them."""
    assert done.exit_code == 0, done.output
    updates = [event.summary.update for event in done.steps]
    assert len(updates) == steps
    for update in updates:
        assert update is not None
        assert update.replayed_fraction == 1.0
        assert update.routing_disagreement == {str(layer): 0.0 for layer in range(LAYERS)}
        assert update.engine_mismatch is None or update.engine_mismatch < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mixture", "shared"])
def test_a_mixture_is_trained_with_the_experts_of_its_engine(model: str, folder: Path) -> None:
    check_replayed(run(folder, f"replayed_{model}", f"model.path={folder / model}", *MIXTURE), steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "modules", "adapted"),
    [
        ("shared", "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]", "shared_expert."),
        ("mixture", "[q_proj, k_proj, v_proj, o_proj, experts]", "experts.3."),
    ],
)
def test_experts_are_trained_by_their_adapters_which_peft_loads_and_export_merges(
    model: str, modules: str, adapted: str, folder: Path
) -> None:
    """Engines have slots for those of a shared expert, and get routed ones merged with the base."""
    lora = f"model.lora={{rank: 8, alpha: 16, modules: {modules}}}"
    words = (f"model.path={folder / model}", lora, *MIXTURE)
    done = run(folder, f"{model}_lora", *words)
    check_replayed(done, steps=2)
    trained = {name for name, tensor in load_file(done.model / ADAPTER_FILE).items() if tensor.abs().max() > 0}
    block = f"base_model.model.model.layers.0.mlp.{adapted}"
    assert {f"{block}{module}_proj.lora_B.weight" for module in ("gate", "up", "down")} <= trained
    out = folder / f"merged_{model}"
    assert command(["export", "--merge", str(done.folder), str(out)]) == 0
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with_adapter, ids = load_adapted(folder / model, done.model), torch.arange(1, 20)[None]
    with torch.no_grad():
        found, expected, base = (
            each(ids).logits for each in (merged, with_adapter, AutoModelForCausalLM.from_pretrained(folder / model))
        )
    assert (found - expected).abs().max() < 1e-5
    assert (expected - base).abs().max() > 1e-4
    other = (*words, "roles.actor={pool: train, tensor: 2, is_sequence_parallel: true}", "run.steps=3")
    resumed = run(folder, f"{model}_lora", *other)
    check_replayed(resumed, steps=3)


@pytest.mark.slow
def test_live_routing_gives_the_same_run_where_rounding_changes_no_choice(folder: Path) -> None:
    model = f"model.path={folder / 'mixture'}"
    replayed, live = (
        run(folder, f"as_{kind}", model, *MIXTURE, f"train.routing={kind}") for kind in ("replay", "live")
    )
    check_replayed(replayed, steps=2)
    assert live.exit_code == 0, live.output
    for one, other in zip(replayed.steps, live.steps, strict=True):
        assert one.summary.update is not None
        assert other.summary.update is not None
        assert (other.summary.update.replayed_fraction, other.summary.update.routing_disagreement) == (0.0, {})
        for name in ("loss", "grad_norm", "mismatch_mean", "entropy"):
            found, expected = (getattr(each.summary.update, name) for each in (one, other))
            assert found == pytest.approx(expected, abs=1e-7), name


@pytest.mark.slow
def test_rollouts_that_a_checkpoint_carries_keep_their_experts(folder: Path) -> None:
    words = (
        f"model.path={folder / 'mixture'}",
        *MIXTURE,
        "train.max_staleness=2",
        "algorithm={kind: grpo, correction: {kind: tis}}",
        "sampling.max_response_tokens=40",
        "run.steps=6",
    )
    with started(folder, "left", *words) as process:
        await_event(folder / "runs" / "left", process, StepFinished, count=2)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=600)
    left = finished(folder, "left", process)
    assert read_state(left.folder / "checkpoints" / "latest").ledger.num_carried > 0
    resumed = run(folder, "left", *words)
    assert resumed.exit_code == 0, resumed.output
    updates = [event.summary.update for event in resumed.steps]
    # The router has moved on since earlier versions chose, so that replay changes the experts of their tokens.
    assert [update and update.replayed_fraction for update in updates] == [1.0] * 6
