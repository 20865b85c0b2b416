"""The loop's only interface to observation: stamps each event and passes it to every sink.

The sinks decide what an event means; the loop knows no file, port or terminal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from statistics import median, median_low
from types import TracebackType

from megarl.errors import MachineError, PreemptedError, RewardError, StoppedError
from megarl.observe import catalogue as names
from megarl.observe.events import (
    Event,
    Noted,
    PhaseEnded,
    PhaseStarted,
    PublishFailed,
    Record,
    Restarted,
    RunFinished,
    RunStatus,
    Sink,
    StepFinished,
    Warned,
)
from megarl.observe.metrics import Meter
from megarl.observe.summary import Flow, Phase, RolloutSummary, StepSummary, summarize_step
from megarl.results import UpdateResult
from megarl.system.gpu_health import GpuHealth
from megarl.types import PolicyVersion, ScoredGroup, TrainSample


class Observer:
    """Used from one thread. As a context manager it records the end of the run on exit.

    The methods up to `warned` record an event in every sink. The methods from `data_read` on are called too often for
    an event; they only set metrics.
    """

    def __init__(self, sinks: Sequence[Sink], *, meter: Meter | None = None, first_sequence: int = 0) -> None:
        """Without a meter the metrics are not exported."""
        self._sinks = tuple(sinks)
        self._meter = meter or Meter("")
        self._next_sequence = first_sequence
        self._phase_seconds: dict[Phase, float] = {}
        self._step_began = time.monotonic()
        self._has_finished = False
        self._step_warnings = StepWarnings()
        self._group_seconds: list[float] = []
        self._num_prompt_tokens = self._num_cached_tokens = 0
        self._num_drafted_tokens = self._num_draft_passes = 0
        """Tokens that requests brought since the last step, and those of them that engines had in their caches."""
        self._failing: set[str] = set()
        """Names of the sinks that cannot write now."""
        self.judges: list[tuple[str, str, str]] = []
        """The judges over HTTP that have answered, with model and version."""

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Time the body; its seconds are added to the next finished step."""
        self.emit(PhaseStarted(phase=phase))
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._phase_seconds[phase] = self._phase_seconds.get(phase, 0.0) + seconds
            self.emit(PhaseEnded(phase=phase, seconds=seconds))

    def step_started(self) -> None:
        """Start the clock of a step: it includes the time that devices take to change hands."""
        self._step_began = time.monotonic()

    def step_finished(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        samples: Sequence[TrainSample],
        update: UpdateResult,
        *,
        dropped: Mapping[str, int],
        kl_coef: float | None,
        flow: Flow | None,
    ) -> None:
        """Summarize and record a step, after its publish. It began with `step_started`."""
        for text in update.warnings:
            self.warned(text)
        summary = summarize_step(
            step=step,
            groups=groups,
            samples=samples,
            dropped_groups=dropped,
            update=update,
            kl_coef=kl_coef,
            flow=flow,
            seconds=time.monotonic() - self._step_began,
        )
        self.step_summarized(summary)

    def step_summarized(self, summary: StepSummary) -> None:
        for text in self._step_warnings.after(summary):
            self.warned(text)
        phase_seconds, self._phase_seconds = self._phase_seconds, {}
        self._measure_tail()
        ratio, tokens = self._take_cached_ratio(), self._take_tokens_per_pass()
        summary = replace(summary, cached_prompt_ratio=ratio, tokens_per_pass=tokens)
        self.emit(StepFinished(summary=summary, phase_seconds=phase_seconds))

    def publish_failed(self, version: PolicyVersion, reason: str) -> None:
        self.emit(PublishFailed(version=version, reason=reason))

    def restarted(self, role: str, index: int, reason: str) -> None:
        """Record that a process of a role (`rollout`, `reward`), or all `trainers` together, is started again."""
        self.emit(Restarted(role=role, index=index, reason=reason))

    def checkpoint_mirrored(self, step: int, url: str, *, num_bytes: int, seconds: float) -> None:
        self._meter.set(names.MIRROR_STEP, step)
        self._meter.set(names.MIRROR_SECONDS, seconds)
        self.noted(f"copied step {step} to {url}: {num_bytes / 1e9:.3f} GB in {seconds:.1f} s")

    def mirror_failed(self, url: str, reason: str, *, is_first: bool) -> None:
        """Count an upload that failed; only the first in a row is an event."""
        self._meter.add(names.MIRROR_FAILURES, 1)
        if is_first:
            self.warned(f"checkpoints are not copied to {url}: {reason}; the run goes on, and it is tried again")

    def judge_answered(self, judge: str, model: str, version: str) -> None:
        """Record the model and version of a judge, each once."""
        if (judge, model, version) not in self.judges:
            self.judges.append((judge, model, version))
            self.noted(f"the judge {judge} is {model}{version and f', version {version}'}")

    def check_judges(self) -> None:
        """Raise a RewardError if a judge has become another model."""
        models: dict[str, str] = {}
        for judge, model, _ in self.judges:
            before = models.setdefault(judge, model)
            if model != before:
                message = f"the judge was {before} and is now {model}; scores before and after are not comparable"
                raise RewardError(message)

    def judge_addressed(self, num_responses: int = 1) -> None:
        """Count responses that name control tokens of their judge."""
        self._meter.add(names.JUDGE_ADDRESSED, num_responses)

    def noted(self, text: str) -> None:
        self.emit(Noted(text=text))

    def warned(self, text: str) -> None:
        self.emit(Warned(text=text))

    def nodes_excluded(self, number: int) -> None:
        self._meter.set(names.EXCLUDED_NODES, number)

    def gpus_checked(self, gpus: Sequence[GpuHealth], *, num_xids: int) -> None:
        """Export the health of all GPUs."""
        self._meter.set(names.GPU_ERRORS, sum(gpu.uncorrected_errors for gpu in gpus))
        self._meter.set(names.GPU_RESETS, sum(gpu.needs_reset for gpu in gpus))
        self._meter.set(names.GPU_THROTTLED, sum(gpu.is_throttled for gpu in gpus))
        self._meter.set(names.GPU_XIDS, num_xids)
        self._meter.set(names.GPU_CELSIUS, max(gpu.celsius for gpu in gpus))
        self._meter.set(names.GPU_WATTS, sum(gpu.watts for gpu in gpus))

    def data_read(self, *, num_prompts: int, num_dropped: int) -> None:
        self._meter.set(names.DATA_PROMPTS, num_prompts)
        self._meter.set(names.DATA_DROPPED, num_dropped)

    def group_generated(self, *, seconds: float, num_rollouts: int, num_tokens: int) -> None:
        """Count the rollouts of one prompt; `seconds` includes waiting and retries."""
        self._meter.observe(names.GROUP_SECONDS, seconds)
        self._meter.add(names.GENERATED_ROLLOUTS, num_rollouts)
        self._meter.add(names.GENERATED_TOKENS, num_tokens)
        self._group_seconds.append(seconds)

    def request_retried(self, cause: str) -> None:
        """Count a request that is sent again; `cause` is one of a few words, such as an error's class."""
        self._meter.add(names.RETRIES, 1, cause)

    def prompt_read(self, num_tokens: int, *, num_cached: int) -> None:
        """Count the tokens that requests brought, and those of them that engines had in their caches."""
        self._num_prompt_tokens += num_tokens
        self._num_cached_tokens += num_cached

    def draft_checked(self, num_tokens: int, *, num_passes: int) -> None:
        """Count the tokens of responses for which drafts were checked, and the passes of the policy for them."""
        self._num_drafted_tokens += num_tokens
        self._num_draft_passes += num_passes

    def measured(self, role: str, seconds: Mapping[int, float]) -> None:
        """Export the slowest member of a role over the median: `seconds` has the time of each in one window."""
        if seconds:
            self._meter.set(names.SLOWEST, max(seconds.values()) / median_low(seconds.values()), role)

    def scored(self, seconds: float) -> None:
        """Count a rollout that got a score."""
        self._meter.observe(names.REWARD_SECONDS, seconds)

    def score_failed(self, cause: str) -> None:
        """Count a rollout that got none; `cause` is one of a few words."""
        self._meter.add(names.REWARD_FAILURES, 1, cause)

    def watch_queue(
        self, *, num_waiting: Callable[[], int], num_under_way: Callable[[], int], capacity: Callable[[], int]
    ) -> None:
        """Export the numbers of groups between generator and trainer; they are read at each scrape."""
        self._meter.watch(names.QUEUE, num_waiting)
        self._meter.watch(names.UNDER_WAY, num_under_way)
        self._meter.watch(names.QUEUE_CAPACITY, capacity)

    def watch_requests(self, index: int, num_outstanding: Callable[[], int]) -> None:
        """Export the number of requests in progress on an engine; it is read at each scrape."""
        self._meter.watch(names.ENGINE_REQUESTS, num_outstanding, str(index))

    def run_finished(self, status: RunStatus, *, reason: str = "") -> None:
        self._has_finished = True
        self.emit(RunFinished(status=status, reason=reason))

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._has_finished:
            self.run_finished(_status(error), reason="" if error is None else _reason(error))

    def _take_cached_ratio(self) -> float | None:
        num_tokens, num_cached = self._num_prompt_tokens, self._num_cached_tokens
        self._num_prompt_tokens = self._num_cached_tokens = 0
        return num_cached / num_tokens if num_tokens else None

    def _take_tokens_per_pass(self) -> float | None:
        num_tokens, num_passes = self._num_drafted_tokens, self._num_draft_passes
        self._num_drafted_tokens = self._num_draft_passes = 0
        return num_tokens / num_passes if num_passes else None

    def _measure_tail(self) -> None:
        seconds, self._group_seconds = self._group_seconds, []
        if seconds and (middle := median(seconds)) > 0:
            self._meter.set(names.GROUP_TAIL, max(seconds) / middle)

    def emit(self, event: Event) -> None:
        """Record an event; methods of this class are for those that are counted or made from several values."""
        record = Record(sequence=self._next_sequence, time=datetime.now(UTC), event=event)
        self._next_sequence += 1
        notes = [self._pass_on(sink, record) for sink in self._sinks]
        for note in notes:
            if note is not None:
                self.warned(note)

    def _pass_on(self, sink: Sink, record: Record) -> str | None:
        """Give a record to one sink; return the text to show when it begins or ceases to fail. No sink ends a run."""
        name = type(sink).__name__
        try:
            sink.record(record)
        except (OSError, ValueError, MachineError) as error:
            self._meter.add(names.SINK_FAILURES, 1, name)
            if name in self._failing:
                return None
            self._failing.add(name)
            return f"{name} cannot write ({_reason(error)}); the run goes on, and it tries again with every event"
        if name not in self._failing:
            return None
        self._failing.remove(name)
        return f"{name} writes again"


