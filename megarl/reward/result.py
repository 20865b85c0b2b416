"""What a reward may return: a finite number, or a dict of them. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

from megarl.reward.protocol import Answer

_PREDICTION = "prediction"


def checked(value: object, weights: Mapping[str, float] | None) -> Answer:
    """The result as numbers. Of a dict, `score` counts, other numbers are components, what is no number is left out.

    With weights the score is the weighted sum of the numbers they name. `prediction` is not a component: it is the
    answer found in the response, as text, and None where there is none.
    """
    if weights is not None and not isinstance(value, Mapping):
        return {"error": f"returned a {type_name(value)}; reward.weights needs a dict with {', '.join(weights)}"}
    results: Mapping[object, object] = value if isinstance(value, Mapping) else {"score": value}
    needed = ("score",) if weights is None else tuple(weights)
    missing = [name for name in needed if name not in results]
    if missing:
        return {"error": f"returned a dict without {', '.join(missing)}; it has {_keys(results)}"}
    numbers = _finite(_numbers_and(results, needed))
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


def _numbers_and(results: Mapping[object, object], names: tuple[str, ...]) -> dict[str, object]:
    """Those that are named, whatever they are, and whatever else is a number."""
    return {
        str(key): item
        for key, item in results.items()
        if key in names or (isinstance(item, Real) and key != _PREDICTION)
    }


def _finite(results: Mapping[str, object]) -> dict[str, float] | str:
    """The numbers, or what is wrong with one of them."""
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
