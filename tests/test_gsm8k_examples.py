"""The examples for GSM8K: the score of calculations, the calculator, and solutions as conversations."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.episodes.dialogue import read_calls
from megarl.episodes.protocol import Malformed
from megarl.system.user_code import load_code
from tests.repository import ROOT

SOLUTION = "He has 48/2 = <<48/2=24>>24 clips.\nTogether 48+24 = $<<48+24=72>>72.\n#### 72"


def example(reference: str) -> Any:
    return load_code(f"{ROOT}/examples/{reference}", key="reward.path")


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (SOLUTION, 1.0),
        ("<<24*3=72>>", 2 / 3),
        ("<<48/2=24>> <<48+24=72>> <<72+1=73>> <<1+1=2>>", 2 / 3),
        ("<<48/2=25>> <<48+24=72>>", 1 / 2),
        ("<<48/0=24>> <<a+b=72>> <<=72>>", 0.0),
        ("24 and 72", 0.0),
    ],
)
def test_calculations_score_by_how_many_are_right_and_wanted(answer: str, score: float) -> None:
    compute_score = example("gsm8k_steps.py:compute_score")
    assert compute_score("gsm8k", answer, SOLUTION) == pytest.approx(score)


def test_a_problem_without_a_solution_scores_nothing() -> None:
    compute_score = example("gsm8k_steps.py:compute_score")
    assert compute_score("gsm8k", SOLUTION, "72") == 0.0


def test_the_calculator_returns_exact_values_and_refuses_all_but_arithmetic() -> None:
    value_of = example("gsm8k_calculator.py:value_of")
    calculator = example("gsm8k_calculator.py:Calculator")(ground_truth="72", extra=1)

    def answer(expression: str) -> str:
        return str(asyncio.run(calculator.calculate(expression)))

    assert [answer(each) for each in ("48/2", "1,200 * $2", "-(1+2)*3", "1/3", "0.1+0.2", "12.50*2")] == [
        "24",
        "2400",
        "-9",
        "0.3333",
        "0.3",
        "25",
    ]
    assert value_of("0.1+0.2") == Fraction(3, 10)
    for refused in ("", "x+1", "2**9", "1/0", "(1", "__import__('os')", "9" * 101, "1e999999", "True", "'1'"):
        assert answer(refused).startswith("error: "), refused


@pytest.mark.parametrize(
    ("asked", "last", "score"),
    [
        (["48/2", "48+24"], "#### 72", 1.5),
        (["48/2", "48+24"], "#### 71", 0.5),
        (["48/2", "48+"], "#### 71", 0.25),
        (["1+1"], "#### 72", 1.0),
        ([], "#### 71", 0.0),
    ],
)
def test_an_episode_scores_by_its_number_and_up_to_a_half_by_its_calculations(
    asked: list[str], last: str, score: float
) -> None:
    calculator = example("gsm8k_calculator.py:Calculator")(ground_truth=SOLUTION)
    for each in asked:
        asyncio.run(calculator.calculate(each))
    assert asyncio.run(calculator.score(SimpleNamespace(last_text=last))) == pytest.approx(score)


def test_values_are_compared_to_cents() -> None:
    agreement = example("gsm8k_calculator.py:agreement")
    assert agreement([Fraction(10, 3)], "<<10/3=3.33>>3.33") == 1.0


def test_a_solution_becomes_a_conversation_whose_calls_are_read() -> None:
    calculator = example("gsm8k_calculator.py:Calculator")
    turns = example("gsm8k_calculator.py:conversation")(SOLUTION)
    assert [turn["role"] for turn in turns] == ["assistant", "tool", "assistant", "tool", "assistant"]
    asked = list[object]()
    for turn in turns[::2]:
        calls = read_calls(turn["content"], "hermes")
        assert not isinstance(calls, Malformed)
        asked.append([call.arguments for call in calls])
    assert asked == [[{"expression": "48/2"}], [{"expression": "48+24"}], []]
    last = SimpleNamespace(last_text=turns[-1]["content"])
    assert asyncio.run(calculator(ground_truth="72").score(last)) == 1.0
    assert asyncio.run(calculator(ground_truth="71").score(last)) == 0.0


def test_a_problem_is_continued_from_each_call_of_its_solution() -> None:
    to_continue = example("gsm8k_calculator.py:to_continue")
    question = {"role": "user", "content": "How many?"}
    truth = {"style": "rule", "ground_truth": SOLUTION}
    row = {"prompt": [question], "reward_model": truth, "extra_info": {"index": 7}}
    whole, rest = to_continue(row)
    assert whole == row
    turns = example("gsm8k_calculator.py:conversation")(SOLUTION)
    assert rest["prompt"] == [question, *turns[:2]]
    left = rest["reward_model"]["ground_truth"]
    assert left == "24 clips.\nTogether 48+24 = $<<48+24=72>>72.\n#### 72"
    assert rest["extra_info"] == {"index": 7}
    # The calculation that is left and the number are all that it scores for.
    calculator = example("gsm8k_calculator.py:Calculator")(ground_truth=left)
    asyncio.run(calculator.calculate("48+24"))
    assert asyncio.run(calculator.score(SimpleNamespace(last_text="72.\n#### 72"))) == 1.5


def test_a_solution_without_calculations_is_left_as_it_is() -> None:
    row = {"prompt": [], "reward_model": {"ground_truth": "He has two.\n#### 2"}}
    assert list(example("gsm8k_calculator.py:to_continue")(row)) == [row]
