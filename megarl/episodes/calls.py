"""Reads the calls of tools out of a response, in the forms in which models are trained to write them. Pure."""

from __future__ import annotations

import json
import re
from typing import Literal, TypeAlias, assert_never

from megarl.episodes.protocol import Call, Malformed
from megarl.types import JsonValue

WrittenFormat: TypeAlias = Literal["hermes", "llama"]

_THOUGHT_END = "</think>"
_BEGIN, _END = "<tool_call>", "</tool_call>"
_TAGGED = re.compile(re.escape(_BEGIN) + r"\s*(.*?)\s*" + re.escape(_END), re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_LOOKS_LIKE_A_CALL = re.compile(r'^\{\s*"(name|type|function|parameters|arguments)"\s*:')
_MAX_CALL_CHARACTERS = 1_000_000
"""A longer call is not read: parsing deeply nested text takes time and stack."""


def read_calls(text: str, call_format: WrittenFormat) -> list[Call] | Malformed:
    """Return the calls in their order, none for an answer. Text inside a thought is not a call."""
    said = text.rpartition(_THOUGHT_END)[2]
    match call_format:
        case "hermes":
            return _tagged_calls(said)
        case "llama":
            return _plain_call(said)
        case _:
            assert_never(call_format)


def written_format(rendered: str) -> WrittenFormat | None:
    """Return the format of a call that a template has rendered; None for one that is not known."""
    if _BEGIN in rendered and _END in rendered:
        return "hermes"
    return "llama" if '"parameters"' in rendered else None


def _tagged_calls(text: str) -> list[Call] | Malformed:
    bodies = _TAGGED.findall(text)
    if text.count(_BEGIN) != len(bodies) or text.count(_END) != len(bodies):
        return Malformed(text=text, why=f"{_BEGIN} and {_END} do not pair up")
    calls = [_read(body, place, "arguments") for place, body in enumerate(bodies)]
    problem = next((call for call in calls if isinstance(call, Malformed)), None)
    return problem or [call for call in calls if isinstance(call, Call)]


def _plain_call(text: str) -> list[Call] | Malformed:
    body = text.strip()
    is_tagged = body.startswith(_PYTHON_TAG)
    body = body.removeprefix(_PYTHON_TAG).strip()
    if not is_tagged and not _LOOKS_LIKE_A_CALL.match(body):
        return []
    call = _read(body, 0, "parameters")
    return call if isinstance(call, Malformed) else [call]


def _read(body: str, place: int, arguments_key: str) -> Call | Malformed:
    """Read one call; `parameters` and `arguments` are both understood, as models mix them up."""
    if len(body) > _MAX_CALL_CHARACTERS:
        return Malformed(text=body[:1000], why=f"it has more than {_MAX_CALL_CHARACTERS} characters")
    try:
        value: JsonValue = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Malformed(text=body, why=f"it is not JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Malformed(text=body, why="it is not an object with a name")
    other = "arguments" if arguments_key == "parameters" else "parameters"
    arguments = value.get(arguments_key, value.get(other, {}))
    if not isinstance(arguments, dict):
        return Malformed(text=body, why=f"its {arguments_key} are not an object")
    return Call(name=str(value["name"]), arguments=arguments, id=f"call_{place}")
