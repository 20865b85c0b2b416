"""A recipe holds no secrets: events and checkpoints keep it, and pages show it. It names the files with the keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import parse_qsl, urlsplit

from pydantic import JsonValue

from megarl.config.environment import EnvironmentConfig, McpEnvironmentConfig
from megarl.config.recipe import MirrorConfig, Recipe
from megarl.errors import Problem

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")
_SECRET_WORD = re.compile(r"key|token|secret|password|credential|signature", re.IGNORECASE)


def check_secrets(recipe: Recipe) -> Iterator[Problem]:
    """Yield every URL of the recipe that has a secret in it; the messages leave the value out."""
    for key, text in _texts(recipe.model_dump(mode="json")):
        if (fault := secret_in(text)) is not None:
            yield Problem(key=key, message=f"{fault}; put the key in api_key_file")


def secret_in(url: str) -> str | None:
    """Return the fault of a URL that has a secret; None without one, and for a text that is no URL."""
    if not _URL.fullmatch(url):
        return None
    try:
        parts = urlsplit(url)
    except ValueError:
        return None  # whoever opens it complains
    if "@" in parts.netloc:
        return "has a user or password in it"
    if any(_SECRET_WORD.search(name) for name, _ in parse_qsl(parts.query)):
        return "has a key in its query"
    return None


def _texts(tree: JsonValue, key: str = "") -> Iterator[tuple[str, str]]:
    match tree:
        case str():
            yield key, tree
        case dict() | list():
            entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
            for name, value in entries:
                yield from _texts(value, f"{key}.{name}" if key else str(name))


def check_own_key_files(environment: EnvironmentConfig | None, mirror: MirrorConfig | None) -> Iterator[Problem]:
    """Yield what is wrong with the files of keys; those of servers are read when the servers are asked."""
    if isinstance(environment, McpEnvironmentConfig):
        for name in sorted(environment.api_key_files.keys() - environment.servers.keys()):
            yield Problem(key=f"environment.api_key_files.{name}", message="names no entry of environment.servers")
    if mirror is None or mirror.api_key_file is None:
        return
    key = "checkpoint.mirror.api_key_file"
    if mirror.url.startswith("file:"):
        yield Problem(key=key, message="a folder needs no key; remove it")
    elif not mirror.api_key_file.is_file():
        yield Problem(key=key, message=f"{mirror.api_key_file} does not exist")
