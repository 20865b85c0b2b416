"""A user's own Python: loaded by its reference, `file.py:name` or `package.module:name`, or as a file.

Worker processes load their files here too: standard library only, so that they start in the time of the user's imports.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

from megarl.errors import ConfigError, Problem

UserFunction = Callable[..., object]


def split_reference(reference: str) -> tuple[str, str]:
    """Return file or module, and name."""
    place, _, name = reference.rpartition(":")
    return place, name


@cache
def load_code(reference: str, *, key: str) -> UserFunction:
    """Return the function or class of a reference; raise a ConfigError that names the recipe's `key`."""
    place, name = split_reference(reference)
    path = Path(place)
    try:
        if not place.endswith(".py"):
            module = import_module(place)
        elif path.is_file():
            module = import_file(path, name=f"megarl_user_code_{abs(hash(path.resolve()))}")
        else:
            raise FileNotFoundError(f"{path} does not exist")
    except BaseException as error:
        # The user's code may raise anything, SystemExit too.
        raise _error(key, f"{reference}: importing it {describe_error(error)}") from error
    code: object = getattr(module, name, None)
    if code is None:
        raise _error(key, f"{place} has no {name}{near_name(module, name)}")
    if not callable(code):
        raise _error(key, f"{name} in {place} is a {type(code).__name__}, not a function or a class")
    return code


def near_name(module: ModuleType, name: str) -> str:
    """Return the end of a message about a missing name."""
    near = difflib.get_close_matches(name, vars(module), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def import_file(path: Path, *, name: str) -> ModuleType:
    """Return the module of a file; raise what its code raises."""
    # Last: files in the user's folder can be imported but do not hide installed packages.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    loader = SourceFileLoader(name, str(path))
    spec = spec_from_loader(name, loader)
    assert spec is not None, f"no module spec for {path}"
    module = module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def sources(path: Path) -> Iterator[tuple[str, str]]:
    """Yield path and digest of the file and of its imports from the same folder, installed packages excepted."""
    files = {path}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or "site-packages" in file:
            continue
        if Path(file).is_relative_to(path.parent) and not Path(file).is_relative_to(sys.base_prefix):
            files.add(Path(file))
    for file in sorted(files):
        yield str(file), hashlib.sha256(file.read_bytes()).hexdigest()


def digest_sources(paths: Iterable[Path]) -> str:
    """Return a digest of these files and of what they import from their folders, before any of them is imported.

    Installed packages do not count, nor do files that the code opens, or imports by names that it computes.
    """
    found = {str(file): digest for path in paths for file, digest in _followed(path)}
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _followed(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield path and digest of a file and of those below its folder that its imports name, directly or not."""
    seen: set[Path] = set()
    pending = [path]
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        seen.add(file)
        try:
            source = file.read_bytes()
        except OSError:
            continue  # no such module there; whoever imports what cannot be read complains
        yield file, hashlib.sha256(source).hexdigest()
        for base in _imports(source, file, path.parent):
            pending += [base.with_name(f"{base.name}.py"), base / "__init__.py"]


def _imports(source: bytes, file: Path, root: Path) -> Iterator[Path]:
    """Yield the places, without suffix, of the modules that a file may import from the user's folder."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # whoever imports it complains
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (root.joinpath(*alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = file.parents[min(node.level, len(file.parents)) - 1] if node.level else root
            module = start.joinpath(*node.module.split(".")) if node.module else start
            yield from (module, *(module / alias.name for alias in node.names if alias.name != "*"))


def source_of(reference: str) -> Path | None:
    """Return the file of `file.py:name` or `package.module:name`; None if it is none, or of an installed package."""
    place, _ = split_reference(reference)
    if place.endswith(".py"):
        return Path(place)
    first, *rest = place.split(".")
    spec = PathFinder.find_spec(first)
    if spec is None or spec.origin is None or "site-packages" in spec.origin:
        return None
    origin = Path(spec.origin)
    module = origin.parent.joinpath(*rest) if rest else origin.with_suffix("")
    return next(
        (file for file in (module.with_name(f"{module.name}.py"), module / "__init__.py") if file.is_file()), None
    )


def describe_error(error: BaseException, path: Path | None = None, *, memory_key: str | None = None) -> str:
    """Return `raised ValueError: text (file:line)`, with the innermost line of `path` if the traceback has one.

    `memory_key` is the key of the recipe that limits the memory of this process.
    """
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or "", error.lineno))
    frames = [frame for frame in frames if frame[0] == str(path)] or frames
    where = f" ({frames[-1][0]}:{frames[-1][1]})" if frames else ""
    message = str(error).strip().partition("\n")[0][:500]
    if isinstance(error, MemoryError) and memory_key is not None:
        message = message or f"the limit is {memory_key}"
    return f"raised {type(error).__name__}{f': {message}' if message else ''}{where}"


def _error(key: str, message: str) -> ConfigError:
    return ConfigError("recipe", (Problem(key=key, message=message),))
