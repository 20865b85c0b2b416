"""Programs: the last Python block of the response, run against tests in a sandbox.

The tests are JSON, in the ground truth or, where that is empty, in `extra_info["tests"]`:

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                       standard input and output
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}          arguments and result of a function
    {"asserts": ["assert add(1, 2) == 3"]}, or the list alone      Python, run after the program

Outputs are compared here, outside the sandbox: a program never sees the expected ones. Asserts have to run with the
program; a random mark, printed after each, shows that it was reached and held.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from secrets import token_hex

from megarl.reward.sandbox import Limits, Ran, Sandbox, SandboxKind

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")
_CALL = """
import json as _json, sys as _sys
_target = globals().get({name!r}) or getattr(globals()["Solution"](), {name!r})
_result = _target(*_json.loads(_sys.stdin.read()))
print()
print({mark!r} + _json.dumps(_result))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test: the code appended to the program, its input, and the expected output."""

    suffix: str
    given: bytes
    expected: object
    mark: str | None
    """Precedes the result on the last line; None if the whole output is the result."""

    def is_passed(self, ran: Ran) -> bool:
        if not ran.is_done:
            return False
        text = ran.output.decode(errors="replace")
        if self.mark is None:
            return _lines(text) == _lines(str(self.expected))
        last = text.rstrip("\n").rpartition("\n")[2]
        if not last.startswith(self.mark):
            return False
        try:
            return bool(json.loads(last.removeprefix(self.mark)) == self.expected)
        except ValueError:
            return False


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object] | None = None,
    *,
    sandbox: SandboxKind,
    deadline_s: float,
    memory_bytes: int,
    disk_bytes: int,
    max_processes: int,
    max_output_bytes: int,
    gives_partial_credit: bool = False,
    python: str | None = None,
) -> dict[str, float]:
    deadline = time.monotonic() + deadline_s
    cases = list(_cases(ground_truth, extra_info or {}))
    program = last_block(solution_str)
    if program is None:
        return {"score": 0.0, "passed": 0.0}
    limits = Limits(
        memory_bytes=memory_bytes,
        disk_bytes=disk_bytes,
        max_processes=max_processes,
        max_output_bytes=max_output_bytes,
    )
    box = _sandbox(sandbox, limits, python)
    num_passed = 0
    for case in cases:
        if time.monotonic() >= deadline:
            break
        if case.is_passed(box.run(program + case.suffix, case.given, deadline=deadline)):
            num_passed += 1
        elif not gives_partial_credit:
            break
    share = num_passed / len(cases)
    return {"score": share if gives_partial_credit else float(share == 1), "passed": share}


def last_block(text: str) -> str | None:
    """Return the last fenced block marked as Python; without one, the last unmarked block."""
    blocks = _BLOCK.findall(text)
    for names in (_PYTHON, ("",)):
        for language, code in reversed(blocks):
            if language.lower() in names:
                return str(code)
    return None


@lru_cache(maxsize=1)
def _sandbox(kind: SandboxKind, limits: Limits, python: str | None) -> Sandbox:
    return Sandbox(kind, limits, python=python)


def _cases(ground_truth: str, extra_info: Mapping[str, object]) -> Iterator[Case]:
    tests: object = extra_info.get("tests") if not ground_truth.strip() else json.loads(ground_truth)
    if isinstance(tests, str):
        tests = json.loads(tests)
    match tests:
        case [*asserts] if asserts:
            yield from map(_assertion, asserts)
        case {"asserts": [*asserts]} if asserts:
            yield from map(_assertion, asserts)
        case {"inputs": [*inputs], "outputs": [*outputs], **rest} if inputs and len(inputs) == len(outputs):
            name = rest.get("fn_name")
            for given, expected in zip(inputs, outputs, strict=True):
                yield _exchange(given, expected) if name is None else _call(str(name), given, expected)
        case _:
            raise ValueError("the tests are neither inputs and outputs of one length nor a list of asserts")


def _exchange(given: object, expected: object) -> Case:
    return Case(suffix="", given=str(given).encode(), expected=expected, mark=None)


def _call(name: str, given: object, expected: object) -> Case:
    if not name.isidentifier():
        raise ValueError(f"fn_name {name[:40]!r} is not a function name")
    mark = token_hex(16)
    # On a new line: the program may end in a comment.
    suffix = "\n" + _CALL.format(name=name, mark=mark)
    return Case(suffix=suffix, given=json.dumps(given).encode(), expected=expected, mark=mark)


def _assertion(source: object) -> Case:
    mark = token_hex(16)
    return Case(suffix=f"\n{source}\nprint()\nprint({mark + '1'!r})\n", given=b"", expected=1, mark=mark)


def _lines(text: str) -> list[str]:
    """Split into lines, without trailing white space and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
