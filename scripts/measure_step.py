"""The path of one synchronous GRPO step, measured: `python -m scripts.measure_step` runs the quickstart and counts.

Two steps in the middle of a run are traced in the driver, the trainer ranks and the engines. A file is on the path if
the step executes one of its functions. A reader of the path opens the whole file, so the lines of a file count whole;
`used` are the lines of the functions that ran, with what stands outside of functions. With `--functions` those that did
not run are listed below each file, with their lines. What timers call is left out (see `line_tracer`).
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.env import current_environment

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megarl"
_FIRST, _LAST, _STEPS = 3, 5, 7
"""The window opens after step `_FIRST` and closes after `_LAST`; the run goes on, so that its end is not in it."""
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFile:
    """A file on the path of a step."""

    name: str
    lines: int
    ran: int
    """Lines of the functions that ran."""
    outside: int
    """Lines outside of functions: imports, constants, fields."""
    idle: Mapping[str, int]
    """Functions that did not run, with their lines."""

    @property
    def used(self) -> int:
        return self.ran + self.outside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", action="store_true", help="list the functions that did not run")
    lists_functions = parser.parse_args().functions
    files = measure()
    for file in files:
        print(f"{file.name:45} {file.lines:5}   used {file.used:5}")
        for function, lines in file.idle.items() if lists_functions else ():
            print(f"    {function:41} {lines:5}")
    lines, ran, used = (
        sum(values) for values in zip(*((file.lines, file.ran, file.used) for file in files), strict=True)
    )
    print(f"\nfiles on the path      {len(files)}")
    print(f"lines in them          {lines:,}")
    print(f"in functions that ran  {ran:,} ({ran / lines:.0%})")
    print(f"used                   {used:,} ({used / lines:.0%})")


def measure() -> list[PathFile]:
    """Run the quickstart's recipe with a random model; return the files of a step, the longest first."""
    folder = Path(tempfile.mkdtemp(prefix="megarl-step-"))
    try:
        executed = _traced_run(folder)
    finally:
        shutil.rmtree(folder)
    files = [_path_file(name, lines) for name, lines in executed.items()]
    return sorted((file for file in files if file.ran), key=lambda file: -file.lines)


def _traced_run(folder: Path) -> Mapping[str, set[int]]:
    """Return the executed lines of each file of megarl."""
    environment = {**current_environment(), "STEP_TRACE": str(folder)}
    paths = [str(ROOT / "scripts" / "line_tracer"), str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    megarl = [sys.executable, "-c", "from megarl.cli.main import main; main()"]
    data = folder / "arithmetic"
    subprocess.run([*megarl, "data", "make", "arithmetic", "--out", str(data)], check=True, cwd=ROOT)  # noqa: S603
    settings = {
        "run.name": "step",
        "run.folder": folder / "runs",
        "run.steps": _STEPS,
        "model.path": data / "model",
        "data.train": f"[{data / 'train.parquet'}]",
        "data.eval": "[]",
        "evaluation": "null",
        "train.prompts_per_step": 16,
    }
    command = [*megarl, "train", str(ROOT / "recipes" / "quickstart.yaml")]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    with subprocess.Popen(command, env=environment, cwd=ROOT) as run:  # noqa: S603
        events = folder / "runs" / "step" / "events.jsonl"
        _wait_for_step(run, events, _FIRST)
        (folder / "window").write_text("open")
        _wait_for_step(run, events, _LAST)
        (folder / "window").write_text("closed")
        run.wait(_TIMEOUT_S)
    executed: defaultdict[str, set[int]] = defaultdict(set)
    for record in folder.glob("lines_*.json"):
        for name, line in json.loads(record.read_text())["lines"]:
            executed[name].add(line)
    return executed


def _wait_for_step(run: subprocess.Popen[bytes], events: Path, step: int) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        if events.exists() and events.read_text(encoding="utf-8").count('"step_finished"') >= step:
            return
        if run.poll() is not None:
            raise SystemExit(f"the run ended with {run.returncode} before step {step}")
        time.sleep(0.05)
    raise SystemExit(f"step {step} did not end within {_TIMEOUT_S:g} s")


def _path_file(name: str, executed: set[int]) -> PathFile:
    text = (PACKAGE / name).read_text(encoding="utf-8")
    num_lines = len(text.splitlines())
    inside: set[int] = set()
    ran: set[int] = set()
    idle: dict[str, int] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            extent = set(range(begin, (node.end_lineno or begin) + 1))
            body = set(range(node.body[0].lineno, (node.end_lineno or begin) + 1))
            inside |= extent
            if executed & body:
                ran |= extent
            else:
                idle[node.name] = idle.get(node.name, 0) + len(extent)
    return PathFile(name=name, lines=num_lines, ran=len(ran), outside=num_lines - len(inside), idle=idle)


if __name__ == "__main__":
    main()
