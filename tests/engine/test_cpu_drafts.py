"""The kernels that check drafts on a CPU; `serving.test_learning_drafts` has them in a real engine."""

from __future__ import annotations

import torch

from megarl.engine.cpu_drafts import (
    build_chain,
    copy_cache,
    keep_likeliest,
    locate_drafts,
    locate_tokens,
    pack_places,
    take_last,
)


def test_each_token_of_a_draft_follows_the_one_before() -> None:
    lengths = torch.tensor([5, 9])
    mask, positions = torch.zeros(2 * 3 * 3, dtype=torch.bool), torch.zeros(6, dtype=torch.long)
    indices, following, siblings = (torch.full((2, 3), -1) for _ in range(3))
    none = torch.zeros(0)
    build_chain(none, none, lengths, mask, positions, indices, following, siblings, 1, 2, 3, 0)
    assert positions.tolist() == [5, 6, 7, 9, 10, 11]
    assert indices.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert following.tolist() == [[1, 2, -1]] * 2
    assert siblings.tolist() == [[-1] * 3] * 2
    assert mask.view(2, 3, 3).tolist() == [torch.ones(3, 3, dtype=torch.bool).tril().tolist()] * 2


def test_a_draft_is_kept_up_to_the_first_token_that_is_another() -> None:
    candidates = torch.tensor([[1, 5, 6], [1, 5, 6], [1, 5, 6]])
    target = torch.tensor([[5, 6, 7], [5, 8, 7], [9, 6, 7]])
    predicts, kept = torch.zeros(9, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    places = torch.full((3, 3), -1, dtype=torch.int32)
    keep_likeliest(
        predicts=predicts, accept_index=places, accept_token_num=kept, candidates=candidates, target_predict=target
    )
    assert kept.tolist() == [2, 1, 0]
    assert places.tolist() == [[0, 1, 2], [3, 4, -1], [6, -1, -1]]
    assert predicts[places[places >= 0].long()].tolist() == [5, 6, 7, 5, 8, 9]
    last = torch.zeros(3, dtype=torch.int32)
    take_last(predicts[places.clamp(min=0).long()].flatten(), kept + 1, last, 3)
    assert last.tolist() == [7, 8, 9]
    packed = torch.zeros(9, dtype=torch.long)
    pack_places(places, torch.arange(100, 109), packed)
    assert packed.tolist() == [100, 101, 102, 103, 104, 106, 0, 0, 0]


def test_places_of_the_cache_are_those_of_the_table() -> None:
    table, rows = torch.arange(40, dtype=torch.int32).view(4, 10), torch.tensor([2, 0])
    locations = torch.zeros(5, dtype=torch.long)
    locate_tokens(rows, table, torch.tensor([3, 7]), torch.tensor([5, 10]), locations, 10)
    assert locations.tolist() == [23, 24, 7, 8, 9]
    drafts = torch.zeros(4, dtype=torch.long)
    locate_drafts(rows, table, torch.tensor([3, 7]), drafts, 10, 1, 2)
    assert drafts.tolist() == [23, 24, 7, 8]


def test_what_is_cached_moves_at_once_although_places_overlap() -> None:
    layers = [torch.arange(12.0).view(4, 3), torch.arange(8.0).view(4, 2)]
    expected = [layer[[0, 0, 1, 3]] for layer in layers]
    addresses = torch.tensor([layer.data_ptr() for layer in layers])
    widths = torch.tensor([layer[0].nbytes for layer in layers])
    copy_cache(addresses, widths, torch.tensor([1, 2]), torch.tensor([0, 1]))
    assert all(torch.equal(layer, each) for layer, each in zip(layers, expected, strict=True))
