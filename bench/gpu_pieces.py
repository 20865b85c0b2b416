"""The pieces of `python -m bench gpu`: each runs in a process of its own with a deadline, and prints figures at once.

A piece that fails, hangs or breaks the device loses its own figures and no others.
"""

from __future__ import annotations

import asyncio
import json
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from bench.figures import Failure, Figure
from megarl.env import current_environment
from megarl.system.guard import start_guarded, stop_guarded

Machine = dict[str, object]
Outcome = Figure | Failure | Machine
Report = Callable[[Outcome], None]

_STOP_GRACE_S = 5.0
_LORA_RANK = 32
_MARK = "megarl-bench "
"""Prefix of the lines for the parent process: libraries print to the same stream."""
_PACKAGES = ("megatron-core", "transformer-engine", "sglang", "transformers", "triton")
_COMMAND = (sys.executable, "-W", "ignore", "-m", "bench", "gpu-piece")


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceOptions:
    engine_model: str
    """A public model, for its size."""
    engine_options: Mapping[str, object]
    """Options of SGLang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPiece:
    timeout_s: float
    measure: Callable[[PieceOptions, Report], None]


@dataclass(slots=True, kw_only=True)
class Results:
    machine: Machine = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        match outcome:
            case Figure():
                self.figures.append(outcome)
            case Failure():
                self.failures.append(outcome)
            case _:
                self.machine |= outcome


def run_pieces(names: Sequence[str], options: PieceOptions, *, out: Path | None) -> Results:
    """Run the pieces one after the other; every line is written to `out` when it arrives."""
    results = Results()
    if out is not None:
        out.write_text("")
    for name in names:
        for line in _lines_of(name, options):
            if out is not None:
                with out.open("a") as file:
                    file.write(line + "\n")
            results.add(_read(line))
    return results


def run_piece(name: str, options: PieceOptions) -> None:
    """Measure in this process, which is the piece's own."""
    PIECES[name].measure(options, lambda outcome: print(f"{_MARK}{_to_line(outcome)}", flush=True))


def _lines_of(name: str, options: PieceOptions) -> Iterator[str]:
    guard = start_guarded(
        [*_COMMAND, name, json.dumps(asdict(options))], environment=current_environment(), output=subprocess.PIPE
    )
    timeout_s = PIECES[name].timeout_s
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        stop_guarded(guard, grace_s=_STOP_GRACE_S)

    timer = threading.Timer(timeout_s, end)
    timer.start()
    last = ""
    try:
        assert guard.stdout is not None
        for raw in guard.stdout:
            line = raw.decode("utf-8", errors="replace").rstrip()
            if line.startswith(_MARK):
                yield line.removeprefix(_MARK)
            else:
                print(f"{name}: {line}", file=sys.stderr, flush=True)
                last = line or last
        code = guard.wait()
    finally:
        timer.cancel()
        stop_guarded(guard, grace_s=_STOP_GRACE_S)
    if is_late.is_set():
        yield _to_line(Failure(part=name, reason=f"not done within {timeout_s:.0f} s"))
    elif code != 0:
        yield _to_line(Failure(part=name, reason=f"ended with {code}: {last[:300]}"))


def _to_line(outcome: Outcome) -> str:
    match outcome:
        case Figure():
            return json.dumps({"figure": asdict(outcome)})
        case Failure():
            return json.dumps({"failure": asdict(outcome)})
        case _:
            return json.dumps({"machine": outcome})


def _read(line: str) -> Outcome:
    ((kind, fields),) = json.loads(line).items()
    match kind:
        case "figure":
            return Figure(**fields)
        case "failure":
            return Failure(**fields)
        case _:
            machine: Machine = fields
            return machine


# --- what the pieces measure --------------------------------------------------------------------------------------


