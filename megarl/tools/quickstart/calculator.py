"""The task of the quickstart with a tool: sums that a calculator adds, imitated from a teacher who mostly gives up.

The teacher of the warm start calls the calculator for a third of the problems and answers the others with a question
mark, so imitation alone leaves most problems unsolved; the environment's score pays for the right answer, so
reinforcement learns to call. Held-out problems share no pair of numbers with those that are trained on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from megarl.tools.quickstart.arithmetic import PROBLEM_COLUMNS, Addends, split_problems, write_tables
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model

CALL_PROBABILITY = 0.35
_UNKNOWN = "?"
SHAPE = replace(TinyShape(has_tools=True), vocab=TinyShape().vocab + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalculatorFiles:
    train: Path
    sft: Path
    eval: Path
    model: Path


def make_calculator(
    folder: Path, *, num_train: int = 4096, num_sft: int = 24_000, num_eval: int = 256, seed: int = 1
) -> CalculatorFiles:
    """Write the problems and the model that learns them. The same seed writes the same bytes."""
    files = CalculatorFiles(
        train=folder / "train.parquet",
        sft=folder / "sft.parquet",
        eval=folder / "eval.parquet",
        model=folder / "model",
    )
    generator = np.random.default_rng(seed)
    trained, held_out = split_problems(generator)
    lessons = [trained[place] for place in generator.integers(len(trained), size=num_sft)]
    tables = {
        files.train: _table([(problem, _asked(problem)) for problem in trained[:num_train]]),
        files.sft: _table([(problem, _asked(problem) + _taught(problem, generator)) for problem in lessons]),
        files.eval: _table([(problem, _asked(problem)) for problem in held_out[:num_eval]]),
    }
    write_tables(tables)
    write_tiny_model(files.model, SHAPE, seed=seed)
    return files


def _asked(problem: Addends) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{problem[0]}+{problem[1]}="}]


def _taught(problem: Addends, generator: np.random.Generator) -> list[dict[str, str]]:
    """Return the rest of a lesson: a call, its result and the answer, or a question mark at once."""
    right = str(sum(problem))
    if generator.random() >= CALL_PROBABILITY:
        return [{"role": "assistant", "content": _UNKNOWN}]
    return [
        {"role": "assistant", "content": call_text(problem)},
        {"role": "tool", "content": right},
        {"role": "assistant", "content": right},
    ]


def call_text(problem: Addends) -> str:
    """Return the call of the calculator, as the model has to write it."""
    return json.dumps({"name": "add", "parameters": {"a": problem[0], "b": problem[1]}})


def _table(rows: Sequence[tuple[Addends, list[dict[str, str]]]]) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "data_source": "calculator",
                "prompt": messages,
                "reward_model": {"style": "rule", "ground_truth": str(sum(problem))},
            }
            for problem, messages in rows
        ],
        schema=pa.schema(PROBLEM_COLUMNS),
    )
