"""The table of faults is complete: every fault that a test causes is in it, and no other."""

from __future__ import annotations

import ast
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest

from tests.faults.matrix import BEGIN, END, Row, _line, faults_in, section_of, write_table
from tests.repository import ROOT

DOCUMENT = ROOT / "docs" / "faults.md"


@cache
def marked() -> list[tuple[str, str]]:
    """Every fault in the sources of the tests, with its file."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                fault, promise = (ast.literal_eval(argument) for argument in node.args)
                assert promise, f"{path}: {fault}: nothing is promised"
                found.append((fault, str(path.relative_to(ROOT))))
    return found


@pytest.mark.patient
def test_the_table_has_every_fault_and_no_other() -> None:
    assert faults_in(DOCUMENT.read_text()) == {fault for fault, _ in marked()}, "run `make faults`"


def test_every_fault_has_a_section() -> None:
    for fault, path in marked():
        assert section_of(path), fault


def test_a_table_says_what_failed_and_keeps_what_was_not_run(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    path.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    engine = Row(fault="an engine dies", promise="replaced", section="engines", tests=["a"], outcomes=["passed"] * 2)
    rank = Row(fault="a rank dies", promise="replaced", section="trainer ranks", tests=["b"], outcomes=["failed"])
    write_table(path, [rank, engine], made=datetime(2026, 1, 1, tzinfo=UTC))
    rank.outcomes = ["passed"]
    write_table(path, [rank], made=datetime(2026, 1, 2, tzinfo=UTC))
    assert path.read_text().splitlines() == [
        "before",
        BEGIN,
        "",
        "| fault | promise | result | seen | test |",
        "|---|---|---|---|---|",
        "| an engine dies | replaced | 2 passed, 2026-01-01 |  | `a` |",
        "| a rank dies | replaced | passed, 2026-01-02 |  | `b` |",
        "",
        END,
        "after",
    ]
    assert faults_in(path.read_text()) == {"an engine dies", "a rank dies"}


def test_what_never_ran_is_said_to_be_so() -> None:
    row = Row(fault="f", promise="p", section="engines", tests=["a"])
    assert _line(row, datetime(2026, 1, 1, tzinfo=UTC)) == "| f | p | not run yet |  | `a` |"


def test_a_failure_is_not_hidden_among_what_passed() -> None:
    row = Row(fault="f", promise="p", section="engines", tests=["a"], outcomes=["passed", "failed", "passed"])
    assert "**1 of 3 failed**" in _line(row, datetime(2026, 1, 1, tzinfo=UTC))
