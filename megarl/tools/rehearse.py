"""Rehearse a run on this machine: a Ray of several local nodes, one whole `megarl train`, and nodes that are killed.

The rehearsal looks only at what a real run leaves behind: its events and the placement groups of the cluster. Import
this module inside `private_ray`.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import ray
import yaml
from ray.util.placement_group import placement_group_table

from megarl.cluster.cluster import GROUP_PREFIX, joined
from megarl.cluster.local_ray import LocalRay, NodeNetwork, local_ray
from megarl.config.recipe import NetworkConfig
from megarl.config.roles import PoolConfig, RolesConfig
from megarl.env import RAY_ADDRESS, current_environment
from megarl.errors import MachineError
from megarl.observe.event_file import EVENTS_FILE, EventTail
from megarl.observe.events import (
    ALL_TRAINERS,
    CheckpointSaved,
    EngineChanged,
    Event,
    Published,
    Restarted,
    RunFinished,
    RunStarted,
    RunStatus,
    StepFinished,
    Warned,
)
from megarl.system.guard import start_guarded, stop_guarded
from megarl.tools.small_recipe import SmallRecipe

Found = TypeVar("Found")

_SILENCE_S = 600.0
"""Longest time without an event of the run."""
_LONGEST_WAIT_S = 1800.0
"""Timeout of one wait while the run goes on."""
_UNTIL_ASKED = 100_000
"""Steps of a run that goes on while engines start, and is then asked to leave."""
_POLL_S = 0.2
_STOP_GRACE_S = 60.0
_MAX_MISMATCH = 1e-3
"""Between a token's log-probability in the trainer and in the engine, both in fp32 on the CPU."""
_TRAIN = "from megarl.cli.main import main; main()"
_READ_URL = "import sys, urllib.request as web; sys.stdout.buffer.write(web.urlopen(sys.argv[1], timeout=60).read())"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One thing that the rehearsal looked for."""

    what: str
    is_shown: bool
    how: str


@dataclass(slots=True, kw_only=True)
class RehearsalReport:
    shown: list[Shown] = field(default_factory=list)
    unshown_network: str = "a network between machines: its speed, RDMA and firewalls"
    """The part of a network that nodes on one machine do not show."""
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        return all(item.is_shown for item in self.shown)

    def add(self, what: str, how: str, *, is_shown: bool = True) -> None:
        self.shown.append(Shown(what=what, how=how, is_shown=is_shown))


def rehearse(small: SmallRecipe, folder: Path, *, say: Callable[[str], None]) -> RehearsalReport:
    """Start the nodes, run the recipe, kill nodes of it, and report what was seen of the run."""
    began = time.monotonic()
    report = RehearsalReport()
    recipe = small.recipe
    path = folder / "recipe.yaml"
    with ExitStack() as stack:
        network = _enter_network(stack, report)
        if network is None:
            recipe = recipe.model_copy(update={"network": NetworkConfig()})
        if _engine_pool(recipe.roles, recipe.pools) is not None:
            recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"steps": _UNTIL_ASKED})})
        path.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True)))
        nodes = LocalRay(device="cpu", log_folder=folder, has_several_nodes=True, network=network)
        num_nodes = sum(pool.nodes for pool in recipe.pools.values())
        say(f"starting Ray: a head and {num_nodes} nodes")
        stack.enter_context(local_ray(nodes, num_slots=0))
        for pool in recipe.pools.values():
            for _ in range(pool.nodes):
                nodes.start_node(num_slots=pool.gpus_per_node)
        nodes.wait_started()
        own = "a loopback address" if network is None else "a network namespace"
        report.add("cluster", f"{num_nodes} nodes and a head, each with {own} of its own, joined with a token")
        say("starting megarl train: its ranks and engines take a minute or two")
        run = WatchedRun(path, folder, recipe.run_folder / EVENTS_FILE, nodes.address, say=say)
        stack.callback(run.stop)
        if network is not None and recipe.network.bind is not None:
            report.shown.append(_read_metrics(run, network))
        engines = 0 if recipe.roles.rollout is None else recipe.num_engines
        _watch(run, nodes, recipe.roles, recipe.pools, num_engines=engines, report=report)
    num_steps = recipe.run.total_steps if _engine_pool(recipe.roles, recipe.pools) is None else None
    report.shown += read_off(run.events, num_engines=engines, num_steps=num_steps)
    report.seconds = time.monotonic() - began
    return report


def _enter_network(stack: ExitStack, report: RehearsalReport) -> NodeNetwork | None:
    """Return a network of namespaces for the nodes; None, with the reason in the report, where that is not allowed."""
    try:
        network = NodeNetwork()
    except MachineError as error:
        report.unshown_network = f"a network between machines: the nodes share this machine's loopback; {error}"
        return None
    stack.callback(network.close)
    return network


def _read_metrics(run: WatchedRun, network: NodeNetwork) -> Shown:
    """Read the metrics of the run from another node than the driver's."""
    url = run.wait_for(lambda event: event.metrics_url if isinstance(event, RunStarted) else None)
    read = [*network.entering(1), sys.executable, "-c", _READ_URL, url]
    found = subprocess.run(read, capture_output=True, check=False).stdout.count(b"\nmegarl_")  # noqa: S603 - our own words
    return Shown(what="metrics", is_shown=found > 0, how=f"{found} values of {url}, read from {network.address_of(1)}")


