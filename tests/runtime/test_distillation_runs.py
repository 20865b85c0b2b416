"""Whole runs that learn from teachers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.tools.quickstart.arithmetic import make_arithmetic
from tests.runtime.runs import run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["{kind: reverse_kl}", "{kind: forward_topk, top_k: 4}"])
def test_a_policy_that_equals_its_teacher_is_at_distance_zero_until_it_has_learnt(kind: str, tmp_path: Path) -> None:
    """Beside a reward, which moves the policy away; the teacher shares the actor's pool and its split."""
    files = make_arithmetic(tmp_path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    done = run(
        tmp_path,
        "taught",
        f"roles.teacher.first={{kind: ranks, pool: train, tensor: 2, model: {files.model}}}",
        f"algorithm={{kind: grpo, distillation: {kind}}}",
        "sampling.temperature=0.7",
    )
    assert done.exit_code == 0, done.output
    first, second = (event.summary.update for event in done.steps)
    assert first is not None
    assert second is not None
    assert first.teacher_kl == 0.0
    assert second.teacher_kl is not None
    assert abs(second.teacher_kl) > 1e-6


def test_each_source_has_its_teacher_and_a_source_without_one_ends_the_run_in_a_sentence(tmp_path: Path) -> None:
    files = make_arithmetic(tmp_path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    teacher = f"kind: ranks, pool: teachers, model: {files.model}"
    overrides = (
        "pools.teachers={gpus_per_node: 1}",
        "algorithm={kind: distill}",
        "sampling.rollouts_per_prompt=1",
        "evaluation=null",
        "data.eval=[]",
    )
    both = f"roles.teacher={{sums: {{{teacher}, sources: [arithmetic]}}, rest: {{{teacher}}}}}"
    done = run(tmp_path, "two", *overrides, both)
    assert done.exit_code == 0, done.output
    assert [event.summary.update is not None for event in done.steps] == [True, True]
    other = run(tmp_path, "none", *overrides, f"roles.teacher.code={{{teacher}, sources: [code]}}")
    assert other.exit_code == 3, other.output
    assert "no teacher for prompts of source arithmetic" in other.output
