"""Where a response puts its final answer: the last `\\boxed{...}`, the last `Answer:` line. Text in, text out."""

from __future__ import annotations

import re

_TOKENS = re.compile(r"\\(?:boxed|fbox)\s*(?P<brace>\{)|\\(?:boxed|fbox)\s*(?P<bare>[^\s${}]+)|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(r"(?im)\banswer\s*[*_]*\s*:[ \t]*[*_]*[ \t]*(\S[^\n]*)")


def last_boxed(text: str) -> str | None:
    """What is in the last box that is closed, its braces balanced; a box in a box is part of the outer one's content.

    `\\boxed 7` without braces holds what follows up to white space.
    """
    last = None  # start and end
    # One pass, however many are opened: per open brace, where the content of a box begins, None for another brace.
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
    """What follows the last `Answer:` on its line, without emphasis around it."""
    lines = _ANSWER_LINE.findall(text)
    return str(lines[-1]).strip().strip("*_").strip() if lines else None
