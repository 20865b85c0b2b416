"""Rules of what goes wrong with runs, each with symptom, cause and remedies, and their application to one run.

A remedy returns the changes of the run's recipe, as values which that recipe accepts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from megarl.config.algorithm import KlRewardConfig, PpoLossConfig
from megarl.errors import DataError
from megarl.observe.event_file import EVENTS_FILE, read_events
from megarl.tools.doctor import symptoms
from megarl.tools.doctor.symptoms import RunHistory, read_run_history


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeChange:
    """One key of a recipe, as `--set KEY=VALUE` takes it."""

    key: str
    value: str
    """YAML, in one line."""

    def __str__(self) -> str:
        return f"{self.key}: {self.value}"


Remedy = Callable[[RunHistory], Sequence[RecipeChange]]

_CLIP_HIGHER = 0.28


def halve_learning_rate(run: RunHistory) -> Sequence[RecipeChange]:
    return (_change("train.optimizer.learning_rate", run.recipe.train.optimizer.learning_rate / 2),)


def tighten_gradient_clip(run: RunHistory) -> Sequence[RecipeChange]:
    return (_change("train.optimizer.clip_grad_norm", run.recipe.train.optimizer.clip_grad_norm / 2),)


def warm_up(run: RunHistory) -> Sequence[RecipeChange]:
    if run.recipe.train.optimizer.warmup_steps:
        return ()
    return (_change("train.optimizer.warmup_steps", max(1, min(10, run.recipe.run.total_steps // 10))),)


def hold_to_reference(run: RunHistory) -> Sequence[RecipeChange]:
    """Add a KL term, or take five times the coefficient of the one that is there."""
    algorithm = run.recipe.algorithm
    match algorithm.kl:
        case None if not algorithm.needs.has_engines:
            return ()
        case None:
            has_reference = run.recipe.roles.reference is not None
            reference = () if has_reference else (_change("roles.reference", "{}"),)
            return (*reference, _change("algorithm.kl", "{kind: loss, coef: 0.001}"))
        case KlRewardConfig(adaptive=adaptive) if adaptive is not None:
            return (_change("algorithm.kl.adaptive.target", adaptive.target / 2),)
        case kl:
            return (_change("algorithm.kl.coef", kl.coef * 5),)


def keep_best(run: RunHistory) -> Sequence[RecipeChange]:
    evaluation = run.recipe.evaluation
    if run.recipe.checkpoint.keep_best is not None or evaluation is None or evaluation.every_steps is None:
        return ()
    return (_change("checkpoint.keep_best", "{metric: accuracy}"),)


def more_rollouts(run: RunHistory) -> Sequence[RecipeChange]:
    return (_change("sampling.rollouts_per_prompt", 2 * run.recipe.sampling.rollouts_per_prompt),)


def filter_groups(run: RunHistory) -> Sequence[RecipeChange]:
    algorithm = run.recipe.algorithm
    if not algorithm.needs.has_engines or algorithm.filter is not None:
        return ()
    return (_change("algorithm.filter", "{}"),)


def longer_responses(run: RunHistory) -> Sequence[RecipeChange]:
    recipe = run.recipe
    limit = 2 * recipe.sampling.max_response_tokens
    changes = [_change("sampling.max_response_tokens", limit)]
    needed = recipe.data.max_prompt_tokens + limit
    if (tokens := recipe.train.tokens_per_micro_batch) is not None and tokens < needed:
        changes.append(_change("train.tokens_per_micro_batch", needed))
    return changes


def penalize_overlong(run: RunHistory) -> Sequence[RecipeChange]:
    algorithm = run.recipe.algorithm
    if not algorithm.needs.has_engines or algorithm.overlong is not None:
        return ()
    buffer_tokens = max(1, run.recipe.sampling.max_response_tokens // 4)
    return (_change("algorithm.overlong", f"{{buffer_tokens: {buffer_tokens}}}"),)


def reward_entropy(run: RunHistory) -> Sequence[RecipeChange]:
    algorithm = run.recipe.algorithm
    if not algorithm.needs.has_engines:
        return ()
    changes = [_change("algorithm.entropy_coef", max(0.001, 2 * algorithm.entropy_coef))]
    if isinstance(algorithm.loss, PpoLossConfig) and algorithm.loss.clip_high < _CLIP_HIGHER:
        changes.append(_change("algorithm.loss", f"{{kind: ppo, clip_high: {_CLIP_HIGHER}}}"))
    return changes


def correct_mismatch(run: RunHistory) -> Sequence[RecipeChange]:
    algorithm = run.recipe.algorithm
    changes = []
    if algorithm.needs.has_engines and algorithm.correction is None:
        changes.append(_change("algorithm.correction", "{kind: tis}"))
    rollout = run.recipe.roles.rollout
    if rollout is not None and not rollout.is_deterministic_on(run.recipe.run.device):
        changes.append(_change("roles.rollout.is_deterministic", "true"))
    return changes


def lower_right_from(run: RunHistory) -> Sequence[RecipeChange]:
    """Lower the limit to the best score of training, where that is below it."""
    evaluation = run.recipe.evaluation
    best = max(item.rollouts.reward_max for item in run.history.summaries if item.rollouts is not None)
    if evaluation is None or best >= evaluation.right_from:
        return ()
    return (_change("evaluation.right_from", best),)


def longer_evaluation(run: RunHistory) -> Sequence[RecipeChange]:
    recipe = run.recipe
    if recipe.evaluation is None or recipe.evaluation_response_tokens >= recipe.sampling.max_response_tokens:
        return ()
    return (_change("evaluation.max_response_tokens", recipe.sampling.max_response_tokens),)


def less_for_engines(run: RunHistory) -> Sequence[RecipeChange]:
    rollout = run.recipe.roles.rollout
    if rollout is None:
        return ()
    less = _change("roles.rollout.memory_fraction", round(max(0.3, rollout.memory_fraction - 0.1), 2))
    if rollout.max_running_requests is None:
        # Fewer are derived from the smaller cache.
        return (less,)
    return less, _change("roles.rollout.max_running_requests", max(1, rollout.max_running_requests // 2))


def less_per_micro_batch(run: RunHistory) -> Sequence[RecipeChange]:
    """Halve the tokens of a micro-batch down to the longest sequence; where that is reached, recompute activations."""
    recipe = run.recipe
    tokens, longest = recipe.train.tokens_per_micro_batch, recipe.max_context_tokens
    if tokens is None or tokens > longest:
        tokens = longest if tokens is None else max(longest, tokens // 2)
        return (_change("train.tokens_per_micro_batch", tokens),)
    if "recompute_granularity" in recipe.roles.actor.megatron:
        return ()
    return (
        _change(
            "roles.actor.megatron",
            "{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}",
        ),
    )


def more_engines(run: RunHistory) -> Sequence[RecipeChange]:
    recipe = run.recipe
    rollout = recipe.roles.rollout
    if rollout is None or rollout.pool is None or list(recipe.roles.used_pools.values()).count(rollout.pool) > 1:
        return ()
    pool = recipe.pools[rollout.pool]
    if pool.nodes > 1:
        return (_change(f"pools.{rollout.pool}.nodes", 2 * pool.nodes),)
    return (_change(f"pools.{rollout.pool}.gpus_per_node", 2 * pool.gpus_per_node),)


def longer_deadline(run: RunHistory) -> Sequence[RecipeChange]:
    """Double the deadline that the failure names, which may be derived."""
    passed = re.search(r"within ([\d.]+) s \(train\.operation_timeout_s\)", run.failure)
    deadline_s = run.recipe.train.deadline_s if passed is None else float(passed[1])
    return (_change("train.operation_timeout_s", 2 * deadline_s),)


def keep_fewer(run: RunHistory) -> Sequence[RecipeChange]:
    return (_change("checkpoint.keep_last", 1),) if run.recipe.checkpoint.keep_last > 1 else ()


def _change(key: str, value: str | float) -> RecipeChange:
    return RecipeChange(key=key, value=value if isinstance(value, str) else f"{value:.6g}")


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
    remedies: tuple[Remedy, ...]
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
            changes=tuple(change for remedy in rule.remedies for change in remedy(run)),
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
        remedies=(halve_learning_rate, tighten_gradient_clip),
        advice="read the rollouts of that step (`megarl view RUN`); from step 1 on: `megarl diagnose mismatch RECIPE`",
    ),
    FindingRule(
        name="out of memory in training",
        severity=Severity.ERROR,
        symptom=symptoms.training_out_of_memory,
        cause="the activations of a micro-batch, or the optimizer and the weights, do not fit",
        remedies=(less_per_micro_batch,),
        advice="`megarl plan RECIPE` shows what fills the device",
    ),
    FindingRule(
        name="out of memory in rollout",
        severity=Severity.ERROR,
        symptom=symptoms.rollout_out_of_memory,
        cause="the KV cache leaves too little for weights, graphs or another role of the same pool",
        remedies=(less_for_engines,),
        advice="read RUN/engines/*.log; `megarl plan RECIPE` shows what fills the device",
    ),
    FindingRule(
        name="nodes do not talk",
        severity=Severity.ERROR,
        symptom=symptoms.nodes_not_talking,
        cause="a process died or hangs, a firewall closes ports, or the nodes use the wrong network interface",
        remedies=(longer_deadline,),
        advice="`megarl doctor RECIPE --ray-address ADDRESS` tries every node and an all-reduce in every pool; "
        "the longer deadline helps only where the work itself is slow",
    ),
    FindingRule(
        name="engines end again and again",
        severity=Severity.ERROR,
        symptom=symptoms.restart_loop,
        cause="a node, a driver or an option makes engines fail until no restarts are left",
        remedies=(),
        advice="read RUN/engines/*.log; `megarl fleet RUN` shows the engines, `megarl doctor RECIPE` their machines",
    ),
    FindingRule(
        name="went silent",
        severity=Severity.ERROR,
        symptom=symptoms.went_silent,
        cause="the run was killed from outside (by the kernel for lack of memory, or by a scheduler), or it hangs",
        remedies=(),
        advice="read the end of RUN/megarl.log and the kernel's log; `megarl train RECIPE` resumes the run",
    ),
    FindingRule(
        name="checkpoints fail",
        severity=Severity.ERROR,
        symptom=symptoms.saves_failed,
        cause="the disk is full, or not writable from every node",
        remedies=(keep_fewer,),
        advice="`megarl checkpoint prune RUN` makes room; `megarl doctor RECIPE` shows how much a save needs",
    ),
    FindingRule(
        name="never rewarded",
        severity=Severity.ERROR,
        symptom=symptoms.never_rewarded,
        cause="the model cannot do the task yet, or the reward does not recognise right answers",
        remedies=(),
        advice="`megarl samples RUN --wrong` shows both. Start from a model that gets some right: a larger one, or "
        "one trained with `algorithm.kind: sft` on demonstrations; more rollouts and a filter do not help",
    ),
    FindingRule(
        name="all rewards equal",
        severity=Severity.ERROR,
        symptom=symptoms.equal_rewards,
        cause="the reward is broken or gives everything the same score, or the prompts are far too hard or too easy",
        remedies=(more_rollouts, filter_groups),
        advice="`megarl samples RUN --wrong` shows wrong answers and the expected ones",
    ),
    FindingRule(
        name="validation always 0",
        severity=Severity.ERROR,
        symptom=symptoms.eval_always_zero,
        cause="right answers score below evaluation.right_from, or responses are cut before the answer",
        remedies=(lower_right_from, longer_evaluation),
        advice="`megarl samples RUN --wrong` shows the answers and their scores",
    ),
    FindingRule(
        name="reward up, validation down",
        severity=Severity.WARNING,
        symptom=symptoms.reward_up_eval_down,
        cause="the policy exploits a flaw of the reward, or memorises the training prompts",
        remedies=(hold_to_reference, keep_best),
        advice="`megarl samples RUN --wrong` shows what the policy does; then correct the reward",
    ),
    FindingRule(
        name="KL explodes",
        severity=Severity.WARNING,
        symptom=symptoms.kl_exploding,
        cause="updates are too large: the policy moves far from the one it was sampled from, or from its reference",
        remedies=(halve_learning_rate, hold_to_reference),
        advice="resume from an earlier checkpoint: `megarl train RECIPE --resume PATH`",
    ),
    FindingRule(
        name="loss oscillates",
        severity=Severity.WARNING,
        symptom=symptoms.loss_oscillating,
        cause="the learning rate is too high for this batch size",
        remedies=(halve_learning_rate, warm_up),
        advice="a larger train.prompts_per_step helps too",
    ),
    FindingRule(
        name="gradient rises with mismatch",
        severity=Severity.WARNING,
        symptom=symptoms.gradient_rises_with_mismatch,
        cause="trainer and engine drift apart: the policy learns from tokens that it would not have generated",
        remedies=(correct_mismatch,),
        advice="`megarl diagnose mismatch RECIPE --checkpoint PATH` names the first module that differs",
    ),
    FindingRule(
        name="groups teach nothing",
        severity=Severity.WARNING,
        symptom=symptoms.no_signal,
        cause="in nearly every group all rollouts have the same reward: the prompts are too hard or too easy",
        remedies=(filter_groups, more_rollouts),
        advice="prompts of another difficulty help more than either change",
    ),
    FindingRule(
        name="empty responses",
        severity=Severity.WARNING,
        symptom=symptoms.empty_responses,
        cause="the reward punishes length or errors more than an empty response",
        remedies=(hold_to_reference,),
        advice="`megarl samples RUN` shows them; give an empty response the lowest score",
    ),
    FindingRule(
        name="responses are cut",
        severity=Severity.WARNING,
        symptom=symptoms.cut_responses,
        cause="responses need more tokens than the limit, or repeat themselves because the reward favours length",
        remedies=(longer_responses, penalize_overlong),
        advice="`megarl samples RUN` shows which: the first change is for long answers, the second for repetitive ones",
    ),
    FindingRule(
        name="responses repeat themselves",
        severity=Severity.WARNING,
        symptom=symptoms.repetition,
        cause="the reward favours length, or the policy has degenerated and repeats itself until it is cut",
        remedies=(hold_to_reference, penalize_overlong),
        advice="`megarl samples RUN` shows them; resume from an earlier checkpoint",
    ),
    FindingRule(
        name="entropy collapsed",
        severity=Severity.WARNING,
        symptom=symptoms.entropy_collapsed,
        cause="the policy repeats one kind of answer and no longer explores others",
        remedies=(reward_entropy,),
        advice="resume from an earlier checkpoint",
    ),
    FindingRule(
        name="slow rollout",
        severity=Severity.WARNING,
        symptom=symptoms.slow_rollout,
        cause="too few engines for the tokens of a step, or a few long responses that hold up every step",
        remedies=(more_engines,),
        advice="`megarl plan RECIPE --what-if KEY=VALUE` estimates the effect of a change",
    ),
)
