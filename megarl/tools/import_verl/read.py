"""The keys a verl user set: from a YAML file, or from the `key=value` words of a shell script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.config.document import Document, Tree, override, read_document
from megarl.errors import ConfigError, Problem

_ASSIGNMENT = re.compile(r"^(?:\+{1,2})?([A-Za-z_]\w*(?:\.[\w-]+)+)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
_USE = re.compile(r"\$\{?([A-Za-z_]\w*)(?::-([^}]*))?\}?")
_HYDRA_SECTIONS = ("hydra", "defaults")


def read_verl(path: Path) -> dict[str, Tree]:
    """By dotted key, in the order of the file. A later one replaces an earlier one."""
    if path.suffix in (".yaml", ".yml"):
        tree = {name: value for name, value in read_document(path).tree.items() if name not in _HYDRA_SECTIONS}
        return dict(_flat(tree, ""))
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), (Problem(key="", message=f"cannot be read: {error}"),)) from None
    document = Document(tree={}, origins={})
    for assignment in _assignments(text, path):
        document = override(document, assignment)
    found = dict(_flat(document.tree, ""))
    if not found:
        message = "no key=value words as verl takes them; give a YAML file or a shell script"
        raise ConfigError(str(path), (Problem(key="", message=message),))
    return found


def _assignments(text: str, path: Path) -> Iterator[str]:
    variables: dict[str, str] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            message = f"not a shell script: {error} in {line.strip()[:60]!r}"
            raise ConfigError(str(path), (Problem(key="", message=message),)) from None
        for word in words:
            assignment = _ASSIGNMENT.match(word)
            if assignment:
                yield f"{assignment[1]}={_expanded(assignment[2], variables)}"
                continue
            variable = _VARIABLE.match(word)
            if variable:
                variables[variable[1]] = _expanded(variable[2], variables)


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Variables of the script; one that it does not set stays as it is written."""
    return _USE.sub(lambda use: variables.get(use[1], use[2] if use[2] is not None else use[0]), text)


def _flat(tree: dict[str, Tree], prefix: str) -> Iterator[tuple[str, Tree]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
