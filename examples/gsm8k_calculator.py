"""GSM8K with a calculator: each calculation of a solution becomes a call of a tool, and its result the tool's answer.

    python examples/gsm8k_calculator.py data/gsm8k models/SmolLM2-135M-Instruct

Reads the tables of `examples/split_gsm8k.py` and writes them as conversations to data/gsm8k_calculator, and the model,
with a chat template that has tools, to models/SmolLM2-135M-Instruct-tools. `Calculator` is the environment of
recipes/gsm8k_smollm_tool.yaml.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import sys
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from megarl.reward.scorers.gsm8k import compute_score

CALCULATION = re.compile(r"<<([^<>=]{1,60})=([^<>=]{1,20})>>")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_ROUNDED = Fraction(1, 100)
"""Solutions round to cents."""
_FOR_CALCULATIONS = 0.5
_NO_VALUE = "error: write numbers, brackets and + - * / alone"
_TEMPLATE = """\
{{ '<|im_start|>system\nTools:' }}{% for tool in tools or [] %} {{ tool['function']['name'] }}({{
tool['function']['parameters']['properties'] | join(', ') }}){% endfor %}{{ '<|im_end|>\n' }}{%
for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}{%
for call in message['tool_calls'] or [] %}<tool_call>{"name": "{{ call['function']['name'] }}", "arguments": {{
call['function']['arguments'] | tojson }}}</tool_call>{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{%
if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


class Calculator:
    def __init__(self, ground_truth: str, **_row):
        self.truth = ground_truth
        self.values: list[Fraction | None] = []

    async def calculate(self, expression: str) -> str:
        """Calculate the value of an expression."""
        try:
            value = value_of(expression)
        except (ValueError, SyntaxError, ZeroDivisionError):
            self.values.append(None)
            return _NO_VALUE
        self.values.append(value)
        return f"{value.numerator}" if value.denominator == 1 else f"{float(value):.4f}".rstrip("0")

    async def score(self, transcript) -> float:
        """Return 1 if the last response ends with the right number, and up to a half for the right calculations."""
        right = compute_score("gsm8k", transcript.last_text, self.truth)["score"]
        return right + _FOR_CALCULATIONS * agreement(self.values, self.truth)


def agreement(values: list[Fraction | None], solution: str) -> float:
    """Return how far values are those of a solution's calculations, from 0 to 1 (F1); None is one that is wrong."""
    wanted = Counter(round(value, 2) for value in results(solution) if value is not None)
    if not wanted or not values:
        return 0.0
    right = Counter(round(value, 2) for value in values if value is not None)
    return 2 * (right & wanted).total() / (len(values) + wanted.total())


def results(text: str) -> Iterator[Fraction | None]:
    """Yield the result of each calculation that is written in a text; None for one that is wrong."""
    for expression, written in CALCULATION.findall(text):
        try:
            result = Fraction(written.replace(",", "").strip())
            yield result if abs(value_of(expression) - result) <= _ROUNDED else None
        except (ValueError, SyntaxError, ZeroDivisionError):
            yield None


def value_of(expression: str) -> Fraction:
    """Return the exact value of +, -, *, / and brackets."""
    if len(expression) > 100:
        raise ValueError("the expression is too long")
    return _value(ast.parse(expression.replace(",", "").replace("$", "").strip(), mode="eval").body)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
    raise ValueError("not arithmetic")


def beginnings(solution: str) -> Iterator[tuple[list[dict[str, str]], str]]:
    """Yield the turns before each calculation of a solution and before its end, and what of it is left then.

    A turn of the assistant ends with a call of the calculator.
    """
    turns, place = list[dict[str, str]](), 0
    for found in CALCULATION.finditer(solution):
        yield list(turns), solution[place:]
        call = json.dumps({"name": "calculate", "arguments": {"expression": found[1]}})
        said = f"{solution[place : found.start()]}<tool_call>{call}</tool_call>"
        turns += [{"role": "assistant", "content": said}, {"role": "tool", "content": found[2]}]
        place = found.end()
    yield turns, solution[place:]


def conversation(solution: str) -> list[dict[str, str]]:
    """Return the turns of a whole solution."""
    *_, (turns, end) = beginnings(solution)
    return [*turns, {"role": "assistant", "content": end}]


def to_continue(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the problem with each beginning of its solution; the truth is what is left.

    A small model rarely finds three calculations in a row, but often the last one. All of them are learned from the
    first step on, and a problem is over sooner. The end alone, which the template of the data gives, is left out.
    """
    *begun, end = beginnings(row["reward_model"]["ground_truth"])
    for turns, left in begun or [end]:
        yield {**row, "prompt": row["prompt"] + turns, "reward_model": {**row["reward_model"], "ground_truth": left}}


def write_tables(source: Path, out: Path) -> None:
    import pyarrow as pa  # noqa: PLC0415 - processes of the environment need none of these
    import pyarrow.parquet as pq  # noqa: PLC0415

    out.mkdir(parents=True, exist_ok=True)
    for name in ("imitate", "reward", "test"):
        rows = pq.read_table(source / f"{name}.parquet").to_pylist()
        for row in rows:
            solution = row.pop("response", None)
            if name == "imitate":
                row["prompt"] += conversation(solution)
        if name == "reward":
            rows = [begun for row in rows for begun in to_continue(row)]
        pq.write_table(pa.Table.from_pylist(rows), out / f"{name}.parquet")
        print(f"{out / name}.parquet: {len(rows)} problems")


def write_model(source: Path, out: Path) -> None:
    import shutil  # noqa: PLC0415

    shutil.copytree(source, out, dirs_exist_ok=True)
    (out / "chat_template.jinja").write_text(_TEMPLATE)
    print(f"{out}: a template with tools")


if __name__ == "__main__":
    data, model = map(Path, sys.argv[1:3])
    write_tables(data, data.with_name(f"{data.name}_calculator"))
    write_model(model, model.with_name(f"{model.name}-tools"))
