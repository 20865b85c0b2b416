from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from megarl.routes import PackedRoutes, RouteShape, join_routes, prompt_digest

SHAPE = RouteShape(num_layers=2, per_token=2, num_experts=8)
NUMBERS = np.array([[[0, 7], [3, 1]], [[5, 4], [2, 6]], [[1, 0], [6, 5]]], "<i4")


def test_layers_without_experts_have_rows_of_zeros() -> None:
    """An engine records a row for every layer; only those of mixtures must name different experts."""
    record = np.array([[[0, 0], [3, 5]], [[0, 0], [1, 2]]], "<u4")
    shape = replace(SHAPE, dense_layers=frozenset({0}))
    assert shape.read(record.tobytes(), 2).tolist() == record.tolist()
    with pytest.raises(ValueError, match="token 0 has expert 0 twice in layer 0"):
        SHAPE.read(record.tobytes(), 2)
    record[1, 1] = 0
    with pytest.raises(ValueError, match="token 1 has expert 0 twice in layer 1"):
        shape.read(record.tobytes(), 2)


def test_routes_take_a_byte_for_each_expert_and_two_where_there_are_many() -> None:
    routes = SHAPE.read(NUMBERS.tobytes(), 3)
    assert routes.tolist() == NUMBERS.tolist()
    assert routes.dtype == np.uint8
    wide = RouteShape(num_layers=2, per_token=2, num_experts=256)
    assert wide.read(NUMBERS.tobytes(), 3).dtype == wide.unknown(1).dtype == np.uint16
    assert SHAPE.read(b"", 0).shape == (0, 2, 2)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (NUMBERS[:2], "32 bytes of routes, not 4 for each of (3, 2, 2) tokens, layers and experts"),
        (np.where(NUMBERS == 7, 8, NUMBERS), "expert 8 of 8"),
        (np.where(NUMBERS == 7, -1, NUMBERS), "expert 4294967295 of 8"),
        (np.where(NUMBERS == 6, 2, NUMBERS), "token 1 has expert 2 twice in layer 1"),
    ],
)
def test_routes_that_no_router_chose_are_refused(numbers: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SHAPE.read(numbers.astype("<i4").tobytes(), 3)


def test_tokens_between_parts_have_unknown_experts() -> None:
    routes = SHAPE.read(NUMBERS.tobytes(), 3)
    found = join_routes([(1, routes[:1]), (4, routes)], 6)
    assert found is not None
    assert found[[1, 4, 5]].tolist() == routes[[0, 0, 1]].tolist()
    assert (found[[0, 2, 3]] == 255).all()
    assert join_routes([], 6) is None


def test_a_stage_takes_its_own_layers() -> None:
    routes = SHAPE.read(NUMBERS.tobytes(), 3)
    packed = PackedRoutes(num_tokens=8, parts=((0, routes), (5, routes[:2])))
    assert packed.are_known().tolist() == [True, True, True, False, False, True, True, False]
    assert packed.of_layers(1, 2)[[0, 5], 0].tolist() == NUMBERS[[0, 0], 1].tolist()
    assert packed.of_layers(0, 2).shape == (8, 2, 2)


def test_a_digest_is_of_the_prompt_alone() -> None:
    routes = SHAPE.read(NUMBERS.tobytes(), 3)
    others = np.concatenate([routes[:2], routes[:1]])
    # A prompt of two tokens and a response of two, the last of which was not computed.
    assert prompt_digest(routes, 2) == prompt_digest(others, 2) == prompt_digest(routes[:2], 1)
    assert prompt_digest(routes, 1) != prompt_digest(others, 1)
