"""One history: a plan of accidents drawn from a seed, the world in which they happen, and smaller plans that fail."""

from __future__ import annotations

import gc
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from unittest import mock

from megarl.checkpoint.manifest import MANIFEST_FILE
from tests.simulation import invariants
from tests.simulation.actors import SimulatedRay
from tests.simulation.disk import SHARED, Disk, close_left, simulated_files
from tests.simulation.drivers import Driver
from tests.simulation.parts import simulated_parts
from tests.simulation.sample_run import sample_recipe
from tests.simulation.seams import deliver, standard_library
from tests.simulation.store import Store
from tests.simulation.world import Process, StuckError, World, current_process

Kind = Literal["shared", "mirror", "pods"]
LIMIT_S = 3000.0
FIRST_START_S = 0.5
_LOOK_EVERY_S = 4.0
_PATIENCE_S = 12.0
"""After so long without a sign of a driver, whoever starts drivers starts another one."""
_MAX_STARTS = 40
HOSTS = ("alpha", "beta", "gamma")

_ACCIDENTS: dict[Kind, tuple[str, ...]] = {
    "shared": (
        "kill_driver",
        "freeze_driver",
        "freeze_driver",
        "second_driver",
        "disk_fails",
        "disk_full",
        "disk_hangs",
        "kill_rank",
        "freeze_rank",
        "late_messages",
        "power",
        "sigterm",
    ),
    "mirror": (
        "kill_driver",
        "freeze_host",
        "freeze_host",
        "second_driver",
        "disk_fails",
        "disk_full",
        "power",
        "sigterm",
        "store_fails",
        "store_stale",
        "damage_store",
    ),
    "pods": ("kill_driver", "freeze_driver", "kill_rank", "sigterm"),
}


@dataclass(frozen=True)
class Accident:
    when_s: float
    what: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.what} at {self.when_s:g} s" + (f" for {self.seconds:g} s" if self.seconds else "")


@dataclass(frozen=True)
class Plan:
    seed: int
    kind: Kind
    steps: int
    save_every: int
    flock: str
    accidents: tuple[Accident, ...]
    drops: bool = False
    """Groups without a signal are dropped, and other prompts take their place."""
    keeps_torn: bool = False

    @classmethod
    def of(cls, seed: int) -> Plan:
        chance = random.Random(f"plan {seed}")
        kind: Kind = chance.choice(("shared", "shared", "shared", "mirror", "mirror", "pods"))
        steps = chance.randint(3, 5)
        accidents = [
            Accident(
                round(chance.uniform(0, 4.0 * steps), 2),
                chance.choice(_ACCIDENTS[kind]),
                chance.choice((2.0, 10.0, 34.0, 38.0, 45.0, 70.0)),
            )
            for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 4)))
        ]
        if kind == "shared" and chance.random() < 0.1:
            accidents.append(Accident(round(FIRST_START_S + chance.uniform(0.0, 0.01), 4), "second_driver"))
        return cls(
            seed=seed,
            kind=kind,
            steps=steps,
            save_every=chance.choice((1, 1, 2)),
            drops=chance.random() < 0.5,
            flock=chance.choice(("shared", "host", "none")),
            keeps_torn=chance.random() < 0.5,
            accidents=tuple(sorted(accidents, key=lambda accident: accident.when_s)),
        )

    def __str__(self) -> str:
        accidents = "; ".join(map(str, self.accidents)) or "no accident"
        return (
            f"seed {self.seed}: {self.kind}, {self.steps} steps, saved every {self.save_every}, flock {self.flock}: "
            f"{accidents}"
        )


@dataclass(eq=False)
class Run:
    """One run of a history, with every driver that was started for it."""

    name: str
    hosts: Sequence[str]
    drivers: list[Driver] = field(default_factory=list)
    resumed: list[tuple[str, int, int]] = field(default_factory=list)
    """Driver, the newest step that was acknowledged when it started, and the step that it began from."""
    acknowledged: dict[Disk | None, int] = field(default_factory=dict)
    """The newest step by disk; None stands for the store."""

    def expected(self, disk: Disk, store: Store, now: float) -> int:
        """Return the step that a driver on this disk must begin from, or after."""
        of_disk = self.acknowledged.get(disk, 0) if now > disk.fails_until else 0
        return max(of_disk, self.acknowledged.get(None, 0) if store.is_sound else 0)

    @property
    def is_finished(self) -> bool:
        return any(driver.outcome == "finished" for driver in self.drivers)

    @property
    def live(self) -> list[Driver]:
        return [driver for driver in self.drivers if driver.outcome == "running" and driver.process.is_alive]


