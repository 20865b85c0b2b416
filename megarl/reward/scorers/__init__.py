"""The built-in scorers: `<kind>.py` has a pure `compute_score` with the signature of a user's function.

Here is what several of them share: reading the last `\\boxed{...}` and the last `Answer:` line of a response.
"""

from __future__ import annotations

import re

_TOKENS = re.compile(r"\\(?:boxed|fbox)\s*(?P<brace>\{)|\\(?:boxed|fbox)\s*(?P<bare>[^\s${}]+)|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(r"(?im)\banswer\s*[*_]*\s*:[ \t]*[*_]*[ \t]*(\S[^\n]*)")


def last_boxed(text: str) -> str | None:
    """Return the content of the last closed box, its braces balanced; a box inside a box belongs to the outer one.

    `\\boxed 7` without braces contains the characters up to the next white space.
    """
    last = None  # start and end
    # One pass, even over many open boxes. For each open brace: where a box's content begins; None if it is no box.
    open_braces: list[int | None] = []
    for token in _TOKENS.finditer(text):
        if token["brace"] is not None:
            open_braces.append(token.end())
        elif token["bare"] is not None:
            last = token.span("bare")
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                last = start, token.start()
    return None if last is None else text[slice(*last)].strip()


def last_answer_line(text: str) -> str | None:
    """Return the rest of the line after the last `Answer:`, without emphasis around it."""
    lines = _ANSWER_LINE.findall(text)
    return str(lines[-1]).strip().strip("*_").strip() if lines else None
