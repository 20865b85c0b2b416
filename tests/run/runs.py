"""Whole runs: `megarl train` in a process of its own, read back through its events."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from megarl.cli.main import main
from megarl.env import FAULTS
from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.observe.events import Evaluated, Event, StepFinished
from megarl.results import EvalResult
from megarl.system.run_lock import LOCKS_FOLDER
from tests.cluster.worker_setup import RAYS, quick_ray
from tests.engine.template import EngineTemplate
from tests.faults.leftovers import Footprint
from tests.processes import template, template_address
from tests.schedule import WATCH

RECIPE = """
run: {name: NAME, folder: FOLDER/runs, steps: 2, device: cpu, seed: 3}
cluster: {lease_s: 0}
model: {path: FOLDER/arithmetic/model}
data:
  train: [FOLDER/arithmetic/train.parquet]
  eval: [FOLDER/arithmetic/eval.parquet]
  max_prompt_tokens: 16
pools:
  train: {gpus_per_node: 2}
  rollout: {gpus_per_node: 1}
roles:
  actor: {pool: train, tensor: 2}
  rollout: {pool: rollout, tensor: 1}
algorithm: {kind: grpo}
sampling: {rollouts_per_prompt: 4, max_response_tokens: 6}
reward: {kind: function, path: FOLDER/reward.py, workers: 1}
train:
  prompts_per_step: 8
  tokens_per_micro_batch: 128
  optimizer: {learning_rate: 1e-3}
evaluation: {max_prompts: 4, sampled: {rollouts_per_prompt: 4, pass_at: [1, 4]}}
"""

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Something a random model gets right now and then, and not always."""
    total = sum(map(ord, solution_str))
    return {"score": float(total % 3 == 0), "length": len(solution_str), "prediction": total % 3}
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    folder: Path
    exit_code: int
    output: str

    @property
    def events(self) -> list[Event]:
        return [record.event for record in read_events(self.folder / EVENTS_FILE)]

    @property
    def steps(self) -> list[StepFinished]:
        return [event for event in self.events if isinstance(event, StepFinished)]

    @property
    def evaluations(self) -> dict[int, EvalResult]:
        """By the step after which they ran."""
        return {event.step: event.result for event in self.events if isinstance(event, Evaluated)}

    @property
    def model(self) -> Path:
        return self.folder / "checkpoints" / "latest" / "model"

    @property
    def weights(self) -> dict[str, bytes]:
        """The files of the last model."""
        return {path.name: path.read_bytes() for path in sorted(self.model.glob("*.safetensors"))}

    def tensors(self, step: int) -> dict[str, bytes]:
        """The files of weights and of optimizer states after a step."""
        folder = self.folder / "checkpoints" / f"step_{step:06d}"
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


def write_recipe(folder: Path, name: str) -> Path:
    (folder / "reward.py").write_text(REWARD)
    path = folder / f"{name}.yaml"
    path.write_text(RECIPE.replace("FOLDER", str(folder)).replace("NAME", name))
    return path


