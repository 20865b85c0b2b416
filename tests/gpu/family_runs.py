"""Whole runs of families that share one card: random models of a few layers, made here, and GRPO with one engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import yaml
from safetensors.torch import save_file

from megarl.families import PUBLIC_MODELS, family_of
from megarl.families.shape import LatentWidths, ModelShape, YarnScaling
from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import StepFinished, Warned
from megarl.results import UpdateStats
from megarl.tools.quickstart.arithmetic import ArithmeticFiles, make_arithmetic
from megarl.weights.executors.codecs import as_files
from megarl.weights.executors.tensors import torch_dtype
from megarl.weights.layouts.canonical import canonical_tensors

ROOT = Path(__file__).parent.parent.parent
MAIN = "from megarl.cli.main import main; main()"
TIMEOUT_S = 400
AT_A_TIME = 3
STD = 0.04
"""Makes a narrow model choose some tokens much more often than others."""
MODELS = {
    "mistral": "mistral-nemo-12b",
    "phi3": "phi-4",
    "glm4_moe": "glm-4.5",
    "deepseek_v3": "deepseek-v3",
    "gpt_oss": "gpt-oss-20b",
    "gemma3_text": "gemma-3-1b",
    "qwen3_next": "qwen3-next-80b-a3b",
    "qwen3_5_text": "qwen3.5-4b",
    "qwen3_5_moe_text": "qwen3.5-35b-a3b",
}
"""A public model of each family, whose layers are made narrow."""
ENGINE = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "cuda_graph_backend_prefill": "disabled",
    # Some batches are larger: steps with and without a graph.
    "cuda_graph_max_bs_decode": 32,
}
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Something a random model gets right now and then, and not always."""
    return float(sum(map(ord, solution_str)) % 3 == 0)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRun:
    """The outcome of a run."""

    family: str
    error: str | None
    """The last line of its output, if it failed."""
    updates: tuple[UpdateStats, ...]
    warnings: tuple[str, ...]
    seconds: float

    @property
    def mismatch_kl(self) -> float:
        """The largest of all steps, by the larger of both estimators."""
        return max((max(abs(each.mismatch_kl), each.mismatch_k3) for each in self.updates), default=float("nan"))

    def __str__(self) -> str:
        replayed = min((each.replayed_fraction or 0.0 for each in self.updates), default=0.0)
        figures = f"{len(self.updates)} steps, mismatch KL at most {self.mismatch_kl:.2g}, replayed {replayed:g}"
        warnings = f", {len(self.warnings)} warnings, the first: {self.warnings[0]}" if self.warnings else ""
        return f"{self.family}: {figures}, {self.seconds:.0f} s{warnings}" + (f", {self.error}" if self.error else "")


def narrow(name: str, *, vocab: int, dtype: str) -> ModelShape:
    """Return a model of few narrow layers, as the kernels of engines on GPUs can compute them."""
    shape = PUBLIC_MODELS[MODELS[name]]
    experts, scaling = shape.experts, shape.rope_scaling
    if experts is not None:
        experts = replace(experts, num=32, per_token=4, shared=256 if experts.shared else 0)
        experts = replace(experts, num_dense_layers=min(1, experts.num_dense_layers))
        if experts.num_groups > 1:
            experts = replace(experts, num_groups=4, groups_per_token=2)
    if isinstance(scaling, YarnScaling):
        scaling = replace(scaling, factor=4.0, original_max_position=512)
    shape = replace(
        shape,
        family=name,
        num_layers=4,
        hidden=512,
        ffn_hidden=256 if experts else 1024,
        dense_hidden=1024 if shape.dense_hidden else 0,
        num_heads=8,
        num_kv_heads=8 if shape.latent else 2,
        vocab=vocab,
        max_context_tokens=2048,
        rope_scaling=scaling,
        dtype=dtype,
        experts=experts,
        window=None if shape.window is None else 15,
        window_layers=(0, 2) if shape.window_layers else (),
        embedding_scale=512**0.5 if shape.embedding_scale != 1 else 1.0,
    )
    if shape.delta is not None:
        shape = replace(shape, delta=replace(shape.delta, key_heads=4, value_heads=8), delta_layers=(0, 1, 2))
    if shape.latent is not None:
        # The widths of its cache are those of the released models: kernels are written for them.
        shape = replace(shape, latent=LatentWidths(query_rank=256, key_rank=512, plain=128, rotary=64, value=128))
    return shape