def _machine(_: PieceOptions, report: Report) -> None:
    import torch

    from bench.training import measure_ceilings

    report(
        {
            "device": torch.cuda.get_device_name(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            **{
                name: _version(name)
                for name in ("megatron-core", "transformer-engine", "sglang", "transformers", "triton")
            },
        }
    )
    report({name: round(value) for name, value in measure_ceilings().items()})


def _scores(_: PieceOptions, report: Report) -> None:
    from bench.training import measure_scores

    for figure in measure_scores():
        report(figure)


def _step(_: PieceOptions, report: Report, *, index: int) -> None:
    from bench.training import PEERS, WORKLOADS, measure_step

    for figure in measure_step(WORKLOADS[index], peers=PEERS):
        report(figure)


def _long_step(_: PieceOptions, report: Report) -> None:
    from bench.training import LONG_WORKLOAD, measure_step

    for figure in measure_step(LONG_WORKLOAD, peers=()):
        report(figure)


def _hybrid(_: PieceOptions, report: Report) -> None:
    from bench.hybrid import measure_hybrid

    for figure in measure_hybrid():
        report(figure)


def _prefixes(_: PieceOptions, report: Report, *, index: int) -> None:
    from bench.prefixes import measure_prefixes

    for figure in measure_prefixes(index):
        report(figure)


def _prefix_attention(_: PieceOptions, report: Report) -> None:
    from bench.prefix_attention import measure_prefix_attention

    for figure in measure_prefix_attention():
        report(figure)


def _linear(_: PieceOptions, report: Report, *, index: int) -> None:
    from bench.linear_layers import measure_linear_layers

    for outcome in measure_linear_layers(index):
        report(outcome)


def _experts(_: PieceOptions, report: Report) -> None:
    from bench.linear_layers import measure_experts

    for outcome in measure_experts():
        report(outcome)


def _phases(_: PieceOptions, report: Report) -> None:
    from bench.training import measure_phases

    for figure in measure_phases():
        report(figure)


def _reads(_: PieceOptions, report: Report) -> None:
    from bench.reads import measure_reads

    for figure in measure_reads():
        report(figure)


def _peers(_: PieceOptions, report: Report) -> None:
    from bench.peers import PeersOptions, measure_peers

    for outcome in measure_peers(PeersOptions()):
        report(outcome)


def _engine(options: PieceOptions, report: Report) -> None:
    from bench.engine import measure_engine

    _report_all(report, lambda folder: measure_engine(options.engine_model, folder, options.engine_options))


def _fp8_publish(options: PieceOptions, report: Report) -> None:
    from bench.engine import measure_fp8_publish

    _report_all(report, lambda folder: measure_fp8_publish(options.engine_model, folder, options.engine_options))


def _generation(options: PieceOptions, report: Report, *, model: str) -> None:
    from bench.generation import measure_generation

    _report_all(report, lambda folder: measure_generation(model, folder, options.engine_options))


def _tail(options: PieceOptions, report: Report) -> None:
    from bench.tail_engine import measure_tail_engine

    _report_all(report, lambda folder: measure_tail_engine("qwen2.5-1.5b", folder, options.engine_options))


def _turns(options: PieceOptions, report: Report) -> None:
    from bench.turns import measure_turns

    _report_all(report, lambda folder: measure_turns("smollm2-135m", folder, options.engine_options))


def _drafts(options: PieceOptions, report: Report) -> None:
    from bench.drafts import measure_drafts

    _report_all(report, lambda folder: measure_drafts(options.engine_model, folder, options.engine_options))


def _adapter(options: PieceOptions, report: Report) -> None:
    report_adapter(options, report, device="cuda", rank=_LORA_RANK)


def _policies(options: PieceOptions, report: Report) -> None:
    report_policies(options, report, device="cuda", rank=_LORA_RANK)


def report_policies(options: PieceOptions, report: Report, *, device: Literal["cpu", "cuda"], rank: int) -> None:
    """Measure generation by several adapters of one engine."""
    from bench.adapter import measure_policies

    model, native = options.engine_model, options.engine_options
    _report_all(report, lambda folder: measure_policies(model, folder, native, device=device, rank=rank))


def report_adapter(options: PieceOptions, report: Report, *, device: Literal["cpu", "cuda"], rank: int) -> None:
    """Measure publishes of adapters."""
    from bench.adapter import measure_adapter

    model, native = options.engine_model, options.engine_options
    _report_all(report, lambda folder: measure_adapter(model, folder, native, device=device, rank=rank))


def _report_all(report: Report, measure: Callable[[Path], AsyncIterator[Outcome]]) -> None:
    """Measure in a folder of its own."""

    async def report_each(folder: Path) -> None:
        async for outcome in measure(folder):
            report(outcome)

    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
        asyncio.run(report_each(Path(folder)))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(unknown)"


PIECES: Mapping[str, GpuPiece] = {
    "machine": GpuPiece(timeout_s=60, measure=_machine),
    "scores": GpuPiece(timeout_s=90, measure=_scores),
    "step-7b": GpuPiece(timeout_s=240, measure=partial(_step, index=0)),
    "step-1.5b": GpuPiece(timeout_s=240, measure=partial(_step, index=1)),
    "step-135m": GpuPiece(timeout_s=240, measure=partial(_step, index=2)),
    "step-16k": GpuPiece(timeout_s=90, measure=_long_step),
    "hybrid": GpuPiece(timeout_s=150, measure=_hybrid),
    "prefixes-1.5b": GpuPiece(timeout_s=110, measure=partial(_prefixes, index=0)),
    "prefixes-7b": GpuPiece(timeout_s=120, measure=partial(_prefixes, index=1)),
    "prefixes-attention": GpuPiece(timeout_s=90, measure=_prefix_attention),
    "linear-7b": GpuPiece(timeout_s=180, measure=partial(_linear, index=0)),
    "linear-1.5b": GpuPiece(timeout_s=180, measure=partial(_linear, index=1)),
    "experts": GpuPiece(timeout_s=150, measure=_experts),
    "phases": GpuPiece(timeout_s=120, measure=_phases),
    "reads": GpuPiece(timeout_s=150, measure=_reads),
    "peers": GpuPiece(timeout_s=230, measure=_peers),
    "engine": GpuPiece(timeout_s=420, measure=_engine),
    "fp8-publish": GpuPiece(timeout_s=420, measure=_fp8_publish),
    "generation-135m": GpuPiece(timeout_s=400, measure=partial(_generation, model="smollm2-135m")),
    "generation-1.5b": GpuPiece(timeout_s=400, measure=partial(_generation, model="qwen2.5-1.5b")),
    "generation-7b": GpuPiece(timeout_s=400, measure=partial(_generation, model="qwen2.5-7b")),
    "tail": GpuPiece(timeout_s=300, measure=_tail),
    "turns": GpuPiece(timeout_s=180, measure=_turns),
    "drafts": GpuPiece(timeout_s=540, measure=_drafts),
    "adapter": GpuPiece(timeout_s=480, measure=_adapter),
    "policies": GpuPiece(timeout_s=240, measure=_policies),
}
