"""Starting an engine where others take ports, too."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megarl.config.roles import RolloutRoleConfig
from megarl.rollout.client import EngineKeys
from megarl.rollout.process import EngineSpec, PortTakenError
from megarl.runtime.engines import processes as engines
from megarl.runtime.engines.processes import EngineHost, with_free_ports


class ScriptedEngine:
    """A server that finds its port taken some times."""

    num_failures = 0
    num_starts = 0

    def __init__(self, spec: EngineSpec) -> None:
        self.endpoint = f"start {ScriptedEngine.num_starts}"

    def start(self) -> None:
        ScriptedEngine.num_starts += 1

    async def wait_ready(self) -> None:
        if ScriptedEngine.num_starts <= ScriptedEngine.num_failures:
            raise PortTakenError("engine 0: EADDRINUSE")

    def stop(self) -> None: ...


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    return EngineSpec(
        index=0,
        model_folder=tmp_path,
        config=RolloutRoleConfig(pool="rollout"),
        device="cpu",
        seed=1,
        run_folder=tmp_path,
        keys=EngineKeys.fresh(),
    )


@pytest.mark.parametrize(("num_failures", "num_starts"), [(0, 1), (1, 2), (2, 3)])
def test_a_port_that_somebody_took_is_no_reason_to_give_up(
    num_failures: int, num_starts: int, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedEngine, "num_failures", num_failures)
    monkeypatch.setattr(ScriptedEngine, "num_starts", 0)
    monkeypatch.setattr(engines, "EngineProcess", ScriptedEngine)
    monkeypatch.setattr(engines, "own_address", lambda _: "127.0.0.1")
    asyncio.run(with_free_ports(lambda: EngineHost().start(spec)))
    assert ScriptedEngine.num_starts == num_starts


def test_three_times_are_enough(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedEngine, "num_failures", 9)
    monkeypatch.setattr(ScriptedEngine, "num_starts", 0)
    monkeypatch.setattr(engines, "EngineProcess", ScriptedEngine)
    monkeypatch.setattr(engines, "own_address", lambda _: "127.0.0.1")
    with pytest.raises(PortTakenError, match="EADDRINUSE"):
        asyncio.run(with_free_ports(lambda: EngineHost().start(spec)))
    assert ScriptedEngine.num_starts == 3
