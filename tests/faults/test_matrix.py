"""The table of faults is complete: every fault that a test causes is in it, and no other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from tests.faults.matrix import BEGIN, END, Row, faults_in, section_of, write_table

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reliability.md"


def marked() -> Iterator[tuple[str, str]]:
    """Every fault in the sources of the tests, with its file."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                fault, promise = (ast.literal_eval(argument) for argument in node.args)
                assert promise, f"{path}: {fault}: nothing is promised"
                yield fault, str(path.relative_to(ROOT))


def test_the_table_has_every_fault_and_no_other() -> None:
    assert faults_in(DOCUMENT.read_text()) == {fault for fault, _ in marked()}, "run `make faults`"


def test_every_fault_has_a_section() -> None:
    for fault, path in marked():
        assert section_of(path), fault


def test_a_table_says_what_failed(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    rows = [
        Row(fault="an engine dies", promise="replaced", section="engines", tests=["a"], outcomes=["passed", "passed"]),
        Row(
            fault="a rank dies", promise="replaced", section="trainer ranks", tests=["b"], outcomes=["passed", "failed"]
        ),
    ]
    write_table(path, rows, made=datetime(2026, 1, 1, tzinfo=UTC))
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| an engine dies | replaced | 2 passed |" in text
    assert "| a rank dies | replaced | **1 of 2 failed** |" in text
    assert "3 of 4 cases passed, 2026-01-01" in text
    assert faults_in(text) == {"an engine dies", "a rank dies"}
