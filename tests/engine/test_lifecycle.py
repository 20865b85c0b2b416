"""The life of an engine under a clock that the tests move."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.engine.lifecycle import (
    FORGIVEN_AFTER_S,
    MAX_DOUBTS,
    MAX_FAILED_SYNCS,
    Action,
    Added,
    Answered,
    Confirmed,
    Doubted,
    Drained,
    Ended,
    EngineState,
    EngineStatus,
    Event,
    FellBehind,
    Relocated,
    RestartPolicy,
    Retired,
    Started,
    SyncFailed,
    Ticked,
    advance,
)

POLICY = RestartPolicy(max_restarts=3, back_off_s=1, max_back_off_s=60, silence_timeout_s=30, start_timeout_s=100)
HEALTHY, SUSPECT, DEAD = EngineState.HEALTHY, EngineState.SUSPECT, EngineState.DEAD
RESTARTING, STALE, RETIRED = EngineState.RESTARTING, EngineState.STALE, EngineState.RETIRED


@dataclass
class Clocked:
    """An engine and a clock."""

    policy: RestartPolicy = POLICY
    now: float = 0.0
    status: EngineStatus = field(default_factory=lambda: EngineStatus.begin(0.0))

    def action(self) -> Action:
        return self.status.action

    def see(self, *events: Event) -> EngineState:
        for event in events:
            self.status = advance(self.status, event, now=self.now, policy=self.policy)
        return self.status.state

    def after(self, seconds: float, *events: Event) -> EngineState:
        """Time passes in small steps, then something happens."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            self.see(Ticked())
        return self.see(*events)


def test_an_engine_that_is_killed_comes_back_through_a_sync() -> None:
    engine = Clocked()
    assert engine.see(Ended(reason="SIGKILL")) is DEAD
    assert engine.action() == Action.END
    assert engine.after(0.75) is DEAD
    assert engine.after(0.25) is RESTARTING
    assert engine.action() == Action.START
    assert engine.after(40, Started()) is STALE
    assert engine.action() == Action.SYNC
    assert engine.see(Answered()) is STALE
    assert engine.see(Confirmed()) is HEALTHY


def test_an_engine_that_falls_silent_is_suspected_then_dead() -> None:
    engine = Clocked()
    assert engine.after(9, Answered()) is HEALTHY
    assert engine.after(10) is HEALTHY
    assert engine.after(1) is SUSPECT
    assert engine.after(19) is SUSPECT
    assert engine.after(1) is DEAD
    assert engine.status.reason == "has not answered for 30 s"


@pytest.mark.parametrize("state", [HEALTHY, STALE])
def test_a_suspect_that_answers_is_what_it_was(state: EngineState) -> None:
    engine = Clocked()
    if state is STALE:
        engine.see(FellBehind(reason="half a commit"))
    assert engine.see(Doubted(reason="disconnected")) is SUSPECT
    assert engine.see(Answered()) is state


def test_a_suspect_that_turns_out_to_have_other_weights_is_stale() -> None:
    assert Clocked().see(Doubted(reason="?"), FellBehind(reason="serves version 3"), Answered()) is STALE


def test_time_in_which_nobody_listened_is_no_silence() -> None:
    engine = Clocked()
    engine.now = 500
    assert engine.see(Ticked(unheard_s=500)) is HEALTHY
    assert engine.after(11) is SUSPECT


def test_an_engine_that_fails_requests_again_and_again_is_dead_whatever_its_probes_say() -> None:
    engine = Clocked()
    for _ in range(MAX_DOUBTS):
        assert engine.see(Doubted(reason="status 500")) is SUSPECT
        assert engine.see(Answered()) is HEALTHY
    assert engine.see(Doubted(reason="status 500")) is DEAD


def test_an_engine_that_cannot_be_synced_is_restarted() -> None:
    engine = Clocked()
    engine.see(FellBehind(reason="half a commit"))
    for _ in range(MAX_FAILED_SYNCS - 1):
        assert engine.see(SyncFailed(reason="digest")) is STALE
    assert engine.see(SyncFailed(reason="digest")) is DEAD


def test_no_restart_begins_while_there_is_no_room_for_it() -> None:
    engine = Clocked()
    engine.see(Ended(reason="SIGKILL"))
    engine.now = 100
    assert engine.see(Ticked(may_start=False)) is DEAD
    assert engine.see(Ticked(may_start=True)) is RESTARTING


def test_waits_between_restarts_grow_and_the_budget_ends_them() -> None:
    engine = Clocked()
    waits = []
    while True:
        engine.see(Ended(reason="SIGKILL"))
        if engine.status.restart_at is None:
            break
        waits.append(engine.status.restart_at - engine.now)
        engine.after(waits[-1])
    assert waits == [1, 2, 4]
    assert engine.status.is_over
    assert engine.after(10_000) is DEAD
    assert engine.see(Added()) is RESTARTING
    assert engine.status.num_restarts == 1


def test_an_engine_that_has_served_for_long_has_its_budget_back() -> None:
    engine = Clocked()
    for _ in range(3):
        engine.see(Ended(reason="SIGKILL"))
        engine.after(10)
        assert engine.see(Started(), Confirmed()) is HEALTHY
    while engine.now < FORGIVEN_AFTER_S + 100:
        engine.after(5, Answered())
    engine.see(Ended(reason="SIGKILL"))
    assert engine.status.restart_at == engine.now + 1


