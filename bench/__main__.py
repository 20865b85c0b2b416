"""`python -m bench`: the figures of megarl that have a goal, measured on this machine."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from megarl.cli.main import run_app

bench_app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Measure megarl on this machine.",
)


def run(arguments: Sequence[str]) -> int:
    """Run one benchmark and return its exit code."""
    return run_app(bench_app, arguments, prog_name="python -m bench")


@bench_app.command("plan")
def bench_plan(
    repeats: Annotated[int, typer.Option(min=1, help="Processes per command; the median counts.")] = 3,
    is_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON in the last line too.")] = False,
) -> None:
    """Time `validate` and `plan` of 70B on 512 + 256 GPUs, `plan` of DeepSeek-V3, and two large publishes; one core.

    Exit code 1 if a goal is missed by more than a factor of 2.
    """
    from bench.planning import TOLERANCE, measure_planning, print_table

    measurements = measure_planning(repeats=repeats)
    print_table(measurements)
    if is_json:
        print(json.dumps([asdict(measurement) for measurement in measurements]))
    if any(measurement.worst_ratio > TOLERANCE for measurement in measurements):
        raise typer.Exit(1)


@bench_app.command("checkpoint")
def bench_checkpoint(
    folder: Annotated[
        Path, typer.Option(metavar="DIR", exists=True, file_okay=False, help="A folder on the disk to measure.")
    ] = Path(),
    gigabytes: Annotated[float, typer.Option(min=0.1, help="Size of the model.")] = 2.0,
    repeats: Annotated[int, typer.Option(min=1, help="Number of saves; the median counts.")] = 3,
    is_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON in the last line too.")] = False,
) -> None:
    """Time saving against `dd`, verifying, and exporting, with random weights; needs 4 times the model on the disk.

    Exit code 1 if a goal is missed by more than a factor of 2.
    """
    from bench.checkpoint import as_json, measure_checkpoint, print_figures
    from bench.planning import TOLERANCE

    figures = measure_checkpoint(folder, gigabytes=gigabytes, repeats=repeats)
    print_figures(figures)
    if is_json:
        print(as_json(figures))
    if any(figure.miss > TOLERANCE for figure in figures):
        raise typer.Exit(1)


@bench_app.command("algo")
def bench_algo(
    rollouts: Annotated[int, typer.Option(min=16, help="Rollouts of the step, in groups of 16.")] = 8192,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each response.")] = 8192,
    repeats: Annotated[int, typer.Option(min=1, help="Processes per estimator; the fastest counts.")] = 3,
    is_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON in the last line too.")] = False,
) -> None:
    """Measure time and memory of credit assignment and packing of one large step, on two cores.

    Exit code 1 if a goal is missed by more than a factor of 2.
    """
    from bench.algo import measure_steps, print_step_table
    from bench.planning import TOLERANCE

    measurements = measure_steps(num_rollouts=rollouts, num_tokens=tokens, repeats=repeats)
    print_step_table(measurements)
    if is_json:
        print(json.dumps([asdict(measurement) for measurement in measurements]))
    if any(measurement.worst_ratio > TOLERANCE for measurement in measurements):
        raise typer.Exit(1)


@bench_app.command("page")
def bench_page(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run with kept rollouts.", show_default=False)],
    rollouts: Annotated[int, typer.Option(min=1, help="The least number of rollouts to show.")] = 10_000,
) -> None:
    """Time the run page in Chromium. Exit code 1 if the first paint takes more than twice its goal."""
    from bench.page import measure_page
    from bench.planning import TOLERANCE

    goal_s = 1.0
    figures = asyncio.run(measure_page(run, num_rollouts=rollouts))
    print(f"{figures.num_rollouts} rollouts, {figures.num_elements} elements in the list")
    print(f"first paint {figures.first_paint_s:.2f} s (goal {goal_s:.0f} s), first rollouts {figures.list_s:.2f} s")
    print(f"slowest jump through the list {figures.jump_s:.2f} s")
    if figures.first_paint_s > TOLERANCE * goal_s:
        raise typer.Exit(1)


@bench_app.command("exporter")
def bench_exporter(
    repeats: Annotated[int, typer.Option(min=1, help="Number of steps; the median counts.")] = 5,
    is_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON in the last line too.")] = False,
) -> None:
    """Time the metrics of a step, and a scrape with the most series that are possible.

    Exit code 1 if a goal is missed.
    """
    from bench.exporter import as_json, measure_exporter, print_figures

    figures = measure_exporter(repeats=repeats)
    print_figures(figures)
    if is_json:
        print(as_json(figures))
    if any(figure.miss > 1 for figure in figures):
        raise typer.Exit(1)


@bench_app.command("dataplane")
def bench_dataplane(
    requests: Annotated[int, typer.Option(min=16, help="Requests under way at once in the large fleet.")] = 16_000,
    engines: Annotated[int, typer.Option(min=1, help="Engines of the large fleet.")] = 1000,
    prompts: Annotated[
        int, typer.Option(min=1, help="Prompts of the step with rollout workers, 16 rollouts each.")
    ] = 1024,
    is_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON in the last line too.")] = False,
) -> None:
    """Time the tokens of a step outside the engines: asking, reading, checking, decoding, buffering and packing them.

    Engines are replaced by a server that answers at once. Exit code 1 if a goal is missed.
    """
    from bench.dataplane import Load, as_json, measure_dataplane, print_figures
    from bench.packing import measure_packing
    from bench.worker_plane import measure_workers

    load = Load(num_requests=requests, num_engines=engines, num_step_prompts=prompts)
    figures = [*measure_dataplane(load), *measure_workers(load), *measure_packing()]
    print_figures(figures)
    if is_json:
        print(as_json(figures))
    if any(figure.is_missed for figure in figures):
        raise typer.Exit(1)


@bench_app.command("episodes")
def bench_episodes(
    episodes: Annotated[int, typer.Option(min=8, help="Episodes, in groups of 8.")] = 512,
    turns: Annotated[
        int, typer.Option(min=2, max=4, help="Responses of each episode; all but the last call a tool.")
    ] = 4,
    is_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON in the last line too.")] = False,
) -> None:
    """Measure the CPU of a turn: in the driver and in the processes of environments.

    Engines are replaced by a server that answers at once. Exit code 1 if a goal is missed.
    """
    from bench.dataplane import as_json, print_figures
    from bench.episodes import measure_episodes

    figures = measure_episodes(num_episodes=episodes, num_turns=turns)
    print_figures(figures)
    if is_json:
        print(as_json(figures))
    if any(figure.is_missed for figure in figures):
        raise typer.Exit(1)


@bench_app.command("agents")
def bench_agents(
    requests: Annotated[int, typer.Option(min=16, help="Requests in each dialect.")] = 512,
    idle: Annotated[int, typer.Option(min=8, help="Episodes that wait for their tools at once.")] = 10_000,
    is_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON in the last line too.")] = False,
) -> None:
    """Measure the endpoint of agents: CPU of a request and a token, the first streamed token, and idle episodes.

    Engines and agents are replaced by processes that compute nothing. Exit code 1 if a goal is missed.
    """
    from bench.agents import measure_agents
    from bench.dataplane import as_json, print_figures

    figures = measure_agents(num_requests=requests, num_idle=idle)
    print_figures(figures)
    if is_json:
        print(as_json(figures))
    if any(figure.is_missed for figure in figures):
        raise typer.Exit(1)


@bench_app.command("async")
def bench_async(
    steps: Annotated[int, typer.Option(min=2, help="Measured steps of each run; the median counts.")] = 12,
    slow_share: Annotated[
        float, typer.Option(min=0.05, max=1, help="Share of the time in which the slower engine runs.")
    ] = 0.3,
    is_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON in the last line too.")] = False,
) -> None:
    """Time a step with `max_staleness` 0, 1 and 3 and two engines of different speed, on this machine's CPUs.

    Exit code 1 if generating beside training gains nothing.
    """
    from bench.asynchronous import measure_async, print_async_table

    figures = measure_async(steps=steps, stalenesses=(0, 1, 3), slow_share=slow_share)
    print_async_table(figures, slow_share=slow_share)
    if is_json:
        print(json.dumps([asdict(item) for item in figures]))
    if any(item.step_s >= figures[0].step_s for item in figures[1:]):
        raise typer.Exit(1)


@bench_app.command("tail")
def bench_tail(
    recipe: Annotated[Path, typer.Argument(help="Engines, prompts of a step, and limits come from it.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Such as train.prompts_per_step=256.")] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Take the lengths of this run, which has a second epoch.")
    ] = None,
    mean: Annotated[
        float, typer.Option(min=0.01, max=1, help="Mean length of answers, as a share of the limit.")
    ] = 0.25,
    alike: Annotated[float, typer.Option(min=0, max=1, help="Share of the variance that is between prompts.")] = 0.5,
    is_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON in the last line too.")] = False,
) -> None:
    """Simulate how long a step generates in each order of its prompts, and what its last answers cost."""
    from bench.tail import LAST, measure_tail

    figures = measure_tail(recipe, overrides or (), run_folder=run, mean_share=mean, alike=alike)
    print(f"{'prompts are asked':45} {'seconds':>9} {'ratio':>7}   last {LAST:.0%} of the answers")
    for each in figures:
        print(f"{each.order:45} {each.seconds:9.1f} {each.ratio:7.3f}   {each.tail:.0%} of the time")
    if is_json:
        print(json.dumps([asdict(each) for each in figures]))


@bench_app.command("reshard")
def bench_reshard(
    gigabytes: Annotated[float, typer.Option(min=0.05, help="Size of the model in fp32.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Publishes of each kind, alternating; the median counts.")] = 5,
    is_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON in the last line too.")] = False,
) -> None:
    """Time publishing from four trainer ranks to a real engine of two, on the CPU.

    The comparison is with the plan's floor, a scheme that gathers every tensor on every rank, and SGLang's flattened
    buckets. Exit code 1 if a goal is missed.
    """
    from bench.reshard import measure_reshard
    from bench.reshard_report import as_json, print_reshard, verdicts

    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
        report = measure_reshard(
            Path(folder), gigabytes=gigabytes, repeats=repeats, on_news=lambda news: print(news, file=sys.stderr)
        )
    print_reshard(report)
    if is_json:
        print(as_json(report))
    if not all(is_kept for _, is_kept in verdicts(report)):
        raise typer.Exit(1)


@bench_app.command("adapter")
def bench_adapter(
    model: Annotated[str, typer.Option(help="A public Qwen2 model with the size to measure.")] = "qwen2.5-0.5b",
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter.")] = 32,
) -> None:
    """Time publishing an adapter and its whole model to a real engine on the CPU, with and without running requests;
    and requests of four policies beside those of one.

    Exit code 1 if a figure could not be measured.
    """
    from bench.gpu_figures import print_results
    from bench.gpu_pieces import Outcome, PieceOptions, Results, report_adapter, report_policies

    results = Results(machine={"device": "cpu", "model": model})

    def report(outcome: Outcome) -> None:
        print(outcome, file=sys.stderr, flush=True)
        results.add(outcome)

    options = PieceOptions(engine_model=model, engine_options={})
    report_adapter(options, report, device="cpu", rank=rank)
    report_policies(options, report, device="cpu", rank=rank)
    print_results(results)
    if results.failures:
        raise typer.Exit(1)


@bench_app.command("image-families")
def bench_image_families(
    repeats: Annotated[int, typer.Option(min=2, help="Turns of each model; the faster ones count.")] = 60,
) -> None:
    """Compare a run of text with a model that sees images with one of the text model of its shape, in CPU seconds.

    Exit code 1 if an update or rollouts cost more than they may.
    """
    from bench.image_families import GOAL, measure_families

    print(f"two layers of one shape on the CPU; goal: a ratio of at most {GOAL}")
    has_missed = False
    for overhead in measure_families(repeats=repeats):
        print(overhead, flush=True)
        has_missed |= overhead.ratio > GOAL
    if has_missed:
        raise typer.Exit(1)


@bench_app.command("gpu")
def bench_gpu(
    piece: Annotated[
        list[str] | None, typer.Option(help="Measure only this piece; may be repeated. The default is all.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Gets each figure when it is measured.")] = None,
    engine_model: Annotated[str, typer.Option(help="A public Qwen2 model with the size to measure.")] = "qwen2.5-7b",
    engine_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of SGLang; VALUE is JSON or a word.")
    ] = None,
) -> None:
    """Time training, publishing and generating on one GPU, each against ceilings and peers of the same run.

    Exit code 1 if a ratio is more than 15 % below its record, or a figure could not be measured.
    """
    from bench.gpu_figures import print_results
    from bench.gpu_pieces import PIECES, PieceOptions, run_pieces
    from bench.training import need_gpu

    for name in piece or ():
        if name not in PIECES:
            raise typer.BadParameter(f"{name}: no such piece; one of {', '.join(PIECES)}", param_hint="--piece")
    options = PieceOptions(engine_model=engine_model, engine_options=_options(engine_option or []))
    need_gpu()
    results = run_pieces(piece or list(PIECES), options, out=out)
    print_results(results)
    if results.failures or any(figure.has_fallen for figure in results.figures):
        raise typer.Exit(1)


@bench_app.command("gpu-piece", hidden=True)
def bench_gpu_piece(name: str, options: str) -> None:
    """Measure one piece of `python -m bench gpu` in this process."""
    from bench.gpu_pieces import PieceOptions, run_piece

    run_piece(name, PieceOptions(**json.loads(options)))


def _options(words: Sequence[str]) -> dict[str, object]:
    options: dict[str, object] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise typer.BadParameter(f"{word}: write NAME=VALUE", param_hint="--engine-option")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
