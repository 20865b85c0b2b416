"""Cost of a run's metrics: time per step, number of series, and time of a scrape, against goals.

One process does everything that a step does for its metrics: it counts groups and scores, summarises, fills the meter,
and answers Prometheus at its interval. CPU time is measured, so that a busy machine gives the same figures; only the
scrape of the most possible series is measured in wall time, by its client.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import httpx
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.env import NO_COLOR
from megarl.observe.catalogue import MAX_SERIES, METRICS
from megarl.observe.endpoint import MetricsEndpoint
from megarl.observe.events import EngineChanged, Published
from megarl.observe.metrics import Meter, Metrics
from megarl.observe.observer import Observer
from megarl.observe.summary import summarize_step
from megarl.results import PublishResult, UpdateResult
from megarl.system.network import LOOPBACK
from megarl.tokens import Content
from megarl.types import FinishReason, PolicyVersion, Prompt, Rollout, RolloutGroup, Score, ScoredGroup, TrainSample

MAX_OVERHEAD = 0.005
MAX_SCRAPE_S = 0.05
SCRAPE_EVERY_S = 5.0
"""The interval of launch/monitoring."""

_NUM_SCRAPES = 20
_WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedStep:
    """A step whose metrics are measured."""

    name: str
    num_groups: int
    num_rollouts: int
    """Rollouts per group."""
    num_tokens: int
    """Tokens per response."""
    num_engines: int
    step_seconds: float
    """Time of such a step: measured on two cores for the quickstart, assumed for others."""


QUICKSTART = WatchedStep(
    name="quickstart", num_groups=64, num_rollouts=8, num_tokens=5, num_engines=1, step_seconds=2.4
)
LARGE = WatchedStep(
    name="512 x 16 of 8192", num_groups=512, num_rollouts=16, num_tokens=8192, num_engines=64, step_seconds=120.0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterFigure:
    name: str
    value: float
    unit: str
    goal: float
    """The largest value allowed."""

    @property
    def miss(self) -> float:
        """Ratio to the goal; above 1 the goal is missed."""
        return self.value / self.goal


def measure_exporter(steps: Sequence[WatchedStep] = (QUICKSTART, LARGE), *, repeats: int = 5) -> list[ExporterFigure]:
    meter = _full_meter()
    all_series = _measure_scrape(meter)
    figures = []
    for watched in steps:
        seconds = _measure_step(watched, repeats)
        figures.append(
            ExporterFigure(
                name=f"overhead, {watched.name} ({1000 * seconds:.1f} ms in {watched.step_seconds:g} s)",
                value=100 * seconds / watched.step_seconds,
                unit="% of a step",
                goal=100 * MAX_OVERHEAD,
            )
        )
    return [
        *figures,
        ExporterFigure(name="series, every label at its limit", value=all_series.num_series, unit="", goal=MAX_SERIES),
        ExporterFigure(
            name="scrape of all of them", value=1000 * all_series.seconds, unit="ms", goal=1000 * MAX_SCRAPE_S
        ),
    ]


def _full_meter() -> Meter:
    """Return a meter in which every metric has the most labels allowed."""
    meter = Meter("bench")
    for metric in METRICS:
        if metric.kind == "histogram":
            meter.observe(metric, 1.0)
            continue
        record: Callable[..., None] = meter.set if metric.kind == "gauge" else meter.add
        for index in range(metric.limit - len(metric.known)):
            record(metric, 1.0, *(f"value{index}" for _ in metric.labels))
    return meter


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scrape:
    num_series: int
    seconds: float
    """Time until the client has them."""
    cpu_seconds: float
    """CPU time of the process, the client's part included."""


