"""The data of the run page, read from the run's folder: numbers, curves, timeline and the saved rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import isfinite
from operator import itemgetter
from pathlib import Path
from typing import Any

from megarl.config.section import IMAGES_FOLDER
from megarl.data.images import ImageStore
from megarl.data.rollout_files import list_rollouts
from megarl.data.rollout_reading import read_episodes, read_list, read_rollout
from megarl.errors import DataError
from megarl.observe.event_file import EVENTS_FILE, EventTail
from megarl.observe.events import Record, RunFinished, RunStarted, Warned
from megarl.observe.history import ROLES, History, Series, fold_history
from megarl.observe.progress import Progress, advance, describe_cost
from megarl.results import CriticStats, PreferenceStats, UpdateStats
from megarl.tools.page.timeline import fold_spans
from megarl.types import JsonValue

_MAX_SPANS = 4000
"""Only the newest spans: more do not fit on a screen."""
_MAX_LANES = 64
_MAX_WARNINGS = 50
_MAX_POINTS = 1500
"""Points of one series, more than a screen has columns; a longer series is thinned out."""
MAX_ROWS = 200
"""Rows of one answer."""

SORT_KEYS = ("step", "score", "num_tokens", "largest_gap")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutQuery:
    """The filter and the order of a list of rollouts."""

    step: int | None = None
    source: str | None = None
    text: str = ""
    """Text in the prompt's name or in the beginning of the response."""
    sort: str = "step"
    is_descending: bool = False
    offset: int = 0
    limit: int = MAX_ROWS