class Driver:
    """The process of a run, with what `subprocess.Popen` calls its methods."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("megarl train", timeout)

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def started(
    folder: Path,
    name: str,
    *overrides: str,
    faults: Sequence[Mapping[str, object]] = (),
    options: Sequence[str] = (),
    footprint: Footprint | None = None,
    environment: Mapping[str, str] | None = None,
    engines: EngineTemplate | None = None,
) -> Iterator[Driver]:
    """A run under way, in a process group of its own, as in a terminal. Killed if it is still there at the end.

    With a footprint or `engines`, from which engines are forked, Ray is forked as well: what runs on it is no
    descendant of the run's process then, and a footprint finds it.
    """
    words = ["megarl", "train", str(write_recipe(folder, name)), *options]
    for override in overrides:
        words += ["--set", override]
    variables = {FAULTS.name: json.dumps(faults) if faults else "", **(environment or {})}
    with forked(
        main,
        words,
        folder=folder,
        output=folder / f"{name}.out",
        environment=variables,
        footprint=footprint,
        engines=engines,
    ) as driver:
        yield driver


@contextmanager
def forked(
    program: Callable[[], object],
    words: Sequence[str],
    *,
    folder: Path,
    output: Path,
    environment: Mapping[str, str],
    footprint: Footprint | None = None,
    engines: EngineTemplate | None = None,
) -> Iterator[Driver]:
    """A process of `program` in `folder`, forked from a template that has imported what a driver needs."""
    WATCH.refuse("megarl train")
    # Forked processes show the variables of their template: only a namespace tells a footprint whose they are.
    is_forked = engines is not None if footprint is None else footprint.is_private
    templates = (engines.address if engines and is_forked else b"", template_address(RAYS) if is_forked else b"")
    ready, theirs = template().Pipe(duplex=False)
    variables = dict(environment) if footprint is None else {**environment, **footprint.environment}
    process = template().Process(
        target=_drive, args=(program, list(words), folder, output, variables, footprint, templates, theirs)
    )
    process.start()
    theirs.close()
    ready.recv()
    if footprint is not None:
        footprint.hold()
    driver = Driver(process)
    try:
        yield driver
    finally:
        if driver.poll() is None:
            children = descendants(driver.pid)
            driver.kill()
            driver.wait(timeout=60)
            psutil.wait_procs(children, timeout=60)


def _drive(
    program: Callable[[], object],
    words: list[str],
    folder: Path,
    output: Path,
    environment: Mapping[str, str],
    footprint: Footprint | None,
    templates: tuple[bytes, bytes],
    ready: Connection,
) -> None:
    """The driver's process, from its beginning."""
    os.setpgid(0, 0)
    os.chdir(folder)
    # A test session in the background has Ctrl-C ignored, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.environ.update(environment)
    sys.argv = words
    if footprint is not None:
        footprint.enter()
    ready.send(None)
    ready.close()
    engines, rays = templates
    try:
        with quick_ray(engines, rays=rays):
            program()
    finally:
        atexit._run_exitfuncs()


def run(
    folder: Path,
    name: str,
    *overrides: str,
    timeout_s: float = 1200,
    faults: Sequence[Mapping[str, object]] = (),
    options: Sequence[str] = (),
    footprint: Footprint | None = None,
    environment: Mapping[str, str] | None = None,
    engines: EngineTemplate | None = None,
) -> Run:
    under_way = started(
        folder,
        name,
        *overrides,
        faults=faults,
        options=options,
        footprint=footprint,
        environment=environment,
        engines=engines,
    )
    with under_way as process:
        process.wait(timeout=timeout_s)
    return finished(folder, name, process)


def finished(folder: Path, name: str, process: Driver) -> Run:
    assert process.returncode is not None
    output = (folder / f"{name}.out").read_text()
    return Run(folder=folder / "runs" / name, exit_code=process.returncode, output=output)


def await_events(
    run_folder: Path, process: Driver, happened: Callable[[list[Event]], bool], *, timeout_s: float = 1200
) -> None:
    """Wait until the events of a run show what is asked for; a run that ends before is an error."""
    deadline, path = time.monotonic() + timeout_s, run_folder / EVENTS_FILE
    while not (path.exists() and happened([record.event for record in read_events(path)])):
        assert process.poll() is None, f"the run ended with {process.returncode} before it came so far"
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.1)


def await_event(run_folder: Path, process: Driver, kind: type[Event], *, count: int = 1) -> None:
    await_events(run_folder, process, lambda events: sum(isinstance(event, kind) for event in events) >= count)


def kill(process: Driver) -> None:
    """Kill the driver with -9; everything it has started goes too."""
    processes = descendants(process.pid)
    process.kill()
    process.wait(timeout=60)
    assert survivors(processes, timeout_s=60) == []


def driver_of(run_folder: Path) -> psutil.Process:
    """The process that holds the run's lock: with a lease not that of the command."""
    held = run_folder.parent / LOCKS_FOLDER / f"{run_folder.name}.json"
    return psutil.Process(json.loads(held.read_text())["pid"])


def descendants(pid: int) -> list[psutil.Process]:
    """Everything a run has started so far."""
    found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    return found


def survivors(processes: list[psutil.Process], *, timeout_s: float) -> list[str]:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [f"{process.pid} {process.name()}" for process in alive if process.status() != psutil.STATUS_ZOMBIE]
