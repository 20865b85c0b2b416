"""Commands on the folders of runs: `megarl view`, `report`, `timeline`, `top`, `samples`, `fleet`, `compare`, and their
metrics for Prometheus and Grafana: `metrics`, `dashboards`. Load no torch.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megarl.cli.display import make_display
from megarl.cli.lines import format_number, make_console, progress_lines
from megarl.config.document import leaves
from megarl.config.load import read_recipe
from megarl.config.section import IMAGES_FOLDER
from megarl.data.episode_trace import EpisodeTrace, as_atif, as_json, find_episode
from megarl.data.evaluation_files import Generation, SpokenTurn, list_generations, read_generations
from megarl.data.rollout_files import list_rollouts
from megarl.data.rollout_reading import read_episodes
from megarl.errors import ConfigError, DataError, Problem, writing
from megarl.observe.catalogue import METRICS, Metric
from megarl.observe.endpoint import TARGETS_FILE, Target, read_targets, write_targets
from megarl.observe.event_file import EVENTS_FILE, EventTail, read_events
from megarl.observe.events import RunFinished
from megarl.observe.history import fold_history
from megarl.observe.progress import Progress, advance
from megarl.run_result import Result
from megarl.tools.dashboards import write_monitoring
from megarl.tools.page.timeline import episode_events, fold_spans, idle_events, last_start, start_events, to_trace
from megarl.types import JsonValue, TurnKind

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)]

metrics_app = typer.Typer(no_args_is_help=True, help="List the metrics of runs, and their addresses.")

_MAX_WIDTH = 100
_TOP_PAUSE_S = 0.5


class EpisodeForm(StrEnum):
    TEXT = "text"
    JSON = "json"
    ATIF = "atif"


def view(
    run: RunArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0 picks a free one.")] = 0,
) -> None:
    """Show a run in a browser on this machine. Its curves, timeline and rollouts grow while the run goes on."""
    from megarl.tools.page.web_page import serve

    asyncio.run(serve(run, port=port, on_start=lambda url: print(f"{run} is at {url} (Ctrl-C ends this)", flush=True)))


def report(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="By default report.html in the run's folder."),
    ] = None,
) -> None:
    """Write a run as one HTML file. It is the page of `megarl view`, and needs no server."""
    from megarl.tools.page.run_data import RunFolder
    from megarl.tools.page.web_page import MAX_INLINED, report_page

    path = out or run / "report.html"
    write_text(path, report_page(RunFolder(run)))
    print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB, at most {MAX_INLINED} rollouts)")


def timeline(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="By default timeline.json in the run's folder."),
    ] = None,
) -> None:
    """Write when each role did what, as a Perfetto trace. The run may still go on."""
    path = out or run / "timeline.json"
    num_phases = _write_trace(run, path)
    print(f"wrote {path} ({num_phases} phases); open it in Perfetto")
    pieces = last_start(run, read_events(run / EVENTS_FILE))
    for piece in pieces:
        after_s = (piece.began - pieces[0].began).total_seconds()
        print(f"start: {after_s:6.1f} s  {piece.process}: {piece.what} {piece.seconds:.1f} s")


@contextmanager
def traced(run: Path, out: Path | None) -> Iterator[Path | None]:
    """Yield the file for Ray's task events; afterwards write them and the run's phases to `out`, if given."""
    if out is None:
        yield None
        return
    write_text(out, "")  # a path that cannot be written fails before the run
    with tempfile.TemporaryDirectory(prefix="megarl-timeline-") as folder:
        tasks = Path(folder) / "ray.json"
        try:
            yield tasks
        finally:
            _write_trace(run, out, others=json.loads(tasks.read_text()) if tasks.exists() else ())


def _write_trace(run: Path, path: Path, *, others: Sequence[Mapping[str, JsonValue]] = ()) -> int:
    """Return the number of phases."""
    records = list(read_events(run / EVENTS_FILE))
    spans = fold_spans(records)
    if not spans:
        raise DataError(f"{run / EVENTS_FILE}: no phase has begun")
    others = [*others, *idle_events(fold_history(records).idle), *start_events(last_start(run, records))]
    for step, file in list_rollouts(run).items():
        others += episode_events(read_episodes(file), step=step)
    write_text(path, json.dumps(to_trace(spans, run=run.name, others=others)))
    return len(spans)


def write_text(path: Path, text: str) -> None:
    with writing(path):
        path.write_text(text, encoding="utf-8")


def top(run: RunArgument) -> None:
    """Show a run that goes on in the terminal, until it ends; elsewhere print where it stands."""
    console = make_console()
    display = make_display(console)
    tail, is_live = EventTail(run / EVENTS_FILE), console.is_terminal
    if not (run / EVENTS_FILE).is_file():
        raise DataError(f"{run}: not the folder of a run: it has no {EVENTS_FILE}")
    if not is_live:
        progress = Progress()
        for record in tail.read():
            progress = advance(progress, record)
        print("\n".join(progress_lines(progress)))
        return
    try:
        while True:
            for record in tail.read():
                display.record(record)
                if isinstance(record.event, RunFinished):
                    return
            time.sleep(_TOP_PAUSE_S)
    finally:
        display.close()


def samples(
    run: RunArgument,
    step: Annotated[
        int | None, typer.Option(min=0, help="The evaluation after this step; the last one if not given.")
    ] = None,
    is_wrong: Annotated[bool, typer.Option("--wrong", help="Only wrong answers.")] = False,
    source: Annotated[str | None, typer.Option(metavar="NAME", help="Only prompts of this data source.")] = None,
    episode: Annotated[
        str | None,
        typer.Option(metavar="STEP/PROMPT/INDEX", help="One saved rollout of training, as the run page names it."),
    ] = None,
    form: Annotated[
        EpisodeForm, typer.Option("--format", help="The episode as text, as plain JSON or as an ATIF trajectory.")
    ] = EpisodeForm.TEXT,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many.")] = 10,
    max_chars: Annotated[
        int,
        typer.Option(min=1, help="Cut longer texts: prompts at the start, answers in the middle."),
    ] = 2000,
) -> None:
    """Show prompts and answers of an evaluation with their scores, or one episode of training."""
    if episode is not None:
        show_episode(find_episode(run, episode), form, make_console(), run=run, max_chars=max_chars)
        return
    path = _evaluation_file(run, step)
    chosen = (
        generation
        for generation in read_generations(path)
        if not (is_wrong and generation.is_right) and source in (None, generation.data_source)
    )
    num_shown = show_generations(islice(chosen, limit), make_console(), run=run, max_chars=max_chars)
    if not num_shown:
        raise DataError(f"{path}: no answer matches; leave out --wrong or --source")
    print(f"{num_shown} shown of {path}")


def show_episode(trace: EpisodeTrace, form: EpisodeForm, console: Console, *, run: Path, max_chars: int) -> None:
    """Print an episode as a conversation, or as JSON of one kind."""
    if form is not EpisodeForm.TEXT:
        print(json.dumps(as_atif(trace) if form is EpisodeForm.ATIF else as_json(trace), ensure_ascii=False, indent=1))
        return
    lines = [Text(_printable(_cut_start(trace.prompt, max_chars)), style="dim"), *_images(run, trace.images)]
    row = 0
    for turn in trace.turns:
        if turn.row != row:
            row = turn.row
            lines.append(Text(f"row {row + 1}: the history was written anew", style="magenta"))
        if turn.kind is TurnKind.CONTEXT:
            lines.append(Text(f"history ({turn.num_tokens} tokens, not trained on)", style="dim"))
            continue
        spoken = SpokenTurn(kind=turn.kind, text=turn.text, reward=turn.reward, seconds=turn.seconds)
        lines.append(_spoken(spoken, max_chars))
    score = "not scored" if trace.is_masked else f"score {trace.score:g}"
    sampled = sum(turn.num_tokens for turn in trace.turns if turn.kind is TurnKind.SAMPLED)
    facts = [score, trace.ending, f"{trace.num_trained} tokens trained of {sampled} sampled", f"{trace.num_rows} rows"]
    facts += [f"{name} {value:g}" for name, value in trace.components.items()]
    lines.append(Text(_printable("  ".join(facts)), style="yellow"))
    title = Text(_printable(f" {trace.episode}  {trace.data_source} "))
    console.print(Panel(Group(*lines), title=title, title_align="left", width=min(console.width, _MAX_WIDTH)))


def _evaluation_file(run: Path, step: int | None) -> Path:
    files = list_generations(run)
    if not files:
        raise DataError(f"{run}: no evaluation here; name the folder of a run with one, as in runs/quickstart")
    if step is None:
        return files[max(files)]
    if step not in files:
        raise DataError(f"{run}: no evaluation after step {step}; choose one of {', '.join(map(str, files))}")
    return files[step]


def show_generations(generations: Iterable[Generation], console: Console, *, run: Path, max_chars: int) -> int:
    """Print one panel each, and return how many."""
    width = min(console.width, _MAX_WIDTH)
    count = 0
    for count, generation in enumerate(generations, start=1):  # noqa: B007 - the count is the answer
        title = Text(_printable(f" {generation.prompt_uid}  {generation.data_source} "))
        panel = Panel(
            Group(*_lines(generation, run, max_chars)),
            title=title,
            title_align="left",
            border_style="green" if generation.is_right else "red",
            width=width,
        )
        console.print(panel, soft_wrap=False)
    return count


def _lines(generation: Generation, run: Path, max_chars: int) -> Iterator[Text]:
    yield Text(_printable(_cut_start(generation.prompt, max_chars)), style="dim")
    yield from _images(run, generation.images)
    for turn in generation.turns:
        yield _spoken(turn, max_chars)
    if not generation.turns:
        yield Text(_printable(_cut_middle(generation.response, max_chars)), style="bold")
    way = "greedy" if generation.is_greedy else f"sampled {generation.index}"
    outcome = "right" if generation.is_right else "wrong"
    length = f"{generation.num_tokens} tokens, {generation.ending or generation.finish_reason}"
    facts = [f"{outcome}: score {generation.score:g}", way, length]
    facts += [f"{name} {value:g}" for name, value in generation.components.items()]
    facts += [f"truth {_cut_start(generation.ground_truth, max_chars)}"]
    if generation.prediction is not None:
        facts.append(f"prediction {_cut_start(generation.prediction, max_chars)}")
    yield Text(_printable("  ".join(facts)), style="green" if generation.is_right else "red")


def _images(run: Path, digests: Sequence[str]) -> Iterator[Text]:
    """Yield the files of the images of a prompt, which a terminal does not show."""
    for digest in digests:
        path = run / IMAGES_FOLDER / f"{digest}.png"
        yield Text(_printable(f"image {path}"), style="cyan", overflow="fold")


def _spoken(turn: SpokenTurn, max_chars: int) -> Text:
    """Return a turn of an episode: what the model wrote, or what it was given."""
    is_sampled = turn.kind is TurnKind.SAMPLED
    facts = f"{turn.seconds:.2f} s" + (f", reward {turn.reward:+g}" if turn.reward else "")
    line = Text(f"{'model' if is_sampled else 'tool '} ({facts}) ", style="yellow" if is_sampled else "cyan")
    return line.append(_printable(_cut_middle(turn.text, max_chars)), style="bold" if is_sampled else "dim")


def _cut_start(text: str, max_chars: int) -> str:
    """Cut the start: the question is at the end of a prompt."""
    cut = len(text) - max_chars
    return text if cut <= 0 else f"[{cut} characters] ... {text[-max_chars:]}"


def _cut_middle(text: str, max_chars: int) -> str:
    """Cut the middle: an answer begins with its plan and ends with its result."""
    cut, half = len(text) - max_chars, max_chars // 2
    return text if cut <= 0 else f"{text[: max_chars - half]} ... [{cut} characters] ... {text[len(text) - half :]}"


def _printable(text: str) -> str:
    """Escape control characters: a model may write codes that would steer the terminal."""
    return "".join(
        f"\\x{ord(char):02x}" if unicodedata.category(char) == "Cc" and char not in "\n\t" else char for char in text
    )


class FleetAction(StrEnum):
    LIST = "list"
    RETIRE = "retire"
    ADD = "add"


def fleet(
    run: RunArgument,
    action: Annotated[FleetAction, typer.Argument(help="What to do.")] = FleetAction.LIST,
    engine: Annotated[int | None, typer.Argument(metavar="N", min=0, help="The number of the engine.")] = None,
    node: Annotated[str | None, typer.Option(metavar="ADDRESS", help="All engines of the node.")] = None,
    count: Annotated[int | None, typer.Option(metavar="N", min=1, help="Add N further engines to the node.")] = None,
) -> None:
    """List, stop or restart the engines of a run that goes on.

    `retire N` stops engine N; `add N` starts a retired or failed one again. `--node` does it with a whole node.
    `add --node` of a node without engines starts as many as its free devices hold, or `--count`.
    """
    from megarl.serving.operator import OperatorRequest, ask

    table = Table(box=None, header_style="bold")
    for title in ("engine", "state", "version", "requests", "restarts", "address", "reason"):
        table.add_column(title)
    for report in ask(run, OperatorRequest(action=action.value, engine=engine, node=node, count=count)):
        cells = (report.index, report.state, report.version, report.num_outstanding, report.num_restarts)
        table.add_row(*map(str, cells), report.address, report.reason)
    make_console().print(table)


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of runs.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the curves of all runs into one HTML file.")
    ] = None,
) -> None:
    """Show runs side by side: last and best numbers, and every key in which their recipes differ."""
    if len(runs) < 2:
        raise ConfigError("megarl compare", (Problem(key="", message="name at least two folders of runs"),))
    results = [Result(run) for run in runs]
    names = run_names(results)
    tables = [table for table in (_results_table(results, names), _recipes_table(results, names)) if table.rows]
    console = make_console()
    for table in tables:
        console.print(table.to_terminal())
    if len(tables) == 1:
        console.print("the recipes are the same")
    if out is not None:
        from megarl.tools.page.run_data import RunFolder
        from megarl.tools.page.web_page import comparison_page

        folders = {name: RunFolder(run) for name, run in zip(names, runs, strict=True)}
        write_text(out, comparison_page(folders, [table.to_page() for table in tables]))
        print(f"wrote {out}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTable:
    """A table for the terminal and for the page: a name and a cell for each run."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def to_terminal(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for place, name in enumerate(self.header):
            # Keys stay whole on a narrow terminal, and no value loses its end.
            table.add_column(Text(name, overflow="fold"), overflow="fold", no_wrap=place == 0)
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_page(self) -> JsonValue:
        return {"title": self.title, "header": list(self.header), "rows": [list(row) for row in self.rows]}