def _watch(
    run: WatchedRun,
    nodes: LocalRay,
    roles: RolesConfig,
    pools: Mapping[str, PoolConfig],
    *,
    num_engines: int,
    report: RehearsalReport,
) -> None:
    """Follow the run to its end; after a checkpoint nodes are killed, and others take their places."""
    engine_pool, actor_pool = _engine_pool(roles, pools), roles.actor.pool
    # While ranks and engines start: on a busy machine the look takes as long as a few small steps.
    while not (held := held_nodes(nodes.address)).keys() >= pools.keys() and run.is_running:
        time.sleep(_POLL_S)
    run.wait_for(lambda event: event if isinstance(event, Published) else None)
    is_whole = all(list(held[name].values()) == [pool.gpus_per_node] * pool.nodes for name, pool in pools.items())
    texts = [f"{name}: {', '.join(f'{count} on {node}' for node, count in held[name].items())}" for name in held]
    report.add("placement", "; ".join(texts), is_shown=is_whole)
    run.wait_for(lambda event: event if isinstance(event, CheckpointSaved) else None)
    if engine_pool is None:
        _lose_ranks(run, nodes, held[actor_pool], actor_pool, pools, num_replaced=1, report=report)
    else:
        lost = list(held[engine_pool])[-1]
        _lose_engines(run, nodes, lost, num_engines=num_engines, report=report)
        fresh = _lose_ranks(run, nodes, held[actor_pool], actor_pool, pools, num_replaced=2, report=report)
        back = run.seen_or_waited(partial(_engine_on, fresh, "healthy"))
        report.add("engines back", f"engine {back} serves on a node that was started after the loss of {lost}")
        run.wait_for(lambda event: event if isinstance(event, StepFinished) else None)
        run.ask_to_leave()
    run.wait_for(lambda event: event if isinstance(event, RunFinished) else None)


def _engine_pool(roles: RolesConfig, pools: Mapping[str, PoolConfig]) -> str | None:
    """Return the pool of engines of which a node can be lost while others serve and no rank is lost."""
    rollout, users = roles.rollout, list(roles.used_pools.values())
    if rollout is None or rollout.pool is None or users.count(rollout.pool) > 1:
        return None
    pool = pools[rollout.pool]
    return rollout.pool if pool.nodes > 1 and rollout.tensor <= pool.gpus_per_node else None


def _lose_engines(run: WatchedRun, nodes: LocalRay, victim: str, *, num_engines: int, report: RehearsalReport) -> None:
    """Kill a node of engines, and wait until a step was taken without it."""
    run.say(f"killing every process of node {victim}, which has engines")
    killed = time.monotonic()
    nodes.kill_node(victim)
    lost = run.wait_for(partial(_engine_on, [victim], "dead"))
    noticed_s = time.monotonic() - killed
    left = run.wait_for(partial(_fewer_engines, num_engines))
    step = run.wait_for(lambda event: event.summary.step if isinstance(event, StepFinished) else None)
    how = f"{victim} killed; engine {lost} dead after {noticed_s:.0f} s; step {step} is trained with {left} engine(s)"
    report.add("engines lost", how, is_shown=left > 0)


