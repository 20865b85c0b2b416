"""The simulated end of a step: time is that of the plan, and orders differ as they must."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.tail import ORDERS, Step, made_step, measure_tail, recorded_steps
from megarl.data.rollout_files import rollouts_file
from megarl.errors import DataError
from megarl.planner.deployment import StepWorkload

RECIPES = Path(__file__).parents[2] / "recipes"
WORKLOAD = StepWorkload(mean_prompt_tokens=10, mean_response_tokens=100, max_response_tokens=400)


@pytest.mark.parametrize("recipe", ["dapo_32b", "grpo_32b_32k"])
def test_what_is_longest_begins_first_where_engines_have_no_room_for_all(recipe: str) -> None:
    figures = measure_tail(RECIPES / f"{recipe}.yaml", mean_share=0.25, alike=0.5)
    in_order, by_epoch_before, known = (each.ratio for each in figures)
    assert in_order == 1
    assert known < by_epoch_before < 0.98


def test_the_order_gains_little_where_all_requests_run_at_once() -> None:
    few = ["train.prompts_per_step=32", "sampling.rollouts_per_prompt=16"]
    figures = measure_tail(RECIPES / "dapo_32b.yaml", few, mean_share=0.25, alike=0.5)
    assert all(0.96 < each.ratio <= 1 for each in figures)


def test_answers_that_are_alike_are_told_by_those_before() -> None:
    same, apart = (made_step(WORKLOAD, num_prompts=64, num_rollouts=8, alike=alike, seed=3) for alike in (1.0, 0.0))
    by_epoch = ORDERS["longest in the epoch before first"]

    def means(step: Step) -> list[float]:
        return [mean(step.lengths[prompt]) for prompt in by_epoch(step)]

    assert means(same) == sorted(means(same), reverse=True)
    assert means(apart) != sorted(means(apart), reverse=True)
    assert sorted(length for group in same.lengths for length in group) == sorted(WORKLOAD.lengths(512))


def test_lengths_come_from_the_files_of_a_run(tmp_path: Path) -> None:
    for step, lengths in enumerate(
        ({"a": [1, 3], "b": [5, 5]}, {"c": [7, 7], "b": [6, 4]}, {"b": [2, 2], "a": [9, 1]})
    ):
        rows = [(uid, num_tokens) for uid, group in lengths.items() for num_tokens in group]
        path = rollouts_file(tmp_path, step + 1)
        path.parent.mkdir(exist_ok=True)
        uids, num_tokens = zip(*rows, strict=True)
        pq.write_table(pa.table({"prompt_uid": uids, "num_tokens": num_tokens}), path)
        if step == 1:
            with pytest.raises(DataError, match="take a run of two epochs"):
                recorded_steps(tmp_path)
    assert recorded_steps(tmp_path) == [Step(lengths=[[2, 2], [9, 1]], before=[5.0, 2.0])]
