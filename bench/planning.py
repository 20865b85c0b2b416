"""Time and memory of `megarl validate`, `megarl plan` and two large publish plans, against goals.

Each runs in fresh processes on one core. The large recipe and its files are written to a temporary folder.
"""

from __future__ import annotations

import json
import math
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bench.large_plans import PUBLISHES
from megarl.env import NO_COLOR
from megarl.errors import MachineError
from megarl.families import PUBLIC_MODELS
from megarl.families.shape import ModelShape
from megarl.tools.quickstart.arithmetic import make_arithmetic
from megarl.weights.layouts.canonical import canonical_tensors

TOLERANCE = 2.0
"""Factor by which a goal may be missed, because machines differ."""

_SHAPE = "llama-3.1-70b"
_MIXTURE = Path(__file__).parent.parent / "recipes/grpo_deepseek_v3.yaml"
_WIDTH = 100
_TIMEOUT_S = 300.0

# `ru_maxrss` does not serve: on Linux a child starts with the peak of its parent.
_CHILD = """\
import os, re, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if sys.argv[1] == "rehearse":
    from bench.large_plans import rehearse
    rehearse(sys.argv[2])
    code = 0
else:
    from megarl.cli.main import run
    code = run(sys.argv[1:])
peak_kib = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
print(f"\\n{code} {time.process_time()} {peak_kib}", file=sys.stderr)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    seconds: float
    megabytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One process, from its start to its end."""

    seconds: float
    cpu_seconds: float
    megabytes: float
    """Peak memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One command or plan: medians of its runs, and the largest of their peaks."""

    command: str
    seconds: float
    cpu_seconds: float
    """Much less than `seconds` on a machine that was busy."""
    megabytes: float
    goal: Goal

    @property
    def worst_ratio(self) -> float:
        """The larger ratio of a value to its goal; above 1 a goal is missed."""
        return max(self.seconds / self.goal.seconds, self.megabytes / self.goal.megabytes)


GOALS = {"validate": Goal(seconds=1.0, megabytes=500.0), "plan": Goal(seconds=5.0, megabytes=500.0)}
PUBLISH_GOALS = dict(
    zip(PUBLISHES, (Goal(seconds=2.0, megabytes=1000.0), Goal(seconds=10.0, megabytes=1000.0)), strict=True)
)


def measure_planning(*, repeats: int) -> list[Measurement]:
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
        recipe = write_large_recipe(Path(folder))
        jobs = [(f"megarl {command}", [command, str(recipe)], goal) for command, goal in GOALS.items()]
        jobs.append(("megarl plan, DeepSeek-V3", ["plan", str(_MIXTURE)], GOALS["plan"]))
        jobs += [(name, ["rehearse", name], goal) for name, goal in PUBLISH_GOALS.items()]
        return [
            measure(name, arguments, goal, repeats=repeats, start=start_in_fresh_process)
            for name, arguments, goal in jobs
        ]


def measure(
    name: str, arguments: Sequence[str], goal: Goal, *, repeats: int, start: Callable[[Sequence[str]], Sample]
) -> Measurement:
    samples = [start(arguments) for _ in range(repeats)]
    return Measurement(
        command=name,
        seconds=round(statistics.median(sample.seconds for sample in samples), 3),
        cpu_seconds=round(statistics.median(sample.cpu_seconds for sample in samples), 3),
        megabytes=round(max(sample.megabytes for sample in samples), 1),
        goal=goal,
    )


def start_in_fresh_process(arguments: Sequence[str]) -> Sample:
    """Run one command of megarl, from the start of its interpreter to its end; a failure raises a MachineError."""
    command = [sys.executable, "-c", _CHILD, *arguments]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603 - ours
    seconds = time.monotonic() - began
    *complaints, last = done.stderr.splitlines() or [""]
    if done.returncode != 0 or not last.startswith("0 "):
        raise MachineError(f"megarl {' '.join(arguments)} failed: {' '.join(' '.join(complaints).split()) or last}")
    _, cpu_seconds, peak_kib = last.split()
    return Sample(seconds=seconds, cpu_seconds=float(cpu_seconds), megabytes=int(peak_kib) * 1024 / 1e6)


def write_large_recipe(folder: Path) -> Path:
    """Write a recipe with everything that `validate` opens: data, and a model's folder with the headers of weights."""
    files = make_arithmetic(folder, num_sft=1)
    (files.model / "config.json").write_text(json.dumps(_config(PUBLIC_MODELS[_SHAPE])))
    _write_hollow_weights(files.model / "model.safetensors", PUBLIC_MODELS[_SHAPE])
    recipe = {
        "run": {"name": "bench", "folder": str(folder / "runs"), "steps": 100, "ray_address": "auto"},
        "model": {"path": str(files.model)},
        "data": {"train": [str(files.train)]},
        "pools": {
            "train": {"nodes": 64, "gpus_per_node": 8},
            "rollout": {"nodes": 32, "gpus_per_node": 8},
        },
        "roles": {
            "actor": {"pool": "train", "tensor": 8, "pipeline": 4, "is_sequence_parallel": True},
            "rollout": {"pool": "rollout", "tensor": 8},
        },
        "algorithm": {"kind": "grpo"},
        "train": {"prompts_per_step": 256, "prompts_per_update": 128},
    }
    path = folder / "bench.yaml"
    # JSON is YAML.
    path.write_text(json.dumps(recipe, indent=2))
    return path


def _write_hollow_weights(path: Path, shape: ModelShape) -> None:
    """Write a file of weights that takes no space: a header, and a hole as large as they are."""
    entries, end = {}, 0
    for name, spec in canonical_tensors(shape).items():
        begin, end = end, end + 2 * math.prod(spec.shape)
        entries[name] = {"dtype": "BF16", "shape": list(spec.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


def _config(shape: ModelShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn_hidden,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_context_tokens,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "dtype": shape.dtype,
    }


def print_table(measurements: Sequence[Measurement]) -> None:
    table = Table(
        title="Recipes of 70B on 512 + 256 GPUs and of DeepSeek-V3 on 512, and plans of large publishes; one core",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for title in ("command", "seconds", "goal", "CPU seconds", "peak MB", "goal", ""):
        table.add_column(title, justify="left" if title in ("command", "") else "right")
    for item in measurements:
        table.add_row(
            item.command,
            f"{item.seconds:.2f}",
            f"{item.goal.seconds:g}",
            f"{item.cpu_seconds:.2f}",
            f"{item.megabytes:.0f}",
            f"{item.goal.megabytes:g}",
            "met" if item.worst_ratio <= 1 else f"missed, {item.worst_ratio:.1f} times the goal",
        )
    Console(width=_WIDTH, no_color=bool(NO_COLOR.read()), highlight=False).print(table)
