"""Splits a shell script into words and operators, finds the parts of a word that are expanded, and does arithmetic.

A word keeps its quotes until it is expanded: only then is known what a quote protects.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")")
_CLOSING = {"(": ")", "{": "}"}
_REDIRECTION = re.compile(r"&>>?|[<>]{1,3}[&|-]?")
_CONTINUATION = re.compile(r"\\[ \t]*\r?\n")
_HEREDOC_END = re.compile(r"[\w.-]+")

_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: int(left / right),
    ast.Mod: operator.mod,
    ast.LShift: lambda left, right: left << min(right, 64),
    ast.Pow: lambda left, right: left ** min(right, 64),
}


class ShellSyntaxError(ValueError):
    """The text cannot be split; the message says where."""


class ShellToken(Enum):
    WORD = auto()
    OPERATOR = auto()
    NEWLINE = auto()
    ARRAY = auto()
    """`name=(` or `name+=(`; its words follow, up to the operator `)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lexeme:
    kind: ShellToken
    text: str


def lexemes(text: str) -> Iterator[Lexeme]:
    """Yield words, operators and ends of lines; comments, redirections and here-documents are left out."""
    place = 0
    while place < len(text):
        char = text[place]
        if char in " \t\r":
            place += 1
        elif continuation := _CONTINUATION.match(text, place):
            place = continuation.end()
        elif char == "\n":
            yield Lexeme(kind=ShellToken.NEWLINE, text="\n")
            place += 1
        elif char == "#":
            place = _end_of_line(text, place)
        elif redirection := _REDIRECTION.match(text, place):
            place = _after_redirection(text, redirection)
        elif operator := next((each for each in _OPERATORS if text.startswith(each, place)), None):
            yield Lexeme(kind=ShellToken.OPERATOR, text=operator)
            place += len(operator)
        else:
            end = _word_end(text, place)
            word = _CONTINUATION.sub("", text[place:end])
            if word.endswith("=") and text.startswith("(", end):
                yield Lexeme(kind=ShellToken.ARRAY, text=word.removesuffix("="))
                end += 1
            elif not (word.isdigit() and text[end : end + 1] in ("<", ">")):  # the 2 of 2>&1
                yield Lexeme(kind=ShellToken.WORD, text=word)
            place = end


def _end_of_line(text: str, place: int) -> int:
    end = text.find("\n", place)
    return len(text) if end < 0 else end


def _after_redirection(text: str, redirection: re.Match[str]) -> int:
    place = redirection.end()
    while place < len(text) and text[place] in " \t":
        place += 1
    if not redirection[0].startswith("<<") or redirection[0] == "<<<":
        return _word_end(text, place)
    end = _word_end(text, place)
    name = _HEREDOC_END.search(text, place, end)
    if name is None:
        return end
    # The rest of the line still belongs to the command; no script of verl has something there.
    last = re.compile(rf"^[ \t]*{re.escape(name[0])}[ \t]*$", re.MULTILINE).search(text, end)
    return len(text) if last is None else last.end()


def _word_end(text: str, place: int) -> int:
    while place < len(text):
        char = text[place]
        if continuation := _CONTINUATION.match(text, place):
            place = continuation.end()
        elif char in " \t\r\n;|&<>()":
            break
        else:
            place = after_part(text, place)
    return place


def after_part(text: str, place: int) -> int:
    """Return the place after one character, quotation or expansion of a word."""
    char = text[place]
    if char == "\\":
        return min(place + 2, len(text))
    if char == "'":
        return _closing(text, text.find("'", place + 1), place)
    if char == '"':
        end = place + 1
        while end < len(text) and text[end] != '"':
            end = after_part(text, end) if text[end] in "\\$`" else end + 1
        return _closing(text, end if end < len(text) else -1, place)
    if char == "`":
        return _closing(text, text.find("`", place + 1), place)
    if char == "$" and text[place + 1 : place + 2] in _CLOSING:
        return _after_brackets(text, place + 1, place)
    return place + 1


def _after_brackets(text: str, place: int, start: int) -> int:
    opening, closing = text[place], _CLOSING[text[place]]
    end = place + 1
    while end < len(text) and text[end] != closing:
        end = _after_brackets(text, end, start) if text[end] == opening else after_part(text, end)
    return _closing(text, end if end < len(text) else -1, start)


def _closing(text: str, end: int, start: int) -> int:
    if end < 0:
        line = text.count("\n", 0, start) + 1
        raise ShellSyntaxError(f"line {line}: {text[start]} is not closed: {text[start : start + 40].splitlines()[0]}")
    return end + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WordPart:
    """A piece of a word: plain text, or an expansion that is still to be made."""

    text: str
    is_quoted: bool = False
    is_expanded: bool = False


def word_parts(word: str) -> Iterator[WordPart]:
    """Yield the plain texts and the expansions of a word; its quotes are removed."""
    place = 0
    while place < len(word):
        end = after_part(word, place)
        part = word[place:end]
        if part.startswith("'"):
            yield WordPart(text=part[1:-1], is_quoted=True)
        elif part.startswith('"'):
            yield WordPart(text="", is_quoted=True)
            yield from _quoted_parts(part[1:-1])
        elif part[0] in "$`":
            end = place + len(_expansion_at(word, place))
            yield WordPart(text=word[place:end], is_expanded=end > place + 1)
        else:
            yield WordPart(text=part.removeprefix("\\"))
        place = end


def _quoted_parts(text: str) -> Iterator[WordPart]:
    place = 0
    while place < len(text):
        if text[place] == "\\":
            escaped = text[place + 1 : place + 2]
            yield WordPart(text=escaped if escaped in '"\\$`' else text[place : place + 2], is_quoted=True)
            place += 2
        elif text[place] in "$`":
            part = _expansion_at(text, place)
            yield WordPart(text=part, is_quoted=True, is_expanded=len(part) > 1)
            place += len(part)
        else:
            yield WordPart(text=text[place], is_quoted=True)
            place += 1


def _expansion_at(text: str, place: int) -> str:
    """Return the expansion that begins here; a `$` alone is none."""
    name = re.match(r"\$([A-Za-z_]\w*|\d|[@*#?$!])", text[place:])
    return name[0] if name else text[place : after_part(text, place)]


def computed(text: str) -> int | None:
    """Return the value of an arithmetic expression without names; None where it is none."""
    try:
        return _evaluate(ast.parse(text.replace("/", "//").strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return None


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _ARITHMETIC:
            return _ARITHMETIC[type(operation)](_evaluate(left), _evaluate(right))
        case _:
            raise ValueError(ast.dump(node))