class RunFolder:
    """Reads a run's files as they grow. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        if not (folder / EVENTS_FILE).is_file():
            raise DataError(f"{folder}: not the folder of a run: it has no {EVENTS_FILE}")
        self.folder = folder
        self._tail = EventTail(folder / EVENTS_FILE)
        self._records: list[Record] = []
        self._lists: dict[Path, tuple[int, list[dict[str, Any]]]] = {}

    @property
    def stamp(self) -> str:
        """A text that changes when there is something new to read."""
        files = list_rollouts(self.folder)
        newest = max(files, default=0)
        return f"{(self.folder / EVENTS_FILE).stat().st_size}-{len(files)}-{newest}"

    def overview(self) -> dict[str, JsonValue]:
        """Return everything but the rollouts."""
        self._records += self._tail.read()
        records = self._records
        started = [record for record in records if isinstance(record.event, RunStarted)]
        if not started:
            raise DataError(f"{self.folder / EVENTS_FILE}: no run has started yet; try again in a moment")
        event = started[-1].event
        assert isinstance(event, RunStarted)
        history = fold_history(records)
        progress = reduce(advance, records, Progress())
        last = records[-1].event
        status, reason = (last.status.value, last.reason) if isinstance(last, RunFinished) else ("running", "")
        return {
            "name": event.name,
            "folder": str(self.folder),
            "algorithm": event.algorithm,
            "version": event.megarl_version,
            "status": status,
            "reason": reason,
            "step": history.summaries[-1].step if history.summaries else event.resumed_step,
            "steps": event.steps,
            "num_lives": len(started),
            "cost": _cost(progress),
            "began": started[0].time.timestamp(),
            "updated": records[-1].time.timestamp(),
            "charts": [
                {
                    "section": chart.section,
                    "title": chart.title,
                    "series": [
                        {"name": name, "steps": list(one.steps), "values": [_finite(v) for v in one.values]}
                        for name, one in chart.series.items()
                    ],
                }
                for chart in draw_charts(history)
            ],
            "spans": _spans(records),
            "idle": [
                {
                    "step": share.step,
                    "began": share.began.timestamp(),
                    "seconds": share.seconds,
                    "roles": {str(role): number for role, number in share.roles.items()},
                }
                for share in history.idle[-_MAX_SPANS:]
            ],
            "episodes": self._episodes(),
            "warnings": _warnings(records),
            "recipe": dict(event.recipe),
        }

    def _episodes(self) -> JsonValue:
        """Return when the turns of the newest saved step were; of many episodes those that ended last."""
        files = list_rollouts(self.folder)
        if not files:
            return None
        step = max(files)
        episodes = read_episodes(files[step])
        last = sorted(episodes, key=lambda one: one["began"] + sum(turn["seconds"] for turn in one["turns"]))
        lanes: list[JsonValue] = [
            {
                "name": f"{one['prompt_uid']}, rollout {one['index']}",
                "ending": one["ending"],
                "score": _finite(one["score"]),
                "began": one["began"],
                "turns": [{"kind": turn["kind"], "seconds": turn["seconds"]} for turn in one["turns"]],
            }
            for one in sorted(last[-_MAX_LANES:], key=itemgetter("began"))
        ]
        return {"step": step, "total": len(episodes), "lanes": lanes}

    def rollouts(self, query: RolloutQuery) -> dict[str, JsonValue]:
        """Return one page of the list, the number of all matches, and the steps and sources to filter by."""
        files = list_rollouts(self.folder)
        rows = [
            {**row, "step": step, "row": place}
            for step, path in files.items()
            if query.step in (None, step)
            for place, row in enumerate(self._list(path))
        ]
        sources = sorted({str(row["data_source"]) for row in rows})
        matching = [row for row in rows if _matches(row, query)]
        key: Callable[[Mapping[str, Any]], Any] = itemgetter(query.sort)
        matching.sort(key=key, reverse=query.is_descending)
        last = query.offset + min(query.limit, MAX_ROWS)
        page: list[JsonValue] = [
            {**row, "largest_gap": _finite(row["largest_gap"])} for row in matching[query.offset : last]
        ]
        return {"total": len(matching), "rows": page, "steps": list(files), "sources": list(sources)}

    def rollout(self, step: int, row: int) -> dict[str, JsonValue]:
        """Return every token of one rollout."""
        files = list_rollouts(self.folder)
        if step not in files:
            raise DataError(f"{self.folder}: no rollouts of step {step} were saved")
        return {
            "step": step,
            "row": row,
            **{key: _strict(value) for key, value in read_rollout(files[step], row).items()},
        }

    def image(self, digest: str) -> bytes:
        """Return the PNG file of an image of a prompt."""
        return ImageStore(self.folder / IMAGES_FOLDER).file_bytes(digest)

    def _list(self, path: Path) -> list[dict[str, Any]]:
        """Read a file once, and again when a resumed run has rewritten the step."""
        changed = path.stat().st_mtime_ns
        if path not in self._lists or self._lists[path][0] != changed:
            self._lists[path] = (changed, read_list(path))
        return self._lists[path][1]


def compare_overviews(runs: Mapping[str, RunFolder]) -> dict[str, JsonValue]:
    """Return the curves of all runs, in each chart one series per run and name, and the timeline of the first.

    A series has the number of its run, which gives it its colour, and its own among those of the run. Warnings and the
    reason of an end are in the pages of the runs.
    """
    overviews: dict[str, dict[str, Any]] = {name: dict(run.overview()) for name, run in runs.items()}
    charts: dict[tuple[str, str], list[Any]] = {}
    for number, (name, overview) in enumerate(overviews.items()):
        for chart in overview["charts"]:
            charts.setdefault((chart["section"], chart["title"]), []).extend(
                {**one, "of": name, "run": number, "part": part} for part, one in enumerate(chart["series"])
            )
    for series in charts.values():
        # Two runs may have one component each, and not the same.
        has_several = len({one["name"] for one in series}) > 1
        for one in series:
            of = one.pop("of")
            one["name"] = f"{of}: {one['name']}" if has_several else of
    merged = [{"section": section, "title": title, "series": series} for (section, title), series in charts.items()]
    shown, first = next(iter(overviews.items()))
    facts = [
        f"{name}: {one['algorithm']}, step {one['step']} of {one['steps']}, {one['status']}"
        for name, one in overviews.items()
    ]
    own = {"name": " · ".join(runs), "facts": facts, "charts": merged, "shown": shown}
    return {**first, **own, "status": "", "reason": None, "warnings": []}


def _matches(row: Mapping[str, Any], query: RolloutQuery) -> bool:
    if query.source not in (None, row["data_source"]):
        return False
    text = query.text.casefold()
    return not text or text in str(row["line"]).casefold() or text in str(row["prompt_uid"]).casefold()


def _spans(records: Sequence[Record]) -> list[JsonValue]:
    return [
        {
            "phase": span.phase,
            "roles": list(ROLES[span.phase]),
            "step": span.step,
            "began": span.began.timestamp(),
            "seconds": span.seconds,
            "is_open": span.is_open,
        }
        for span in fold_spans(records)[-_MAX_SPANS:]
    ]


def _warnings(records: Sequence[Record]) -> list[JsonValue]:
    texts: list[JsonValue] = [
        {"time": record.time.timestamp(), "text": record.event.text}
        for record in records
        if isinstance(record.event, Warned)
    ]
    return texts[-_MAX_WARNINGS:]


def _finite(value: float) -> float | None:
    """Return None for NaN, which JSON lacks; the curve has a gap there."""
    return value if isfinite(value) else None


def _strict(value: Any) -> JsonValue:
    match value:
        case float():
            return _finite(value)
        case list():
            return [_strict(item) for item in value]
        case dict():
            return {str(key): _strict(item) for key, item in value.items()}
        case _:
            other: JsonValue = value
            return other


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    section: str
    title: str
    series: Mapping[str, Series]
    """By name, which is shown where a chart has several series."""


def draw_charts(history: History) -> list[Chart]:
    """Return the charts that have data, in the order of the page."""
    charts = [
        Chart(section=section, title=title, series={name: thinned(one) for name, one in series.items() if one})
        for section, title, series in _all_charts(history)
    ]
    return [chart for chart in charts if chart.series]


def _all_charts(history: History) -> list[tuple[str, str, Mapping[str, Series]]]:
    update, rollouts, steps = history.of_updates, history.of_rollouts, history.of_steps

    def critic(number: Callable[[CriticStats], float]) -> Series:
        return Series.of((s.step, number(s.critic)) for s in history.summaries if s.critic is not None)

    return [
        ("Outcome", "Evaluation", _evaluations(history)),
        ("Outcome", "Reward", {"mean": history.reward, "median": rollouts(lambda r: r.reward_median)}),
        ("Outcome", "Reward by component", _components(history)),
        ("Outcome", "Reward spread", {"standard deviation": rollouts(lambda r: r.reward_std)}),
        ("Policy", "Loss", {"loss": history.loss}),
        ("Policy", "Entropy", {"entropy": update(lambda u: u.entropy)}),
        ("Policy", "Gradient norm", {"gradient norm": update(lambda u: u.grad_norm)}),
        ("Policy", "KL from the policy before", {"k3": update(lambda u: u.approx_kl)}),
        ("Policy", "KL from the reference", {"KL": _known(history, lambda u: u.reference_kl)}),
        ("Policy", "Clipped tokens", {"share": update(lambda u: u.clip_fraction)}),
        ("Policy", "Learning rate", {"actor": update(lambda u: u.learning_rate)}),
        (
            "Rollouts",
            "Response tokens",
            {
                "mean": rollouts(lambda r: r.response_tokens_mean),
                "longest": rollouts(lambda r: float(r.response_tokens_max)),
            },
        ),
        ("Rollouts", "Cut off at the limit", {"share": rollouts(lambda r: r.truncated_ratio)}),
        (
            "Rollouts",
            "Groups without signal",
            {
                "no advantage": rollouts(lambda r: float(r.num_zero_signal_groups)),
                "dropped": rollouts(lambda r: float(r.num_dropped_groups)),
            },
        ),
        ("Rollouts", "Age of the trained tokens", _age(history)),
        ("Rollouts", "Prompt tokens found in engines' caches", {"share": _cached(history)}),
        (
            "Engine against trainer",
            "|p_train - p_rollout|",
            {"mean": update(lambda u: u.mismatch_mean), "largest": update(lambda u: u.mismatch_max)},
        ),
        (
            "Engine against trainer",
            "KL(rollout || train)",
            {"k1": update(lambda u: u.mismatch_kl), "k3": update(lambda u: u.mismatch_k3)},
        ),
        ("Engine against trainer", "Tokens taken out of the loss", {"share": update(lambda u: u.rejected_fraction)}),
        ("Critic", "Value loss", {"loss": critic(lambda c: c.loss)}),
        ("Critic", "Explained variance", {"share": critic(lambda c: c.explained_variance)}),
        (
            "Critic",
            "Value and return",
            {"value": critic(lambda c: c.value_mean), "return": critic(lambda c: c.return_mean)},
        ),
        *_pair_charts(history),
        ("Speed", "Tokens per second", {"tokens/s": steps(lambda s: s.tokens_per_second)}),
        ("Speed", "Seconds per step", {"seconds": steps(lambda s: s.seconds)}),
        ("Speed", "Tokens computed, of those trained on", {"share": _computed(history)}),
    ]


def _cost(progress: Progress) -> str | None:
    """Return GPU hours and money so far, and at the end; None on CPUs and before the first step."""
    usage, projected = progress.usage, progress.projected_gpu_hours
    if not usage.num_gpus or projected is None:
        return None
    spent, whole = describe_cost(usage.gpu_hours, usage.hour_price), describe_cost(projected, usage.hour_price)
    return f"{spent} of {whole}"


def _pair_charts(history: History) -> list[tuple[str, str, Mapping[str, Series]]]:
    def pairs(number: Callable[[PreferenceStats], float]) -> Series:
        return Series.of((s.step, number(s.preference)) for s in history.summaries if s.preference is not None)

    rewards = {"chosen": pairs(lambda p: p.chosen_reward), "rejected": pairs(lambda p: p.rejected_reward)}
    return [
        ("Preferences", "Pairs in the right order", {"share": pairs(lambda p: p.accuracy)}),
        ("Preferences", "Implicit rewards", rewards),
        ("Preferences", "Loss of a pair", {"loss": pairs(lambda p: p.loss)}),
    ]


def _known(history: History, number: Callable[[UpdateStats], float | None]) -> Series:
    points = ((s.step, number(s.update)) for s in history.summaries if s.update is not None)
    return Series.of((step, value) for step, value in points if value is not None)


def _evaluations(history: History) -> dict[str, Series]:
    names = dict.fromkeys(name for _, result in history.evaluations for name in result.numbers)
    return {name: history.of_evaluations(name) for name in names}


def _components(history: History) -> dict[str, Series]:
    steps = [(s.step, s.rollouts.component_means) for s in history.summaries if s.rollouts is not None]
    names = dict.fromkeys(name for _, means in steps for name in means)
    return {name: Series.of((step, means[name]) for step, means in steps if name in means) for name in names}


def _age(history: History) -> dict[str, Series]:
    """Return the mean age in versions behind the newest token of the step; nothing where all ages are 0."""
    points = [(s.step, _mean_age(s.rollouts.tokens_by_version)) for s in history.summaries if s.rollouts is not None]
    return {"mean": Series.of(points)} if any(age for _, age in points) else {}


def _cached(history: History) -> Series:
    points = ((s.step, s.cached_prompt_ratio) for s in history.summaries)
    return Series.of((step, ratio) for step, ratio in points if ratio is not None)


def _computed(history: History) -> Series:
    points = ((s.step, s.computed_ratio) for s in history.summaries)
    return Series.of((step, ratio) for step, ratio in points if ratio is not None)


def _mean_age(tokens_by_version: Mapping[int, int]) -> float:
    newest, total = max(tokens_by_version, default=0), sum(tokens_by_version.values())
    return sum((newest - version) * count for version, count in tokens_by_version.items()) / max(1, total)


def thinned(series: Series) -> Series:
    """Return every nth point and the last one."""
    stride = -(-len(series.steps) // _MAX_POINTS)
    if stride <= 1:
        return series
    places = sorted({*range(0, len(series.steps), stride), len(series.steps) - 1})
    return Series(
        steps=tuple(series.steps[place] for place in places), values=tuple(series.values[place] for place in places)
    )
