"""Many histories of all worlds, one seed after the other, and the failures that are alike."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.simulation.fleets import run_scene
from tests.simulation.histories import Plan, run_plan, shrink, worlds
from tests.simulation.talks import TalkPlan, run_talk


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
    return tuple(talk.broken), "\n".join([str(talk.plan), *(f"{when:9.3f}  {text}" for when, text in talk.log)])


def _fleets(seed: int) -> tuple[tuple[str, ...], str]:
    scene = run_scene(seed)
    return tuple(scene.broken), f"fleet {seed}: {scene.num_accidents} accidents"


WORLDS: Mapping[str, Callable[[int], tuple[tuple[str, ...], str]]] = {
    "drivers": _drivers,
    "talks": _talks,
    "fleets": _fleets,
}


def run_seeds(names: tuple[str, ...], first: int, stride: int, seconds: float, most: int) -> tuple[int, list[Failure]]:
    """Return the number of histories of every `stride`th seed from `first` on, and those that failed."""
    logging.disable(logging.CRITICAL)
    failures: list[Failure] = []
    num_histories, deadline = 0, time.monotonic() + seconds
    with worlds():
        while num_histories < most and time.monotonic() < deadline:
            seed = first + stride * (num_histories // len(names))
            world = names[num_histories % len(names)]
            broken, text = WORLDS[world](seed)
            num_histories += 1
            if broken:
                failures.append(Failure(world=world, seed=seed, broken=broken, text=text))
    return num_histories, failures


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
