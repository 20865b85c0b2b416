"""Calls as models write them, and as they should not."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.episodes.dialogue import WrittenFormat, read_calls
from megarl.episodes.protocol import Malformed
from tests import hostile


def _names(text: str, call_format: WrittenFormat) -> list[tuple[str, object]]:
    calls = read_calls(text, call_format)
    assert not isinstance(calls, Malformed), calls
    return [(call.name, call.arguments) for call in calls]


def test_tagged_calls_are_read_in_their_order() -> None:
    text = (
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    )
    assert _names(text, "hermes") == [("add", {"a": 1, "b": 2}), ("now", {})]


def test_a_plain_call_is_the_whole_response() -> None:
    assert _names('{"name": "add", "parameters": {"a": 1}}', "llama") == [("add", {"a": 1})]
    assert _names('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "llama") == [("add", {"a": 1})]
    assert _names('The answer is {"a": 1}.', "llama") == []
    assert _names('{"a": 1} is a dict', "llama") == []


def test_an_answer_has_no_calls() -> None:
    assert _names("It is 4.", "hermes") == []


def test_a_call_in_a_thought_is_not_made() -> None:
    text = '<think>maybe <tool_call>{"name": "add"</think>It is 4.'
    assert _names(text, "hermes") == []


def test_ids_tell_calls_apart() -> None:
    calls = read_calls('<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "a"}</tool_call>', "hermes")
    assert not isinstance(calls, Malformed)
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize(
    ("text", "call_format", "why"),
    [
        ('<tool_call>{"name": "add"}', "hermes", "do not pair up"),
        ('{"name": "add"}</tool_call>', "hermes", "do not pair up"),
        ("<tool_call>add(1, 2)</tool_call>", "hermes", "not JSON"),
        ("<tool_call>[1]</tool_call>", "hermes", "not an object with a name"),
        ('<tool_call>{"name": 3}</tool_call>', "hermes", "not an object with a name"),
        ('<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', "hermes", "are not an object"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "hermes", "not JSON"),
        ("<tool_call>" + "1" * 1_000_001 + "</tool_call>", "hermes", "characters"),
        ('{"name": "add", "parameters": {"a": 1}', "llama", "not JSON"),
        ("<|python_tag|>add(1)", "llama", "not JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "hermes", "half of a character"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "hermes", "NaN is no number"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "hermes", "too large"),
        ('<tool_call>{"name": "a", "arguments": ' + '{"a":' * 99 + "1" + "}" * 100 + "</tool_call>", "hermes", "deep"),
        ('<tool_call>{"name": "a"}</tool_call>' * 65, "hermes", "65 calls in one response; at most 64"),
    ],
)
def test_a_broken_call_is_malformed(text: str, call_format: WrittenFormat, why: str) -> None:
    calls = read_calls(text, call_format)
    assert isinstance(calls, Malformed)
    assert why in calls.why


_PARTS = ("<tool_call>", "</tool_call>", "</think>", "<|python_tag|>", '{"name": "add", "arguments": ', "}", "[")


@pytest.mark.patient
@settings(max_examples=200)
@given(text=hostile.texts(_PARTS), value=hostile.values(), call_format=st.sampled_from(("hermes", "llama")))
def test_any_text_is_calls_malformed_or_an_answer(text: str, value: object, call_format: WrittenFormat) -> None:
    called = json.dumps({"name": text, "arguments": value, "parameters": value})
    for response in (text, called, f"<tool_call>{called}</tool_call>", f"<tool_call>{text}</tool_call>"):
        calls = read_calls(response, call_format)
        if not isinstance(calls, Malformed):
            for call in calls:  # what is called can be sent to a tool
                json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize(
    "text", ["<tool_call>" * 20_000, "<tool_call>" + " " * 200_000, "</think>" * 50_000, "{" + " " * 200_000]
)
def test_a_flood_of_tags_is_read_at_once(text: str) -> None:
    began = time.process_time()
    read_calls(text, "hermes")
    read_calls(text, "llama")
    assert time.process_time() - began < 1
