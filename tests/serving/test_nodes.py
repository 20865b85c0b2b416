"""Nodes of engines that are taken out, added, and excluded: processes and wire are scripted, the supervisor is real."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megarl.cluster.cluster import WITHIN_S, NodeFaults
from megarl.engine.fleet import Fleet
from megarl.errors import FleetError
from megarl.observe.observer import Observer
from megarl.serving.nodes import EngineNodes
from megarl.serving.supervisor import Supervisor
from tests.observe.samples import ListSink
from tests.serving.supervised import Scripted, supervised, until


@dataclass
class Watched:
    """A fleet of nodes with two engines each, and a clock."""

    scripted: Scripted
    fleet: Fleet
    supervisor: Supervisor
    now: float = 0.0

    def __post_init__(self) -> None:
        self.sink = ListSink()
        self.faults = NodeFaults(lambda: self.now)
        self.excluded: list[tuple[str, list[int]]] = []
        self.grown: list[tuple[str, int | None]] = []
        self.nodes = EngineNodes(
            self.fleet,
            self.supervisor,
            max_faults=3,
            observer=Observer([self.sink]),
            faults=self.faults,
            grow=self.grow,
            notify_excluded=lambda node, engines: self.excluded.append((node, [engine.index for engine in engines])),
        )

    async def grow(self, node: str, count: int | None) -> None:
        self.grown.append((node, count))

    @property
    def states(self) -> list[str]:
        return [engine.state.value for engine in self.fleet.engines]

    async def lose(self, *indices: int) -> None:
        """Kill engines at once, and wait until they are back or out of service."""
        engines = [self.fleet.engines[index] for index in indices]
        for index in indices:
            self.scripted.kill(index)
        await until(lambda: not any(engine.is_live for engine in engines))
        await until(lambda: all(engine.is_live or engine.status.is_over for engine in engines))


async def test_a_node_is_taken_out_and_added_as_a_whole() -> None:
    async with supervised(4, per_node=2) as (scripted, fleet, supervisor):
        scene = Watched(scripted, fleet, supervisor)
        scene.nodes.retire("10.0.0.1")
        assert scene.states == ["healthy", "healthy", "retired", "retired"]
        with pytest.raises(FleetError, match=r"node 10\.0\.0\.0 has the last engines; stop the run instead"):
            scene.nodes.retire("10.0.0.0")
        with pytest.raises(FleetError, match=r"no engine is on node n7; there are engines on 10\.0\.0\.0, 10\."):
            scene.nodes.retire("n7")
        await scene.nodes.add("n7")
        await scene.nodes.add("10.0.0.1")
        assert scene.grown == [("n7", None)], "a node with engines gets no further ones unless asked for a number"
        await scene.nodes.add("10.0.0.1", 3)
        assert scene.grown[1:] == [("10.0.0.1", 3)]
        await until(lambda: all(engine.is_live for engine in fleet.engines))


async def test_a_node_with_repeated_faults_gets_nothing_more_until_the_operator_adds_it() -> None:
    async with supervised(4, per_node=2) as (scripted, fleet, supervisor):
        scene = Watched(scripted, fleet, supervisor)
        await scene.lose(2, 3)  # one accident
        scene.now += 100
        await scene.lose(2)
        assert not scene.sink.warnings
        scene.now += 100
        await scene.lose(3)
        assert scene.states == ["healthy", "healthy", "retired", "retired"]
        (text,) = scene.sink.warnings
        assert text.startswith("node 10.0.0.1 is excluded after 3 faults within an hour (cluster.max_node_faults)")
        assert "`megarl fleet RUN add --node 10.0.0.1` takes it back" in text
        assert scene.excluded == [("10.0.0.1", [2, 3])]
        assert scene.faults.excluded == {"10.0.0.1"}
        assert fleet.engines[2].reason == "node 10.0.0.1 is excluded after 3 faults within an hour"
        await scene.nodes.add("10.0.0.1")
        await until(lambda: all(engine.is_live for engine in fleet.engines))
        scene.now += 100
        await scene.lose(2)
        assert scene.states == ["healthy"] * 4


async def test_old_faults_do_not_count_and_the_last_node_is_never_excluded() -> None:
    async with supervised(4, per_node=2) as (scripted, fleet, supervisor):
        scene = Watched(scripted, fleet, supervisor)
        await scene.lose(2)
        scene.now += WITHIN_S
        for index in (2, 3):
            scene.now += 100
            await scene.lose(index)
        assert scene.states == ["healthy"] * 4
        scene.nodes.retire("10.0.0.1")
        for index in (0, 1, 0):
            scene.now += 100
            await scene.lose(index)
        assert scene.states == ["healthy", "healthy", "retired", "retired"]
        assert not scene.sink.warnings
