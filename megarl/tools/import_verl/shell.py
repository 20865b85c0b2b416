"""Reads the arguments that a shell script gives to verl's trainer. Starts no process and reads no file.

Variables, arrays, arithmetic, defaults, substitutions, conditions and cases are followed; a loop's body is read once.
The value of a variable that the script does not set, and the output of a command, stay as they are written. A word
keeps its quotes until it is expanded: only then is known what a quote protects.
"""

from __future__ import annotations

import ast
import operator
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from fnmatch import fnmatchcase

KEY_WORD = re.compile(r"^(?:\+{1,2})?([A-Za-z_]\w*(?:\.[\w-]+)+)=(.*)$", re.DOTALL)
"""An argument of the trainer, such as `data.seed=1`."""
_VARIABLE = re.compile(r"^([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_PARAMETER = re.compile(r"^(#?)([A-Za-z_]\w*|\d+|[@*#?$!])(?:\[([^]]*)\])?(.*)$", re.DOTALL)
_TESTS = ("[", "[[", "test")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_SILENT = ("echo", "printf", "exit", "cd", "source", ".", "mkdir", "rm", "pip", "unset", "ulimit", "ray", "tee")
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
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


@dataclass(slots=True)
class _Branch:
    """An `if`, `case` or loop that is being read."""

    is_read: bool
    was_read: bool
    """Whether a branch of it was read."""
    subject: str | None = None
    """The word that the patterns of a `case` are compared with; None for an `if` or loop."""
    awaits_pattern: bool = False


@dataclass(slots=True)
class Script:
    """The state of a script, command after command; `words` are those of the first trainer."""

    arguments: Sequence[str] = ()
    holds_unknown: bool = False
    """Whether a test holds, and a case's first pattern matches, that only the script's caller could decide."""
    variables: dict[str, list[str]] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    num_trainers: int = 0
    _orphans: list[str] = field(default_factory=list)
    _branches: list[_Branch] = field(default_factory=list)
    _num_shifted: int = 0
    _joined: str = ""
    """The operator before the next command; whether the last one succeeded, as all but tests are taken to."""
    _succeeded: bool = True

    def read(self, text: str) -> list[str]:
        """Return the words of the first command with arguments of a trainer, or else all such words."""
        command: list[Lexeme] = []
        condition: list[list[Lexeme]] | None = None
        for token in [*lexemes(text), Lexeme(kind=ShellToken.NEWLINE, text="\n")]:
            is_in_array = any(part.kind is ShellToken.ARRAY for part in command) and _is_open(command)
            if is_in_array or token.kind in (ShellToken.WORD, ShellToken.ARRAY):
                command.append(token)
                continue
            condition = self._end_command(command, token.text, condition)
            command = []
        return self.words or self._orphans

    def _end_command(
        self, command: list[Lexeme], separator: str, condition: list[list[Lexeme]] | None
    ) -> list[list[Lexeme]] | None:
        """Follow one command; return the condition that it belongs to, if it is not whole yet."""
        texts = [part.text for part in command]
        if texts[:1] == ["case"]:
            subject = " ".join(self.expand(" ".join(texts[1:2]), splits=False))
            self._branches.append(_Branch(is_read=False, was_read=False, subject=subject, awaits_pattern=True))
            command, texts = command[3:], texts[3:]
        if self._branches and self._branches[-1].awaits_pattern and texts[:1] != ["esac"]:
            self._compare(texts, self._branches[-1], is_last=separator == ")")
            return None
        if condition is not None:
            if texts[:1] != ["then"]:
                return [*condition, command, [Lexeme(kind=ShellToken.OPERATOR, text=separator)]]
            self._enter(condition)
            command, texts = command[1:], texts[1:]
        if texts[:1] and texts[0] in ("if", "elif"):
            if texts[0] == "if":
                self._branches.append(_Branch(is_read=False, was_read=False))
            return [command[1:], [Lexeme(kind=ShellToken.OPERATOR, text=separator)]]
        is_wanted = self._joined not in ("&&", "||") or self._succeeded is (self._joined == "&&")
        self._joined = separator
        if texts[:1] and texts[0] in _TESTS:
            self._succeeded = self._holds([command]) if is_wanted else self._succeeded
        elif not self._follow_structure(command, texts) and is_wanted and self._is_read:
            self._run(command)
            self._succeeded = True
        if separator == ";;" and any(branch.subject is not None for branch in self._branches):
            self._leave_arm()
            self._branches[-1].is_read, self._branches[-1].awaits_pattern = False, True
        return None

    def _leave_arm(self) -> None:
        """Forget what was left open within the arm of a `case`."""
        while self._branches and self._branches[-1].subject is None:
            del self._branches[-1]

    def _compare(self, patterns: list[str], case: _Branch, *, is_last: bool) -> None:
        """Read the arm of a `case` after these patterns, if it is the first that matches."""
        subject = case.subject or ""
        words = [word for text in patterns for word in self.expand(text)]
        matches = (self.holds_unknown and "$" in subject) or any(fnmatchcase(subject, word) for word in words)
        if patterns and matches and not case.was_read:
            case.is_read = case.was_read = True
        case.awaits_pattern = not (patterns and is_last)

    @property
    def _is_read(self) -> bool:
        return all(branch.is_read for branch in self._branches)

    def _enter(self, condition: list[list[Lexeme]]) -> None:
        branch = self._branches[-1]
        outer = all(each.is_read for each in self._branches[:-1])
        branch.is_read = outer and not branch.was_read and self._holds(condition)
        branch.was_read = branch.was_read or branch.is_read

    def _follow_structure(self, command: list[Lexeme], texts: list[str]) -> bool:
        """Return whether the command only says what is read next; words after it are run."""
        match texts:
            case ["else", *_] if self._branches:
                self._branches[-1].is_read = not self._branches[-1].was_read
            case ["fi" | "done" | "esac" as end, *_]:
                if end == "esac":
                    self._leave_arm()
                del self._branches[-1:]
                return True
            case ["for", name, "in", *_]:
                values = [value for part in command[3:] for value in self.expand(part.text)]
                is_known = bool(values) and "$" not in values[0]
                self.variables[name] = values[:1]
                self._branches.append(_Branch(is_read=is_known, was_read=is_known))
                return True
            case ["while" | "until" | "for" | "select", *_]:
                self._branches.append(_Branch(is_read=False, was_read=False))
                return True
            case ["do" | "then" | "{", *_]:
                pass
            case _:
                return False
        if self._is_read:
            self._run(command[1:])
        return True

    def _holds(self, condition: list[list[Lexeme]]) -> bool:
        """Return whether tests that are joined and grouped hold; one that cannot be told does not."""
        return self._holds_group(iter([part for command in condition for part in _ungrouped(command)]))

    def _holds_group(self, parts: Iterator[list[Lexeme]]) -> bool:
        """Return whether the tests up to the end of a group hold."""
        holds, joined = True, "&&"
        for part in parts:
            text = part[0].text
            if text in ("}", ")"):
                break
            if part[0].kind is ShellToken.OPERATOR and text != "(":
                joined = text
                continue
            is_group = text in ("{", "(")
            test = self._holds_group(parts) if is_group else self._test([w for p in part for w in self.expand(p.text)])
            holds = holds and test if joined == "&&" else (holds or test if joined == "||" else test)
        return holds

    def _test(self, words: list[str]) -> bool:
        inner = [word for word in words if word not in (*_TESTS, "]", "]]")]
        match inner:
            case ["!", *rest]:
                return not self._test(rest)
            case ["-z"] | ["-z", ""]:
                return True
            case ["-z", value]:
                return value.startswith("$")
            case ["-n", value]:
                return bool(value) and not value.startswith("$")
            case [left, "=" | "==", right]:
                return fnmatchcase(left, right)
            case [left, "!=", right]:
                return not fnmatchcase(left, right)
            case [left, comparison, right] if (
                comparison in _COMPARISONS
                and left.removeprefix("-").isdecimal()
                and right.removeprefix("-").isdecimal()
            ):
                return _COMPARISONS[comparison](int(left), int(right))
            case _:
                return self.holds_unknown

    def _run(self, command: list[Lexeme]) -> None:
        """Set the variables of a command, and keep the arguments that it gives to a trainer."""
        rest = self._assign(command)
        texts = [part.text for part in rest]
        if texts[:1] == ["shift"]:
            count = texts[1] if len(texts) > 1 else "1"
            self._num_shifted += int(count) if count.isdigit() else 1
        if not texts or (texts[0] in _SILENT and "--" not in texts) or texts[0].endswith("()"):
            return
        words = [word for part in rest for word in self.expand(part.text)]
        if not any(map(KEY_WORD.match, words)):
            return
        if KEY_WORD.match(words[0]):
            # A comment within the command cut it in two.
            (self.words if self.num_trainers == 1 else self._orphans).extend(words)
            return
        self.num_trainers += 1
        if self.num_trainers == 1:
            self.words += words

    def _assign(self, command: list[Lexeme]) -> list[Lexeme]:
        """Set the variables that a command begins with; return what follows them."""
        place = 0
        is_declaring = False
        while place < len(command):
            part = command[place]
            variable = _VARIABLE.match(part.text)
            if part.kind is ShellToken.ARRAY:
                end = next(i for i in range(place, len(command)) if command[i].text == ")" or i == len(command) - 1)
                inner = [each for each in command[place + 1 : end] if each.kind is ShellToken.WORD]
                values = [value for each in inner for value in self.expand(each.text)]
                name = part.text.removesuffix("+")
                self.variables[name] = [*self.variables.get(name, []), *values] if name != part.text else values
                place = end
            elif variable is not None:
                value = " ".join(self.expand(variable[3], splits=False))
                before = " ".join(self.variables.get(variable[1], [])) if variable[2] else ""
                self.variables[variable[1]] = [before + value]
            elif part.text in _DECLARING or (is_declaring and part.text.startswith("-")):
                is_declaring = True
            else:
                return command[place:]
            place += 1
        return []

    def expand(self, word: str, *, splits: bool = True) -> list[str]:
        """Return the words that a word becomes: quotes removed, expansions made and, outside quotes, split."""
        done: list[str] = []
        current, has_text = "", False
        for part in word_parts(word):
            if not part.is_expanded:
                current, has_text = current + part.text, True
                continue
            values = self._expansion(part.text)
            if len(values) != 1 or (splits and not part.is_quoted):
                pieces = [piece for value in values for piece in ([value] if part.is_quoted else value.split())]
                if pieces:
                    done += [current + pieces[0], *pieces[1:]]
                    current, has_text = done.pop(), True
            else:
                current, has_text = current + values[0], True
        return [*done, current] if has_text or not splits else done

    def _expansion(self, part: str) -> list[str]:
        if part.startswith("$(("):
            value = self._arithmetic(part[3:-2])
            return [part if value is None else str(value)]
        if part.startswith(("$(", "`")):
            output = self._output(part.removeprefix("$(").removesuffix(")").strip("` "))
            return [part if output is None else output]
        return self._parameter(part[2:-1] if part.startswith("${") else part[1:], part)

    def _output(self, text: str) -> str | None:
        """Return the output of a command that names a folder, a word or the time; None for others.

        A command of which nothing is known fails, so that `probe && echo a || echo b` is b.
        """
        folder, words, joined, is_done = ".", list[str](), "", True
        for token in [*lexemes(text), Lexeme(kind=ShellToken.NEWLINE, text="")]:
            if token.kind is ShellToken.WORD:
                words += [word for word in self.expand(token.text) if word != "--"]
                continue
            if joined not in ("&&", "||") or is_done is (joined == "&&"):
                printed = _printed(words, folder)
                if printed is not None or token.text == "|":
                    return None if token.text == "|" else printed
                is_done = words[:1] == ["cd"]
                folder = posixpath.normpath(posixpath.join(folder, *words[1:2])) if is_done else folder
            words, joined = [], token.text
        return None

    def _parameter(self, text: str, written: str) -> list[str]:
        """Return the value of `NAME`, `NAME[@]`, `NAME:-default` and the like; unset ones stay as written."""
        found = _PARAMETER.match(text)
        if found is None:
            return [written]
        counts, name, index, action = found.groups()
        values = self._values(name)
        if counts:
            return [str(len(values or ()) if index else len("".join(values or ())))]
        if name in ("@", "*") or index in ("@", "*"):
            first = re.match(r":(\d+)", action)
            chosen = list(values or ())[max(0, int(first[1]) - 1) if first else 0 :]
            return [" ".join(chosen)] if "*" in (name, index) else chosen
        if index:
            values = values[int(index) : int(index) + 1] if values and index.isdigit() else None
        value = None if not values else values[0]
        is_set = value is not None and (bool(value) or not action.startswith(":"))
        operation, argument = action.lstrip(":")[:1], action.lstrip(":")[1:]
        if operation in ("-", "="):
            return [value] if is_set and value is not None else self._default(name, argument, operation)
        if operation == "+":
            return self.expand(argument, splits=False) if is_set else [""]
        if value is None:
            return [written]
        return [self._substituted(value, action)]

    def _default(self, name: str, argument: str, operation: str) -> list[str]:
        value = " ".join(self.expand(argument, splits=False))
        if operation == "=":
            self.variables[name] = [value]
        return [value]

    def _values(self, name: str) -> list[str] | None:
        given = self.arguments[self._num_shifted :]
        if name in ("@", "*"):
            return list(given)
        if name == "#":
            return [str(len(given))]
        if name == "0":
            return self.variables.get("BASH_SOURCE")
        if name.isdigit():
            return [given[int(name) - 1]] if 0 < int(name) <= len(given) else None
        return self.variables.get(name)

    def _substituted(self, value: str, action: str) -> str:
        """Apply `//a/b`, `/a/b`, `##a`, `#a`, `%%a`, `%a`, `^^` and `,,`."""
        replaced = re.match(r"^(//?)((?:\\.|[^/])*)/?(.*)$", action, re.DOTALL)
        if replaced is not None:
            old, new = ("".join(self.expand(text, splits=False)) for text in (replaced[2], replaced[3]))
            return value.replace(old, new, -1 if replaced[1] == "//" else 1) if old else value
        trimmed = re.match(r"^(##?|%%?)(.*)$", action, re.DOTALL)
        if trimmed is not None:
            is_front, is_longest = trimmed[1][0] == "#", len(trimmed[1]) == 2
            ends = range(len(value) + 1)
            matching = [end for end in ends if fnmatchcase(value[:end] if is_front else value[end:], trimmed[2])]
            if not matching:
                return value
            end = max(matching) if is_front is is_longest else min(matching)
            return value[end:] if is_front else value[:end]
        return {"^^": value.upper(), ",,": value.lower()}.get(action, value)

    def _arithmetic(self, text: str) -> int | None:
        """Return the value of an arithmetic expression; None where it cannot be told."""
        plain = "".join(self.expand(text, splits=False))
        return computed(re.sub(r"[A-Za-z_]\w*", lambda name: (self._values(name[0]) or ["0"])[0] or "0", plain))


def _printed(words: list[str], folder: str) -> str | None:
    """Return what a command prints in a folder; None for one of which nothing is known."""
    match words:
        case ["pwd", *_]:
            return folder
        case ["echo", *echoed]:
            return " ".join(echoed)
        case ["dirname", place]:
            return posixpath.dirname(place) or "."
        case ["basename", place, *_]:
            return posixpath.basename(place)
        case ["realpath" | "readlink", *_, place]:
            return posixpath.normpath(place)
        case ["date", *_]:
            return ""
        case _:
            return None


def _ungrouped(command: list[Lexeme]) -> Iterator[list[Lexeme]]:
    """Yield the brackets that a command begins with, each by itself, and the rest."""
    while command and command[0].text in ("{", "}", "(", ")"):
        yield command[:1]
        command = command[1:]
    if command:
        yield command


def _is_open(command: Sequence[Lexeme]) -> bool:
    """Whether the command ends within an array."""
    for part in reversed(command):
        if part.kind is ShellToken.ARRAY:
            return True
        if part.kind is ShellToken.OPERATOR and part.text == ")":
            return False
    return False


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