def _engine_on(nodes: Collection[str], state: str, event: Event) -> int | None:
    if not isinstance(event, EngineChanged) or event.state != state or event.address.rpartition(":")[0] not in nodes:
        return None
    return event.index


def _fewer_engines(num_engines: int, event: Event) -> int | None:
    return event.result.num_engines if isinstance(event, Published) and event.result.num_engines < num_engines else None


def _lose_ranks(
    run: WatchedRun,
    nodes: LocalRay,
    held: Collection[str],
    name: str,
    pools: Mapping[str, PoolConfig],
    *,
    num_replaced: int,
    report: RehearsalReport,
) -> list[str]:
    """Kill a node of the pool `name`; when it is missed, start nodes in place of all that were lost, and return them.

    The ranks wait meanwhile: on a busy machine no node would start beside them.
    """
    victim = list(held)[-1]
    run.say(f"killing every process of node {victim}")
    killed = time.monotonic()
    nodes.kill_node(victim)
    missed = run.wait_for(partial(_loss_in, name))
    report.add("node lost", f"{victim} killed; after {time.monotonic() - killed:.0f} s: {missed}")
    # Each is large enough for any pool: Ray decides which pool gets it.
    num_slots, fresh = max(pool.gpus_per_node for pool in pools.values()), []
    for _ in range(num_replaced):
        fresh.append(nodes.start_node(num_slots=num_slots))
        run.say(f"starting node {fresh[-1]} in place of a lost one")
        nodes.wait_started()
    while not set(fresh) & (after := held_nodes(nodes.address).get(name, {})).keys() and run.is_running:
        time.sleep(_POLL_S)
    run.wait_for(lambda event: event if isinstance(event, StepFinished) else None)
    report.add(
        "node replaced",
        f"pool {name} has {', '.join(after)} {time.monotonic() - killed:.0f} s after the loss, and trains",
        is_shown=bool(set(fresh) & after.keys()) and victim not in after,
    )
    return fresh


def _loss_in(pool: str, event: Event) -> str | None:
    return event.text if isinstance(event, Warned) and event.text.startswith(f"pools.{pool}: ") else None


