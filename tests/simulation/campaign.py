"""Many histories of all worlds, one seed after the other, and the failures that are alike."""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.simulation.fleets import run_scene
from tests.simulation.histories import Plan, run_plan, shrink, worlds
from tests.simulation.judges import run_judge
from tests.simulation.talks import TalkPlan, run_talk
from tests.simulation.tools import run_bench


@dataclass(frozen=True)
class Failure:
    """A history that broke something."""

    world: str
    seed: int
    broken: tuple[str, ...]
    text: str
    """All that happened in it."""

    @property
    def signature(self) -> str:
        """The first sentence without its numbers: failures of one cause have the same."""
        return f"{self.world}: " + re.sub(r"\d+|alpha|beta|gamma", "N", self.broken[0])


def _drivers(seed: int) -> tuple[tuple[str, ...], str]:
    verdict = run_plan(Plan.of(seed))
    return verdict.broken, str(verdict)


def _talks(seed: int) -> tuple[tuple[str, ...], str]:
    talk = run_talk(TalkPlan.of(seed))
    return tuple(talk.broken), _listed(str(talk.plan), talk.log)


def _fleets(seed: int) -> tuple[tuple[str, ...], str]:
    scene = run_scene(seed)
    return tuple(scene.broken), _listed(f"fleet {seed}: {scene.num_accidents} accidents", scene.log)


def _listed(title: str, log: Sequence[tuple[float, str]]) -> str:
    return "\n".join([title, *(f"{when:9.3f}  {text}" for when, text in log)])


def _tools(seed: int) -> tuple[tuple[str, ...], str]:
    return tuple(run_bench(seed).broken), f"tool {seed}"


def _judges(seed: int) -> tuple[tuple[str, ...], str]:
    return tuple(run_judge(seed).broken), f"judge {seed}"


WORLDS: dict[str, Callable[[int], tuple[tuple[str, ...], str]]] = {
    "drivers": _drivers,
    "talks": _talks,
    "fleets": _fleets,
    "tools": _tools,
    "judges": _judges,
}


def _fairly(spent_s: Mapping[str, float]) -> Iterator[str]:
    """Yield the world that has had the least time so far."""
    while True:
        yield min(spent_s, key=spent_s.__getitem__)


def histories(names: Sequence[str], first: int, stride: int) -> Iterator[tuple[str, Failure | None]]:
    """Run every `stride`th seed from `first` on in each world; yield the world, and what was broken.

    All worlds get the same time: a talk takes a tenth of what a run of several drivers does.
    """
    logging.disable(logging.CRITICAL)
    seeds = {name: itertools.count(first, stride) for name in names}
    spent_s = dict.fromkeys(names, 0.0)
    with worlds():
        for name in itertools.chain(names, _fairly(spent_s)):
            seed, began = next(seeds[name]), time.process_time()
            broken, text = WORLDS[name](seed)
            if seed != first:  # the first one makes what all of them share
                spent_s[name] += time.process_time() - began
            yield name, Failure(world=name, seed=seed, broken=broken, text=text) if broken else None


def show(name: str, seed: int, *, shrinks: bool) -> tuple[bool, str]:
    """Return whether a history holds, and all that happened in it, in its smallest form if asked for."""
    logging.disable(logging.CRITICAL)
    with worlds():
        if name == "drivers":
            verdict = run_plan(Plan.of(seed))
            verdict = shrink(verdict) if shrinks and verdict.broken else verdict
            return not verdict.broken, str(verdict)
        broken, text = WORLDS[name](seed)
    return not broken, "\n".join([text, *(f"BROKEN: {each}" for each in broken)])
