"""`megarl plan --from RUN`: the error of the model on a recorded run, and a recipe by the corrected model."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from megarl.cli.plan import fit_lines, make_table
from megarl.planner.replay import GENERATE, PARTS, RecordedRun, Replay
from megarl.planner.run_plan import PlanAnswer


def replay_tables(run: RecordedRun, replay: Replay, answers: Sequence[PlanAnswer]) -> Group:
    """Return the error on the run first, then the recipe's step by the corrected model, then whether it fits."""
    return Group(
        *_run_lines(run),
        "",
        _error_table(replay),
        *_error_lines(replay),
        "",
        _estimate_table(run, replay, answers),
        *fit_lines(answers[-1]),
    )


def _run_lines(run: RecordedRun) -> list[str]:
    workload = run.workload
    lines = [
        f"{run.folder}: {len(run.steps)} steps up to {run.steps[-1].step}; {run.num_left_out} with a start left out",
        f"mean prompt {workload.mean_prompt_tokens:,} tokens, mean response {workload.mean_response_tokens:,}, "
        f"longest {workload.max_response_tokens:,}; {workload.kept_share or 1:.0%} of the groups kept",
    ]
    if not workload.quantiles:
        lines.append("the run recorded no quantiles of its lengths: they are assumed from mean and maximum")
    return lines


def _error_table(replay: Replay) -> Table:
    table = make_table("The run itself, mean seconds of a step", "", "recorded", "modelled", "factor")
    for name in PARTS:
        part = replay.parts[name]
        if part.recorded_s or part.modelled_s:
            factor = "" if part.factor is None else f"{part.factor:.3g}"
            is_known = name != GENERATE or replay.knows_rollout
            table.add_row(name, f"{part.recorded_s:.2f}" if is_known else "?", f"{part.modelled_s:.2f}", factor)
    return table


def _error_lines(replay: Replay) -> list[str]:
    lines = [f"error of the model on the run: {replay.error:+.0%} without the factors"]
    if replay.num_tested < replay.num_fitted or replay.num_fitted == replay.num_tested == 1:
        lines.append(f"with factors from the same {replay.num_fitted} steps: {replay.corrected_error:.0%} per step")
    else:
        lines.append(
            f"with factors from the first {replay.num_fitted} of these steps, the other {replay.num_tested} are off by "
            f"{replay.corrected_error:.0%} on average"
        )
    if not replay.knows_rollout:
        lines.append("the trainer never waited for rollouts: the time of generating was not recorded, and is modelled")
    return lines


def _estimate_table(run: RecordedRun, replay: Replay, answers: Sequence[PlanAnswer]) -> Table:
    """Return the seconds that the trainer waits for each part: recorded, and by the corrected model."""
    titles = ["this recipe"] if len(answers) == 1 else ["this recipe", "with the change"]
    table = make_table("A step, seconds", "", "recorded", *titles)
    recorded = {name: sum(step.seconds[name] for step in run.steps) / len(run.steps) for name in PARTS}
    columns, tokens = [recorded], [run.workload.sequence_tokens * _num_sequences(run)]
    for answer in answers:
        timing, recipe = answer.plan.sizes.timing, answer.recipe
        assert timing is not None, "a replayed recipe is always timed"
        is_concurrent = recipe.train.max_staleness > 0
        columns.append(replay.corrected(timing, recipe.algorithm, is_concurrent=is_concurrent))
        tokens.append(timing.trained_tokens)
    for name in PARTS:
        if any(column[name] for column in columns):
            table.add_row(name, *(f"{column[name]:.2f}" for column in columns))
    table.add_section()
    table.add_row("step", *(f"{sum(column.values()):.2f}" for column in columns))
    speeds = (count / sum(column.values()) for count, column in zip(tokens, columns, strict=True))
    table.add_row("tokens a second", *(f"{speed:,.0f}" for speed in speeds))
    gpus = (str(answer.plan.placement.num_gpus) for answer in answers)
    table.add_row("devices", str(sum(pool.gpus for pool in run.recipe.pools.values())), *gpus)
    return table


def _num_sequences(run: RecordedRun) -> int:
    return run.recipe.train.prompts_per_step * run.recipe.sampling.rollouts_per_prompt
