"""Finds the actors that outlived the driver before this one, by their names."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from uuid import uuid4

import ray
from ray.actor import ActorHandle

_NUMBER = "#"
"""Precedes a part that no other actor's name has: Ray frees the name of a dead actor only later."""


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
