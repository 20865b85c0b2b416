"""A user's own Python, loaded by its reference: `file.py:name` or `package.module:name`."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.machinery import SourceFileLoader
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
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else import_module(place)
    except BaseException as error:
        # The user's code may raise anything, SystemExit too.
        raise _error(key, f"{reference}: importing it {describe_error(error)}") from error
    found: object = getattr(module, name, None)
    if found is None:
        near = difflib.get_close_matches(name, vars(module), n=1)
        raise _error(key, f"{place} has no {name}" + (f"; did you mean {near[0]}?" if near else ""))
    if not callable(found):
        raise _error(key, f"{name} in {place} is a {type(found).__name__}, not a function or a class")
    return found


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    # Last: files in the user's folder can be imported but do not hide installed packages.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"megarl_user_code_{abs(hash(path.resolve()))}"
    loader = SourceFileLoader(name, str(path))
    spec = spec_from_loader(name, loader)
    assert spec is not None, f"no module spec for {path}"
    module = module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def describe_error(error: BaseException) -> str:
    """Return `raised ValueError: text (file:line)`, with the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    message = str(error).strip().partition("\n")[0][:500]
    return f"raised {type(error).__name__}{f': {message}' if message else ''}{where}"


def _error(key: str, message: str) -> ConfigError:
    return ConfigError("recipe", (Problem(key=key, message=message),))
