"""The figures of the structure: `python -m scripts.structure` prints them, tests/test_style.py holds them."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megarl"

SHORT_FILE_LINES = 40
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

READING_ORDER = ("types.py", "stages.py", "runtime/loop.py")


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
            value=sum(lines[PACKAGE / name] for name in READING_ORDER),
            goal=400,
        ),
        Figure(name="class names defined twice", value=len(repeated_classes()), goal=0),
        Figure(name="functions that take the whole recipe", value=len(recipe_functions()), goal=40),
    ]


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def folder_sizes() -> Mapping[Path, int]:
    """Return the number of modules directly in each folder, without `__init__.py`."""
    return Counter(path.parent for path in source_files() if path.name != "__init__.py")


def long_functions(path: Path) -> Iterator[str]:
    for node in _functions(path):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines"


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
