"""The figures of the structure: `python -m scripts.structure` prints them; tests/test_style.py holds some of them.

`python -m scripts.measure_step` measures what a reader of one step has to open.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megarl"

LOOK_AT_LINES = 400
"""A longer file is looked at for a second reason to change."""
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
MAX_IMPORTS = 20
"""Modules of megarl that one module imports."""

GENERATED_PAGES = frozenset({"api.md", "cli.md", "metrics.md", "recipe.md"})
_GENERATED_PART = re.compile(r"^<!-- (\w+): .*?^<!-- end of \1 -->", flags=re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^ *```.*?^ *```", flags=re.MULTILINE | re.DOTALL)

_RIDDLE = re.compile(r"(Of|What|Those|As|One that|So many|Whoever|Who|By which)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    name: str
    value: int


def figures() -> list[Figure]:
    files = source_files()
    lines = {path: count_lines(path) for path in files}
    return [
        Figure(name="files in megarl/", value=len(files)),
        Figure(name="lines in megarl/", value=sum(lines.values())),
        Figure(name=f"files over {LOOK_AT_LINES} lines", value=sum(n > LOOK_AT_LINES for n in lines.values())),
        Figure(name=f"functions over {MAX_FUNCTION_LINES} lines", value=len(long_functions())),
        Figure(name=f"modules with over {MAX_IMPORTS} imports", value=len(crowded_modules())),
        Figure(name="pairs of packages that import each other", value=len(mutual_packages())),
        Figure(name="class names defined twice", value=len(repeated_classes())),
        Figure(name="Protocols", value=len(protocols())),
        Figure(name="Protocols with one implementer in megarl/", value=len(single_protocols())),
        Figure(name="isinstance(algorithm outside config and algo", value=len(algorithm_branches())),
        Figure(name="words of documentation by hand", value=sum(written_words().values())),
    ]


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def long_files() -> list[str]:
    return [str(path.relative_to(ROOT)) for path in source_files() if count_lines(path) > MAX_FILE_LINES]


def long_functions() -> list[str]:
    return [
        f"{path.relative_to(ROOT)} {node.name}"
        for path in source_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


@cache
def imports() -> Mapping[str, frozenset[str]]:
    """Return the modules of megarl that each module imports when it is imported itself."""
    modules = {module_name(path): path for path in source_files()}
    found: dict[str, frozenset[str]] = {}
    for name, path in modules.items():
        imported: set[str] = set()
        for node in _imports_of(tree_of(path).body):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= {each if each in modules else node.module for each in inner}
        found[name] = frozenset(imported & set(modules)) - {name}
    return found


def _imports_of(statements: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports at the top of a module; those for types alone do not count."""
    for node in statements:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def crowded_modules() -> dict[str, int]:
    """Return the modules with more imports of megarl than a reader can hold, and how many."""
    return {name: len(imported) for name, imported in imports().items() if len(imported) > MAX_IMPORTS}


def mutual_packages() -> list[tuple[str, str]]:
    """Return the pairs of packages, sub-packages included, of which each imports modules of the other."""
    arrows: set[tuple[str, str]] = set()
    for name, imported in imports().items():
        for other in imported:
            source, target = _packages_of(name), _packages_of(other)
            arrows |= {(a, b) for a in source for b in target if not _is_within(a, b) and not _is_within(b, a)}
    return sorted((a, b) for a, b in arrows if a < b and (b, a) in arrows)


def _packages_of(module: str) -> list[str]:
    """Return the packages of a module below megarl itself, from the outermost."""
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    parts = module.split(".") if is_package else module.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(2, len(parts) + 1)]


def _is_within(package: str, outer: str) -> bool:
    return package == outer or package.startswith(f"{outer}.")


def circles() -> list[list[str]]:
    """Return the groups of modules that import each other in a circle."""
    found: list[list[str]] = []
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in imports()[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in imports():
        if name not in index:
            visit(name)
    return found


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in source_files():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                yield path, node


def repeated_classes() -> dict[str, list[str]]:
    """Return the public class names that more than one module defines, with those modules."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for path, node in classes():
        if not node.name.startswith("_"):
            homes[node.name].append(str(path.relative_to(ROOT)))
    return {name: paths for name, paths in homes.items() if len(paths) > 1}


def protocols() -> dict[str, frozenset[str]]:
    """Return the public methods of each Protocol."""
    return {
        node.name: frozenset(_methods(node))
        for _, node in classes()
        if any(isinstance(base, ast.Name | ast.Subscript) and "Protocol" in ast.dump(base) for base in node.bases)
    }


def single_protocols() -> list[str]:
    """Return the Protocols whose methods exactly one class of megarl defines itself or inherits by name.

    A Protocol of one `__call__` describes functions, and one without methods or without any class describes a library's
    objects: neither is a seam.
    """
    known = protocols()
    methods = {
        node.name: frozenset((*_methods(node), *_attributes(node))) for _, node in classes() if node.name not in known
    }
    bases = {node.name: [base.id for base in node.bases if isinstance(base, ast.Name)] for _, node in classes()}

    def all_methods(name: str) -> frozenset[str]:
        inherited = [all_methods(base) for base in bases.get(name, ()) if base in methods]
        return methods[name].union(*inherited)

    implementers = {
        protocol: {name for name in methods if wanted <= all_methods(name)}
        for protocol, wanted in known.items()
        if wanted and wanted != {"__call__"}
    }
    return sorted(protocol for protocol, names in implementers.items() if len(names) == 1)


def _methods(node: ast.ClassDef) -> Iterator[str]:
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not re.match("_(?!_call__)", child.name):
            yield child.name


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """Yield what a class sets on itself or on its objects: it may stand for a property of a Protocol."""
    for child in ast.walk(node):
        match child:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store())
            ):
                yield name
            case _:
                pass


def algorithm_branches() -> list[str]:
    """Return the places outside of config and algo that ask which algorithm a recipe has."""
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in source_files()
        if path.relative_to(PACKAGE).parts[0] not in ("config", "algo")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(r"isinstance\([\w.]*algorithm\b", line)
    ]


def riddles() -> Iterator[str]:
    """Yield the docstrings that begin as a fragment, such as "Of each row" or "What was sent"."""
    for path in source_files():
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
                and _RIDDLE.match(node.value.value)
            ):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.value.value.splitlines()[0]}"


def written_words() -> dict[str, int]:
    """Return the words that people have written on each page, the README and the changelog included.

    Generated pages and parts, fenced code, the addresses of links and the rules of tables are left out; the code inside
    a sentence counts.
    """
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {page.name: _count_words(page.read_text()) for page in pages if page.name not in GENERATED_PAGES}


def _count_words(page: str) -> int:
    written = re.sub(r"\]\([^)]*\)", "]", _FENCED.sub("", _GENERATED_PART.sub("", page)))
    return sum(any(map(str.isalnum, word)) for word in written.split())


def main() -> None:
    for figure in figures():
        print(f"{figure.name:46} {figure.value:7,}")
    for page, count in written_words().items():
        print(f"    {page:42} {count:7,}")


if __name__ == "__main__":
    main()