def write_model(folder: Path, shape: ModelShape, tokenizer: Path) -> None:
    """Write random weights with the tokenizer of another folder."""
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = json.loads((tokenizer / "config.json").read_text())
    ids = {name: sizes[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in sizes}
    (folder / "config.json").write_text(json.dumps(family_of(shape).config_json(shape) | ids))
    generator, weights = torch.Generator().manual_seed(1), dict[str, torch.Tensor]()
    for name, spec in canonical_tensors(shape).items():
        is_centred = shape.has_centred_norms and "linear_attn" not in name
        mean = float("norm" in name and not is_centred)
        weight = torch.empty(spec.shape).normal_(mean, STD, generator=generator)
        weights[name] = weight.to(torch_dtype(spec.dtype))
    save_file(as_files(weights), folder / "model.safetensors", metadata={"format": "pt"})


def recipe(name: str, folder: Path, prompts: Path, *, steps: int, device: str) -> dict[str, object]:
    return {
        "run": {"name": name, "folder": str(folder / "runs"), "steps": steps, "device": device},
        "model": {"path": str(folder / name)},
        "data": {"train": [str(prompts)], "max_prompt_tokens": 16},
        "pools": {"card": {"gpus_per_node": 1}},
        "roles": {
            "actor": {"pool": "card"},
            "rollout": {
                "pool": "card",
                "max_cached_tokens": 20000,
                "max_running_requests": 128,
                "canary_every": 1,
                **({"sglang": ENGINE} if device == "cuda" else {}),
            },
        },
        "algorithm": {"kind": "grpo", "correction": {"kind": "tis"}},
        "sampling": {"rollouts_per_prompt": 8, "max_response_tokens": 48},
        "reward": {"kind": "function", "path": str(folder / "reward.py"), "workers": 1},
        "train": {
            "prompts_per_step": 16,
            "tokens_per_micro_batch": 4096,
            "optimizer": {"learning_rate": 1e-4, "weight_decay": 0.0},
        },
        "checkpoint": {"save_every_steps": None, "save_at_end": False},
    }


def train(
    family: str, folder: Path, files: ArithmeticFiles, *settings: str, steps: int, device: Literal["cpu", "cuda"]
) -> FamilyRun:
    """Make a model and run the recipe on it."""
    name = family + "".join(f"_{word.rpartition('=')[2]}" for word in settings)
    dtype = "bfloat16" if device == "cuda" else "float32"
    vocab = json.loads((files.model / "config.json").read_text())["vocab_size"]
    write_model(folder / name, narrow(family, vocab=vocab, dtype=dtype), files.model)
    return run(name, folder, recipe(name, folder, files.train, steps=steps, device=device), *settings)


def run(name: str, folder: Path, content: Mapping[str, object], *settings: str) -> FamilyRun:
    """Run a recipe of this folder; an error is a part of the outcome."""
    began, path = time.monotonic(), folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    words = [word for setting in settings for word in ("--set", setting)]
    with (folder / f"{name}.log").open("w+") as log:
        try:
            code = subprocess.run(
                [sys.executable, "-c", MAIN, "train", str(path), *words],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join((str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep))),
                },
                stdout=log,
                stderr=log,
                timeout=TIMEOUT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
        log.seek(0)
        last = next((line.strip() for line in reversed(log.readlines()) if line.strip()), "no output")
    events_path = folder / "runs" / name / EVENTS_FILE
    events = [record.event for record in read_events(events_path)] if events_path.exists() else []
    updates = [event.summary.update for event in events if isinstance(event, StepFinished)]
    return FamilyRun(
        family=name,
        error=None if code == 0 else last,
        updates=tuple(update for update in updates if update is not None),
        warnings=tuple(event.text for event in events if isinstance(event, Warned)),
        seconds=time.monotonic() - began,
    )


def train_all(
    families: Iterable[str],
    folder: Path,
    *settings: str,
    steps: int,
    device: Literal["cpu", "cuda"],
    say: Callable[[FamilyRun], None],
) -> Mapping[str, Future[FamilyRun]]:
    """Run families, some at a time; `say` hears of each as it ends."""
    (folder / "reward.py").write_text(REWARD)
    files = make_arithmetic(folder / "arithmetic", num_train=512, num_sft=16, num_eval=16)

    def one(family: str) -> FamilyRun:
        outcome = train(family, folder, files, *settings, steps=steps, device=device)
        say(outcome)
        return outcome

    with ThreadPoolExecutor(AT_A_TIME if device == "cuda" else 1) as pool:
        return {family: pool.submit(one, family) for family in families}
