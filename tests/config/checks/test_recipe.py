"""What is allowed but probably not meant is said, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.checks.recipe import advise
from megarl.config.load import read_recipe
from megarl.config.model import read_model_shape

GOOD = Path(__file__).parent.parent / "good.yaml"


def advice(scratch: Path, *assignments: str) -> list[str]:
    recipe = read_recipe(GOOD, assignments).recipe
    return [str(item) for item in advise(recipe, read_model_shape(scratch / "model"))]


def test_a_good_recipe_needs_no_advice(scratch: Path) -> None:
    assert advice(scratch) == []


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (["sampling.temperature=1.6"], "sampling.temperature: 1.6 is close to noise; 0.6 to 1.2 is usual"),
        (["data.eval=[train.parquet]"], "data.eval: train.parquet is trained on as well"),
        (["evaluation.every_steps=20"], "evaluation.every_steps: 20 is more than run.steps 10"),
        (
            ["roles.actor.tensor=4", "pools.train.gpus_per_node=4"],
            "roles.actor.tensor: each of the 2 key/value heads is on 2 ranks",
        ),
        (
            ["pools.train.nodes=80", "train.prompts_per_update=1"],
            "train.prompts_per_update: 8 sequences per update for 80 data-parallel ranks: 72 of them compute padding",
        ),
        (
            [
                "pools.critic={nodes: 80, gpus_per_node: 1}",
                "roles.critic={pool: critic, prompts_per_update: 2}",
                "algorithm={kind: gae}",
            ],
            "roles.critic.prompts_per_update: 16 sequences per update for 80 data-parallel ranks: 64 of them compute",
        ),
        (["data.response_key=answer"], "data.response_key: only sft and spin read it"),
        (
            ["checkpoint.save_every_steps=20"],
            "checkpoint.save_every_steps: 20 is more than run.steps 10: only the last",
        ),
        (["algorithm={kind: sft}", "sampling.top_p=0.9"], "sampling.top_p: has no effect in sft"),
        (
            ["algorithm={kind: grpo, filter: {oversampling: 2}}"],
            "algorithm.filter.oversampling: 2 leaves groups for the next step, which trains on what an earlier policy",
        ),
        (["train.max_staleness=1"], "train.max_staleness: 1 trains on what earlier policies chose as if the current"),
    ],
)
def test_a_doubtful_recipe_gets_one_line(scratch: Path, assignments: list[str], expected: str) -> None:
    (line,) = advice(scratch, *assignments)
    assert line.startswith(expected)
