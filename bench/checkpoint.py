"""Rates of saving, verifying and exporting on this machine and this disk, against goals.

Rank processes with random weights of a model's shape save through the code of a run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from bench.planning import start_in_fresh_process
from megarl import __version__
from megarl.checkpoint.folder import begin, below, checkpoint_folder, commit
from megarl.checkpoint.manifest import FORMAT, MODEL_FOLDER, FileDigest, Manifest, verify
from megarl.checkpoint.save import contribution, copy_to_host, save_hf
from megarl.env import NO_COLOR
from megarl.errors import MachineError
from megarl.families.shape import ModelShape
from megarl.weights.algebra.slices import Index, TensorSpec
from megarl.weights.executors.group import TransferGroup
from megarl.weights.executors.meeting import StoreAddress, StoreServer
from megarl.weights.executors.tensors import box_of, torch_dtype
from megarl.weights.layouts.canonical import canonical_tensors
from megarl.weights.layouts.megatron import MegatronParallel, megatron_layout

NUM_RANKS = 2
"""Processes that save together."""

_DTYPE = "bfloat16"
_TIMEOUT_S = 600.0
_PATTERN_ITEMS = 1 << 22
_WIDTH = 100
_SHAPE = ModelShape(
    family="llama",
    num_layers=1,
    hidden=2048,
    ffn_hidden=5632,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    vocab=32000,
    max_context_tokens=4096,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    has_tied_embeddings=True,
    has_qkv_bias=False,
    has_qk_norm=False,
    dtype=_DTYPE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFigure:
    name: str
    value: float
    unit: str
    goal: float | None = None
    """The smallest value allowed or, with `is_cost`, the largest; None is for comparison only."""
    is_cost: bool = False

    @property
    def miss(self) -> float:
        """Factor to the goal; above 1 the goal is missed."""
        if self.goal is None:
            return 0.0
        return self.value / self.goal if self.is_cost else self.goal / max(self.value, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTimes:
    """Times of one rank; all ranks save together."""

    stages_s: tuple[float, ...]
    """Saves in which each rank holds whole tensors and only writes them."""
    tensor_s: tuple[float, ...]
    """Saves in which each rank holds a part of every tensor, so that half of all bytes are exchanged first."""
    blocking_s: tuple[float, ...]
    """Copies to host memory, for which training would wait."""
    dd_s: tuple[float, ...]
    """Runs of `dd` by rank 0, one before each save of `stages_s`, then one before each of `tensor_s`."""
    files: dict[str, FileDigest]

    def against_dd(self, saves_s: Sequence[float], *, first: int) -> float:
        """Return the median speed of saves, each relative to the `dd` before it, of which the first is `first`.

        A disk changes its speed by the minute.
        """
        return statistics.median(dd / save for dd, save in zip(self.dd_s[first:], saves_s, strict=False))


def measure_checkpoint(folder: Path, *, gigabytes: float, repeats: int) -> list[CheckpointFigure]:
    """Measure the disk of `folder`; everything written there is removed again."""
    shape = shape_of(gigabytes)
    num_bytes = sum(spec.num_bytes for spec in canonical_tensors(shape).values())
    with _room(folder, num_bytes=4 * num_bytes) as inner:
        checkpoint, times = _save(inner, shape, repeats=repeats)
        gigabytes = num_bytes / 1e9
        dd_rate = gigabytes / statistics.median(times.dd_s)
        blocking_s = statistics.median(times.blocking_s)
        stages_rate = gigabytes / statistics.median(times.stages_s)
        tensor_rate = gigabytes / statistics.median(times.tensor_s)
        cold, warm, warm_all = _verify(checkpoint)
        exported = start_in_fresh_process(["export", str(checkpoint), str(inner / "exported"), "--no-load-check"])
    return [
        CheckpointFigure(name="model", value=gigabytes, unit="GB"),
        CheckpointFigure(name="dd with fsync", value=dd_rate, unit="GB/s"),
        CheckpointFigure(name="blocking part of a save, per GB", value=blocking_s / gigabytes, unit="s"),
        CheckpointFigure(name=f"save, {NUM_RANKS} stages", value=stages_rate, unit="GB/s"),
        CheckpointFigure(name="  against dd", value=times.against_dd(times.stages_s, first=0), unit="times", goal=0.70),
        CheckpointFigure(name=f"save, tensor parallel {NUM_RANKS}", value=tensor_rate, unit="GB/s"),
        CheckpointFigure(
            name="  against dd", value=times.against_dd(times.tensor_s, first=repeats), unit="times", goal=0.70
        ),
        CheckpointFigure(name="verify, from disk", value=gigabytes / cold, unit="GB/s"),
        CheckpointFigure(name="verify, from memory, one core", value=gigabytes / warm, unit="GB/s", goal=2.0),
        CheckpointFigure(name=f"verify, from memory, {os.cpu_count()} cores", value=gigabytes / warm_all, unit="GB/s"),
        CheckpointFigure(name="export, one core", value=gigabytes / exported.seconds, unit="GB/s"),
        # The goal does not shrink with the model: most of a small export's memory is the interpreter and torch.
        CheckpointFigure(name="export, peak memory", value=exported.megabytes / 1e3, unit="GB", goal=1.5, is_cost=True),
    ]


def shape_of(gigabytes: float) -> ModelShape:
    """Return a shape of about that size, with as many layers as it takes, equally many for each rank."""
    sizes = [
        sum(spec.num_bytes for spec in canonical_tensors(replace(_SHAPE, num_layers=layers)).values())
        for layers in (1, 2)
    ]
    num_groups = round((gigabytes * 1e9 - 2 * sizes[0] + sizes[1]) / (sizes[1] - sizes[0]) / NUM_RANKS)
    return replace(_SHAPE, num_layers=NUM_RANKS * max(1, num_groups))


def print_figures(figures: Sequence[CheckpointFigure]) -> None:
    table = Table(title="checkpoints on this machine", title_justify="left", box=box.SIMPLE_HEAD)
    for title in ("figure", "value", "", "goal", ""):
        table.add_column(title, justify="right" if title in ("value", "goal") else "left")
    for figure in figures:
        goal = "" if figure.goal is None else f"{'<=' if figure.is_cost else '>='} {figure.goal:g}"
        verdict = "" if figure.goal is None else "met" if figure.miss <= 1 else f"missed, by {figure.miss:.1f} times"
        table.add_row(figure.name, f"{figure.value:.2f}", figure.unit, goal, verdict)
    Console(width=_WIDTH, no_color=bool(NO_COLOR.read()), highlight=False).print(table)


def as_json(figures: Sequence[CheckpointFigure]) -> str:
    return json.dumps([{**asdict(figure), "value": round(figure.value, 4)} for figure in figures])


@contextmanager
def _room(folder: Path, *, num_bytes: int) -> Iterator[Path]:
    try:
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < num_bytes:
            raise MachineError(
                f"{folder}: needs {num_bytes / 1e9:.1f} GB and {free_bytes / 1e9:.1f} GB are free; lower --gigabytes"
            )
        with tempfile.TemporaryDirectory(prefix="megarl-bench-", dir=folder) as inner:
            yield Path(inner)
    except OSError as error:
        raise MachineError(f"{folder}: the disk cannot be measured: {error}") from error


def _save(folder: Path, shape: ModelShape, *, repeats: int) -> tuple[Path, SaveTimes]:
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "dtype": _DTYPE}))
    checkpoint = checkpoint_folder(folder / "checkpoints", 1)
    partial = begin(checkpoint, num_bytes=0)
    server = StoreServer()
    try:
        with ProcessPoolExecutor(NUM_RANKS, mp_context=multiprocessing.get_context("spawn")) as pool:
            calls = [
                pool.submit(save_as_rank, server.address, rank, shape, partial / MODEL_FOLDER, source, repeats)
                for rank in range(NUM_RANKS)
            ]
            ranks = [call.result() for call in calls]
    except BrokenProcessPool as error:
        raise MachineError("a rank process died; is there enough memory? lower --gigabytes") from error
    files = below(MODEL_FOLDER, {name: file for rank in ranks for name, file in rank.files.items()})
    manifest = Manifest(
        format=FORMAT,
        megarl_version=__version__,
        step=1,
        contents="weights",
        recipe={},
        recipe_digest="",
        files=dict(sorted(files.items())),
    )
    commit(partial, checkpoint, manifest)
    return checkpoint, ranks[0]


def save_as_rank(
    address: StoreAddress, rank: int, shape: ModelShape, folder: Path, source: Path, repeats: int
) -> SaveTimes:
    """Save `repeats` times in each layout as one rank, all ranks together; the last save is kept."""
    torch.set_num_threads(1)
    group = TransferGroup.join(address, name="bench", peer=rank, num_peers=NUM_RANKS, timeout_s=_TIMEOUT_S)
    times: dict[str, list[float]] = {"stages": [], "tensor": [], "blocking": [], "dd": []}
    files: dict[str, FileDigest] = {}
    layouts = {
        "stages": MegatronParallel(pipeline=NUM_RANKS),
        "tensor": MegatronParallel(tensor=NUM_RANKS),
    }
    for kind, parallel in layouts.items():
        layout = megatron_layout(shape, parallel, dtype=_DTYPE)
        tensors = {name: _random(spec, seed=rank) for name, spec in layout.by_rank[rank].tensors.items()}
        given = contribution(layout, rank)
        view = partial(_box, tensors)
        for _ in range(repeats):
            group.barrier()
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                times["dd"].append(_dd(folder.parent / "dd", sum(spec.num_bytes for spec in layout.canonical.values())))
                os.sync()
            group.barrier()
            began = time.monotonic()
            copies = copy_to_host(given, rank, view)
            times["blocking"].append(time.monotonic() - began)
            group.barrier()
            began = time.monotonic()
            files = save_hf(folder, source_folder=source, layout=given.layout, tensors=copies, group=group)
            times[kind].append(time.monotonic() - began)
    return SaveTimes(
        stages_s=tuple(times["stages"]),
        tensor_s=tuple(times["tensor"]),
        blocking_s=tuple(times["blocking"]),
        dd_s=tuple(times["dd"]),
        files=files,
    )


def _box(tensors: Mapping[str, torch.Tensor], name: str, offsets: Index, shape: Index) -> torch.Tensor:
    return box_of(tensors[name], offsets, shape)


def _random(spec: TensorSpec, *, seed: int) -> torch.Tensor:
    """Return values that a disk cannot compress; a pattern is repeated, because new values take longer than saving."""
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randn(_PATTERN_ITEMS, generator=generator).to(torch_dtype(spec.dtype))
    num_items = prod(spec.shape)
    return pattern.repeat(num_items // _PATTERN_ITEMS + 1)[:num_items].reshape(spec.shape).clone()


def _dd(path: Path, num_bytes: int) -> float:
    """Return the seconds that `dd` takes to write `num_bytes` to the disk."""
    os.sync()
    size = ("bs=16M", "iflag=count_bytes", f"count={num_bytes}")
    command = ["dd", "if=/dev/zero", f"of={path}", *size, "conv=fsync", "status=none"]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603 - ours
    seconds = time.monotonic() - began
    if done.returncode != 0:
        raise MachineError(f"dd failed: {done.stderr.strip()}")
    path.unlink()
    return seconds


def _verify(checkpoint: Path) -> tuple[float, float, float]:
    """Return the seconds from disk with all cores, from memory with one, and from memory with all."""
    for path in checkpoint.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    from_disk = _timed(checkpoint, num_threads=None)
    return from_disk, _timed(checkpoint, num_threads=1), _timed(checkpoint, num_threads=None)


def _timed(checkpoint: Path, *, num_threads: int | None) -> float:
    began = time.monotonic()
    verify(checkpoint, num_threads=num_threads)
    return time.monotonic() - began
