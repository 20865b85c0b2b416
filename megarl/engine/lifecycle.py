"""The life of one engine as a pure state machine: events go in, the next state comes out. The clock is an argument.

    HEALTHY     --silence, a failed request-->  SUSPECT     --an answer-->          HEALTHY or STALE, as before
    SUSPECT     --silence, too many doubts-->   DEAD        --back-off passed-->    RESTARTING
    RESTARTING  --it generates-->               STALE       --weights confirmed-->  HEALTHY
    RESTARTING  --it failed, it is late-->      DEAD        --budget spent-->       DEAD for good
    any         --its process ended-->          DEAD
    any         --the operator-->               RETIRED     --the operator-->       RESTARTING
    HEALTHY     --it is slow-->                 DRAINING    --its requests left-->  DEAD

What must be done follows from the state alone (`Life.wants`), so it may be done late or twice.
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
"""Share of the silence timeout after which an engine is suspect and gets no further request."""
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


class Want(Enum):
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
class Life:
    """The state of an engine and what led to it."""

    state: EngineState
    since: float
    """When it entered the state."""
    reason: str = ""
    """Why it is not healthy."""
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
    def begin(cls, now: float) -> Life:
        """Return the life of an engine that has just started and serves version 0."""
        return cls(state=EngineState.HEALTHY, since=now, last_answer=now, confirmed_at=now)

    @classmethod
    def starting(cls, now: float, reason: str) -> Life:
        """Return the life of an engine that is still to be started."""
        return cls(state=EngineState.RESTARTING, since=now, last_answer=now, reason=reason)

    @property
    def wants(self) -> Want:
        match self.state:
            case EngineState.HEALTHY | EngineState.SUSPECT:
                return Want.WATCH
            case EngineState.STALE:
                return Want.SYNC
            case EngineState.RESTARTING:
                return Want.START
            case EngineState.DEAD | EngineState.RETIRED | EngineState.DRAINING:
                return Want.END
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


def advance(life: Life, event: Event, *, now: float, policy: RestartPolicy) -> Life:  # noqa: C901 - one case per event
    """Return the life after an event. Events without meaning in a state change nothing."""
    match event:
        case Retired(reason=reason):
            return _enter(life, EngineState.RETIRED, now, reason, restart_at=None)
        case Added():
            return _restart(replace(life, num_restarts=0), now) if life.is_over else life
        case Drained(reason=reason):
            return _enter(life, EngineState.DRAINING, now, reason) if life.state is EngineState.HEALTHY else life
        case Relocated():
            fresh = replace(life, num_restarts=0)
            is_dead = life.state is EngineState.DEAD
            return _enter(fresh, life.state, now, life.reason, restart_at=now) if is_dead else fresh
        case Ticked():
            return _tick(life, event, now, policy)
        case Ended(reason=reason):
            return _die(life, reason, now, policy)
        case Started():
            if life.state is not EngineState.RESTARTING:
                return life
            fresh = replace(life, last_answer=now, num_doubts=0, num_failed_syncs=0, confirmed_at=None)
            return _enter(fresh, EngineState.STALE, now, "has just started, without weights")
        case Confirmed():
            if not life.is_reachable:
                return life
            confirmed_at = now if life.confirmed_at is None else life.confirmed_at
            known = replace(life, last_answer=now, num_doubts=0, num_failed_syncs=0, confirmed_at=confirmed_at)
            return _enter(known, EngineState.HEALTHY, now, "")
        case Answered():
            if not life.is_reachable:
                return life
            heard = replace(life, last_answer=now)
            if heard.state is not EngineState.SUSPECT:
                return heard
            return _enter(heard, heard.suspended, now, "" if heard.suspended is EngineState.HEALTHY else heard.reason)
        case Doubted(reason=reason):
            return _doubt(life, reason, now, policy)
        case FellBehind(reason=reason):
            if life.state is EngineState.SUSPECT:
                return replace(life, suspended=EngineState.STALE, reason=reason)
            return _enter(life, EngineState.STALE, now, reason) if life.state is EngineState.HEALTHY else life
        case SyncFailed(reason=reason):
            if life.state is not EngineState.STALE:
                return life
            failed = replace(life, num_failed_syncs=life.num_failed_syncs + 1, reason=reason)
            return _die(failed, reason, now, policy) if failed.num_failed_syncs >= MAX_FAILED_SYNCS else failed
        case _:
            assert_never(event)


def _tick(life: Life, tick: Ticked, now: float, policy: RestartPolicy) -> Life:
    match life.state:
        case EngineState.DEAD:
            is_due = life.restart_at is not None and now >= life.restart_at and tick.may_start
            return _restart(life, now) if is_due else life
        case EngineState.RESTARTING:
            seconds = now - life.since
            is_late = seconds > policy.start_timeout_s + _START_GRACE_S
            return _die(life, f"no sign of a start for {seconds:.0f} s", now, policy) if is_late else life
        case EngineState.HEALTHY | EngineState.SUSPECT | EngineState.STALE:
            life = replace(life, last_answer=min(now, life.last_answer + tick.unheard_s))
            silence_s = now - life.last_answer
            if silence_s > policy.silence_timeout_s:
                return _die(life, f"has not answered for {silence_s:.0f} s", now, policy)
            if silence_s > policy.silence_timeout_s * _SUSPECT_AFTER and life.state is not EngineState.SUSPECT:
                return _suspect(life, f"has not answered for {silence_s:.0f} s", now)
            return life
        case EngineState.DRAINING:
            # Its requests do not come back: they are lost, and sent again.
            is_late = now - life.since > policy.silence_timeout_s
            return _die(life, life.reason, now, policy) if is_late else life
        case EngineState.RETIRED:
            return life
        case _:
            assert_never(life.state)


def _doubt(life: Life, reason: str, now: float, policy: RestartPolicy) -> Life:
    if life.state not in (EngineState.HEALTHY, EngineState.STALE):
        return life
    doubted = replace(life, num_doubts=life.num_doubts + 1)
    if doubted.num_doubts > MAX_DOUBTS:
        return _die(doubted, f"failed {doubted.num_doubts} times, at last: {reason}", now, policy)
    return _suspect(doubted, reason, now)


def _suspect(life: Life, reason: str, now: float) -> Life:
    return _enter(replace(life, suspended=life.state), EngineState.SUSPECT, now, reason)


def _die(life: Life, reason: str, now: float, policy: RestartPolicy) -> Life:
    if life.state is EngineState.RETIRED:
        return life
    if life.state is EngineState.DEAD:
        return replace(life, reason=reason)
    if life.confirmed_at is not None and now - life.confirmed_at >= FORGIVEN_AFTER_S:
        life = replace(life, num_restarts=0)
    is_spent = life.num_restarts >= policy.max_restarts
    restart_at = None if is_spent else now + policy.back_off(life.num_restarts)
    return _enter(replace(life, confirmed_at=None), EngineState.DEAD, now, reason, restart_at=restart_at)


def _restart(life: Life, now: float) -> Life:
    begun = replace(life, num_restarts=life.num_restarts + 1)
    return _enter(begun, EngineState.RESTARTING, now, life.reason)


def _enter(life: Life, state: EngineState, now: float, reason: str, *, restart_at: float | None = None) -> Life:
    since = life.since if state is life.state else now
    return replace(life, state=state, since=since, reason=reason, restart_at=restart_at)
