"""`megarl metrics` and `megarl dashboards`: what a run exports, where Prometheus finds it, and what Grafana draws."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from megarl.config.load import read_recipe
from megarl.errors import DataError
from megarl.observe.catalogue import METRICS, Metric
from megarl.observe.prometheus import TARGETS_FILE, Target, read_targets, write_targets
from megarl.tools.dashboards.monitoring import write_monitoring

metrics_app = typer.Typer(no_args_is_help=True, help="What a run exports, and where.")


@metrics_app.command("list")
def list_metrics(
    is_markdown: Annotated[bool, typer.Option("--docs", help="Print docs/metrics.md.")] = False,
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
        list[Path], typer.Argument(metavar="RUN|RECIPE...", help="Folders of runs, or recipes.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="A JSON file for Prometheus.", show_default=False)],
) -> None:
    """Write where Prometheus finds the exporters and engines of runs, in the format of its `file_sd_configs`.

    A run keeps such a file itself, as prometheus_targets.json in its folder; this gathers several.
    """
    found: list[Target] = []
    for path in run:
        found += read_targets(_run_folder(path) / TARGETS_FILE)
    write_targets(out, found)
    print(f"wrote {out}: {len(found)} targets")


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
    raise DataError(f"{path} is neither the folder of a run nor a recipe")


def metrics_page() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Written by `megarl metrics list --docs` from `megarl/observe/catalogue.py`. [monitoring.md](monitoring.md)",
        "says how to look at them. Every metric has the label `run` besides those named here.",
    ]
    for section, metrics in groupby(METRICS, key=lambda metric: metric.section):
        lines += ["", f"## {section}", "", "| metric | kind | labels | |", "|---|---|---|---|"]
        lines += [_row(metric) for metric in metrics]
    return "\n".join(lines) + "\n"


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    text = metric.text.replace("|", "\\|")
    return f"| `{metric.full_name}` | {metric.kind} | {labels} | {text} |"
