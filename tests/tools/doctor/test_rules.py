"""Every rule on a run that has what it is about, and on runs that do not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from megarl.config.checks.algorithm import check_algorithm
from megarl.config.checks.roles import check_step
from megarl.config.load import load_recipe, read_recipe
from megarl.config.recipe import Recipe
from megarl.errors import DataError
from megarl.observe.events import CheckpointFailed, Event, PhaseStarted
from megarl.tools.doctor.rules import RULES, Finding, diagnose_run
from tests.observe.samples import BEGAN
from tests.tools.doctor.runs import RECIPE, Step, lost_engine, write_run


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run with one thing wrong, and what has to be said about it."""

    rule: str
    steps: Sequence[Step]
    evidence: str
    changes: Sequence[str]
    failure: str = ""
    extra: Sequence[Event] = ()
    has_ended: bool = True
    silence: timedelta = timedelta()


def rising(first: float, last: float, *, num: int = 24) -> list[float]:
    return [first + (last - first) * index / (num - 1) for index in range(num)]


FINE = [Step(reward=reward, accuracy=0.1 + 0.8 * reward) for reward in rising(0.2, 0.6)]
HELD = ("roles.reference: {}", "algorithm.kl: {kind: loss, coef: 0.001}")
HALF_RATE = "train.optimizer.learning_rate: 0.00015"

