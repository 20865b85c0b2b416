"""Actors that outlive their driver: the next one finds them by their names.

On a Ray that a run joined, an actor has the lease, and ends what runs there when no driver renews it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from uuid import uuid4

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group

from megarl.cluster.worker_group import Fence
from megarl.errors import MachineError
from megarl.system.lease import JoinedLease

logger = logging.getLogger(__name__)

_NUMBER = "#"
"""Precedes a part that no other actor's name has: Ray frees the name of a dead actor only later."""
_NAME = "lease-"
"""Precedes a part that no other actor's name has: Ray frees the name of a dead actor only later."""
_ANSWER_S = 60.0
_POLL_S = 0.25


class AdoptableActors:
    """The names by which the next driver of a run finds actors that outlived this one."""

    def __init__(self, *, outlive_driver: bool, finds: bool = False) -> None:
        """Without `outlive_driver` actors end with their driver. With `finds` an earlier one may have left some."""
        self._outlive_driver = outlive_driver
        self.left: dict[str, ActorHandle] = {}
        """Actors of an earlier driver that this one has not taken."""
        if finds:
            self._find()

    def _find(self) -> None:
        names = [name for name in ray.util.list_named_actors() if _NUMBER in name]
        counts = Counter(name.partition(_NUMBER)[0] for name in names)
        for name in names:
            plain = name.partition(_NUMBER)[0]
            with suppress(ValueError):  # it has ended meanwhile
                actor = ray.get_actor(name)
                if counts[plain] == 1:
                    self.left[plain] = actor
                else:  # one of them was just being replaced
                    ray.kill(actor)

    def options(self, name: str) -> dict[str, object]:
        """Return Ray's options for a new actor that outlives the driver as `name`."""
        return {"name": f"{name}{_NUMBER}{uuid4().hex[:8]}", "lifetime": "detached"} if self._outlive_driver else {}

    def take(self, name: str) -> ActorHandle | None:
        """Return the actor of this name that an earlier driver left, once."""
        return self.left.pop(name, None)


class LeaseActor:
    """Ends the actors and placement groups of its namespace when no driver has renewed the lease for `seconds`.

    It obeys the driver with the highest token.
    """

    def __init__(self, token: int, seconds: float) -> None:
        self._fence = Fence(token)
        self._seconds = seconds
        self._num_renewals = 0
        self._renewed = time.monotonic()
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def renew(self, token: int, seconds: float) -> None:
        self._fence.enter(token)
        self._seconds = seconds
        self._num_renewals += 1
        self._renewed = time.monotonic()

    def num_renewals(self) -> int:
        return self._num_renewals

    def end(self, token: int) -> None:
        """End everything but this actor."""
        self._fence.enter(token)
        self._end()

    def _end(self) -> None:
        own = ray.get_runtime_context().get_actor_id()
        for name in ray.util.list_named_actors():
            with suppress(ValueError):  # it has ended meanwhile
                actor = ray.get_actor(name)
                if actor._actor_id.hex() != own:
                    ray.kill(actor)
        for key, group in placement_group_table().items():
            with suppress(ValueError):  # of another namespace, or removed
                ours = get_placement_group(group["name"])
                if ours.id.hex() == key:
                    remove_placement_group(ours)

    def _watch(self) -> None:
        while time.monotonic() < self._renewed + self._seconds:
            time.sleep(_POLL_S)
        # Twice: an actor that was just being made has a name now.
        for _ in range(2):
            with suppress(ray.exceptions.RayError):
                self._end()
            time.sleep(_POLL_S)
        ray.kill(ray.get_runtime_context().current_actor)


@contextmanager
def leased(lease: JoinedLease) -> Iterator[None]:
    """Renew the lease of what an earlier driver left, or end that; end everything after the block."""
    actor = take_lease(lease)
    try:
        yield
    finally:
        if lease.give_back():
            _end(actor, lease.token)


def take_lease(lease: JoinedLease) -> ActorHandle:
    """Return the lease actor, which is renewed from now on. What an earlier driver left is adopted or ended.

    Raise MachineError if a driver still renews it.
    """
    actor = _left()
    if actor is not None and lease.adopted is None:
        _refuse_renewed(actor, lease)
        logger.warning("what an earlier driver of this run left on Ray is ended")
        _end(actor, lease.token)
        actor = None
    if actor is None:
        lease.adopted = None
        options = {"name": f"{_NAME}{uuid4().hex[:8]}", "lifetime": "detached", "num_cpus": 0, "max_restarts": -1}
        actor = ray.remote(LeaseActor).options(**options).remote(lease.token, lease.seconds)
    else:
        _answered(actor.renew.remote(lease.token, lease.seconds))
    lease.renew_by = partial(_renew, actor, lease.token, lease.seconds)
    lease.renew()
    lease.start_renewing()
    return actor


def _refuse_renewed(actor: ActorHandle, lease: JoinedLease) -> None:
    """Raise MachineError if a driver renews the lease: this one has another lock, as a copy of the folder has."""
    before = _answered(actor.num_renewals.remote())
    time.sleep(1.5 * lease.renew_every_s)
    if before is not None and _answered(actor.num_renewals.remote()) not in (None, before):
        raise MachineError(
            f"another driver of this run works on the Ray cluster ({lease.namespace}); end it, or give this run "
            "another name (--set run.name=...)"
        )


def _answered(call: ray.ObjectRef) -> object:
    """Return what the lease actor answers, None if it has ended; raise what it refuses."""
    try:
        return ray.get(call, timeout=_ANSWER_S)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError:
        return None


def _renew(actor: ActorHandle, token: int, seconds: float) -> None:
    with suppress(Exception):  # Ray cannot be reached now: the next time may succeed
        actor.renew.remote(token, seconds)


def _left() -> ActorHandle | None:
    """Return the lease actor of an earlier driver of this run."""
    for name in ray.util.list_named_actors():
        if name.startswith(_NAME):
            with suppress(ValueError):  # it has ended meanwhile
                return ray.get_actor(name)
    return None


def _end(actor: ActorHandle, token: int) -> None:
    with suppress(Exception):  # it ended everything by itself, or its node is gone: Ray raises anything then
        ray.get(actor.end.remote(token), timeout=_ANSWER_S)
        ray.kill(actor)
