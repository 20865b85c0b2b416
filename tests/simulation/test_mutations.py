"""The world notices when the code does not do what protects a run: each protection is taken out, and a seed fails."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from megarl.checkpoint import folder, mirror
from megarl.checkpoint.store import Store
from megarl.cluster import leases
from megarl.cluster.worker_group import Fence
from megarl.data import tokenizer
from megarl.episodes import dialogue, mcp_environments, openenv_environments, worker
from megarl.episodes.built_in import python
from megarl.errors import CheckpointError
from megarl.ranks.ranks import RankGroup
from megarl.reward import protocol
from megarl.rollout import frozen
from megarl.system import lease, run_lock
from tests.simulation.histories import Accident, Plan, run_plan, worlds
from tests.simulation.judges import Bench as JudgeBench
from tests.simulation.judges import run_judge
from tests.simulation.seams import monotonic
from tests.simulation.talks import TalkPlan, run_talk
from tests.simulation.tools import Bench as ToolBench
from tests.simulation.tools import run_bench


@dataclass(frozen=True)
class Mutation:
    """What is taken out, where that shows, and the invariant that breaks."""

    replaced: Sequence[tuple[object, str, object]]
    breaks: str
    plans: Sequence[Plan | TalkPlan | int]
    """A number is the seed of a tool or a judge."""
    world: Callable[[int], ToolBench | JudgeBench] = run_bench


def _nothing(*_: object, **__: object) -> None:
    pass


def _frozen(seed: int, seconds: float = 48.0) -> Plan:
    accidents = (Accident(7.0 + 0.3 * seed, "freeze_driver", seconds),)
    return Plan(seed=seed, kind="shared", steps=8, save_every=1, flock="none", accidents=accidents)


def _finite64(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _by_path(self: lease.JoinedLease, *arguments: object, **named: object) -> None:
    _joined(self, *arguments, **named)  # type: ignore[arg-type]
    self.namespace = f"megarl-{hashlib.sha256(str(arguments[0]).encode()).hexdigest()[:16]}"


_joined = lease.JoinedLease.__init__


def _prune_all(store: Store, **named: Any) -> None:
    """Remove later steps than the newest on the local disk, whoever copied them."""
    owner = SimpleNamespace(steps=tuple(store.steps()))
    _prune(store, **named | {"owner": cast("Any", owner)})


_prune = mirror._prune
_AT_ONCE = SimpleNamespace(monotonic=monotonic, sleep=_nothing)
"""Takes the lock without waiting for others that take it at the same moment."""


class _OtherError(CheckpointError):
    """Is not what a damaged manifest raises."""


def _prepare_halfway(self: python.Python) -> None:
    """Start an interpreter, and keep it where its first frame does not come in time."""
    if self._process is None:
        self._process = self._sandbox.start("")
        self._exchange(b"", 0, time.monotonic() + python.START_TIMEOUT_S)


def _python_halfway(self: python.Python, code: str) -> str:
    """Run code, and keep the interpreter where the call's deadline passes."""
    self.prepare()
    try:
        return str(self._call(code).get("text"))
    except python._StoppedError as error:
        self.close()
        return f"error: {error}"


def _exchange_in_order(self: python.Python, payload: bytes, number: int, deadline: float) -> dict[str, object]:
    """Take the next reply for that of the request."""
    frame = python._HEADER.pack(len(payload), number) + payload if number else b""
    size, _ = python._HEADER.unpack(self._read(python._HEADER.size, deadline, unsent=frame))
    return dict(json.loads(self._read(size, deadline)))


def _talk(kind: str, seed: int) -> TalkPlan:
    return TalkPlan(seed=seed, kind=kind)  # type: ignore[arg-type]


