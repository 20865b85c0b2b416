"""The table of what goes wrong with runs, and its application to one run. A row: symptom, cause, remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from megarl.errors import DataError
from megarl.observe.events import EVENTS_FILE, read_events
from megarl.tools.doctor import remedies, symptoms
from megarl.tools.doctor.remedies import RecipeChange, Remedy
from megarl.tools.doctor.run_history import RunHistory, read_run_history


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRule:
    name: str
    severity: Severity
    symptom: Callable[[RunHistory], str | None]
    """Returns the evidence with numbers and steps, or None."""
    cause: str
    remedy: Remedy
    advice: str
    """Further steps, or how to confirm the cause. `RUN` stands for the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule whose symptom a run has."""

    rule: str
    severity: Severity
    evidence: str
    cause: str
    changes: tuple[RecipeChange, ...]
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDiagnosis:
    run: str
    num_steps: int
    last_step: int
    status: str
    reason: str
    findings: tuple[Finding, ...]
    """Errors first."""


def diagnose_run(folder: Path, *, now: datetime) -> RunDiagnosis:
    """Apply every rule to the events of a run; no other file of it is read."""
    path = folder / EVENTS_FILE
    if not path.is_file():
        raise DataError(f"{folder}: no {EVENTS_FILE} here; name the folder of a run, as in runs/quickstart")
    try:
        run = read_run_history(read_events(path), now=now)
    except DataError as error:
        raise DataError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from None
    return RunDiagnosis(
        run=run.recipe.run.name,
        num_steps=run.recipe.run.total_steps,
        last_step=run.last_step,
        status="has not ended" if run.end is None else run.end.status.value,
        reason="" if run.end is None else run.end.reason,
        findings=_findings(run),
    )


def _findings(run: RunHistory) -> tuple[Finding, ...]:
    evidence = [(rule, rule.symptom(run)) for rule in RULES]
    return tuple(
        Finding(
            rule=rule.name,
            severity=rule.severity,
            evidence=text,
            cause=rule.cause,
            changes=tuple(rule.remedy(run)),
            advice=rule.advice,
        )
        for rule, text in evidence
        if text is not None
    )


RULES: tuple[FindingRule, ...] = (
    FindingRule(
        name="not finite",
        severity=Severity.ERROR,
        symptom=symptoms.not_finite,
        cause="the learning rate is too high, or a batch contains values that the model cannot process",
        remedy=remedies.all_of(remedies.halve_learning_rate, remedies.tighten_gradient_clip),
        advice="read the rollouts of that step (`megarl view RUN`); from step 1 on: `megarl diagnose mismatch RECIPE`",
    ),
    FindingRule(
        name="out of memory in training",
        severity=Severity.ERROR,
        symptom=symptoms.training_out_of_memory,
        cause="the activations of a micro-batch, or the optimizer and the weights, do not fit",
        remedy=remedies.less_per_micro_batch,
        advice="`megarl plan RECIPE` shows what fills the device",
    ),
    FindingRule(
        name="out of memory in rollout",
        severity=Severity.ERROR,
        symptom=symptoms.rollout_out_of_memory,
        cause="the KV cache leaves too little for weights, graphs or another role of the same pool",
        remedy=remedies.less_for_engines,
        advice="read RUN/engines/*.log; `megarl plan RECIPE` shows what fills the device",
    ),
    FindingRule(
        name="nodes do not talk",
        severity=Severity.ERROR,
        symptom=symptoms.nodes_not_talking,
        cause="a process died or hangs, a firewall closes ports, or the nodes use the wrong network interface",
        remedy=remedies.longer_deadline,
        advice="`megarl doctor RECIPE --ray-address ADDRESS` tries every node and an all-reduce in every pool; "
        "the longer deadline helps only where the work itself is slow",
    ),
    FindingRule(
        name="engines end again and again",
        severity=Severity.ERROR,
        symptom=symptoms.restart_loop,
        cause="a node, a driver or an option makes engines fail until no restarts are left",
        remedy=remedies.none,
        advice="read RUN/engines/*.log; `megarl fleet RUN` shows the engines, `megarl doctor RECIPE` their machines",
    ),
    FindingRule(
        name="went silent",
        severity=Severity.ERROR,
        symptom=symptoms.went_silent,
        cause="the run was killed from outside (by the kernel for lack of memory, or by a scheduler), or it hangs",
        remedy=remedies.none,
        advice="read the end of RUN/megarl.log and the kernel's log; `megarl train RECIPE` resumes the run",
    ),
    FindingRule(
        name="checkpoints fail",
        severity=Severity.ERROR,
        symptom=symptoms.saves_failed,
        cause="the disk is full, or not writable from every node",
        remedy=remedies.keep_fewer,
        advice="`megarl checkpoint prune RUN` makes room; `megarl doctor RECIPE` shows how much a save needs",
    ),
    FindingRule(
        name="never rewarded",
        severity=Severity.ERROR,
        symptom=symptoms.never_rewarded,
        cause="the model cannot do the task yet, or the reward does not recognise right answers",
        remedy=remedies.none,
        advice="`megarl samples RUN --wrong` shows both. Start from a model that gets some right: a larger one, or "
        "one trained with `algorithm.kind: sft` on demonstrations; more rollouts and a filter do not help",
    ),
    FindingRule(
        name="all rewards equal",
        severity=Severity.ERROR,
        symptom=symptoms.equal_rewards,
        cause="the reward is broken or gives everything the same score, or the prompts are far too hard or too easy",
        remedy=remedies.all_of(remedies.more_rollouts, remedies.filter_groups),
        advice="`megarl samples RUN --wrong` shows wrong answers and the expected ones",
    ),
    FindingRule(
        name="validation always 0",
        severity=Severity.ERROR,
        symptom=symptoms.eval_always_zero,
        cause="right answers score below evaluation.right_from, or responses are cut before the answer",
        remedy=remedies.all_of(remedies.lower_right_from, remedies.longer_evaluation),
        advice="`megarl samples RUN --wrong` shows the answers and their scores",
    ),
    FindingRule(
        name="reward up, validation down",
        severity=Severity.WARNING,
        symptom=symptoms.reward_up_eval_down,
        cause="the policy exploits a flaw of the reward, or memorises the training prompts",
        remedy=remedies.all_of(remedies.hold_to_reference, remedies.keep_best),
        advice="`megarl samples RUN --wrong` shows what the policy does; then correct the reward",
    ),
    FindingRule(
        name="KL explodes",
        severity=Severity.WARNING,
        symptom=symptoms.kl_exploding,
        cause="updates are too large: the policy moves far from the one it was sampled from, or from its reference",
        remedy=remedies.all_of(remedies.halve_learning_rate, remedies.hold_to_reference),
        advice="resume from an earlier checkpoint: `megarl train RECIPE --resume PATH`",
    ),
    FindingRule(
        name="loss oscillates",
        severity=Severity.WARNING,
        symptom=symptoms.loss_oscillating,
        cause="the learning rate is too high for this batch size",
        remedy=remedies.all_of(remedies.halve_learning_rate, remedies.warm_up),
        advice="a larger train.prompts_per_step helps too",
    ),
    FindingRule(
        name="gradient rises with mismatch",
        severity=Severity.WARNING,
        symptom=symptoms.gradient_rises_with_mismatch,
        cause="trainer and engine drift apart: the policy learns from tokens that it would not have generated",
        remedy=remedies.correct_mismatch,
        advice="`megarl diagnose mismatch RECIPE --checkpoint PATH` names the first module that differs",
    ),
    FindingRule(
        name="groups teach nothing",
        severity=Severity.WARNING,
        symptom=symptoms.no_signal,
        cause="in nearly every group all rollouts have the same reward: the prompts are too hard or too easy",
        remedy=remedies.all_of(remedies.filter_groups, remedies.more_rollouts),
        advice="prompts of another difficulty help more than either change",
    ),
    FindingRule(
        name="empty responses",
        severity=Severity.WARNING,
        symptom=symptoms.empty_responses,
        cause="the reward punishes length or errors more than an empty response",
        remedy=remedies.hold_to_reference,
        advice="`megarl samples RUN` shows them; give an empty response the lowest score",
    ),
    FindingRule(
        name="responses are cut",
        severity=Severity.WARNING,
        symptom=symptoms.cut_responses,
        cause="responses need more tokens than the limit, or repeat themselves because the reward favours length",
        remedy=remedies.all_of(remedies.longer_responses, remedies.penalize_overlong),
        advice="`megarl samples RUN` shows which: the first change is for long answers, the second for repetitive ones",
    ),
    FindingRule(
        name="responses repeat themselves",
        severity=Severity.WARNING,
        symptom=symptoms.repetition,
        cause="the reward favours length, or the policy has degenerated and repeats itself until it is cut",
        remedy=remedies.all_of(remedies.hold_to_reference, remedies.penalize_overlong),
        advice="`megarl samples RUN` shows them; resume from an earlier checkpoint",
    ),
    FindingRule(
        name="entropy collapsed",
        severity=Severity.WARNING,
        symptom=symptoms.entropy_collapsed,
        cause="the policy repeats one kind of answer and no longer explores others",
        remedy=remedies.reward_entropy,
        advice="resume from an earlier checkpoint",
    ),
    FindingRule(
        name="slow rollout",
        severity=Severity.WARNING,
        symptom=symptoms.slow_rollout,
        cause="too few engines for the tokens of a step, or a few long responses that hold up every step",
        remedy=remedies.more_engines,
        advice="`megarl plan RECIPE --what-if KEY=VALUE` estimates the effect of a change",
    ),
)