def run_names(results: Sequence[Result]) -> list[str]:
    """Return the names of the folders, or their paths where names repeat."""
    names = [result.path.name for result in results]
    return names if len(set(names)) == len(names) else [str(result.path) for result in results]


def _results_table(results: Sequence[Result], names: Sequence[str]) -> ComparedTable:
    from megarl.observe.report import tabulate

    table = [("status", *(result.status for result in results))]
    table.append(("steps", *(str(len(result.history.summaries)) for result in results)))
    rows = [{row.name: row for row in tabulate(result.history)} for result in results]
    for name in dict.fromkeys(name for each in rows for name in each):
        cells = []
        for each in rows:
            row = each.get(name)
            best = "" if row is None or row.best is None else f" ({format_number(row.best)} at {row.best_step})"
            cells.append("" if row is None else f"{format_number(row.last)}{best}")
        table.append((name, *cells))
    return ComparedTable(title="last (best at step)", header=("", *names), rows=table)


def _recipes_table(results: Sequence[Result], names: Sequence[str]) -> ComparedTable:
    """Return every key in which the recipes differ; no row where they are the same."""
    values = [{".".join(key): value for key, value in leaves(result.recipe_values)} for result in results]
    keys = list(dict.fromkeys(key for each in values for key in each))
    different = [key for key in keys if len({str(each.get(key)) for each in values}) > 1 and key != "run.name"]
    rows = [(key, *("not set" if each.get(key) is None else str(each[key]) for each in values)) for key in different]
    return ComparedTable(title="recipes differ in", header=("key", *names), rows=rows)


