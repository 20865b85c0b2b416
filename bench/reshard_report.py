"""The table and the goals of `python -m bench reshard`."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from bench.reshard import GATHER_BUCKET_BYTES, ReshardReport
from megarl.env import NO_COLOR

GOAL = 0.5
"""Share of the gather scheme's time."""
_WIDTH = 120
_NAMES = {
    "publish": "megarl: by the plan, digests, commit",
    "gather": f"gather everything, one sender, {GATHER_BUCKET_BYTES >> 20} MiB buckets",
    "flattened": "SGLang's flattened buckets, already gathered",
}


def print_reshard(report: ReshardReport) -> None:
    title = f"{report.model_bytes / 1e9:.2f} GB, 4 trainer ranks (TP2 x PP2) to an engine of 2 TP ranks"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "best s", "median s", "GB/s", "GB between processes", "of the gather"):
        table.add_column(name, justify="right" if name else "left")
    floor = report.floor
    table.add_row(
        "floor: once over loopback, once into place",
        f"{floor.seconds:.2f}",
        "",
        f"{report.plan_bytes / 1e9 / floor.seconds:.2f}",
        f"{report.plan_bytes / 1e9:.3f}",
        f"{floor.seconds / report.gather.median_s:.2f}",
    )
    for timing in (report.ours, report.gather, report.flattened):
        table.add_row(
            _NAMES[timing.name],
            f"{timing.best_s:.2f}",
            f"{timing.median_s:.2f}",
            f"{report.plan_bytes / 1e9 / timing.median_s:.2f}",
            f"{timing.group_bytes / 1e9:.3f}",
            f"{timing.median_s / report.gather.median_s:.2f}",
        )
    Console(width=_WIDTH, no_color=bool(NO_COLOR.read()), highlight=False).print(table)
    links = ", ".join(f"{link} {size / 1e9:.3f} GB" for link, size in report.bytes_by_link.items())
    print(f"plan: {report.plan_bytes} bytes ({links}); over the group: {report.ours.group_bytes} bytes")
    print(
        f"this machine: loopback {floor.loopback_bytes_s / 1e9:.2f} GB/s, copies {floor.copy_bytes_s / 1e9:.2f} GB/s, "
        "two streams at once"
    )
    print(f"the engine serves {'the same bytes after each of them' if report.is_equal else 'DIFFERENT bytes'}")
    print("; ".join(sentence for sentence, _ in verdicts(report)))


def verdicts(report: ReshardReport) -> list[tuple[str, bool]]:
    """Return each goal as a sentence, and whether it is met."""
    share = report.ours.median_s / report.gather.median_s
    sends_exactly = report.ours.group_bytes == report.plan_bytes
    return [
        (f"bytes over the group {'are' if sends_exactly else 'are NOT'} the plan's", sends_exactly),
        (f"time is {share:.2f} of the gather scheme's, at most {GOAL:g} is the goal", share <= GOAL),
        ("what is served is " + ("equal" if report.is_equal else "NOT equal"), report.is_equal),
    ]


def as_json(report: ReshardReport) -> str:
    return json.dumps(asdict(report))
