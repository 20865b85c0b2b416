"""The page itself: the static files, linked for a server or put into one document with the data inside."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from megarl.tools.page.run_data import MAX_ROWS, RolloutQuery, RunFolder
from megarl.types import JsonValue

STYLE = "page.css"
SCRIPTS = ("source.js", "elements.js", "charts.js", "timeline.js", "rollouts.js", "page.js")
"""In the order they are loaded: each uses only those before it."""
STATIC_FILES = {STYLE: "text/css", **dict.fromkeys(SCRIPTS, "text/javascript")}
MAX_INLINED = 400
"""Rollouts in a report; of a long run a choice by chance, the same each time."""


def read_static(name: str) -> str:
    return (files("megarl.tools.page") / "static" / name).read_text(encoding="utf-8")


def served_page() -> str:
    links = f'<link rel="stylesheet" href="static/{STYLE}">'
    scripts = "\n".join(f'<script defer src="static/{name}"></script>' for name in SCRIPTS)
    return read_static("index.html").replace("<!-- head -->", f"{links}\n{scripts}")


def served_policy() -> str:
    """What the browser may load for the served page: files of this server and nothing else."""
    return (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )


def report_page(run: RunFolder) -> str:
    """One file that needs no server and no network, and may load nothing from anywhere."""
    style, script = read_static(STYLE), "\n".join(read_static(name) for name in SCRIPTS)
    data = _inlined(json.dumps({"run": run.overview(), **_chosen_rollouts(run)}, allow_nan=False))
    policy = f"default-src 'none'; script-src {_hash(script)} {_hash(data)}; style-src {_hash(style)}"
    head = "\n".join(
        (
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<style>{style}</style>",
            f'<script type="application/json" id="data">{data}</script>',
        )
    )
    page = read_static("index.html").replace("<!-- head -->", head)
    # At the end: a script inside the document cannot be deferred.
    return page.replace("</body>", f"<script>{script}</script>\n</body>")


def _chosen_rollouts(run: RunFolder) -> dict[str, JsonValue]:
    rows = _all_rows(run)
    chosen = sorted(random.Random(0).sample(range(len(rows)), min(MAX_INLINED, len(rows))))  # noqa: S311 - a choice
    kept = [rows[place] for place in chosen]
    details = [run.rollout(row["step"], row["row"]) for row in kept]
    return {"num_rollouts": len(rows), "rows": list(kept), "rollouts": list(details)}


def _all_rows(run: RunFolder) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while True:
        page: Mapping[str, Any] = run.rollouts(RolloutQuery(offset=len(rows)))
        rows += page["rows"]
        if len(page["rows"]) < MAX_ROWS:
            return rows


def _inlined(text: str) -> str:
    """JSON that cannot end the element it is in."""
    return text.replace("<", "\\u003c")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
