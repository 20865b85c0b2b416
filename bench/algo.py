"""Time and memory of credit assignment and packing of one large step, against goals.

A fresh process on two cores makes up the rollouts of a step, which is not measured. Half of the tokens are the
policy's, in alternating turns, as in episodes with tool results.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.algo.algorithm import build_algorithm
from megarl.config.algorithm import AlgorithmConfig, GaeConfig, GrpoConfig
from megarl.data.packing import Packing
from megarl.data.shares import make_shares
from megarl.env import NO_COLOR
from megarl.errors import MachineError
from megarl.stages import Algorithm
from megarl.tokens import Content
from megarl.types import (
    BoolArray,
    Estimates,
    FinishReason,
    FloatArray,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    ScoredGroup,
)

Kind: TypeAlias = Literal["grpo", "gae"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The usual estimator, and the most expensive one."""

GOAL_SECONDS = 2.0
GOAL_MEMORY_RATIO = 3.0

_NUM_CORES = 2
_GROUP = 16
_PROMPT_TOKENS = (64, 512)
_MEAN_TURN_TOKENS = 128
_DATA_PARALLEL = 16
_PAD_MULTIPLE = 64
_MICRO_BATCH_SEQUENCES = 3
_WIDTH = 120
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurement:
    """One step: the times of its fastest run, and the largest peak of all runs."""

    kind: str
    num_rollouts: int
    num_tokens: int
    """Tokens of each response."""
    assign_seconds: float
    pack_seconds: float
    cpu_seconds: float
    """Much less than `seconds` on a machine that was busy."""
    input_megabytes: float
    peak_megabytes: float
    """Peak of the input and everything made of it."""

    @property
    def seconds(self) -> float:
        return self.assign_seconds + self.pack_seconds

    @property
    def memory_ratio(self) -> float:
        return self.peak_megabytes / self.input_megabytes

    @property
    def worst_ratio(self) -> float:
        """The larger ratio of a value to its goal; above 1 a goal is missed."""
        return max(self.seconds / GOAL_SECONDS, self.memory_ratio / GOAL_MEMORY_RATIO)


def measure_steps(*, num_rollouts: int, num_tokens: int, repeats: int) -> list[StepMeasurement]:
    return [_best([_in_fresh_process(kind, num_rollouts, num_tokens) for _ in range(repeats)]) for kind in KINDS]


def _best(runs: Sequence[StepMeasurement]) -> StepMeasurement:
    fastest = min(runs, key=lambda run: run.seconds)
    peak = max(run.peak_megabytes for run in runs)
    return StepMeasurement(**{**asdict(fastest), "peak_megabytes": peak})


