"""The figures of the structure: `python -m scripts.structure` prints them, tests/test_style.py holds them."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megarl"

SHORT_FILE_LINES = 40
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

READING_ORDER = ("types", "stages", "runtime/loop")

STEP = (
    *READING_ORDER,
    *("runtime/buffer", "runtime/phases"),
    *("data/stream", "rollout/generator", "rollout/fleet", "rollout/lifecycle", "rollout/client", "rollout/reply"),
    *("reward/scorer", "algo/algorithm", "algo/advantage", "algo/selection"),
    *(
        "tokens",
        "data/packing",
        "data/shares",
        "runtime/trainers/trainer",
        "runtime/trainers/ranks",
        "runtime/trainers/worker_group",
    ),
    *("train/interface", "train/rank", "train/trained", "train/actor", "train/passes", "train/model"),
    *("train/attention/packed", "train/logprob", "train/stats", "train/optimizer", "train/topology"),
    *("algo/objective", "algo/loss"),
    *(
        "runtime/engines/publisher",
        "runtime/trainers/actor",
        "runtime/trainers/publishing",
        "rollout/control",
        "rollout/commands",
        "rollout/loader",
    ),
    *(
        "weights/executors/transfer",
        "weights/executors/channel",
        "weights/executors/group",
        "weights/executors/digest_sums",
        "weights/executors/tensors",
    ),
    *("weights/algebra/plan", "weights/algebra/slices", "weights/algebra/buckets"),
)
"""Modules to read to follow one synchronous GRPO step from prompt to published version."""

STEP_START = (
    *("cli/train", "results", "runtime/launch", "runtime/run", "runtime/build", "runtime/inputs", "runtime/cluster"),
    *("runtime/tasks", "runtime/rollout_samples", "runtime/engines/serving", "runtime/engines/processes"),
    *("runtime/trainers/start", "runtime/trainers/build", "runtime/rollouts/groups"),
    *("weights/algebra/bundles", "weights/algebra/routing", "weights/algebra/locality"),
    *("weights/layouts/canonical", "weights/layouts/pieces", "weights/layouts/megatron", "weights/layouts/sglang"),
    "weights/layouts/transfer_spec",
)
"""Modules that build what the step passes through, from the command line to the plan of the first publish."""

_RIDDLE = re.compile(r"(Of|What|Those|As|One that|So many|Whoever|Who|By which)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    name: str
    value: int
    goal: int


def figures() -> list[Figure]:
    """Return every figure with its goal; a value above its goal is a miss."""
    files = source_files()
    lines = {path: count_lines(path) for path in files}
    code = [path for path in files if path.name != "__init__.py"]
    return [
        Figure(name="files in megarl/", value=len(files), goal=250),
        Figure(name="files in the largest folder", value=max(folder_sizes().values()), goal=22),
        Figure(
            name=f"files under {SHORT_FILE_LINES} lines",
            value=sum(lines[path] < SHORT_FILE_LINES for path in code),
            goal=20,
        ),
        Figure(
            name=f"files over {MAX_FILE_LINES} lines", value=sum(lines[path] > MAX_FILE_LINES for path in code), goal=0
        ),
        Figure(
            name=f"functions over {MAX_FUNCTION_LINES} lines",
            value=sum(1 for path in code for _ in long_functions(path)),
            goal=0,
        ),
        Figure(
            name="lines of types, stages and loop",
            value=_total(READING_ORDER),
            goal=400,
        ),
        Figure(name="lines to follow one step", value=_total(STEP), goal=8_000),
        Figure(name="lines with what builds the step", value=_total((*STEP, *STEP_START)), goal=10_500),
        Figure(name="class names defined twice", value=len(repeated_classes()), goal=0),
        Figure(name="functions that take the whole recipe", value=len(recipe_functions()), goal=40),
    ]


def module(name: str) -> Path:
    return PACKAGE / f"{name}.py"


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def folder_sizes() -> Mapping[Path, int]:
    """Return the number of modules directly in each folder, without `__init__.py`."""
    return Counter(path.parent for path in source_files() if path.name != "__init__.py")


def long_files() -> list[Path]:
    return [path for path in source_files() if count_lines(path) > MAX_FILE_LINES]


def long_functions(path: Path) -> Iterator[str]:
    for node in _functions(path):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield node.name


def repeated_classes() -> dict[str, list[Path]]:
    """Return the public class names that more than one module defines, with those modules."""
    homes: defaultdict[str, list[Path]] = defaultdict(list)
    for path in source_files():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.relative_to(ROOT))
    return {name: paths for name, paths in homes.items() if len(paths) > 1}


def recipe_functions() -> list[str]:
    """Return the functions with a parameter that is the whole recipe."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in source_files()
        for node in _functions(path)
        if any(
            isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Recipe"
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        )
    ]


def riddles() -> Iterator[str]:
    """Yield the docstrings that begin as a fragment, such as "Of each row" or "What was sent"."""
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
                and _RIDDLE.match(node.value.value)
            ):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.value.value.splitlines()[0]}"


def _total(names: Sequence[str]) -> int:
    return sum(count_lines(module(name)) for name in names if module(name).exists())


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def main() -> None:
    for figure in figures():
        mark = "" if figure.value <= figure.goal else "   missed"
        print(f"{figure.name:40} {figure.value:6,}   goal {figure.goal:6,}{mark}")


if __name__ == "__main__":
    main()
