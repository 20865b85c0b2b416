"""Gain of generating beside training with engines of different speed, from whole runs on this machine.

One of two engines is stopped for a part of every tenth of a second. A synchronous step waits for it; a step with
`max_staleness` above 0 does not.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from megarl.env import NO_COLOR
from megarl.errors import MachineError
from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import StepFinished
from megarl.observe.summary import StepSummary
from megarl.system.proc import descendants
from megarl.tools.quickstart.arithmetic import make_arithmetic

GOAL = 0.75
"""Share of the time of a synchronous step."""

_NUM_WARM_UP_STEPS = 2
_PERIOD_S = 0.1
_ENGINE = b"sglang::scheduler"
_TIMEOUT_S = 1200.0

_RECIPE = """
run: {{name: staleness_{staleness}, folder: {folder}/runs, steps: {steps}, device: cpu}}
model: {{path: {folder}/arithmetic/model}}
data: {{train: ["{folder}/arithmetic/train.parquet"], max_prompt_tokens: 16}}
pools: {{train: {{gpus_per_node: 1}}, rollout: {{gpus_per_node: 2}}}}
roles: {{actor: {{pool: train}}, rollout: {{pool: rollout, max_running_requests: 32{in_flight}}}}}
algorithm: {{kind: grpo, correction: {{kind: tis}}}}
sampling: {{rollouts_per_prompt: 8, max_response_tokens: 48}}
reward: {{kind: exact}}
train: {{prompts_per_step: 16, tokens_per_micro_batch: 4096, max_staleness: {staleness}}}
checkpoint: {{save_every_steps: null, save_at_end: false}}
observe: {{metrics_port: null}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncFigures:
    """One run, without its warm-up steps."""

    max_staleness: int
    step_s: float
    """Median wall time from the end of a step to the end of the next."""
    trainer_wait_s: float
    age_mean: float
    load: float
    """Load average of the minute before the run ended."""


def measure_async(*, steps: int, stalenesses: Sequence[int], slow_share: float) -> list[AsyncFigures]:
    """Run the same recipe with each staleness; the slower engine runs for `slow_share` of the time."""
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name:
        folder = Path(name)
        make_arithmetic(folder / "arithmetic", seed=1)
        return [
            _measure_run(folder, staleness, steps=steps + _NUM_WARM_UP_STEPS, slow_share=slow_share)
            for staleness in stalenesses
        ]


def print_async_table(figures: Sequence[AsyncFigures], *, slow_share: float) -> None:
    console = Console(no_color=bool(NO_COLOR.read()), highlight=False, width=100)
    table = Table(
        box=box.SIMPLE,
        title=f"two engines, one of them running {slow_share:.0%} of the time; goal {GOAL} of a synchronous step",
    )
    for heading in ("max_staleness", "step, s", "of synchronous", "trainer waits, s", "mean age, steps", "load"):
        table.add_column(heading, justify="right")
    for item in figures:
        table.add_row(
            str(item.max_staleness),
            f"{item.step_s:.2f}",
            f"{item.step_s / figures[0].step_s:.2f}",
            f"{item.trainer_wait_s:.2f}",
            f"{item.age_mean:.2f}",
            f"{item.load:.1f}",
        )
    console.print(table)


def _measure_run(folder: Path, staleness: int, *, steps: int, slow_share: float) -> AsyncFigures:
    recipe = folder / f"staleness_{staleness}.yaml"
    in_flight = ", in_flight: retract" if staleness else ""
    recipe.write_text(_RECIPE.format(folder=folder, staleness=staleness, steps=steps, in_flight=in_flight))
    command = [sys.executable, "-c", "from megarl.cli.main import main; main()", "train", str(recipe)]
    with subprocess.Popen(  # noqa: S603 - ours
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            with _slowed(process.pid, share=slow_share):
                output, _ = process.communicate(timeout=_TIMEOUT_S)
        except BaseException:
            process.send_signal(signal.SIGTERM)
            raise
    if process.returncode != 0:
        raise MachineError(f"{recipe.name}: the run ended with exit code {process.returncode}: {output[-500:]}")
    records = list(read_events(folder / "runs" / f"staleness_{staleness}" / EVENTS_FILE))
    ends = [record.time.timestamp() for record in records if isinstance(record.event, StepFinished)]
    summaries = [record.event.summary for record in records if isinstance(record.event, StepFinished)]
    return _figures(staleness, ends[_NUM_WARM_UP_STEPS - 1 :], summaries[_NUM_WARM_UP_STEPS:])


def _figures(staleness: int, ends: Sequence[float], summaries: Sequence[StepSummary]) -> AsyncFigures:
    flows = [summary.flow for summary in summaries if summary.flow is not None]
    return AsyncFigures(
        max_staleness=staleness,
        step_s=statistics.median(later - earlier for earlier, later in pairwise(ends)),
        trainer_wait_s=statistics.median(flow.trainer_wait_s for flow in flows),
        age_mean=statistics.fmean(flow.age_mean for flow in flows),
        load=os.getloadavg()[0],
    )


@contextmanager
def _slowed(root: int, *, share: float) -> Iterator[None]:
    """Let the last engine among the descendants of process `root` run for `share` of the time, until the end."""
    is_over = threading.Event()

    def slow_down() -> None:
        while not is_over.wait(_PERIOD_S * share):
            engines = [pid for pid in descendants(root) if _is_engine(pid)]
            # A single engine is the fast one, or the second has not started yet.
            if len(engines) < 2:
                continue
            with suppress(ProcessLookupError):
                os.kill(max(engines), signal.SIGSTOP)
                time.sleep(_PERIOD_S * (1 - share))
                os.kill(max(engines), signal.SIGCONT)

    thread = threading.Thread(target=slow_down, name="slow-engine")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _is_engine(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_ENGINE)
    return False