def _in_fresh_process(kind: Kind, num_rollouts: int, num_tokens: int) -> StepMeasurement:
    """Measure in a process of its own: a peak is one of a whole process."""
    command = [sys.executable, "-m", __name__, kind, str(num_rollouts), str(num_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603 - ours
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["the process was killed; is there enough memory?"])[-1]
        raise MachineError(f"bench algo: {kind} failed: {reason}; choose fewer --rollouts or --tokens")
    return StepMeasurement(**json.loads(done.stdout))


def measure_step(kind: Kind, *, num_rollouts: int, num_tokens: int) -> StepMeasurement:
    """Measure in this process."""
    before = _resident_megabytes("VmRSS")
    random = np.random.default_rng(0)
    groups = [_group(random, index, num_tokens) for index in range(num_rollouts // _GROUP)]
    rollouts = [rollout for group in groups for rollout in group.group.rollouts]
    estimates = _estimates(kind, random, rollouts)
    algorithm = _algorithm(kind, num_tokens)
    began, cpu_began = time.perf_counter(), time.process_time()
    samples = algorithm.assign(groups, estimates)
    assigned = time.perf_counter()
    packing = Packing(
        data_parallel=_DATA_PARALLEL,
        tokens_per_micro_batch=_MICRO_BATCH_SEQUENCES * (num_tokens + _PROMPT_TOKENS[1]),
        samples_per_update=None,
        pad_multiple=_PAD_MULTIPLE,
        micro_batch_multiple=1,
    )
    # As a run does: one share after the other, each of which is stored and forgotten.
    for _batch in (share.fill() for share in make_shares(samples, packing, temperature=1.0)):
        pass
    packed = time.perf_counter()
    return StepMeasurement(
        kind=kind,
        num_rollouts=len(rollouts),
        num_tokens=num_tokens,
        assign_seconds=round(assigned - began, 3),
        pack_seconds=round(packed - assigned, 3),
        cpu_seconds=round(time.process_time() - cpu_began, 3),
        input_megabytes=round(_num_bytes(groups, estimates) / 1e6, 3),
        peak_megabytes=round(_resident_megabytes("VmHWM") - before, 3),
    )


def _algorithm(kind: Kind, num_tokens: int) -> Algorithm:
    config: AlgorithmConfig = GrpoConfig(kind="grpo") if kind == "grpo" else GaeConfig(kind="gae")
    return build_algorithm(config, max_response_tokens=num_tokens)


def _group(random: np.random.Generator, index: int, num_tokens: int) -> ScoredGroup:
    prompt = Prompt(
        uid=str(index),
        position=index,
        epoch=0,
        token_ids=random.integers(0, 1 << 17, int(random.integers(*_PROMPT_TOKENS)), dtype=np.int32),
        data_source="",
        ground_truth="",
        extra_info={},
    )
    rollouts = tuple(
        Rollout(
            content=Content(
                token_ids=random.integers(0, 1 << 17, num_tokens, dtype=np.int32),
                logprobs=-random.random(num_tokens, dtype=np.float32),
                text="",
            ),
            versions=np.full(num_tokens, index, np.int32),
            loss_mask=_turns(random, num_tokens),
            finish_reason=FinishReason.STOP,
        )
        for _ in range(_GROUP)
    )
    scores = tuple(Score(value=float(random.integers(2)), components={}) for _ in rollouts)
    return ScoredGroup(group=RolloutGroup(prompt=prompt, rollouts=rollouts), scores=scores)


def _turns(random: np.random.Generator, num_tokens: int) -> BoolArray:
    """Return alternating runs of True and False of random lengths, half of each."""
    shortest = _MEAN_TURN_TOKENS // 2
    lengths = random.integers(shortest, 3 * shortest + 1, num_tokens // shortest + 1)
    return np.repeat(np.arange(len(lengths)) % 2 == 0, lengths)[:num_tokens]


def _estimates(kind: Kind, random: np.random.Generator, rollouts: Sequence[Rollout]) -> Estimates:
    if kind == "grpo":
        return Estimates()
    values: tuple[FloatArray, ...] = tuple(
        random.random(len(rollout.token_ids), dtype=np.float32) for rollout in rollouts
    )
    return Estimates(values=values)


def _num_bytes(groups: Sequence[ScoredGroup], estimates: Estimates) -> int:
    """Return the size of the step's input arrays."""
    total = sum(group.group.prompt.token_ids.nbytes for group in groups)
    for group in groups:
        for rollout in group.group.rollouts:
            columns = (rollout.token_ids, rollout.logprobs, rollout.versions, rollout.loss_mask)
            total += sum(column.nbytes for column in columns)
    return total + sum(array.nbytes for array in estimates.values or ())


def _resident_megabytes(field: Literal["VmRSS", "VmHWM"]) -> float:
    # `ru_maxrss` does not serve: on Linux a child starts with the peak of its parent.
    match = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None, f"no {field} in /proc/self/status"
    return int(match[1]) * 1024 / 1e6


def print_step_table(measurements: Sequence[StepMeasurement]) -> None:
    first = measurements[0]
    title = f"{first.num_rollouts} rollouts of {first.num_tokens} tokens, {_NUM_CORES} cores"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("estimator", "assign s", "pack s", "both s", "CPU s", "input MB", "peak MB", "/ input", ""):
        table.add_column(name, justify="left" if name in ("estimator", "") else "right")
    for item in measurements:
        table.add_row(
            item.kind,
            f"{item.assign_seconds:.2f}",
            f"{item.pack_seconds:.2f}",
            f"{item.seconds:.2f}",
            f"{item.cpu_seconds:.2f}",
            f"{item.input_megabytes:.0f}",
            f"{item.peak_megabytes:.0f}",
            f"{item.memory_ratio:.2f}",
            "met" if item.worst_ratio <= 1 else f"missed, {item.worst_ratio:.1f} times",
        )
    console = Console(width=_WIDTH, no_color=bool(NO_COLOR.read()), highlight=False)
    console.print(table)
    console.print(f"goal: both within {GOAL_SECONDS:g} s, peak within {GOAL_MEMORY_RATIO:g} times the input")


def _main(kind: str, num_rollouts: str, num_tokens: str) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:_NUM_CORES])
    (known,) = [item for item in KINDS if item == kind]
    print(json.dumps(asdict(measure_step(known, num_rollouts=int(num_rollouts), num_tokens=int(num_tokens)))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
