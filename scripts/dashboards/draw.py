"""Draw megarl's dashboards from the data of a Prometheus, one PNG each, without a Grafana.

python -m scripts.dashboards.draw --prometheus http://127.0.0.1:9090 --minutes 5 --out docs/images
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from scripts.dashboards.monitoring import DASHBOARDS
from scripts.dashboards.panels import COLUMNS, Dashboard, Panel, PanelRow, Query

NUM_POINTS = 150
CELL_INCHES = 0.62
UNIT_INCHES = 0.36
# Okabe and Ito's palette: distinct with every common colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")

Line = tuple[str, list[float], list[float]]
"""Legend, seconds since the beginning, values."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--minutes", type=float, default=10, help="how far to look back from --end")
    parser.add_argument("--end", type=float, default=None, help="seconds since the epoch; now if not given")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    arguments = parser.parse_args()
    end = arguments.end or time.time()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for board in DASHBOARDS:
        path = arguments.out / f"{board.uid}.png"
        source = Source(arguments.prometheus, start=end - 60 * arguments.minutes, end=end)
        draw(board, source, path)
        print(f"{path}: {source.num_empty} of {source.num_asked} queries have no data")


class Source:
    """Queries one Prometheus over one period, and counts the queries without data."""

    def __init__(self, url: str, *, start: float, end: float) -> None:
        self._url, self._start, self._end = url, start, end
        self.num_asked = 0
        self.num_empty = 0

    @property
    def seconds(self) -> float:
        return self._end - self._start

    def lines(self, query: Query) -> list[Line]:
        step = self.seconds / NUM_POINTS
        answer = httpx.get(
            f"{self._url}/api/v1/query_range",
            params={
                "query": query.text.replace("$run", ".+").replace("$__rate_interval", "30s"),
                "start": self._start,
                "end": self._end,
                "step": step,
            },
            timeout=30,
        ).raise_for_status()
        results = json.loads(answer.text)["data"]["result"]
        self.num_asked += 1
        self.num_empty += not results
        return [self._line(query, item) for item in results]

    def _line(self, query: Query, item: dict[str, object]) -> Line:
        labels, points = item["metric"], item["values"]
        assert isinstance(labels, dict)
        assert isinstance(points, list)
        legend = query.legend.replace(" ({{run}})", "")
        for name, text in labels.items():
            legend = legend.replace(f"{{{{{name}}}}}", str(text))
        return legend, [float(at) - self._start for at, _ in points], [float(text) for _, text in points]


def draw(board: Dashboard, source: Source, path: Path) -> None:
    height = sum(_height(row) for row in board.rows) + 2
    figure = Figure(figsize=(COLUMNS * CELL_INCHES, height * UNIT_INCHES), dpi=70, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.012, 1 - 0.75 / height, board.title, fontsize=15, fontweight="bold", va="center")
    figure.text(0.012, 1 - 1.45 / height, board.text, fontsize=10, color="#555555", va="center")
    top = 2.0
    for row in board.rows:
        figure.text(0.012, 1 - (top + 0.5) / height, row.title, fontsize=12, color="#0072B2", va="center")
        top += 1
        left, row_height = 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top, row_height = 0, top + row_height, 0
            _draw_panel(figure, panel, source, left=left, top=top, height=height)
            left, row_height = left + panel.width, max(row_height, panel.height)
        top += row_height
    figure.savefig(path)
    # Lines on white need few colours; the file is a third as large.
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


def _height(row: PanelRow) -> int:
    height, left, row_height = 1, 0, 0
    for panel in row.panels:
        if left + panel.width > COLUMNS:
            height, left, row_height = height + row_height, 0, 0
        left, row_height = left + panel.width, max(row_height, panel.height)
    return height + row_height


def _draw_panel(figure: Figure, panel: Panel, source: Source, *, left: int, top: float, height: float) -> None:
    margin_left, margin_right, margin_top, margin_bottom = 1.3, 0.35, 1.2, 1.9
    is_plot = panel.kind == "timeseries"
    if not is_plot:
        margin_bottom = 0.4
    axes = figure.add_axes(
        (
            (left + margin_left) / COLUMNS,
            1 - (top + panel.height - margin_bottom) / height,
            (panel.width - margin_left - margin_right) / COLUMNS,
            (panel.height - margin_top - margin_bottom) / height,
        )
    )
    axes.set_title(panel.title, fontsize=9.5, fontweight="bold", loc="left")
    lines = [line for query in panel.queries for line in source.lines(query)]
    if is_plot and lines:
        _draw_lines(axes, panel, lines)
        axes.set_xlim(0, source.seconds)
        return
    axes.set_axis_off()
    if not lines:
        needs = ", ".join(sorted({query.needs for query in panel.queries if query.needs is not None}))
        axes.text(0.5, 0.5, f"no data (needs {needs})" if needs else "no data", ha="center", color="#999999")
    elif panel.kind == "table":
        axes.text(0, 0.5, "\n".join(legend.replace(" ", "   ") for legend, _, _ in lines), fontsize=10, va="center")
    else:
        text = _formatted(lines[0][2][-1], panel)
        axes.text(0.5, 0.45, text, ha="center", va="center", fontsize=20, color="#009E73", fontweight="bold")


def _draw_lines(axes: Axes, panel: Panel, lines: Sequence[Line]) -> None:
    if panel.is_stacked:
        # Series of one scrape have the same times; one that began later starts with zeros.
        times = max((times for _, times, _ in lines), key=len)
        values = [[0.0] * (len(times) - len(line[2])) + line[2] for line in lines]
        axes.stackplot(times, values, labels=[line[0] for line in lines], colors=COLOURS, alpha=0.75)
    else:
        for index, (legend, times, values_of_line) in enumerate(lines):
            colour, style = COLOURS[index % len(COLOURS)], "-" if index < len(COLOURS) else "--"
            axes.plot(times, values_of_line, style, color=colour, linewidth=1.4, label=legend or "value")
    if panel.is_log and any(value > 0 for _, _, values_of_line in lines for value in values_of_line):
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _formatted(value, panel)))
        if panel.max is not None:
            axes.set_ylim(-0.03 * panel.max, panel.max)
        elif not any(value for _, _, values_of_line in lines for value in values_of_line):
            axes.set_ylim(-0.03, 1)
    axes.tick_params(which="both", labelsize=7.5)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 60:.2g} min"))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1:
        axes.legend(
            fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False, handlelength=1.2
        )


def _formatted(value: float, panel: Panel) -> str:
    match panel.unit:
        case "percentunit":
            return f"{100 * value:.3g} %"
        case "bytes":
            for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
                if abs(value) >= size:
                    return f"{value / size:.3g} {unit}"
            return f"{value:.3g} B"
        case "s":
            return f"{value * 1000:.3g} ms" if 0 < abs(value) < 1 else f"{value:.3g} s"
        case _:
            for suffix, unit_size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
                if abs(value) >= unit_size:
                    return f"{value / unit_size:.3g} {suffix}"
            return f"{value:.3g}"


if __name__ == "__main__":
    main()
