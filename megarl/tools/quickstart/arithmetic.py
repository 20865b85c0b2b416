"""The quickstart's task: two-digit addition, first imitated from a careless teacher, then improved by a reward.

The teacher of the warm start often forgets every carry, so imitation alone answers most problems wrong; the reward
compares with the right answer, so reinforcement improves it. Held-out problems share no pair of numbers, in either
order, with the problems that are trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.errors import DataError
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model

OPERANDS = range(10, 100)
HELD_OUT_FRACTION = 0.12
CARELESS_PROBABILITY = 0.65
"""How often the teacher forgets the carries: more than half, so that a faithful imitation answers wrong."""

SHAPE = TinyShape()

Addends: TypeAlias = tuple[int, int]

_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
PROBLEM_COLUMNS = (
    ("data_source", pa.string()),
    ("prompt", pa.list_(_MESSAGE)),
    ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
)
_EXTRA = ("extra_info", pa.struct([("index", pa.int64()), ("split", pa.string()), ("has_carry", pa.bool_())]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticFiles:
    train: Path
    sft: Path
    pairs: Path
    """Problems with a carry: the sum is chosen, the careless one rejected."""
    eval_pairs: Path
    """The same of held-out problems."""
    eval: Path
    model: Path


def make_arithmetic(
    folder: Path,
    *,
    num_train: int = 4096,
    num_sft: int = 24_000,
    num_eval: int = 512,
    seed: int = 1,
    shape: TinyShape = SHAPE,
) -> ArithmeticFiles:
    """Write the problems and the model that learns them. The same seed writes the same bytes."""
    files = ArithmeticFiles(
        train=folder / "train.parquet",
        sft=folder / "sft.parquet",
        pairs=folder / "pairs.parquet",
        eval_pairs=folder / "eval_pairs.parquet",
        eval=folder / "eval.parquet",
        model=folder / "model",
    )
    if num_sft < 1:
        raise DataError(f"num_sft is {num_sft}; it must be at least 1")
    generator = np.random.default_rng(seed)
    trained, held_out = split_problems(generator)
    # A problem may occur twice with different answers, since the teacher is careless at random.
    lessons = [trained[place] for place in generator.integers(len(trained), size=num_sft)]
    responses = [_teach(problem, generator) for problem in lessons]
    tables = {
        files.train: _table(_first(trained, num_train, "num_train"), "train"),
        files.sft: _table(lessons, "sft").append_column("response", pa.array(responses, pa.string())),
        files.eval: _table(_first(held_out, num_eval, "num_eval"), "eval"),
    }
    tables[files.pairs] = _pairs_table(trained, num_train, "pairs")
    tables[files.eval_pairs] = _pairs_table(held_out, num_eval, "eval_pairs")
    write_tables(tables)
    write_tiny_model(files.model, shape, seed=seed)
    return files


def write_tables(tables: Mapping[Path, pa.Table]) -> None:
    for path, table in tables.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)


def _pairs_table(problems: Sequence[Addends], count: int, split: str) -> pa.Table:
    """Return the problems with a carry, with the sum as the chosen and the careless sum as the rejected answer."""
    carried = [problem for problem in problems if careless_sum(*problem) != str(sum(problem))][:count]
    table = _table(carried, split)
    for name, answers in (
        ("chosen", [str(a + b) for a, b in carried]),
        ("rejected", [careless_sum(*p) for p in carried]),
    ):
        table = table.append_column(name, pa.array(answers, pa.string()))
    return table


def _teach(problem: Addends, generator: np.random.Generator) -> str:
    is_careless = generator.random() < CARELESS_PROBABILITY
    return careless_sum(*problem) if is_careless else str(sum(problem))


def careless_sum(a: int, b: int) -> str:
    """Return the sum without carries: 67+58 gives 15."""
    tens, ones = (a // 10 + b // 10) % 10, (a + b) % 10
    return f"{tens}{ones}"


def split_problems(generator: np.random.Generator) -> tuple[list[Addends], list[Addends]]:
    """Return the shuffled problems to train on and those held out; a+b and b+a are on the same side."""
    pairs = [(a, b) for a in OPERANDS for b in OPERANDS if a <= b]
    is_held_out = dict(zip(pairs, generator.random(len(pairs)) < HELD_OUT_FRACTION, strict=True))
    problems = [(a, b) for a in OPERANDS for b in OPERANDS]
    shuffled = [problems[place] for place in generator.permutation(len(problems))]
    trained = [(a, b) for a, b in shuffled if not is_held_out[min(a, b), max(a, b)]]
    held_out = [(a, b) for a, b in shuffled if is_held_out[min(a, b), max(a, b)]]
    return trained, held_out


def _first(problems: Sequence[Addends], count: int, name: str) -> Sequence[Addends]:
    if not 1 <= count <= len(problems):
        raise DataError(f"{name} is {count}; it must be between 1 and {len(problems)}")
    return problems[:count]


def _table(problems: Sequence[Addends], split: str) -> pa.Table:
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index, "split": split, "has_carry": careless_sum(a, b) != str(a + b)},
        }
        for index, (a, b) in enumerate(problems)
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema([*PROBLEM_COLUMNS, _EXTRA]))