@metrics_app.command("list")
def list_metrics(
    is_markdown: Annotated[bool, typer.Option("--docs", help="Print docs/metrics.md instead.")] = False,
) -> None:
    """Print every metric: its name, kind, labels and meaning."""
    if is_markdown:
        print(metrics_page(), end="")
        return
    width = max(len(metric.full_name) for metric in METRICS)
    for metric in METRICS:
        labels = f" {{{', '.join(metric.labels)}}}" if metric.labels else ""
        print(f"{metric.full_name:<{width}}  {metric.kind:<9}  {metric.text}{labels}")


@metrics_app.command("targets")
def write_target_file(
    run: Annotated[
        list[Path],
        typer.Argument(metavar="RUN|RECIPE...", help="Folders of runs, or recipes.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The JSON file to write.", show_default=False)],
) -> None:
    """Write the addresses of runs for Prometheus.

    The file has the exporters and engines in the format of `file_sd_configs`. Every run writes one itself,
    prometheus_targets.json in its folder; this joins several.
    """
    targets: list[Target] = []
    for path in run:
        targets += read_targets(_run_folder(path) / TARGETS_FILE)
    write_targets(out, targets)
    print(f"wrote {out}: {len(targets)} targets")


def dashboards(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.", show_default=False)],
) -> None:
    """Write the Grafana dashboards and the Prometheus alerts."""
    for path in write_monitoring(out):
        print(f"wrote {path}")


def _run_folder(path: Path) -> Path:
    if path.is_dir():
        return path
    if path.suffix in {".yaml", ".yml"}:
        return read_recipe(path).recipe.run_folder
    raise DataError(f"{path}: neither the folder of a run nor a recipe")


def metrics_page() -> str:
    """Return the text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated by `megarl metrics list --docs` from `megarl/observe/catalogue.py`. [monitoring.md](monitoring.md)",
        "explains how to view them. Every metric also has the label `run`.",
    ]
    for section, metrics in groupby(METRICS, key=lambda metric: metric.section):
        lines += ["", f"## {section}", "", "| metric | kind | labels | |", "|---|---|---|---|"]
        lines += [_metric_row(metric) for metric in metrics]
    return "\n".join(lines) + "\n"


def _metric_row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    text = metric.text.replace("|", "\\|")
    return f"| `{metric.full_name}` | {metric.kind} | {labels} | {text} |"
