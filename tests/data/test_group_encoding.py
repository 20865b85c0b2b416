from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from megarl.data.group_encoding import ContentArrays, GroupRecord, rollout_columns
from megarl.tokens import COLUMNS, Content, PackedColumns, SampledTokens
from megarl.types import Rollout, TrainSample
from tests.algo.groups import scored_group, with_baseline


def test_every_number_per_token_is_in_the_table() -> None:
    owners = {"content": Content, "rollout": Rollout, "sample": TrainSample}
    for owner, kind in owners.items():
        declared = {column.name for column in COLUMNS if column.owner == owner}
        arrays = {each.name for each in fields(kind) if "Array" in str(each.type)}
        assert declared == arrays - {"prompt_ids"}
    assert {column.packed_as for column in COLUMNS} - {None} == {each.name for each in fields(PackedColumns)}
    sampled = {each.name for each in fields(SampledTokens)} - {"is_cut"}
    assert sampled <= {column.name for column in COLUMNS}


def test_contents_come_back_one_by_one() -> None:
    one = Content(token_ids=np.arange(3, dtype=np.int32), logprobs=np.zeros(3, np.float32), text="one")
    routes = np.arange(8, dtype=np.uint8).reshape(4, 1, 2)
    other = replace(one, token_ids=one.token_ids[:2], logprobs=one.logprobs[:2], text="other", routes=routes)
    empty = replace(one, token_ids=one.token_ids[:0], logprobs=one.logprobs[:0], text="")
    arrays = ContentArrays.of([one, other, empty])
    for index, expected in enumerate((one, other, empty)):
        found = arrays.content(index)
        assert (found.text, found.teacher) == (expected.text, None)
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert (found.routes is None) == (expected.routes is None)
    np.testing.assert_array_equal(arrays.content(1).routes, routes)
    assert ContentArrays.of([]).texts == ()


def test_a_group_comes_back_with_its_baseline_last() -> None:
    scored = with_baseline(scored_group(7, [0.5, 1.0], components=[{"right": 0.25}, {}]), score=1.0, length=4)
    rollouts = scored.group.with_baseline
    record = GroupRecord.of(scored)
    assert record.num_tokens == tuple(rollout.num_tokens for rollout in rollouts)
    contents = [rollout.content for rollout in rollouts]
    found = record.scored_group(scored.group.prompt, contents, map(rollout_columns, rollouts))
    assert (found.scores, found.baseline) == (scored.scores, scored.baseline)
    assert found.group.baseline is not None
    assert found.group.baseline.content is rollouts[-1].content