def _measure_scrape(meter: Meter) -> _Scrape:
    """Return the medians of some scrapes."""
    endpoint = MetricsEndpoint(meter.registry, port=0)
    try:
        with httpx.Client() as client:
            text = client.get(endpoint.url).text
            seconds, cpu_seconds = [], []
            for _ in range(_NUM_SCRAPES):
                began, cpu_began = time.perf_counter(), time.process_time()
                client.get(endpoint.url)
                seconds.append(time.perf_counter() - began)
                cpu_seconds.append(time.process_time() - cpu_began)
    finally:
        endpoint.close()
    return _Scrape(
        num_series=sum(not line.startswith("#") for line in text.splitlines()),
        seconds=statistics.median(seconds),
        cpu_seconds=statistics.median(cpu_seconds),
    )


def _measure_step(watched: WatchedStep, repeats: int) -> float:
    """Return the median time of all work for metrics in one step, with the scrapes during it."""
    groups, samples = _groups(watched)
    meter = Meter("bench")
    observer = Observer([Metrics(meter)], meter=meter)
    update = UpdateResult(version=PolicyVersion(1), stats=None)
    for index in range(watched.num_engines):
        changed = EngineChanged(
            index=index,
            state="healthy",
            is_serving=True,
            is_running=True,
            version=PolicyVersion(0),
            address=f"{LOOPBACK}:{index}",
        )
        observer.emit(changed)
    seconds = []
    for step in range(1, repeats + 1):
        began = time.thread_time()
        for _ in groups:
            observer.group_generated(seconds=1.0, num_rollouts=watched.num_rollouts, num_tokens=watched.num_tokens)
            for _ in range(watched.num_rollouts):
                observer.scored(0.01)
        summary = summarize_step(
            step=step,
            groups=groups,
            samples=samples,
            dropped_groups={},
            update=update,
            kl_coef=None,
            seconds=watched.step_seconds,
        )
        published = PublishResult(version=PolicyVersion(step), num_bytes=0, seconds=1.0, num_engines=1)
        observer.emit(Published(result=published))
        observer.step_summarized(summary)
        seconds.append(time.thread_time() - began)
    num_scrapes = watched.step_seconds / SCRAPE_EVERY_S
    return statistics.median(seconds) + num_scrapes * _measure_scrape(meter).cpu_seconds


def _groups(watched: WatchedStep) -> tuple[list[ScoredGroup], list[TrainSample]]:
    """Return the groups and samples of a step; all groups share the arrays of one group."""
    random = np.random.default_rng(1)
    size = watched.num_tokens
    rollouts = [
        Rollout(
            content=Content(
                token_ids=random.integers(0, 1000, size, dtype=np.int32), logprobs=np.zeros(size, np.float32), text=""
            ),
            versions=np.zeros(size, np.int32),
            loss_mask=np.ones(size, np.bool_),
            finish_reason=FinishReason.STOP,
        )
        for _ in range(watched.num_rollouts)
    ]
    advantages = np.ones(size, np.float32)
    prompt = Prompt(
        uid="bench",
        position=0,
        epoch=0,
        token_ids=np.zeros(8, np.int32),
        data_source="bench",
        ground_truth="",
        extra_info={},
    )
    scores = tuple(Score(value=float(value), components={"a": 1.0}) for value in random.random(watched.num_rollouts))
    group = ScoredGroup(group=RolloutGroup(prompt=prompt, rollouts=tuple(rollouts)), scores=scores)
    samples = [TrainSample(prompt_ids=prompt.token_ids, rollout=item, advantages=advantages) for item in rollouts]
    return [group] * watched.num_groups, samples * watched.num_groups


def print_figures(figures: Sequence[ExporterFigure]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("figure", "measured", "goal"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for figure in figures:
        table.add_row(figure.name, f"{figure.value:.4g} {figure.unit}", f"<= {figure.goal:g} {figure.unit}")
    Console(no_color=bool(NO_COLOR.read()), width=_WIDTH, highlight=False).print(table)


def as_json(figures: Sequence[ExporterFigure]) -> str:
    return json.dumps([asdict(figure) for figure in figures])
