"""A plan as tables of at most a hundred columns, or as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from megarl.config.advice import advise
from megarl.planner.answer import Answer
from megarl.planner.placement import Placement
from megarl.planner.run_plan import RunPlan
from megarl.planner.timing import Timing

_MAX_NODES = 12


def as_json(answer: Answer) -> dict[str, object]:
    fits = {"fits": answer.plan.sizes.fits, "proposals": [asdict(proposal) for proposal in answer.proposals]}
    return {"run": answer.recipe.run.name, **fits, **asdict(answer.plan)}


def tables(answer: Answer) -> Group:
    plan = answer.plan
    parts: list[RenderableType] = [_title(answer), "", _placement_table(plan.placement), "", _memory_table(plan)]
    parts += [*_verdict(answer), ""]
    if plan.reshard is not None:
        parts += [_reshard_table(plan), ""]
    if plan.sizes.timing is not None:
        parts += [_time_table(plan.sizes.timing), *_time_notes(plan)]
    parts += [f"warning: {warning}" for warning in advise(answer.recipe, plan.model.shape)]
    return Group(*parts)


def _title(answer: Answer) -> str:
    plan = answer.plan
    device = "cpu" if answer.recipe.run.device == "cpu" else plan.gpu.name
    return (
        f"{answer.recipe.run.name}: {answer.recipe.algorithm.kind}, shape from {plan.model.source}, "
        f"{plan.placement.num_gpus} x {device} on {plan.placement.num_nodes} node(s)"
    )


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="none", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right")
    return table


def _placement_table(placement: Placement) -> Table:
    table = _table("Placement", "node", "GPUs", "actor ranks", "tensor x data x pipeline", "engines", left=5)
    places = [rank.place for rank in placement.ranks] + [rank.place for rank in placement.engine_ranks]
    nodes = list(dict.fromkeys(place.node for place in places))
    shown = nodes if len(nodes) <= _MAX_NODES else [*nodes[: _MAX_NODES - 2], "...", nodes[-1]]
    for node in shown:
        if node == "...":
            table.add_row(f"... {len(nodes) - _MAX_NODES + 1} more")
            continue
        ranks = [rank for rank in placement.ranks if rank.place.node == node]
        engines = [rank for rank in placement.engine_ranks if rank.place.node == node]
        coordinates = (
            f"{_span(rank.tensor for rank in ranks)} x {_span(rank.data for rank in ranks)} x "
            f"{_span(rank.pipeline for rank in ranks)}"
        )
        table.add_row(
            node,
            _span(place.gpu for place in places if place.node == node),
            _span(rank.rank for rank in ranks),
            coordinates if ranks else "",
            _span(rank.engine for rank in engines),
        )
    return table


def _memory_table(plan: RunPlan) -> Table:
    """One column per GPU kind and phase."""
    ledgers = plan.sizes.ledgers
    table = _table("Memory of the fullest GPU, GiB", "", *(f"{item.where}\n{item.phase}" for item in ledgers))
    names = list(dict.fromkeys(item.name for ledger in ledgers for item in ledger.items))
    estimated = {item.name for ledger in ledgers for item in ledger.items if not item.is_exact}
    for name in names:
        sums = [sum(item.num_bytes for item in ledger.items if item.name == name) for ledger in ledgers]
        label = f"{name} (about)" if name in estimated else name
        table.add_row(label, *(_gib(number) if number else "" for number in sums))
    table.add_section()
    table.add_row("total", *(_gib(ledger.total_bytes) for ledger in ledgers))
    if plan.sizes.worst is not None:
        table.add_row("margin", *(_gib(ledger.margin_bytes or 0) for ledger in ledgers), style="bold")
    return table


def _verdict(answer: Answer) -> list[str]:
    sizes = answer.plan.sizes
    worst = sizes.worst
    if worst is None or worst.margin_bytes is None:
        return ["host memory of one process; no limit is stated for a CPU run"]
    if sizes.fits:
        return [f"fits: at least {_gib(worst.margin_bytes)} GiB are left ({worst.where}, {worst.phase})"]
    if worst.margin_bytes >= 0:
        lines = ["does not fit: roles.rollout.memory_fraction leaves no room for a KV cache beside the weights"]
    else:
        lines = [f"does not fit: {_gib(-worst.margin_bytes)} GiB too much ({worst.where}, {worst.phase})"]
    for proposal in answer.proposals:
        changes = " ".join(f"--set {assignment}" for assignment in proposal.assignments)
        lines.append(
            f"  fits with {changes}: {_gib(proposal.margin_bytes)} GiB left, {proposal.num_gpus} GPUs, "
            f"step about {_seconds(proposal.step_s)}"
        )
    if not answer.proposals:
        lines.append("  no change of one or two keys makes it fit; it needs more GPUs or a smaller model")
    return lines


def _reshard_table(plan: RunPlan) -> Table:
    reshard = plan.reshard
    assert reshard is not None
    table = _table("Publishing one version", "", "GB", "seconds")
    for link, num_bytes in reshard.bytes_by_link.items():
        table.add_row(f"over {link}", _gb(num_bytes), "")
    table.add_row("all of it", _gb(reshard.total_bytes), "")
    table.add_row("by gathering full models", _gb(reshard.gathered_bytes), "")
    table.add_row("staging of an engine rank", _gb(reshard.staging_bytes), "")
    is_cpu = plan.sizes.timing is None
    table.add_row("busiest GPU", _gb(reshard.busiest_bytes), "" if is_cpu else f"{reshard.seconds:.2f}")
    table.add_row("floor of the busiest GPU", _gb(reshard.floor_bytes), "" if is_cpu else f"{reshard.floor_s:.2f}")
    table.add_row(f"messages: about {reshard.num_messages:,}", "", "")
    return table


def _time_table(timing: Timing) -> Table:
    table = _table("Time of a step (roofline)", "phase", "seconds", "share")
    for name, seconds in _phases(timing):
        table.add_row(name, f"{seconds:.1f}", f"{seconds / timing.step_s:.0%}" if timing.step_s else "")
    table.add_section()
    table.add_row("step", f"{timing.step_s:.1f}", "")
    return table


def _phases(timing: Timing) -> list[tuple[str, float]]:
    return [
        ("rollout", timing.rollout_s),
        ("log-probabilities", timing.logprobs_s),
        ("update", timing.update_s),
        ("publish", timing.publish_s),
    ]


def _time_notes(plan: RunPlan) -> list[str]:
    timing, gpu, workload = plan.sizes.timing, plan.gpu, plan.workload
    assert timing is not None
    notes = [
        f"assumes a mean prompt of {workload.mean_prompt_tokens:,} and a mean response of "
        f"{workload.mean_response_tokens:,} tokens: {timing.trained_tokens:,} tokens a step",
        f"{gpu.name}: {gpu.tflops:g} TFLOP/s, {gpu.memory_gb_per_s:g} GB/s memory, "
        f"{gpu.node_gb_per_s:g} GB/s in a node, {gpu.network_gb_per_s:g} GB/s network",
        f"{timing.num_micro_batches} micro-batches per rank and update, {timing.bubble:.0%} of it pipeline bubble; "
        f"{timing.running_requests} requests run per engine",
        f"saving the weights takes about {_seconds(timing.save_s)}",
    ]
    advice = _first_change(timing)
    return [*notes, f"change first: {advice}"] if advice else notes


def _first_change(timing: Timing) -> str | None:
    """The lever on the longest phase."""
    name, seconds = max(_phases(timing), key=lambda phase: phase[1])
    if seconds < 0.5 * timing.step_s:
        return None
    if name == "rollout":
        return "rollout: more engines (a larger rollout pool), or more running requests per engine"
    if name == "update" and timing.bubble > 0.1:
        return "update: the pipeline bubble; raise virtual_pipeline, lower pipeline, or make more micro-batches"
    return f"{name}: more GPUs for the actor" if name != "publish" else "publish: engines nearer to the trainer"


def comparison(first: Answer, second: Answer, changes: list[str]) -> Table:
    table = _table(first.recipe.run.name, "", "as it is", "\n".join(changes))

    def row(label: str, *values: str) -> None:
        table.add_row(label, *values)

    plans = [first.plan, second.plan]
    row("GPUs", *(str(plan.placement.num_gpus) for plan in plans))
    row("fits", *("yes" if plan.sizes.fits else "no" for plan in plans))
    row("smallest margin, GiB", *(_worst_margin(plan) for plan in plans))
    row("publish, GB", *(_gb(plan.reshard.total_bytes) if plan.reshard else "" for plan in plans))
    timings = [plan.sizes.timing for plan in plans]
    for index, label in enumerate(("rollout, s", "log-probabilities, s", "update, s", "publish, s")):
        row(label, *(f"{_phases(timing)[index][1]:.1f}" if timing else "" for timing in timings))
    row("step, s", *(f"{timing.step_s:.1f}" if timing else "" for timing in timings))
    row("pipeline bubble", *(f"{timing.bubble:.0%}" if timing else "" for timing in timings))
    return table


def _worst_margin(plan: RunPlan) -> str:
    worst = plan.sizes.worst
    return "" if worst is None or worst.margin_bytes is None else _gib(worst.margin_bytes)


def _span(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    if not found:
        return ""
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _gib(num_bytes: int) -> str:
    gib = num_bytes / (1 << 30)
    return f"{gib:.1f}" if abs(gib) >= 0.1 or not num_bytes else f"{gib:.4f}"


def _gb(num_bytes: int) -> str:
    gb = num_bytes / 1e9
    return f"{gb:,.1f}" if gb >= 0.1 or not num_bytes else f"{gb:.5f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
