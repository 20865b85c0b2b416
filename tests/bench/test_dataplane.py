from __future__ import annotations

import numpy as np
import pytest

from bench.dataplane import Load, measure_dataplane, read_as_before
from bench.instant_engine import reply_content
from megarl.engine.reply import Expectation, read_response
from megarl.types import PolicyVersion

SMALL = Load(num_tokens=256, num_prompts=2, num_rollouts=4, num_engines=4, num_requests=32, num_open=4, delay_s=0.0)


@pytest.mark.slow
def test_every_figure_is_measured() -> None:
    figures = measure_dataplane(SMALL, repeats=2)
    assert all(figure.value > 0 for figure in figures if figure.unit not in ("KB", "bytes/token"))
    assert [figure.unit for figure in figures] == ["us/token"] * 4 + ["bytes/token", "us", "ms", "us", "%", "KB"]
    goals = [figure.goal for figure in figures if figure.goal is not None]
    assert goals == [0.15, 0.25, pytest.approx(14.9, abs=0.1), 200.0]


@pytest.mark.parametrize("is_flat", [True, False])
def test_both_ways_of_reading_give_the_same_numbers(is_flat: bool) -> None:
    expected = Expectation(
        vocab=300,
        max_response_tokens=100,
        eos_ids=frozenset({2}),
        version=PolicyVersion(0),
        newest_version=PolicyVersion(0),
    )
    response = read_response(reply_content(100, vocab=300, is_flat=is_flat), expected)
    token_ids, logprobs = read_as_before(reply_content(100, vocab=300, is_flat=False), 300)
    assert np.array_equal(response.token_ids, token_ids)
    assert np.array_equal(response.logprobs, logprobs)
