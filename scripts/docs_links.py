"""A hook of mkdocs: a link from a page to a file of the repository becomes the file's name, since the site has no such
page."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page without links that lead out of docs/."""
    return _OUTSIDE.sub(_named, markdown)


def _named(match: re.Match[str]) -> str:
    text, path = match.groups()
    return text if path.rstrip("/") in text or text.endswith(path.rpartition("/")[2]) else f"{text} (`{path}`)"
