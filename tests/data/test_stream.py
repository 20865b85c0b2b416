from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.stream import PromptStream
from megarl.types import Prompt
from tests.values import make_prompt


def prompts(count: int) -> list[Prompt]:
    return [make_prompt(number) for number in range(count)]


def draw(stream: PromptStream, count: int) -> list[tuple[str, int, int]]:
    return [(prompt.uid, prompt.position, prompt.epoch) for prompt in (next(stream) for _ in range(count))]


@given(count=st.integers(1, 40), epochs=st.integers(1, 4), seed=st.integers(0, 2**32), is_shuffled=st.booleans())
def test_every_epoch_has_every_prompt_once(count: int, epochs: int, seed: int, is_shuffled: bool) -> None:
    drawn = draw(PromptStream(prompts(count), seed=seed, is_shuffled=is_shuffled), count * epochs)
    assert [position for _, position, _ in drawn] == list(range(count * epochs))
    for epoch in range(epochs):
        part = drawn[epoch * count : (epoch + 1) * count]
        assert sorted(uid for uid, _, _ in part) == sorted(prompt.uid for prompt in prompts(count))
        assert {number for _, _, number in part} == {epoch}


@given(count=st.integers(1, 40), seed=st.integers(0, 2**32), drawn=st.integers(0, 100), is_shuffled=st.booleans())
def test_a_cursor_goes_on_where_the_stream_stood(count: int, seed: int, drawn: int, is_shuffled: bool) -> None:
    stream = PromptStream(prompts(count), seed=seed, is_shuffled=is_shuffled)
    draw(stream, drawn)
    assert stream.cursor == drawn
    resumed = PromptStream(prompts(count), seed=seed, is_shuffled=is_shuffled, cursor=stream.cursor)
    assert draw(resumed, 2 * count) == draw(stream, 2 * count)
    assert resumed.cursor == stream.cursor == drawn + 2 * count


def test_the_order_depends_on_seed_and_epoch() -> None:
    orders = set()
    for seed in (1, 2):
        stream = PromptStream(prompts(20), seed=seed)
        orders |= {tuple(uid for uid, _, _ in draw(stream, 20)) for _ in range(3)}
    assert len(orders) == 6


def test_without_shuffle_the_order_is_the_files() -> None:
    stream = PromptStream(prompts(3), seed=1, is_shuffled=False)
    assert [uid for uid, _, _ in draw(stream, 4)] == [f"train.parquet:{number}" for number in (0, 1, 2, 0)]


@pytest.mark.parametrize("num_drawn", [0, 1, 3, 4, 9])
def test_prompts_that_were_not_finished_are_drawn_again_before_any_other(num_drawn: int) -> None:
    drawn = draw(PromptStream(prompts(5), seed=3), 20)
    stream = PromptStream(prompts(5), seed=3, cursor=11, pending=(4, 7, 9))
    positions = (4, 7, 9, *range(11, 20))[:num_drawn]
    assert draw(stream, num_drawn) == [drawn[position] for position in positions]
    assert tuple(stream.position_of(number) for number in range(num_drawn)) == positions
    assert stream.pending == (4, 7, 9)[num_drawn:]
    assert stream.cursor == 11 + max(0, num_drawn - 3)