def _status(error: BaseException | None) -> RunStatus:
    match error:
        case None:
            return RunStatus.DONE
        case StoppedError() | KeyboardInterrupt() | asyncio.CancelledError():
            return RunStatus.INTERRUPTED
        case PreemptedError():
            return RunStatus.PREEMPTED
        case _:
            return RunStatus.FAILED


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


class StepWarnings:
    """Remembers for how many steps each warning has lasted."""

    def __init__(self) -> None:
        self._streaks: dict[str, int] = {}

    def after(self, summary: StepSummary) -> tuple[str, ...]:
        """Return the warnings to show after this step."""
        warnings = {} if summary.rollouts is None else dict(_warnings(summary.rollouts))
        self._streaks = {name: self._streaks.get(name, 0) + 1 for name in warnings}
        return tuple(
            f"step {summary.step}{_duration(self._streaks[name])}: {text}"
            for name, text in warnings.items()
            if _is_power_of_two(self._streaks[name])
        )


def _warnings(rollouts: RolloutSummary) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each warning."""
    if rollouts.reward_min == rollouts.reward_max and rollouts.num_groups > 1:
        remedy = "the prompts are too easy or too hard, or the reward is broken"
        signal = "" if rollouts.has_signal else ", nothing was learned"
        yield "equal", f"all rewards are {rollouts.reward_median:g}{signal}; {remedy}"
    elif not rollouts.has_signal:
        yield (
            "zero_signal",
            f"none of {rollouts.num_groups} groups has signal, nothing was learned: within each the advantages are 0; "
            "more rollouts per prompt, other prompts or algorithm.filter can help",
        )
    outlier = rollouts.first_outlier
    if outlier is not None:
        yield (
            "outliers",
            f"{rollouts.num_reward_outliers} rewards are far from the median {rollouts.reward_median:g}; the first is "
            f"{outlier.reward:g}, of prompt {outlier.prompt_uid}",
        )


def _duration(num_steps: int) -> str:
    return f", for {num_steps} steps now" if num_steps > 1 else ""


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
