from __future__ import annotations

import time
from pathlib import Path

import pytest
from math_verify import verify

from megarl.reward.scorers import math


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1),
        ("Answer: 1/2", r"\frac12", 1),
        ("Answer: $\\sqrt{8}$.", r"2\sqrt{2}", 1),
        ("**Answer:** 7", "7", 1),
        (r"\boxed{1,000}", "1000", 1),
        (r"\boxed{-3}", "\u22123", 1),
        ("\\boxed{\u22123}", "-3", 1),
        (r"\boxed{3}", "-3", 0),
        (r"\boxed{5 \text{ cm}}", "5", 1),
        (r"\boxed{50\%}", "50", 1),
        (r"\boxed{\boxed{7}}", "7", 1),
        (r"\boxed{1} then \boxed{2}", "2", 1),
        (r"\boxed{1} then \boxed{2}", "1", 0),
        (r"Answer: 1. \boxed{2}", "2", 1),
        (r"\boxed{x=5}", "5", 1),
        (r"\boxed{(1,2)}", "(1, 2)", 1),
        (r"\boxed{(2,1)}", "(1, 2)", 0),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", 1),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        (r"\boxed{\text{Monday}}", "Monday", 1),
        (r"\boxed{42}", r"\boxed{42}", 1),
        (r"\boxed{}", "1", 0),
        ("the answer is 42", "42", 0),
        ("", "1", 0),
        ("x" * 1_000_000, "1", 0),
        ("\\boxed{" + "1" * 1_000_000 + "}", "1", 0),
    ],
)
def test_answers_are_compared_as_mathematics(response: str, truth: str, score: float) -> None:
    began = time.monotonic()
    assert math.compute_score("", response, truth)["score"] == score
    assert time.monotonic() - began < 10


@pytest.mark.patient
def test_what_takes_too_long_to_compute_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "_MAX_CPU_S", 1.0)
    began = time.process_time()
    assert math.compute_score("", r"\boxed{9^{9^{9^{9}}}}", "1")["score"] == 0
    assert time.process_time() - began < 15


def test_a_right_answer_is_right_however_long_the_machine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sleeps past the limit, as if the machine gave the time to others, and then goes on."""

    def stalled(*arguments: object, **options: object) -> object:
        time.sleep(1.5)
        return verify(*arguments, **options)

    monkeypatch.setattr(math, "_MAX_CPU_S", 1.0)
    monkeypatch.setattr(math, "verify", stalled)
    assert math.compute_score("", r"\boxed{\frac{1}{2}}", "0.5")["score"] == 1


def test_a_comparison_that_computes_too_long_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_arguments: object, **_options: object) -> object:
        while True:
            pass

    monkeypatch.setattr(math, "_MAX_CPU_S", 0.2)
    monkeypatch.setattr(math, "verify", endless)
    assert math.compute_score("", r"\boxed{\frac{1}{2}}", "0.5")["score"] == 0


@pytest.mark.parametrize("answer", ["{}", "({})", "1+{}", r"\text{{{}}}"])
def test_python_in_an_answer_is_never_run(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("parse_expr was called")

    monkeypatch.setattr("sympy.parsing.sympy_parser.eval_expr", refuse)
    target = tmp_path / "owned"
    code = answer.format(f"__import__('pathlib').Path('{target}').touch()")
    math.compute_score("", f"\\boxed{{{code}}}", "1")
    math.compute_score("", f"Answer: {code}", "1")
    assert not target.exists()


def test_an_empty_ground_truth_is_an_error() -> None:
    with pytest.raises(ValueError, match="ground truth is empty"):
        math.compute_score("", r"\boxed{1}", " ")