class History:
    """The world of a plan."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.world = World(plan.seed, limit_s=LIMIT_S)
        self.recipe = sample_recipe(
            steps=plan.steps, save_every=plan.save_every, has_mirror=plan.kind == "mirror", drops=plan.drops
        )
        shared = Disk(self.world, folder, SHARED) if plan.kind == "shared" else None
        self.disks = {host: shared or Disk(self.world, folder, host) for host in HOSTS}
        for disk in self.disks.values():
            disk.flock = plan.flock
        ray = SimulatedRay(self.world)
        self.clusters = {host: SimulatedRay(self.world, host=host) if plan.kind == "mirror" else ray for host in HOSTS}
        self.store = Store(self.world)
        self.store.keeps_torn = plan.keeps_torn
        self.store.removed = self._look_at_store
        self.losses: list[str] = []
        """Steps that the store had acknowledged, and has no more."""
        if plan.kind == "pods":
            self.runs = [Run("first", HOSTS[:1]), Run("second", HOSTS[1:2])]
        else:
            self.runs = [Run("run", HOSTS)]
        self.silent_since: dict[Driver, float] = {}
        for run in self.runs:
            self.world.push(FIRST_START_S, lambda run=run: self._look(run))  # type: ignore[misc]
        for accident in plan.accidents:
            self.world.push(accident.when_s, lambda accident=accident: self._happen(accident))  # type: ignore[misc]

    def run(self) -> None:
        try:
            self.world.run()
        finally:
            for process in self.world.processes:
                close_left(process)

    def start(self, run: Run, host: str) -> None:
        """Start a driver on a host."""
        process = Process(self.world, f"{run.name}-{len(run.drivers)}@{host}", host=host)
        process.values.update(disk=self.disks[host], store=self.store, cluster=self.clusters[host], run=run)
        driver = Driver(process, self.recipe)
        process.values["driver"] = driver
        driver.expected = run.expected(self.disks[host], self.store, self.world.now)
        run.drivers.append(driver)
        process.spawn(driver.run)
        self.world.note(f"{process.name} starts")

    def _look(self, run: Run) -> None:
        """Start another driver where none is left, or where the last one has been silent for long."""
        if run.is_finished or len(run.drivers) >= _MAX_STARTS:
            return
        speaking = [driver for driver in run.live if not driver.process.is_frozen]
        for driver in run.live:
            if driver.process.is_frozen:
                since = self.silent_since.setdefault(driver, self.world.now)
                if self.world.now - since < _PATIENCE_S:
                    speaking.append(driver)
            else:
                self.silent_since.pop(driver, None)
        if not speaking:
            self.start(run, self.world.random.choice(run.hosts))
        self.world.push(self.world.now + _LOOK_EVERY_S * (0.5 + self.world.random.random()), lambda: self._look(run))

    def _look_at_store(self, path: str) -> None:
        newest = self.runs[0].acknowledged.get(None, 0)
        kept = [int(step) for name in self.store.objects if (step := _step_of_manifest(name))]
        if path.endswith(MANIFEST_FILE) and newest > max(kept, default=0) and self.store.is_sound:
            by = current_process()
            self.losses.append(f"{path}, step {newest} was the newest, by {by}")

    def _happen(self, accident: Accident) -> None:
        self.world.note(f"accident: {accident}")
        getattr(self, f"_{accident.what}")(accident.seconds)

    def _after(self, seconds: float, action: Callable[[], object]) -> None:
        self.world.push(self.world.now + seconds, action)

    def _some_driver(self) -> Driver | None:
        live = [driver for run in self.runs for driver in run.live if not driver.process.is_frozen]
        return self.world.random.choice(live) if live else None

    def _kill_driver(self, _: float) -> None:
        if (driver := self._some_driver()) is not None:
            driver.process.kill()

    def _freeze_driver(self, seconds: float) -> None:
        if (driver := self._some_driver()) is not None:
            driver.process.freeze()
            self._after(seconds, driver.process.thaw)

    def _freeze_host(self, seconds: float) -> None:
        if (driver := self._some_driver()) is None:
            return
        for process in self.world.processes:
            if process.host == driver.process.host and process.is_alive and not process.is_frozen:
                process.freeze()
                self._after(seconds, process.thaw)

    def _second_driver(self, _: float) -> None:
        run = self.runs[0]
        if not run.is_finished:
            self.start(run, self.world.random.choice(run.hosts))

    def _some_disk(self) -> Disk:
        return self.disks[self.world.random.choice(HOSTS)]

    def _disk_fails(self, seconds: float) -> None:
        self._some_disk().fails_until = self.world.now + seconds

    def _disk_hangs(self, seconds: float) -> None:
        self._some_disk().hangs_until = self.world.now + seconds

    def _disk_full(self, seconds: float) -> None:
        disk = self._some_disk()
        disk.is_full = True
        self._after(seconds, lambda: setattr(disk, "is_full", False))

    def _some_rank(self) -> Process | None:
        live = [process for process in self.world.processes if "ActorRank" in process.name and process.is_alive]
        return self.world.random.choice(live) if live else None

    def _kill_rank(self, _: float) -> None:
        if (rank := self._some_rank()) is not None:
            rank.kill()

    def _freeze_rank(self, seconds: float) -> None:
        if (rank := self._some_rank()) is not None:
            rank.freeze()
            self._after(seconds, rank.thaw)

    def _late_messages(self, seconds: float) -> None:
        for cluster in self.clusters.values():
            before, cluster.longest_delay_s = cluster.longest_delay_s, seconds
            self._after(10.0, lambda cluster=cluster, before=before: setattr(cluster, "longest_delay_s", before))  # type: ignore[misc]

    def _power(self, _: float) -> None:
        """Cut the power of a disk, and of all that is connected to it."""
        disk = self._some_disk()
        for process in self.world.processes:
            if process.values.get("disk") is disk:
                process.kill()
        # Its threads have to end before their files are gone.
        self._after(0.0, disk.lose_power)

    def _sigterm(self, _: float) -> None:
        if (driver := self._some_driver()) is not None:
            deliver(driver.process, signal.SIGTERM)

    def _store_fails(self, seconds: float) -> None:
        self.store.fails_until, self.store.is_sound = self.world.now + seconds, False

    def _store_stale(self, seconds: float) -> None:
        self.store.listing_lag_s, self.store.is_sound = seconds, False
        self._after(30.0, lambda: setattr(self.store, "listing_lag_s", 0.0))

    def _damage_store(self, _: float) -> None:
        names = sorted(name for name in self.store.objects if name.endswith("manifest.json"))
        if names:
            self.store.is_sound = False
            content = self.store.objects[names[-1]]
            self.store.put(names[-1], content[: len(content) // 2])


def _step_of_manifest(name: str) -> str:
    found = re.search(rf"step_(\d+)/{MANIFEST_FILE}$", name)
    return found[1] if found else ""


@dataclass(frozen=True)
class Verdict:
    plan: Plan
    broken: tuple[str, ...]
    log: tuple[tuple[float, str], ...] = ()
    num_events: int = 0

    def __str__(self) -> str:
        lines = [f"{when:9.3f}  {text}" for when, text in self.log]
        return "\n".join([str(self.plan), *lines, *(f"BROKEN: {text}" for text in self.broken)])


def run_plan(plan: Plan) -> Verdict:
    """Return what a history broke."""
    folder = Path(tempfile.mkdtemp(prefix="megarl-world-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        history = History(plan, folder)
        broken: list[str] = []
        try:
            history.run()
        except StuckError as error:
            broken.append(f"every wait ends: {error}")
        broken += invariants.broken(history)
        world = history.world
        return Verdict(plan, tuple(broken), tuple(world.log), world.num_events)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shrink(verdict: Verdict) -> Verdict:
    """Return a smaller plan that breaks an invariant: fewer accidents, then fewer steps."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(verdict.plan):
            tried = run_plan(smaller)
            if tried.broken:
                verdict, is_smaller = tried, True
                break
    return verdict


def _smaller(plan: Plan) -> Iterator[Plan]:
    for place in range(len(plan.accidents)):
        yield replace(plan, accidents=plan.accidents[:place] + plan.accidents[place + 1 :])
    if plan.steps > 2:
        yield replace(plan, steps=plan.steps - 1)
    if plan.drops:
        yield replace(plan, drops=False)


def _ignore(_: object) -> None:
    pass


@contextmanager
def worlds() -> Iterator[None]:
    """Let histories happen inside the block."""
    gc.freeze()
    # Coroutines of killed processes are unwound without a loop; what they say then is of no interest.
    with mock.patch.object(sys, "unraisablehook", _ignore), standard_library(), simulated_files(), simulated_parts():
        yield
    gc.unfreeze()
