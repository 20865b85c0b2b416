"""The messages between a scorer and its worker processes. Standard library only: a worker imports little else.

A message is its length and a JSON object in UTF-8. The worker sends the first one: an `Answer` with `sources`, or with
`key` and `error` if it cannot load the function. After that one `Answer` follows each `Request`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from numbers import Real
from typing import TypedDict

LENGTH = struct.Struct("!I")
_PREDICTION = "prediction"


class WorkerTask(TypedDict):
    """The function that a worker runs; one line of JSON on its command line."""

    path: str
    name: str
    options: Mapping[str, object]
    """Keyword arguments in addition to those of a `Request`; empty for a user's function."""
    weights: Mapping[str, float] | None
    memory_bytes: int | None
    cpu_s: int | None


class Request(TypedDict):
    """The arguments of the function, by name."""

    data_source: str
    solution_str: str
    ground_truth: str
    extra_info: Mapping[str, object]


class Answer(TypedDict, total=False):
    """First `sources`; later `score`, `components` and an optional `prediction`, or `error`."""

    sources: dict[str, str]
    """The digest of each file that the function was loaded from."""
    score: float
    components: dict[str, float]
    prediction: str
    """The answer that the function read from the response."""
    error: str
    key: str
    """The key of the recipe's `reward` section that the error belongs to."""


def check_result(value: object, weights: Mapping[str, float] | None) -> Answer:
    """Return what a reward function returned, a finite number or a dict, as an `Answer`; an `error` if it is neither.

    In a dict, `score` is the score, other numbers are components, the rest is ignored. With weights the score is the
    weighted sum of the numbers that they name. `prediction` is the answer read from the response, as text or None.
    """
    if weights is not None and not isinstance(value, Mapping):
        return {"error": f"returned a {type_name(value)}; reward.weights needs a dict with {', '.join(weights)}"}
    results: Mapping[object, object] = value if isinstance(value, Mapping) else {"score": value}
    needed = ("score",) if weights is None else tuple(weights)
    missing = [name for name in needed if name not in results]
    if missing:
        return {"error": f"returned a dict without {', '.join(missing)}; it has {_keys(results)}"}
    numbers = _finite(_named_and_numbers(results, needed))
    if isinstance(numbers, str):
        return {"error": numbers}
    if weights is None:
        answer: Answer = {"score": numbers.pop("score"), "components": numbers}
    else:
        total = sum(weight * numbers[name] for name, weight in weights.items())
        answer = {"score": total, "components": numbers}
    match results.get(_PREDICTION):
        case None:
            return answer
        case str() | Real() as prediction:
            return {**answer, "prediction": str(prediction).strip()}
        case other:
            return {"error": f"returned a {type_name(other)} for {_PREDICTION}; it must be text, or None"}


def _named_and_numbers(results: Mapping[object, object], names: tuple[str, ...]) -> dict[str, object]:
    """Return the named items, of any type, and all other items that are numbers."""
    return {
        str(key): item
        for key, item in results.items()
        if key in names or (isinstance(item, Real) and key != _PREDICTION)
    }


def _finite(results: Mapping[str, object]) -> dict[str, float] | str:
    """Return the items as floats, or an error message."""
    numbers: dict[str, float] = {}
    for name, item in results.items():
        if not isinstance(item, Real):
            return f"returned a {type_name(item)} for {name}; it must be a float, or a dict with score"
        if not math.isfinite(item):
            return f"returned {float(item)} for {name}; it must be finite"
        numbers[name] = float(item)
    return numbers


def _keys(value: Mapping[object, object]) -> str:
    return ", ".join(map(str, value)) or "no keys"


def type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
