"""What people are told of the engines: a line and an event for every change of state."""

from __future__ import annotations

from megarl.observe.observer import Observer
from megarl.rollout.fleet import Engine, Fleet
from megarl.rollout.lifecycle import EngineState, Life


def observe_fleet(fleet: Fleet, observer: Observer) -> None:
    """Tell `observer` who is there, and from now on what becomes of them."""

    def tell(engine: Engine, reason: str) -> None:
        endpoint = engine.client.endpoint
        observer.engine_changed(
            engine.index,
            engine.state,
            is_serving=engine.is_live,
            is_running=engine.life.is_reachable,
            version=engine.version,
            address=f"{endpoint.host}:{endpoint.port}",
            reason=reason,
        )

    def tell_change(engine: Engine, before: Life) -> None:
        if engine.state is EngineState.RESTARTING:
            observer.restarted("rollout", engine.index, f"restart {_count(engine.life, fleet)}")
            tell(engine, "")
        else:
            tell(engine, describe_change(engine, before, fleet))

    for engine in fleet.engines:
        observer.watch_requests(engine.index, lambda engine=engine: engine.num_outstanding)  # type: ignore[misc]
        tell(engine, "")
    fleet.listen(tell_change)
    fleet.requests = observer


def describe_change(engine: Engine, before: Life, fleet: Fleet) -> str:
    """Why an engine is what it is now, and what happens next."""
    life = engine.life
    match life.state:
        case EngineState.HEALTHY if before.state is EngineState.SUSPECT:
            return "it answers again"
        case EngineState.HEALTHY:
            return f"it has joined at version {engine.version}"
        case EngineState.DEAD if life.restart_at is not None:
            return f"{life.reason}; it is restarted in {life.restart_at - life.since:.0f} s"
        case EngineState.DEAD:
            return f"{life.reason}; it is given up after {fleet.policy.max_restarts} restarts"
        case EngineState.STALE:
            return f"{life.reason}; it waits for version {fleet.committed_version}"
        case _:
            return life.reason


def _count(life: Life, fleet: Fleet) -> str:
    return f"{life.num_restarts} of {fleet.policy.max_restarts}"
