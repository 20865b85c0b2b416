"""The messages between a scorer and its worker processes. Standard library only: a worker imports little else.

A request has `samples`, each the arguments of the function that it names; the reply has `answers`, one per sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import NotRequired, TypedDict

from megarl.system.foreign import finite32, one_line, whole_text
from megarl.system.user_process import ForeignReplyError

_PREDICTION = "prediction"
_TOKENS = "tokens"
_FINITE = "it must be finite in 32 bits, and so must its square"
_MAX_COMPONENTS = 256
_MAX_NAME = 100
_MAX_PREDICTION = 10_000


class WorkerTask(TypedDict):
    """The function that a worker runs; one line of JSON on its command line."""

    path: str
    name: str
    options: Mapping[str, object]
    """Keyword arguments in addition to those of a `Request`; empty for a user's function."""
    weights: Mapping[str, float] | None
    scores_groups: NotRequired[bool]
    """The function takes the list of all samples of a group and returns a list of as many results."""
    memory_bytes: int | None
    cpu_s: int | None


class Request(TypedDict):
    """One sample: the arguments of the function, by name. Those after `extra_info` are sent where it names them."""

    data_source: str
    solution_str: str
    ground_truth: str
    extra_info: Mapping[str, object]
    response: NotRequired[str]
    """The same text as `solution_str`."""
    prompt: NotRequired[str]
    """The text of the last message."""
    messages: NotRequired[Sequence[Mapping[str, object]]]
    """The chat before the response."""
    token_ids: NotRequired[Sequence[int]]
    """The tokens of the response."""
    finish_reason: NotRequired[str]
    """`stop`, or `length` where the response was cut at its limit."""
    group: NotRequired[Sequence[str]]
    """All responses to the prompt, this one among them."""


CLASSIC = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The names that a function with `**arguments` gets."""
ARGUMENTS = tuple(Request.__annotations__)


class Answer(TypedDict, total=False):
    """Either `score`, `components` and an optional `prediction`, or `error`."""

    score: float
    components: dict[str, float]
    prediction: str
    """The answer that the function read from the response."""
    tokens: list[float]
    """The reward of each token, beside the score."""
    error: str
    is_machine_fault: bool
    """The error is not the sample's: the sandbox could not be started."""


def read_answers(reply: Mapping[str, object], num_samples: int) -> list[Answer]:
    """Return the answers of a reply, one per sample in their order; a ForeignReplyError if these are none.

    The user's code shares a process with the channel: each field is checked.
    """
    answers = reply.get("answers")
    if not isinstance(answers, list) or len(answers) != num_samples:
        raise ForeignReplyError("it does not have one answer per sample")
    if not all(map(is_answer, answers)):
        raise ForeignReplyError("a score in it is no finite number")
    return answers


def is_answer(value: object) -> bool:
    """Whether a message is a checked `Answer`."""
    if not isinstance(value, dict):
        return False
    if "error" in value:
        return isinstance(value["error"], str)
    components = value.get("components")
    if not isinstance(components, dict) or not isinstance(value.get("prediction", ""), str):
        return False
    tokens = value.get("tokens", [])
    if not isinstance(tokens, list):
        return False
    if len(components) > _MAX_COMPONENTS or any(len(name) > _MAX_NAME for name in components):
        return False
    numbers = (value.get("score"), *components.values(), *tokens)
    return all(isinstance(number, float) and finite32(number) is not None for number in numbers)


def check_result(value: object, weights: Mapping[str, float] | None) -> Answer:
    """Return what a reward function returned, a finite number or a dict, as an `Answer`; an `error` if it is neither.

    In a dict, `score` is the score, other numbers are components, the rest is ignored. With weights the score is the
    weighted sum of the numbers that they name. `prediction` is the answer read from the response, as text or None,
    `tokens` a list of one number per token.
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
        total = finite32(sum(weight * numbers[name] for name, weight in weights.items()))
        if total is None:
            return {"error": f"returned numbers whose weighted sum is too large; {_FINITE}"}
        answer = {"score": total, "components": numbers}
    tokens = results.get(_TOKENS)
    if tokens is not None and not isinstance(tokens, Real):
        rewards = finite_list(tokens)
        if rewards is None:
            return {"error": f"returned a {type_name(tokens)} for {_TOKENS}; it must be a list of finite numbers"}
        answer["tokens"] = rewards
    return _with_prediction(answer, results.get(_PREDICTION))


def _with_prediction(answer: Answer, prediction: object) -> Answer:
    match prediction:
        case None:
            return answer
        case str():
            return {**answer, "prediction": whole_text(prediction[:_MAX_PREDICTION]).strip()}
        case Real():
            return {**answer, "prediction": _described(prediction) if finite32(prediction) is None else str(prediction)}
        case other:
            return {"error": f"returned a {type_name(other)} for {_PREDICTION}; it must be text, or None"}


def finite_list(value: object) -> list[float] | None:
    """Return a list, tuple or array of finite numbers as floats; None if it is something else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple):
        return None
    numbers = [number for each in value if (number := finite32(each)) is not None]
    return numbers if len(numbers) == len(value) else None


def _named_and_numbers(results: Mapping[object, object], names: tuple[str, ...]) -> dict[str, object]:
    """Return the named items, of any type, and all other items that are numbers."""
    return {
        str(key) if key in names else one_line(key, max_characters=_MAX_NAME - 3): item
        for key, item in results.items()
        if key in names or (isinstance(item, Real) and key != _PREDICTION)
    }


def _finite(results: Mapping[str, object]) -> dict[str, float] | str:
    """Return the items as floats, or an error message."""
    if len(results) > _MAX_COMPONENTS:
        return f"returned {len(results)} numbers; at most {_MAX_COMPONENTS} are recorded"
    numbers: dict[str, float] = {}
    for name, item in results.items():
        if not isinstance(item, Real):
            return f"returned a {type_name(item)} for {name}; it must be a float, or a dict with score"
        number = finite32(item)
        if number is None:
            return f"returned {_described(item)} for {name}; {_FINITE}"
        numbers[name] = number
    return numbers


def _described(number: Real) -> str:
    try:
        return f"{float(number):g}"
    except (OverflowError, ValueError, TypeError):
        return "a number of more than 300 digits"


def _keys(value: Mapping[object, object]) -> str:
    return one_line(", ".join(map(str, value))) or "no keys"


def type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