def test_a_start_without_an_end_is_given_up() -> None:
    engine = Clocked()
    engine.see(Ended(reason="SIGKILL"))
    engine.after(2)
    assert engine.after(150) is RESTARTING
    assert engine.after(10) is DEAD


def test_a_retired_engine_comes_back_only_when_it_is_added() -> None:
    engine = Clocked()
    assert engine.see(Retired(), Ended(reason="as asked"), Answered(), Confirmed(), FellBehind(reason="?")) is RETIRED
    assert engine.after(1000) is RETIRED
    assert engine.see(Added(), Started(), Confirmed()) is HEALTHY


EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Answered),
    st.builds(Doubted, reason=st.just("doubt")),
    st.builds(Ended, reason=st.just("end")),
    st.builds(Started),
    st.builds(Confirmed),
    st.builds(FellBehind, reason=st.just("behind")),
    st.builds(SyncFailed, reason=st.just("sync")),
    st.builds(Retired),
    st.builds(Added),
    st.builds(Ticked, unheard_s=st.floats(0, 100), may_start=st.booleans()),
)
HISTORIES = st.lists(st.tuples(st.floats(0, 200), EVENTS), max_size=60)
POLICIES = st.builds(
    RestartPolicy,
    max_restarts=st.integers(0, 4),
    back_off_s=st.floats(0.1, 5),
    max_back_off_s=st.floats(5, 60),
    silence_timeout_s=st.floats(1, 100),
    start_timeout_s=st.floats(10, 300),
)


@given(HISTORIES, POLICIES)
def test_only_an_engine_whose_weights_were_confirmed_last_gets_requests(
    history: list[tuple[float, Event]], policy: RestartPolicy
) -> None:
    engine, is_confirmed = Clocked(policy=policy), True
    for seconds, event in history:
        engine.now += seconds
        before = engine.status.state
        engine.see(event)
        if isinstance(event, Confirmed) and before in (HEALTHY, SUSPECT, STALE):
            is_confirmed = True
        elif isinstance(event, FellBehind) or engine.status.state in (DEAD, RESTARTING, RETIRED):
            is_confirmed = False
        if engine.status.state is HEALTHY:
            assert is_confirmed


@given(HISTORIES, POLICIES)
def test_the_budget_is_never_exceeded_and_waits_never_shrink_within_it(
    history: list[tuple[float, Event]], policy: RestartPolicy
) -> None:
    engine, last_wait, num_begun = Clocked(policy=policy), 0.0, 0
    for seconds, event in history:
        engine.now += seconds
        before = engine.status
        engine.see(event)
        after = engine.status
        if isinstance(event, Added) or after.num_restarts < before.num_restarts:
            last_wait, num_begun = 0.0, 0
        if after.state is DEAD and before.state is not DEAD and after.restart_at is not None:
            assert after.restart_at - engine.now >= last_wait - 1e-9
            last_wait = after.restart_at - engine.now
        if after.state is RESTARTING and before.state is DEAD and not isinstance(event, Added):
            num_begun += 1
            assert num_begun <= policy.max_restarts


@given(HISTORIES, POLICIES)
def test_every_path_ends_when_nothing_but_time_passes(
    history: list[tuple[float, Event]], policy: RestartPolicy
) -> None:
    engine = Clocked(policy=policy)
    for seconds, event in history:
        engine.now += seconds
        engine.see(event)
    for _ in range(40):
        engine.now += policy.start_timeout_s + policy.max_back_off_s + policy.silence_timeout_s + 61
        engine.see(Ticked())
    assert engine.status.is_over


def test_an_engine_without_a_node_spends_no_restart_and_one_that_moved_has_them_all() -> None:
    engine = Clocked(policy=RestartPolicy(max_restarts=1, back_off_s=1, silence_timeout_s=30, start_timeout_s=100))
    engine.see(Ended(reason="its node is gone"))
    for _ in range(100):
        engine.now += 1
        assert engine.see(Ticked(may_start=False)) is DEAD
    assert engine.status.num_restarts == 0
    assert engine.after(1, Ended(reason="again")) is DEAD
    assert engine.status.is_over
    assert engine.see(Relocated()) is DEAD
    assert not engine.status.is_over
    assert engine.after(1, Started()) is STALE
    assert engine.status.num_restarts == 1


def test_a_retired_engine_that_moved_stays_retired() -> None:
    engine = Clocked()
    assert engine.see(Retired(), Relocated()) is RETIRED
    assert engine.status.is_over


def test_a_draining_engine_is_dead_when_its_requests_do_not_leave() -> None:
    engine = Clocked()
    assert engine.see(Drained(reason="is slow")) is EngineState.DRAINING
    assert engine.action() is Action.END
    assert engine.after(29) is EngineState.DRAINING
    assert engine.after(2) is DEAD
    assert engine.status.reason == "is slow"
    engine = Clocked()
    assert engine.see(Retired(), Drained(reason="is slow")) is RETIRED
