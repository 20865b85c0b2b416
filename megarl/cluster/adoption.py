"""A driver takes over from one that died: it finds actors by their names, and trainer ranks at a checkpoint."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar
from uuid import uuid4

import ray
from ray.actor import ActorHandle

from megarl.errors import WorkerError

logger = logging.getLogger(__name__)

Rank = TypeVar("Rank", covariant=True)

_NUMBER = "#"
"""Precedes a part that no other actor's name has: Ray frees the name of a dead actor only later."""
_RANKS_S = 60.0
"""For ranks of an earlier driver to end the calls that it began."""


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


class AdoptableRanks(Protocol[Rank]):
    """The ranks of one model, as `ranks.ranks.RankGroup` has them."""

    role: str

    async def adopt(self, fill: Callable[[Rank], bool], *, timeout_s: float) -> bool: ...


async def adopt_ranks(ranks: AdoptableRanks[Rank], fill: Callable[[Rank], bool], *, is_shared: bool) -> bool:
    """Take over the ranks that an earlier driver left; return False if they must be started again."""
    try:
        if is_shared:
            raise WorkerError("they may have given up memory to engines of their devices")
        is_there = await ranks.adopt(fill, timeout_s=_RANKS_S)
    except WorkerError as error:
        logger.warning("role=%s ranks are not adopted, but started again: %s", ranks.role, error)
        return False
    logger.info("adopted role=%s %s", ranks.role, "as they are" if is_there else "with the checkpoint")
    return True