def held_nodes(address: str) -> dict[str, dict[str, int]]:
    """Return for each pool of the Ray at `address` the addresses of its nodes, with the devices held on each.

    In a process of its own: a process that has joined a Ray and left it again may crash at its end.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_held_nodes, address).result()


def _held_nodes(address: str) -> dict[str, dict[str, int]]:
    held: dict[str, dict[str, int]] = {}
    with joined(address):
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    for group in groups:
        bundles = {
            addresses[node]: int(sum(group["bundles"][index].values()))
            for index, node in group["bundles_to_node_id"].items()
        }
        held[group["name"].removeprefix(GROUP_PREFIX)] = dict(sorted(bundles.items()))
    return held


class WatchedRun:
    """`megarl train` in a process of its own, as its events tell it."""

    def __init__(
        self, recipe: Path, folder: Path, events_path: Path, address: str, *, say: Callable[[str], None]
    ) -> None:
        self.events: list[Event] = []
        self.say = say
        self._log = folder / "train.log"
        self._path = events_path
        self._tail = EventTail(events_path)
        self._unread: list[Event] = []
        environment = {**current_environment(), RAY_ADDRESS.name: address}
        with self._log.open("wb") as log:
            self._process: subprocess.Popen[bytes] = start_guarded(
                [sys.executable, "-c", _TRAIN, "train", str(recipe)], environment=environment, output=log
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_for(self, find: Callable[[Event], Found | None]) -> Found:
        """Return what `find` finds in the first event in which it finds something; earlier events are passed over."""
        deadline, latest = time.monotonic() + _SILENCE_S, time.monotonic() + _LONGEST_WAIT_S
        while True:
            while self._unread:
                event = self._unread.pop(0)
                self.events.append(event)
                if (line := _progress(event)) is not None:
                    self.say(line)
                if (found := find(event)) is not None:
                    return found
                deadline = min(latest, time.monotonic() + _SILENCE_S)
                if isinstance(event, RunFinished):
                    raise MachineError(f"the run ended early: {event.status}: {event.reason}; its log is {self._log}")
            has_ended = not self.is_running
            if self._path.exists():
                self._unread += [record.event for record in self._tail.read()]
            if not self._unread:
                if has_ended:
                    raise MachineError(f"the run ended without an event of its end; its log is {self._log}")
                if time.monotonic() > deadline:
                    raise MachineError(f"the run does not do what is waited for; its log is {self._log}")
                time.sleep(_POLL_S)

    def seen_or_waited(self, find: Callable[[Event], Found | None]) -> Found:
        """Do as `wait_for`, beginning with the events that were passed over."""
        seen = (found for event in self.events if (found := find(event)) is not None)
        found = next(seen, None)
        return self.wait_for(find) if found is None else found

    def ask_to_leave(self) -> None:
        self.say("asking the run to leave (SIGTERM)")
        self._process.terminate()

    def stop(self) -> None:
        """Let a finished run end, and end any other."""
        if self.events and isinstance(self.events[-1], RunFinished):
            try:
                self._process.wait(timeout=_STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                self.say("the run does not end; it is killed")
        stop_guarded(self._process, grace_s=_STOP_GRACE_S)


def _progress(event: Event) -> str | None:
    match event:
        case StepFinished(summary=summary):
            return f"step {summary.step} is trained"
        case CheckpointSaved(step=step):
            return f"step {step} is saved"
        case Published(result=result):
            return f"version {result.version} is published to {result.num_engines} engine(s)"
        case Restarted() | Warned():
            return event.reason if isinstance(event, Restarted) else event.text
        case EngineChanged(index=index, state=state, reason=reason):
            return f"engine {index} is {state}{': ' + reason if reason else ''}"
        case _:
            return None


def read_off(events: list[Event], *, num_engines: int, num_steps: int | None) -> Iterator[Shown]:
    """Yield what the events of a whole run show; one without `num_steps` was asked to leave."""
    published = [event.result for event in events if isinstance(event, Published)]
    steps = [event.summary for event in events if isinstance(event, StepFinished)]
    saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
    resumed = [event.reason for event in events if isinstance(event, Restarted) and event.role == ALL_TRAINERS]
    ends = [event for event in events if isinstance(event, RunFinished)]
    if num_engines:
        whole = [result for result in published if result.num_engines == num_engines]
        yield Shown(
            what="publish",
            is_shown=bool(whole) and published[-1].num_engines == num_engines,
            how=f"{len(published)} publishes, {len(whole)} of them to all {num_engines} engines, the last to "
            f"{published[-1].num_engines}; every digest was equal"
            if published
            else "no publish",
        )
        updates = [step.update for step in steps if step.update is not None]
        worst = max((update.mismatch_max for update in updates), default=float("nan"))
        yield Shown(
            what="rollouts",
            is_shown=bool(updates) and worst <= _MAX_MISMATCH,
            how=f"trainer and engines agree about every token within {worst:.1e}",
        )
    yield Shown(what="checkpoints", is_shown=bool(saved), how=f"steps {', '.join(map(str, saved))}, by all ranks")
    yield Shown(
        what="resume",
        is_shown=any(reason.startswith("from step ") for reason in resumed),
        how="; ".join(reason.partition(":")[0] for reason in resumed) or "the ranks were never restarted",
    )
    last, end = steps[-1].step if steps else 0, ends[-1].status if ends else "no end"
    if num_steps is None:
        is_shown = end is RunStatus.PREEMPTED and saved[-1:] == [last]
        yield Shown(what="end", is_shown=is_shown, how=f"step {last}, saved when the run was asked to leave: {end}")
        return
    is_shown = end is RunStatus.DONE and last == num_steps
    yield Shown(what="end", is_shown=is_shown, how=f"step {last} of {num_steps}, {end}")