CASES = (
    Case(
        rule="not finite",
        steps=[*FINE, Step(loss=math.nan, num_skipped=1), *FINE[:3]],
        evidence="loss or gradient not finite in 1 step(s), first in step 25, last in step 25",
        changes=(HALF_RATE, "train.optimizer.clip_grad_norm: 0.5"),
    ),
    Case(
        rule="not finite",
        steps=FINE,
        failure="step 25: the loss is nan, the gradient norm nan; the 3 updates before it were not finite either",
        evidence="step 25: the loss is nan, the gradient norm nan; the 3 updates before it were not finite either",
        changes=(HALF_RATE, "train.optimizer.clip_grad_norm: 0.5"),
    ),
    Case(
        rule="out of memory in training",
        steps=FINE[:2],
        failure="actor rank 3: update failed: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB",
        evidence="actor rank 3: update failed: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB",
        changes=("train.tokens_per_micro_batch: 512",),
    ),
    Case(
        rule="out of memory in rollout",
        steps=[],
        failure="engine 0: exited with SIGKILL; last message: 'Capture cuda graph begin'; log: engine_0.log",
        evidence="engine 0: exited with SIGKILL; last message: 'Capture cuda graph begin'; log: engine_0.log",
        changes=("roles.rollout.memory_fraction: 0.7",),
    ),
    Case(
        rule="out of memory in rollout",
        steps=FINE,
        extra=[lost_engine(1, "exited with SIGKILL; it is restarted in 1 s")] * 2,
        evidence="engines ended 2 times, the last, engine 1: exited with SIGKILL; it is restarted in 1 s",
        changes=("roles.rollout.memory_fraction: 0.7",),
    ),
    Case(
        rule="engines end again and again",
        steps=FINE,
        extra=[lost_engine(2, "exited with code 1; it is given up after 3 restarts")] * 3,
        evidence="engines ended 3 times, the last, engine 2: exited with code 1; it is given up after 3 restarts",
        changes=(),
    ),
    Case(
        rule="nodes do not talk",
        steps=FINE[:3],
        failure="actor rank(s) 8, 9: update did not finish within 4740 s (train.operation_timeout_s)",
        evidence="actor rank(s) 8, 9: update did not finish within 4740 s (train.operation_timeout_s)",
        changes=("train.operation_timeout_s: 9480",),
    ),
    Case(
        rule="went silent",
        steps=FINE[:3],
        extra=[PhaseStarted(phase="update")],
        has_ended=False,
        silence=timedelta(minutes=30),
        evidence="no event for 30 minutes after step 3 during update, and the run has not ended",
        changes=(),
    ),
    Case(
        rule="checkpoints fail",
        steps=FINE,
        extra=[CheckpointFailed(step=24, reason="No space left on device")],
        evidence="1 checkpoint(s) not saved, the last at step 24: No space left on device",
        changes=("checkpoint.keep_last: 1",),
    ),
    Case(
        rule="all rewards equal",
        steps=[*FINE[:4], *[Step(reward=0.0, reward_max=0.0, zero_signal=8)] * 6],
        evidence="all rewards of a step are equal in 6 of the last 8 steps; in the last one they are 0",
        changes=("sampling.rollouts_per_prompt: 16", "algorithm.filter: {}"),
    ),
    Case(
        rule="never rewarded",
        steps=[Step(reward=0.0, reward_max=0.0, zero_signal=8)] * 8,
        evidence="no response of 8 steps scored above 0; the best scored 0",
        changes=(),
    ),
    Case(
        rule="validation always 0",
        steps=[Step(reward=0.4, reward_max=0.8, accuracy=0.0, score=0.4)] * 4,
        evidence="accuracy 0 in all 4 evaluations, mean score 0.4, while the reward in training is 0.4",
        changes=("evaluation.right_from: 0.8", "evaluation.max_response_tokens: 192"),
    ),
    Case(
        rule="reward up, validation down",
        steps=[Step(reward=reward, accuracy=0.8 - 0.5 * reward) for reward in rising(0.2, 0.9)],
        evidence="reward 0.2 -> 0.854 while accuracy 0.700 -> 0.350, steps 1 to 24",
        changes=(*HELD, "checkpoint.keep_best: {metric: accuracy}"),
    ),
    Case(
        rule="KL explodes",
        steps=[*FINE, *[Step(reward=0.6, approx_kl=0.3)] * 8],
        evidence="KL of an update 0.002 -> 0.3 nats, steps 25 to 32",
        changes=(HALF_RATE, *HELD),
    ),
    Case(
        rule="KL explodes",
        steps=[Step(reference_kl=kl) for kl in rising(0.0, 4.0)],
        evidence="KL to the reference 1.48 -> 3.57 nats, steps 19 to 24",
        changes=(HALF_RATE, *HELD),
    ),
    Case(
        rule="loss oscillates",
        steps=[Step(loss=0.02 * number * (-1) ** number, grad_norm=0.1 * number) for number in range(1, 31)],
        evidence="swings of the loss 0.22 -> 1, turning in 100% of the last 9 steps; "
        "gradient norm above 1 in 9 of them",
        changes=(HALF_RATE, "train.optimizer.warmup_steps: 4"),
    ),
    Case(
        rule="gradient rises with mismatch",
        steps=[Step(grad_norm=0.3 + 40 * gap, mismatch=gap) for gap in rising(1e-4, 0.02)],
        evidence="gradient norm 0.391 -> 1.01 and |p_train - p_rollout| 0.0023 -> 0.018, steps 19 to 24",
        changes=("algorithm.correction: {kind: tis}", "roles.rollout.is_deterministic: true"),
    ),
    Case(
        rule="groups teach nothing",
        steps=[*FINE, *[Step(zero_signal=8)] * 5],
        evidence="90 % of the groups or more teach nothing in 5 of the last 8 steps",
        changes=("algorithm.filter: {}", "sampling.rollouts_per_prompt: 16"),
    ),
    Case(
        rule="empty responses",
        steps=[Step(response_tokens=tokens) for tokens in rising(120, 4)],
        evidence="a response has 16.6 tokens, and 0% are empty, in steps 19 to 24; 107 and 0% at the beginning",
        changes=HELD,
    ),
    Case(
        rule="empty responses",
        steps=[Step(empty=share) for share in rising(0.0, 0.6)],
        evidence="a response has 100 tokens, and 53% are empty, in steps 19 to 24; 100 and 7% at the beginning",
        changes=HELD,
    ),
    Case(
        rule="responses are cut",
        steps=[Step(truncated=share) for share in rising(0.1, 0.9)],
        evidence="81% of the responses are cut at 192 tokens in steps 19 to 24, 19% at the beginning",
        changes=("sampling.max_response_tokens: 384", "algorithm.overlong: {buffer_tokens: 48}"),
    ),
    Case(
        rule="responses repeat themselves",
        steps=[Step(repetition=share) for share in rising(0.0, 0.6)],
        evidence="53% of a response repeats an earlier part of it in steps 19 to 24; 7% at the beginning",
        changes=(*HELD, "algorithm.overlong: {buffer_tokens: 48}"),
    ),
    Case(
        rule="entropy collapsed",
        steps=[Step(entropy=entropy, reward=0.4) for entropy in rising(0.6, 0.001, num=20)]
        + [Step(entropy=0.001, reward=0.4)] * 8,
        evidence="entropy 0.505 -> 0.001 nats while the reward stays at 0.4 of 1, steps 22 to 28",
        changes=("algorithm.entropy_coef: 0.001", "algorithm.loss: {kind: ppo, clip_high: 0.28}"),
    ),
    Case(
        rule="slow rollout",
        steps=[Step(generate_s=20)] * 6,
        evidence="waiting for rollouts takes 95% of the last 6 steps; longest response 200 tokens, 2.0 times the mean",
        changes=("pools.rollout.gpus_per_node: 2",),
    ),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def recipe(path: Path) -> Recipe:
    return load_recipe(path, checks=())


def findings(folder: Path, recipe: Recipe, case: Case) -> tuple[Finding, ...]:
    last = write_run(
        folder / "run", recipe, case.steps, failure=case.failure, extra=case.extra, has_ended=case.has_ended
    )
    return diagnose_run(folder / "run", now=last + case.silence).findings


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_run_with_one_thing_wrong_is_told_that_and_what_to_change(
    case: Case, path: Path, recipe: Recipe, tmp_path: Path
) -> None:
    (found,) = findings(tmp_path, recipe, case)
    assert found.rule == case.rule
    assert found.evidence == case.evidence
    assert [str(change) for change in found.changes] == list(case.changes)
    changed = read_recipe(path, [f"{change.key}={change.value}" for change in found.changes]).recipe
    assert [*check_algorithm(changed), *check_step(changed)] == []
    assert (changed != recipe) == bool(case.changes)


def test_every_rule_has_such_a_run() -> None:
    assert {case.rule for case in CASES} == {rule.name for rule in RULES}


@pytest.mark.parametrize(
    "steps",
    [
        FINE,
        FINE[:1],
        [],
        # A task that is learned to the end: entropy and signal go, since there is nothing left to find.
        [
            Step(reward=reward, entropy=0.6 * (1 - reward), zero_signal=int(6 * reward), accuracy=reward)
            for reward in rising(0.2, 0.98, num=32)
        ],
        # The loss of a policy gradient is noise around zero, and a gradient may well be clipped.
        [Step(loss=0.003 * (-1) ** number, grad_norm=1.5) for number in range(32)],
    ],
    ids=["learning", "one step", "no step", "learned", "noise"],
)
def test_nothing_is_found_in_a_healthy_run(steps: Sequence[Step], recipe: Recipe, tmp_path: Path) -> None:
    last = write_run(tmp_path / "run", recipe, steps)
    assert diagnose_run(tmp_path / "run", now=last + timedelta(days=30)).findings == ()


def test_a_run_under_way_is_not_taken_for_dead(recipe: Recipe, tmp_path: Path) -> None:
    last = write_run(tmp_path / "run", recipe, FINE, has_ended=False)
    found = diagnose_run(tmp_path / "run", now=last + timedelta(minutes=5))
    assert (found.status, found.last_step, found.findings) == ("has not ended", 24, ())


def test_a_kl_term_is_made_dearer_where_there_is_one(path: Path, tmp_path: Path) -> None:
    held = load_recipe(path, ["algorithm.kl={kind: loss, coef: 0.01}", "roles.reference={}"], checks=())
    case = next(case for case in CASES if case.rule == "KL explodes")
    (found,) = findings(tmp_path, held, case)
    assert [str(change) for change in found.changes] == [HALF_RATE, "algorithm.kl.coef: 0.05"]


def test_activations_are_recomputed_where_a_micro_batch_cannot_shrink(path: Path, tmp_path: Path) -> None:
    tight = load_recipe(path, ["train.tokens_per_micro_batch=256"], checks=())
    case = next(case for case in CASES if case.rule == "out of memory in training")
    (found,) = findings(tmp_path, tight, case)
    assert [change.key for change in found.changes] == ["roles.actor.megatron"]


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no events\.jsonl here; name the folder of a run"):
        diagnose_run(tmp_path, now=BEGAN)