MUTATIONS = {
    "ranks obey a driver that was followed": Mutation(
        replaced=[
            (Fence, "enter", _nothing),
            (run_lock._RunLock, "check", _nothing),
            (run_lock._RunLock, "watch", _nothing),
        ],
        breaks="rising tokens",
        plans=[_frozen(seed) for seed in range(4)],
    ),
    "a driver that was followed ends the ranks": Mutation(
        replaced=[(RankGroup, "is_ours", None)], breaks="rising tokens", plans=[_frozen(seed) for seed in range(4)]
    ),
    "two first starts both hold": Mutation(
        replaced=[(run_lock, "time", _AT_ONCE)],
        breaks="rising tokens",
        plans=[
            Plan(
                seed=seed,
                kind="shared",
                steps=3,
                save_every=1,
                flock="none",
                accidents=(Accident(0.5, "second_driver"),),
            )
            for seed in range(12)
        ],
    ),
    "a Ray knows a run by its path": Mutation(
        replaced=[(lease.JoinedLease, "__init__", _by_path), (leases, "_refuse_renewed", _nothing)],
        breaks="runs are apart",
        plans=[
            Plan(
                seed=seed, kind="pods", steps=4, save_every=1, flock="shared", accidents=(Accident(2.0, "kill_driver"),)
            )
            for seed in range(4)
        ],
    ),
    "a mirror has no owner": Mutation(
        replaced=[(mirror, "check_owner", _nothing), (mirror, "_prune", _prune_all)],
        breaks="newest kept: the store",
        plans=[
            Plan(
                seed=seed,
                kind="mirror",
                steps=6,
                save_every=1,
                flock="none",
                accidents=(Accident(7.0, "freeze_host", 45.0),),
            )
            for seed in range(12)
        ],
    ),
    "the folders of a new run are not synced": Mutation(
        replaced=[(folder, "_sync_names_of", _nothing)],
        breaks="newest kept",
        plans=[
            Plan(seed=seed, kind="shared", steps=3, save_every=1, flock="shared", accidents=(Accident(8.0, "power"),))
            for seed in range(12)
        ],
    ),
    "text is encoded as it comes": Mutation(
        replaced=[(tokenizer, "whole_text", str)], breaks="", plans=[_talk("openenv", seed) for seed in range(3)]
    ),
    "an opening is not made plain": Mutation(
        replaced=[(dialogue.Dialogue, "cut", None)],
        breaks="control token",
        plans=[_talk("openenv", seed) for seed in range(5, 12)],
    ),
    "numbers are finite in 64 bits only": Mutation(
        replaced=[(module, "finite32", _finite64) for module in (openenv_environments, protocol)],
        breaks="",
        plans=[_talk(kind, seed) for seed in range(12) for kind in ("openenv", "class")],
    ),
    "arguments are sent as they were written": Mutation(
        replaced=[(dialogue, "read_json", json.loads)],
        breaks="no text loses an episode",
        plans=[_talk("mcp", seed) for seed in range(7, 12)],
    ),
    "a damaged manifest in the store is an error": Mutation(
        replaced=[(mirror, "CheckpointError", _OtherError)],
        breaks="progress",
        plans=[
            Plan(
                seed=seed,
                kind="mirror",
                steps=5,
                save_every=1,
                flock="host",
                accidents=(Accident(8.0, "damage_store"), Accident(8.01, "kill_driver")),
            )
            for seed in range(12)
        ],
    ),
    "the judge reads what the policy wrote as it is": Mutation(
        replaced=[(frozen, "map_texts", lambda chat, _plain: chat)],
        breaks="control token",
        plans=range(12),
        world=run_judge,
    ),
    "frames of the Python tool have no numbers, and a start is part of its call": Mutation(
        replaced=[
            (worker, "PreparedTool", _OtherError),
            (python.Python, "prepare", _prepare_halfway),
            (python.Python, "python", _python_halfway),
            (python.Python, "_exchange", _exchange_in_order),
        ],
        breaks="an observation belongs to its call",
        plans=range(40),
    ),
    "an interpreter that does not start is a result": Mutation(
        replaced=[(python, "SandboxError", python._StoppedError)],
        breaks="a machine's fault is no result",
        plans=range(40),
    ),
    "lists of tools may have any number of pages": Mutation(
        replaced=[(mcp_environments, "_MAX_PAGES", 1 << 30), (mcp_environments._Session, "tools", None)],
        breaks="every wait ends",
        plans=[_talk("mcp", seed) for seed in range(30, 36)],
    ),
}


async def _uncut(_self: object, text: str) -> str:
    return text


async def _ours(_self: object) -> bool:
    return True


async def _without_deadline(self: mcp_environments._Session) -> object:
    return await self._listed()


_LATER: dict[str, Callable[..., object]] = {"cut": _uncut, "tools": _without_deadline, "is_ours": _ours}


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with worlds():
        yield
    logging.disable(level)


def _broken(mutation: Mutation, plan: Plan | TalkPlan | int) -> Sequence[str]:
    match plan:
        case Plan():
            return run_plan(plan).broken
        case TalkPlan():
            return run_talk(plan).broken
        case seed:
            return mutation.world(seed).broken


@pytest.mark.patient
@pytest.mark.parametrize("what", MUTATIONS)
def test_the_world_notices_that(what: str) -> None:
    mutation = MUTATIONS[what]
    with ExitStack() as stack:
        for place, name, value in mutation.replaced:
            stack.enter_context(mock.patch.object(place, name, value or _LATER[name]))
        found = any(mutation.breaks in text for plan in mutation.plans for text in _broken(mutation, plan))
    assert found, f"no seed broke {mutation.breaks!r}"
