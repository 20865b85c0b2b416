"""`megarl plan`: what a recipe will need, as tables of at most a hundred columns or as JSON."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from megarl.cli.lines import make_console
from megarl.cli.recipe import Overrides, RecipePath, ShapeName
from megarl.config.checks.recipe import advise
from megarl.config.roles import RolesConfig
from megarl.errors import ConfigError
from megarl.observe.progress import HOUR_S, describe_cost
from megarl.planner.deployment import Placement, PublishWay, RankPlace, engine_requests
from megarl.planner.fit import PlanAnswer, PlanQuestion, Proposal, RunPlan, answer, replay_run
from megarl.planner.hardware import parse_gpu
from megarl.planner.ledger import MemoryLedger, saves
from megarl.planner.replay import GENERATE, PARTS, RecordedRun, Replay, read_run
from megarl.planner.sharing import prompt_obstacle, sharing_obstacle
from megarl.planner.timing import PhaseName, PhaseTime, Timing
from megarl.weights.layouts.megatron import padded_vocab

_MAX_NODES = 12
_WAYS = {
    PublishWay.MEMORY: "engines read all weights from the trainers' memory on their node (CUDA IPC)",
    PublishWay.NCCL: "between nodes: rounds on one NCCL communicator; within a node: CUDA IPC",
    PublishWay.HOST: "between nodes: gloo through host memory; within a node: in place",
}
WIDTH = 100
_WORTHWHILE = 0.98
"""A change that saves less than two percent of a step is not named."""


def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Instead of the recipe's cluster.gpu; with other figures as in h100,memory_gib=94,network_gb_per_s=25."
        ),
    ] = None,
    shape: ShapeName = None,
    what_if: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Compare with this change. May be repeated.")
    ] = None,
    mean_response_tokens: Annotated[int | None, typer.Option(min=1, help="Half the limit if not given.")] = None,
    recorded: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="The folder of a run, whose lengths and times are replayed."),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Estimate the memory and the time that a recipe needs; exit with 2 if it does not fit its GPUs. Starts nothing."""
    run = None if recorded is None else read_run(recorded)
    question = PlanQuestion(
        gpu=None if gpu is None else parse_gpu(gpu),
        shape_name=shape,
        mean_response_tokens=mean_response_tokens,
        recorded=None if run is None else run.workload,
        recorded_gpu=None if run is None else run.gpu,
    )
    # A large plan is a million small objects without cycles, which the collector would walk through again and again.
    gc.disable()
    try:
        first = answer(recipe, overrides or [], question)
        changed = answer(recipe, [*(overrides or []), *what_if], question) if what_if else None
    finally:
        gc.enable()
    answers = [first] if changed is None else [first, changed]
    replayed = None if run is None else replay_run(run, shape_name=shape)
    if is_json:
        plans = [as_json(each) for each in answers]
        shown: object = plans if what_if else plans[0]
        print(json.dumps(shown if replayed is None else {"replay": asdict(replayed), "plans": plans}, indent=2))
        raise typer.Exit(_exit_code(first))
    console = make_console(width=WIDTH)
    if run is not None and replayed is not None:
        console.print(replay_tables(run, replayed, answers))
    else:
        console.print(tables(first) if changed is None else comparison(first, changed, what_if or []))
    raise typer.Exit(_exit_code(first))


def _exit_code(answer: PlanAnswer) -> int:
    return 0 if answer.plan.sizes.fits else ConfigError.exit_code


def as_json(answer: PlanAnswer) -> dict[str, object]:
    fits = {"fits": answer.plan.sizes.fits, "proposals": [asdict(proposal) for proposal in answer.proposals]}
    faster = None if answer.faster is None else asdict(answer.faster)
    timing, cost = answer.plan.sizes.timing, {}
    if timing is not None and answer.recipe.run.device == "cuda":
        hours, price = _step_gpu_hours(answer, timing), answer.recipe.cluster.gpu_hour_price
        cost = {"step_gpu_hours": hours, "step_cost": None if price is None else hours * price}
    return {"run": answer.recipe.run.name, **fits, "faster": faster, **cost, **asdict(answer.plan)}


def tables(answer: PlanAnswer) -> Group:
    plan = answer.plan
    parts: list[RenderableType] = [_title(answer), "", _placement_table(plan.placement), ""]
    for where in dict.fromkeys(ledger.where for ledger in plan.sizes.ledgers):
        parts += [_memory_table(where, [ledger for ledger in plan.sizes.ledgers if ledger.where == where])]
    parts += [*fit_lines(answer), ""]
    if plan.sizes.hosts:
        parts += [_host_table(plan), ""]
    if plan.reshard is not None:
        parts += [_reshard_table(plan), ""]
    if plan.sizes.timing is not None:
        parts += [_time_table(plan.sizes.timing), *_time_notes(answer)]
    parts += _padding_notes(answer)
    parts += [f"warning: {warning}" for warning in advise(answer.recipe, plan.shapes.policy)]
    return Group(*parts)


