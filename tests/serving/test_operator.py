from __future__ import annotations

import asyncio
import errno
import stat
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from megarl.cluster.cluster import NodeFaults
from megarl.engine.fleet import Fleet
from megarl.errors import EngineError, FleetError, MachineError
from megarl.observe.observer import Observer
from megarl.serving import operator
from megarl.serving.nodes import EngineNodes
from megarl.serving.operator import SOCKET_FILE, EngineReport, OperatorRequest, ask, open_to_operator
from megarl.serving.supervisor import Supervisor
from tests.serving.supervised import supervised, until


async def no_room(address: str, count: int | None) -> None:
    raise EngineError(f"node {address} has no room for {count}")


def nodes_of(fleet: Fleet, supervisor: Supervisor) -> EngineNodes:
    return EngineNodes(fleet, supervisor, max_faults=4, observer=Observer(()), faults=NodeFaults(), grow=no_room)


async def test_an_operator_sees_the_engines_and_takes_one_out_and_back(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()

    async def say(request: OperatorRequest) -> tuple[EngineReport, ...]:
        return await asyncio.to_thread(ask, folder, request)

    async with (
        supervised() as (_, fleet, supervisor),
        open_to_operator(folder, fleet, supervisor, nodes_of(fleet, supervisor), warn=pytest.fail),
    ):
        assert stat.S_IMODE((folder / SOCKET_FILE).stat().st_mode) == 0o600
        assert [report.state for report in await say(OperatorRequest(action="list"))] == ["healthy", "healthy"]
        first, _ = await say(OperatorRequest(action="retire", engine=0))
        assert (first.state, first.reason) == ("retired", "retired by the operator")
        for request, reason in (
            (OperatorRequest(action="retire", engine=1), "engine 1 is the last one; stop the run instead"),
            (OperatorRequest(action="add", engine=7), "there is no engine 7"),
            (OperatorRequest(action="add"), "add which engine"),
            (OperatorRequest(action="retire", node="127.0.0.1"), "127.0.0.1 has the last engines; stop the run"),
            (OperatorRequest(action="retire", node="10.9.9.9"), "no engine is on node 10.9.9.9; .* on 127.0.0.1"),
            (OperatorRequest(action="add", node="10.9.9.9"), "node 10.9.9.9 has no room for None"),
            (OperatorRequest(action="add", node="127.0.0.1", count=2), "node 127.0.0.1 has no room for 2"),
            (OperatorRequest(action="add", engine=0, count=2), "--count .* to add to a node: name it with --node"),
        ):
            with pytest.raises(FleetError, match=reason):
                await say(request)
        await say(OperatorRequest(action="add", engine=0))
        await until(lambda: fleet.engines[0].is_live)
    assert not (folder / SOCKET_FILE).exists()


def test_asking_where_no_run_is_says_so(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="no run with engines is under way here"):
        ask(tmp_path, OperatorRequest(action="list"))


@pytest.mark.fault("a run folder that cannot have sockets (SMB, some FUSE)", "a warning; the run goes on")
async def test_a_folder_without_unix_sockets_costs_the_operator_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(operator, "_bind", refuse)
    warnings: list[str] = []
    async with (
        supervised() as (_, fleet, supervisor),
        open_to_operator(tmp_path, fleet, supervisor, nodes_of(fleet, supervisor), warn=warnings.append),
    ):
        assert not (tmp_path / SOCKET_FILE).exists()
    (warning,) = warnings
    assert warning.startswith(f"{tmp_path / SOCKET_FILE}: cannot be made: Operation not permitted; the run goes on")


async def test_the_socket_of_a_later_driver_stays(tmp_path: Path) -> None:
    async with supervised() as (_, fleet, supervisor):
        opened = partial(open_to_operator, tmp_path, fleet, supervisor, nodes_of(fleet, supervisor), warn=pytest.fail)
        async with AsyncExitStack() as late:
            async with opened():
                await late.enter_async_context(opened())
            assert (tmp_path / SOCKET_FILE).exists()
        assert not (tmp_path / SOCKET_FILE).exists()
