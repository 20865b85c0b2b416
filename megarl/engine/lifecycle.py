"""The states of one engine as a pure machine: suspicion, death, back-off and restarts, failed catch-ups.

Events go in, the next state comes out; the clock is an argument.

    HEALTHY     --silence, a failed request-->  SUSPECT     --an answer-->          HEALTHY or STALE, as before
    SUSPECT     --silence, too many doubts-->   DEAD        --back-off passed-->    RESTARTING
    RESTARTING  --it generates-->               STALE       --weights confirmed-->  HEALTHY
    RESTARTING  --it failed, it is late-->      DEAD        --budget spent-->       DEAD for good
    any         --its process ended-->          DEAD
    any         --the operator-->               RETIRED     --the operator-->       RESTARTING
    HEALTHY     --it is slow-->                 DRAINING    --its requests left-->  DEAD

What must be done follows from the state alone (`EngineStatus.action`), so it may be done late or twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from typing import assert_never

FORGIVEN_AFTER_S = 3600.0
"""An engine that has served this long has its whole budget of restarts again."""
MAX_DOUBTS = 10
"""Failed requests between two confirmations of the weights; an engine with more is dead, whatever its probes say."""
MAX_FAILED_SYNCS = 3
_SUSPECT_AFTER = 1 / 3
"""Fraction of the silence timeout after which an engine is suspect and gets no further request."""
_START_GRACE_S = 60.0
"""Added to the start timeout: the starting process has its own deadline, and its message says more."""


class EngineState(StrEnum):
    HEALTHY = "healthy"
    """Serves the committed version. No other state gets a request."""
    SUSPECT = "suspect"
    """It failed a request or was silent for a while; it may still answer."""
    DEAD = "dead"
    """Its process is gone or useless, and must be ended."""
    RESTARTING = "restarting"
    STALE = "stale"
    """It runs but serves other weights. A publish with compared digests makes it healthy."""
    RETIRED = "retired"
    """The operator took it out, or its node is excluded."""
    DRAINING = "draining"
    """It is slow: its requests go on elsewhere with the tokens they have, then it is restarted."""


class Action(Enum):
    """An action that an engine needs."""

    WATCH = auto()
    END = auto()
    START = auto()
    SYNC = auto()
    """Watch it, and send it the committed version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    max_restarts: int
    """Consecutive restarts; see FORGIVEN_AFTER_S."""
    back_off_s: float = 1.0
    """Pause before the first restart; doubled before each further one."""
    max_back_off_s: float = 60.0
    silence_timeout_s: float = 30.0
    start_timeout_s: float = 300.0

    def back_off(self, num_restarts: int) -> float:
        return min(self.max_back_off_s, self.back_off_s * 2.0 ** min(num_restarts, 60))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """The state of an engine and what led to it."""

    state: EngineState
    since: float
    """When it entered the state."""
    reason: str = ""
    """The reason that it is not healthy."""
    last_answer: float
    num_restarts: int = 0
    """Restarts begun, out of the budget."""
    restart_at: float | None = None
    """When a dead engine is restarted; None: only if the operator adds it."""
    confirmed_at: float | None = None
    """When it first served a committed version after its last start."""
    suspended: EngineState = EngineState.HEALTHY
    """The state that a suspect returns to."""
    num_doubts: int = 0
    num_failed_syncs: int = 0

    @classmethod
    def begin(cls, now: float) -> EngineStatus:
        """Return the status of an engine that has just started and serves version 0."""
        return cls(state=EngineState.HEALTHY, since=now, last_answer=now, confirmed_at=now)

    @classmethod
    def starting(cls, now: float, reason: str) -> EngineStatus:
        """Return the status of an engine that is still to be started."""
        return cls(state=EngineState.RESTARTING, since=now, last_answer=now, reason=reason)

    @property
    def action(self) -> Action:
        match self.state:
            case EngineState.HEALTHY | EngineState.SUSPECT:
                return Action.WATCH
            case EngineState.STALE:
                return Action.SYNC
            case EngineState.RESTARTING:
                return Action.START
            case EngineState.DEAD | EngineState.RETIRED | EngineState.DRAINING:
                return Action.END
            case _:
                assert_never(self.state)

    @property
    def is_reachable(self) -> bool:
        """Whether weights can be sent to the engine."""
        return self.state in (EngineState.HEALTHY, EngineState.SUSPECT, EngineState.STALE)

    @property
    def hands_over(self) -> bool:
        """Whether its requests are ended with the tokens they have, and continued elsewhere."""
        return self.state in (EngineState.RETIRED, EngineState.DRAINING)

    @property
    def is_over(self) -> bool:
        """Whether the engine is out of service until the operator adds it."""
        return self.state is EngineState.RETIRED or (self.state is EngineState.DEAD and self.restart_at is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """It answered a probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubted:
    """A request failed on the way."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Its process ended, or did not start."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """It generates, with other weights than the committed ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """It serves the committed version: every digest was compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FellBehind:
    """It serves other weights than the committed ones."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFailed:
    """The committed version was sent to this engine alone and did not arrive."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    """The operator takes it out, or its node is excluded."""

    reason: str = "retired by the operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """The operator adds it (again), with a fresh budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """It has to be restarted, without haste."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocated:
    """Its devices are on another node now: its failures before that do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time has passed."""

    unheard_s: float = 0.0
    """Time in which this process could not receive answers; it does not count as silence."""
    may_start: bool = True
    """Whether it may start now: its node is there, and in a shared pool engines may generate."""


Event = (
    Answered
    | Doubted
    | Ended
    | Started
    | Confirmed
    | FellBehind
    | SyncFailed
    | Retired
    | Added
    | Drained
    | Relocated
    | Ticked
)


def advance(status: EngineStatus, event: Event, *, now: float, policy: RestartPolicy) -> EngineStatus:  # noqa: C901 - one case per event
    """Return the status after an event. Events without meaning in a state change nothing."""
    match event:
        case Retired(reason=reason):
            return _enter(status, EngineState.RETIRED, now, reason, restart_at=None)
        case Added():
            return _restart(replace(status, num_restarts=0), now) if status.is_over else status
        case Drained(reason=reason):
            return _enter(status, EngineState.DRAINING, now, reason) if status.state is EngineState.HEALTHY else status
        case Relocated():
            fresh = replace(status, num_restarts=0)
            is_dead = status.state is EngineState.DEAD
            return _enter(fresh, status.state, now, status.reason, restart_at=now) if is_dead else fresh
        case Ticked():
            return _tick(status, event, now, policy)
        case Ended(reason=reason):
            return _die(status, reason, now, policy)
        case Started():
            if status.state is not EngineState.RESTARTING:
                return status
            fresh = replace(status, last_answer=now, num_doubts=0, num_failed_syncs=0, confirmed_at=None)
            return _enter(fresh, EngineState.STALE, now, "has just started, without weights")
        case Confirmed():
            if not status.is_reachable:
                return status
            confirmed_at = now if status.confirmed_at is None else status.confirmed_at
            confirmed = replace(status, last_answer=now, num_doubts=0, num_failed_syncs=0, confirmed_at=confirmed_at)
            return _enter(confirmed, EngineState.HEALTHY, now, "")
        case Answered():
            if not status.is_reachable:
                return status
            heard = replace(status, last_answer=now)
            if heard.state is not EngineState.SUSPECT:
                return heard
            return _enter(heard, heard.suspended, now, "" if heard.suspended is EngineState.HEALTHY else heard.reason)
        case Doubted(reason=reason):
            return _doubt(status, reason, now, policy)
        case FellBehind(reason=reason):
            if status.state is EngineState.SUSPECT:
                return replace(status, suspended=EngineState.STALE, reason=reason)
            return _enter(status, EngineState.STALE, now, reason) if status.state is EngineState.HEALTHY else status
        case SyncFailed(reason=reason):
            if status.state is not EngineState.STALE:
                return status
            failed = replace(status, num_failed_syncs=status.num_failed_syncs + 1, reason=reason)
            return _die(failed, reason, now, policy) if failed.num_failed_syncs >= MAX_FAILED_SYNCS else failed
        case _:
            assert_never(event)


def _tick(status: EngineStatus, tick: Ticked, now: float, policy: RestartPolicy) -> EngineStatus:
    match status.state:
        case EngineState.DEAD:
            is_due = status.restart_at is not None and now >= status.restart_at and tick.may_start
            return _restart(status, now) if is_due else status
        case EngineState.RESTARTING:
            seconds = now - status.since
            is_late = seconds > policy.start_timeout_s + _START_GRACE_S
            return _die(status, f"no sign of a start for {seconds:.0f} s", now, policy) if is_late else status
        case EngineState.HEALTHY | EngineState.SUSPECT | EngineState.STALE:
            status = replace(status, last_answer=min(now, status.last_answer + tick.unheard_s))
            silence_s = now - status.last_answer
            if silence_s > policy.silence_timeout_s:
                return _die(status, f"has not answered for {silence_s:.0f} s", now, policy)
            if silence_s > policy.silence_timeout_s * _SUSPECT_AFTER and status.state is not EngineState.SUSPECT:
                return _suspect(status, f"has not answered for {silence_s:.0f} s", now)
            return status
        case EngineState.DRAINING:
            # Its requests do not come back: they are lost, and sent again.
            is_late = now - status.since > policy.silence_timeout_s
            return _die(status, status.reason, now, policy) if is_late else status
        case EngineState.RETIRED:
            return status
        case _:
            assert_never(status.state)


def _doubt(status: EngineStatus, reason: str, now: float, policy: RestartPolicy) -> EngineStatus:
    if status.state not in (EngineState.HEALTHY, EngineState.STALE):
        return status
    doubted = replace(status, num_doubts=status.num_doubts + 1)
    if doubted.num_doubts > MAX_DOUBTS:
        return _die(doubted, f"failed {doubted.num_doubts} times, at last: {reason}", now, policy)
    return _suspect(doubted, reason, now)


def _suspect(status: EngineStatus, reason: str, now: float) -> EngineStatus:
    return _enter(replace(status, suspended=status.state), EngineState.SUSPECT, now, reason)


def _die(status: EngineStatus, reason: str, now: float, policy: RestartPolicy) -> EngineStatus:
    if status.state is EngineState.RETIRED:
        return status
    if status.state is EngineState.DEAD:
        return replace(status, reason=reason)
    if status.confirmed_at is not None and now - status.confirmed_at >= FORGIVEN_AFTER_S:
        status = replace(status, num_restarts=0)
    is_spent = status.num_restarts >= policy.max_restarts
    restart_at = None if is_spent else now + policy.back_off(status.num_restarts)
    return _enter(replace(status, confirmed_at=None), EngineState.DEAD, now, reason, restart_at=restart_at)


def _restart(status: EngineStatus, now: float) -> EngineStatus:
    begun = replace(status, num_restarts=status.num_restarts + 1)
    return _enter(begun, EngineState.RESTARTING, now, status.reason)


def _enter(
    status: EngineStatus, state: EngineState, now: float, reason: str, *, restart_at: float | None = None
) -> EngineStatus:
    since = status.since if state is status.state else now
    return replace(status, state=state, since=since, reason=reason, restart_at=restart_at)