def _title(answer: PlanAnswer) -> str:
    plan = answer.plan
    device = "cpu" if answer.recipe.run.device == "cpu" else plan.gpu.name
    return (
        f"{answer.recipe.run.name}: {answer.recipe.algorithm.kind}, shape from {plan.shapes.source}, "
        f"{plan.placement.num_gpus} x {device} on {plan.placement.num_nodes} node(s)"
    )


def make_table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="none", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right")
    return table


def _placement_table(placement: Placement) -> Table:
    """Return a line per node with the ranks of each role and the parts of the model that they hold."""
    roles = list(placement.models)
    table = make_table(
        f"Placement; ranks: {' x '.join(_axes(placement))}",
        "node",
        "GPUs",
        *(f"{role} ranks" for role in roles),
        "engines",
        left=3 + len(roles),
    )
    # On one machine all pools are on the same node: it belongs to the first.
    pool_of = {place.node: place.pool for place in reversed(placement.places)}
    pools = list(dict.fromkeys(place.pool for place in placement.places if pool_of[place.node] == place.pool))
    for pool in pools:
        nodes = list(dict.fromkeys(place.node for place in placement.places if pool_of[place.node] == pool))
        for node in _shown(nodes, max_nodes=max(3, _MAX_NODES // len(pools))):
            if node.startswith("..."):
                table.add_row(node)
                continue
            ranks = [[rank for rank in placement.models[role].ranks if rank.place.node == node] for role in roles]
            table.add_row(
                node,
                _span(place.gpu for place in placement.places if place.node == node),
                *(_coordinates(node_ranks, _axes(placement)) for node_ranks in ranks),
                _span(rank.engine for rank in placement.engine_ranks if rank.place.node == node),
            )
    return table


def _shown(nodes: Sequence[str], *, max_nodes: int) -> list[str]:
    """Return at most `max_nodes` lines; one of them counts the nodes that are left out."""
    if len(nodes) <= max_nodes:
        return [*nodes]
    first = nodes[: max_nodes - 2]
    return [*first, f"... {len(nodes) - len(first) - 1} more", nodes[-1]]


def _axes(placement: Placement) -> tuple[str, ...]:
    """Return the coordinates to show: the context only where a model is divided by it."""
    is_divided = any(model.parallel.context > 1 for model in placement.models.values())
    return ("tensor", "context", "data", "pipeline") if is_divided else ("tensor", "data", "pipeline")


def _coordinates(ranks: Sequence[RankPlace], axes: Sequence[str]) -> str:
    parts = [_span(getattr(rank, axis) for rank in ranks) for axis in axes]
    return f"{_span(rank.rank for rank in ranks)}: {' x '.join(parts)}" if ranks else ""


def _memory_table(where: str, ledgers: Sequence[MemoryLedger]) -> Table:
    """Return the table of one kind of GPU, with a column per phase."""
    title = f"Memory of the fullest GPU, GiB: {where}"
    table = make_table(title, "", *(ledger.phase for ledger in ledgers))
    names = list(dict.fromkeys(item.name for ledger in ledgers for item in ledger.items))
    estimated = {item.name for ledger in ledgers for item in ledger.items if not item.is_exact}
    for name in names:
        sums = [sum(item.num_bytes for item in ledger.items if item.name == name) for ledger in ledgers]
        label = f"{name} (about)" if name in estimated else name
        table.add_row(label, *(_gib(number) if number else "" for number in sums))
    table.add_section()
    table.add_row("total", *(_gib(ledger.total_bytes) for ledger in ledgers))
    if any(ledger.margin_bytes is not None for ledger in ledgers):
        table.add_row("margin", *(_gib(ledger.margin_bytes or 0) for ledger in ledgers), style="bold")
    return table


def _host_table(plan: RunPlan) -> Table:
    hosts = plan.sizes.hosts
    table = make_table("Host memory of the fullest node, GiB", "", *(host.where for host in hosts))
    names = list(dict.fromkeys(item.name for host in hosts for item in host.items))
    for name in names:
        sums = [sum(item.num_bytes for item in host.items if item.name == name) for host in hosts]
        table.add_row(name, *(_gib(number) if number else "" for number in sums))
    table.add_section()
    table.add_row("total", *(_gib(host.total_bytes) for host in hosts))
    return table


def fit_lines(answer: PlanAnswer) -> list[str]:
    sizes = answer.plan.sizes
    worst = sizes.worst
    if worst is None or worst.margin_bytes is None:
        return ["this is the host memory of one process; a CPU run has no limit to compare it with"]
    if sizes.fits:
        fits = f"fits: at least {_gib(worst.margin_bytes)} GiB are left ({worst.where}, {worst.phase})"
        return [fits, *_faster_lines(answer)]
    lines = [f"does not fit: {sizes.excess}"]
    for proposal in answer.proposals:
        lines += _proposal_lines(proposal)
    if not answer.proposals:
        lines.append("  no change of one or two keys makes it fit; it needs more GPUs or a smaller model")
    return lines


def _faster_lines(answer: PlanAnswer) -> list[str]:
    """Return a proposal to recompute less, which changes no number."""
    faster, timing = answer.faster, answer.plan.sizes.timing
    if faster is None or timing is None or faster.step_s > _WORTHWHILE * timing.step_s:
        return []
    outcome = f"step about {_seconds(faster.step_s)}, {_gib(faster.training_margin_bytes)} GiB left in training"
    return [f"memory is left to recompute less: {outcome}", *(f"  --set {each}" for each in faster.assignments)]


def _proposal_lines(proposal: Proposal) -> list[str]:
    changes = [f"--set {assignment}" for assignment in proposal.assignments]
    outcome = (
        f"{_gib(proposal.margin_bytes)} GiB left, {proposal.num_gpus} GPUs, step about {_seconds(proposal.step_s)}"
    )
    line = f"  fits with {' '.join(changes)}: {outcome}"
    return [line] if len(line) <= WIDTH else [f"  fits with these: {outcome}", *(f"    {change}" for change in changes)]


def _reshard_table(plan: RunPlan) -> Table:
    reshard = plan.reshard
    assert reshard is not None
    table = make_table("Publishing one version", "", "GB", "seconds")
    for link, num_bytes in reshard.bytes_by_link.items():
        table.add_row(f"over {link}", _gb(num_bytes), "")
    table.add_row("total", _gb(reshard.total_bytes), "")
    table.add_row("total, if full models were gathered", _gb(reshard.gathered_bytes), "")
    table.add_row("buckets in each engine rank, at most", _gb(reshard.staging_bytes), "")
    if reshard.communicator_bytes:
        table.add_row("communicator in each trainer and engine rank, about", _gb(reshard.communicator_bytes), "")
    if reshard.host_bytes:
        table.add_row("pinned host memory of each rank", _gb(reshard.host_bytes), "")
    for link, num_bytes in reshard.busiest_bytes.items():
        if num_bytes:
            table.add_row(f"busiest GPU, over {link}", _gb(num_bytes), "")
    if plan.sizes.timing is not None:
        table.add_row("estimate from the rates of the links", "", f"{reshard.seconds:.2f}")
        table.add_row("lower bound of any plan", "", f"{reshard.floor_s:.2f}")
    table.add_row(
        f"about {reshard.num_messages:,} buckets, {reshard.num_rounds:,} rounds; hops: {reshard.num_hops}", "", ""
    )
    table.add_row(_WAYS[reshard.way], "", "")
    table.add_row(f"plan {reshard.hash}", "", "")
    return table


def _time_table(timing: Timing) -> Table:
    table = make_table("Time of a step", "phase", "seconds", "share")
    for phase in timing.phases:
        share = f"{phase.seconds / timing.step_s:.0%}" if phase.is_waited_for else "in parallel"
        table.add_row(phase.name, f"{phase.seconds:.1f}", share)
    table.add_section()
    table.add_row("step", f"{timing.step_s:.1f}", "")
    return table


def _padding_notes(answer: PlanAnswer) -> list[str]:
    """Return a note per vocabulary that is padded to be divisible."""
    vocab = answer.plan.shapes.policy.vocab
    sizes = sorted({split.tensor for split in answer.recipe.roles.megatron_roles.values()})
    return [
        f"the vocabulary of {vocab:,} is padded to {padded_vocab(vocab, tensor):,} rows for tensor {tensor}"
        for tensor in sizes
        if padded_vocab(vocab, tensor) > vocab
    ]


def _time_notes(answer: PlanAnswer) -> list[str]:
    plan = answer.plan
    timing = plan.sizes.timing
    gpu = plan.gpu
    workload = plan.workload
    assert timing is not None
    notes = [
        f"assumes a mean prompt of {workload.mean_prompt_tokens:,} and a mean response of "
        f"{workload.mean_response_tokens:,} tokens: {timing.trained_tokens:,} tokens a step",
        f"{gpu.name}: {gpu.tflops:g} TFLOP/s, {gpu.memory_gb_per_s:g} GB/s memory, "
        f"{gpu.node_gb_per_s:g} GB/s in a node, {gpu.network_gb_per_s:g} GB/s network",
        f"{timing.num_micro_batches} micro-batches of up to {plan.tokens_per_micro_batch:,} tokens per rank and "
        f"update, a pipeline bubble of {timing.bubble:.0%}, "
        f"{timing.running_requests} requests per engine{_why_so_many(answer)}",
        *_draft_notes(answer.recipe.roles, timing),
        *_sharing_notes(answer, timing),
        *_image_notes(answer, timing),
    ]
    if saves(answer.recipe.checkpoint):
        notes.append(
            f"saving: training waits about {_seconds(timing.copy_s)} for the copy to host memory; "
            f"writing it takes about {_seconds(timing.save_s)}"
        )
    if answer.recipe.run.device == "cuda":
        notes.append(_cost(answer, timing))
    notes += _run_notes(answer)
    advice = _first_change(timing)
    return [*notes, f"change first: {advice}"] if advice else notes


def _draft_notes(roles: RolesConfig, timing: Timing) -> list[str]:
    rollout = roles.rollout
    if rollout is None or rollout.draft is None:
        return []
    note = rollout.draft.note(timing.running_requests, learns_every=roles.draft_learns_every)
    if not rollout.draft.is_started(timing.running_requests):
        return [note]
    return [f"{note}; times are without drafts: only a run shows how many are kept (megarl_tokens_per_pass)"]


def _sharing_notes(answer: PlanAnswer, timing: Timing) -> list[str]:
    """Return what shared prefixes save, or why rows stay apart."""
    plan, recipe = answer.plan, answer.recipe
    split, shape = recipe.roles.actor, plan.shapes.policy
    apart = prompt_obstacle(recipe, split, shape)
    as_far = " where the engine chose the same experts in all of them" if recipe.replays_routing(shape) else ""
    notes = []
    if apart is None:
        notes.append(
            f"shared prefixes: the actor computes {timing.computed_tokens:,} of these tokens, prompts of a group once"
            f"{as_far}; saves {_seconds(timing.shared_s)} of passes"
        )
    elif recipe.samples_per_prompt > 1 or recipe.environment is not None:
        notes.append(f"shared prefixes: the actor computes each prompt for every row: {apart}")
    if recipe.environment is not None and sharing_obstacle(recipe.train, split, shape) is None:
        notes.append("histories of episodes are computed once as well, which is not counted here")
    if plan.tokens_per_tree is not None:
        notes.append(f"rows with a common beginning may fill a micro-batch up to {plan.tokens_per_tree:,} tokens")
    return notes


def _image_notes(answer: PlanAnswer, timing: Timing) -> list[str]:
    tower, data = answer.plan.tower, answer.recipe.data
    if tower is None:
        return []
    limit = "data.max_prompt_tokens" if data.max_image_pixels is None else "data.max_image_pixels"
    return [
        f"images: assumes one of {tower.mean_tokens:,} tokens in each prompt, and none of more than "
        f"{tower.most_tokens:,} ({limit}); towers take {_seconds(timing.images_s)} of the step"
    ]


def _cost(answer: PlanAnswer, timing: Timing) -> str:
    """Return the GPU hours of a step and of all steps, with money where the recipe has a price."""
    price, steps, step = answer.recipe.cluster.gpu_hour_price, answer.recipe.run.steps, _step_gpu_hours(answer, timing)
    beginning = f"cost: {describe_cost(step, price)} a step"
    if steps is None:
        return beginning
    return f"{beginning}; {steps} steps: {timing.step_s * steps / 86400:.1f} days, {describe_cost(step * steps, price)}"


def _step_gpu_hours(answer: PlanAnswer, timing: Timing) -> float:
    return timing.step_s * answer.plan.placement.num_gpus / HOUR_S


def _run_notes(answer: PlanAnswer) -> list[str]:
    """Return the time outside of steps, and the limits that follow from the plan."""
    outside, limits, recipe = answer.plan.sizes.run_time, answer.plan.sizes.limits, answer.recipe
    if outside is None or limits is None:
        return []
    rate = f"{recipe.cluster.file_system_gb_per_s:g} GB/s of the file system"
    notes = [
        f"starting: about {_seconds(outside.start_s)}, and {_seconds(outside.load_s)} to read the models, "
        f"{_seconds(outside.resume_s)} for a checkpoint, at {rate}"
    ]
    if outside.evaluation_s:
        meanwhile = ", beside training" if outside.is_evaluated_beside else ""
        what = f"an evaluation of {outside.evaluated_prompts} prompts"
        notes.append(f"{what} takes about {_seconds(outside.evaluation_s)}{meanwhile}")
    if outside.total_s is not None:
        notes.append(f"with its start and evaluations the run takes about {outside.total_s / HOUR_S:,.1f} h")
    every = recipe.checkpoint.save_every_steps
    if saves(recipe.checkpoint) and every is not None:
        steps = f"hourly, about every {limits.steps_per_hour} step(s)" if every == "hourly" else f"every {every} steps"
        notes.append(f"saves {steps}; {limits.grace_s:g} s to save after a signal")
    notes.append(
        f"a call to ranks may take {limits.operation_timeout_s:g} s; the longest takes about "
        f"{_seconds(limits.longest_call_s)} once responses are long"
    )
    return notes


def _why_so_many(answer: PlanAnswer) -> str:
    rollout, engine = answer.recipe.roles.rollout, answer.plan.sizes.engine
    return "" if rollout is None else f" ({engine_requests(answer.recipe, rollout, engine).limit})"


def _first_change(timing: Timing) -> str | None:
    """Return what to change first, where one phase takes half of the step or more."""
    longest = max(
        (phase for phase in timing.phases if phase.is_waited_for), key=lambda phase: phase.seconds, default=None
    )
    if longest is None or longest.seconds < 0.5 * timing.step_s:
        return None
    return f"{longest.name}: {_lever(longest, timing)}"


def _lever(phase: PhaseTime, timing: Timing) -> str:
    match phase.name:
        case PhaseName.ROLLOUT:
            return "more engines (a larger rollout pool)"
        case PhaseName.UPDATE if timing.bubble > 0.1:
            return "the pipeline bubble; raise virtual_pipeline, lower pipeline, or make more micro-batches"
        case PhaseName.OLD | PhaseName.UPDATE:
            return "more GPUs for the actor"
        case PhaseName.VALUES | PhaseName.CRITIC_UPDATE:
            return "more GPUs for the critic"
        case PhaseName.DRAFT_UPDATE:
            return "more GPUs for the drafter, or more steps from one of its updates to the next"
        case PhaseName.REFERENCE:
            return "a pool for the reference, or more GPUs in it"
        case PhaseName.TEACHER:
            return "more GPUs for the teacher"
        case PhaseName.PUBLISH:
            return "engines nearer to the trainer"
        case PhaseName.SWITCH:
            return "less `offload`, or pools of their own"


def comparison(first: PlanAnswer, second: PlanAnswer, changes: list[str]) -> Table:
    table = make_table(first.recipe.run.name, "", "as it is", "\n".join(changes))

    def row(label: str, *values: str) -> None:
        table.add_row(label, *values)

    plans = [first.plan, second.plan]
    row("GPUs", *(str(plan.placement.num_gpus) for plan in plans))
    row("fits", *("yes" if plan.sizes.fits else "no" for plan in plans))
    row("smallest margin, GiB", *(_worst_margin(plan) for plan in plans))
    row("publish, GB", *(_gb(plan.reshard.total_bytes) if plan.reshard else "" for plan in plans))
    timings = [plan.sizes.timing for plan in plans]
    for name in PhaseName:
        if any(timing is not None and timing.seconds(name) for timing in timings):
            row(f"{name}, s", *(f"{timing.seconds(name):.1f}" if timing else "" for timing in timings))
    row("step, s", *(f"{timing.step_s:.1f}" if timing else "" for timing in timings))
    row("pipeline bubble", *(f"{timing.bubble:.0%}" if timing else "" for timing in timings))
    return table


def _worst_margin(plan: RunPlan) -> str:
    worst = plan.sizes.worst
    return "" if worst is None or worst.margin_bytes is None else _gib(worst.margin_bytes)


def _span(numbers: Iterable[int]) -> str:
    ordered = sorted(set(numbers))
    if not ordered:
        return ""
    return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]}-{ordered[-1]}"


def _gib(num_bytes: int) -> str:
    gib = num_bytes / (1 << 30)
    return f"{gib:.1f}" if abs(gib) >= 0.1 or not num_bytes else f"{gib:.4f}"


def _gb(num_bytes: int) -> str:
    gb = num_bytes / 1e9
    return f"{gb:,.1f}" if gb >= 0.1 or not num_bytes else f"{gb:.5f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


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
    for replayed in answers:
        timing, recipe = replayed.plan.sizes.timing, replayed.recipe
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
