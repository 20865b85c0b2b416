"""The door for foreign text and numbers, by properties."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings

from megarl.system.foreign import finite32, map_texts, one_line, read_json, whole_text, without_marks, without_markup
from tests import hostile

_MARKS = ("<|im_start|>", "<|im_end|>", "|im_end|", "</think>", "$")


@given(hostile.texts(_MARKS))
def test_any_text_can_be_encoded_and_whole_text_stays(text: str) -> None:
    whole = whole_text(text)
    whole.encode()
    assert whole_text(whole) is whole
    if not any(0xD800 <= ord(each) < 0xE000 for each in text):
        assert whole == text


@settings(max_examples=200)
@given(hostile.texts(_MARKS))
def test_no_mark_is_left_in_a_text_and_other_text_is_as_it_was(text: str) -> None:
    cleaned = without_marks(text, _MARKS)
    assert not any(mark in cleaned for mark in _MARKS)
    if not any(mark in text for mark in _MARKS):
        assert cleaned == text


def test_a_mark_stays_legible() -> None:
    assert without_marks("5<|im_start|>\n$", _MARKS) == "5< |im_start|>\n\ufffd"
    assert without_marks("5</think>", _MARKS) == "5< /think>"
    assert without_markup("5<|eot_id|>[INST] x</s>") == "5< |eot_id|>[ INST] x< /s>"


@given(hostile.values())
def test_a_number_is_finite_in_32_bits_with_its_square_or_none(value: object) -> None:
    number = finite32(value)
    if number is not None:
        assert np.isfinite(np.square(np.float32(number)))
        assert number == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308, 10**400, 1e30, "1", None, [1], 1j])
def test_what_is_no_finite_number_is_none(value: object) -> None:
    assert finite32(value) is None


@given(hostile.values() | hostile.texts().map(json.dumps))
def test_json_that_is_read_can_be_written_again(value: object) -> None:
    try:
        read = read_json(json.dumps(value))
    except ValueError:
        return
    assert json.loads(json.dumps(read, ensure_ascii=False, allow_nan=False).encode()) == read


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": "\\ud800"}', "half of a character"),
        ('{"\\udc00": 1}', "half of a character"),
        ("[NaN]", "NaN is no number"),
        ("1e999", "too large"),
        ("[" * 100 + "]" * 100, "nested more than 64 deep"),
        ("[" * 200_000, "nested more than 64 deep"),
        ("9" * 5000, "4300 digits"),
        ("{", "Expecting"),
    ],
)
def test_json_that_cannot_be_sent_on_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_json(text)


@given(hostile.texts())
def test_a_line_of_a_log_is_one_line_without_control_characters(text: str) -> None:
    line = one_line(text, max_characters=20)
    assert line.isprintable()
    assert len(line) <= 23
    line.encode()


def test_all_texts_of_a_value_are_changed() -> None:
    assert map_texts(["a", {"b": ("c", 1, None)}], str.upper) == ["A", {"B": ["C", 1, None]}]
