"""Starting an engine where others take ports, too, and one whose ranks are on two nodes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil
import pytest
import ray

from megarl.cluster.cluster import NodeBundle, Place, open_cluster
from megarl.cluster.leases import AdoptableActors
from megarl.cluster.local_ray import private_ray
from megarl.config.load import load_recipe
from megarl.config.roles import PoolConfig, RolloutRoleConfig
from megarl.engine import admin
from megarl.engine.client import EngineClient, EngineEndpoint, EngineKeys, GenerateRequest
from megarl.engine.control import EngineControl
from megarl.engine.fleet import Fleet
from megarl.engine.process import EngineSpec, PortTakenError
from megarl.engine.reply import Expectation, read_response
from megarl.errors import EngineError, MachineError
from megarl.serving import processes as engines
from megarl.serving.processes import Adoption, EngineHost, Engines, on_nodes, start_engines, take_over, with_free_ports
from megarl.system.run_lock import run_lock
from megarl.tools.quickstart.arithmetic import make_arithmetic
from megarl.types import PolicyVersion
from tests.cluster.worker_setup import quick_ray
from tests.engine.engines import COMMAND_TIMEOUT_S, EOS, REQUEST_TIMEOUT_S, ServedModel, engine_spec
from tests.engine.template import EngineTemplate
from tests.processes import command_of
from tests.run.runs import write_recipe
from tests.system.test_run_lock import ELSEWHERE, write
from tests.tiny_models import greedy_tokens, write_tiny_model

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup


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


@pytest.mark.parametrize(("num_failures", "num_starts"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_a_port_that_somebody_took_is_no_reason_to_give_up_before_the_third_time(
    num_failures: int, num_starts: int, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedEngine, "num_failures", num_failures)
    monkeypatch.setattr(ScriptedEngine, "num_starts", 0)
    monkeypatch.setattr(engines, "EngineProcess", ScriptedEngine)
    monkeypatch.setattr(engines, "own_address", lambda _: "127.0.0.1")
    with pytest.raises(PortTakenError, match="EADDRINUSE") if num_failures > num_starts else nullcontext():
        asyncio.run(with_free_ports(lambda: EngineHost().start(1, spec)))
    assert ScriptedEngine.num_starts == num_starts


class FakeStop:
    """A host that is asked to stop."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.stop = self

    async def remote(self, token: int) -> None:
        self.tokens.append(token)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_driver_that_lost_its_run_ends_no_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    killed: list[object] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    place = Place(bundle=NodeBundle(cast("PlacementGroup", None), 0, resource="slot", size=1), slot=0)
    with run_lock(tmp_path / "run", beat_s=3600) as holder:
        spec = engine_spec(tmp_path / "model", tmp_path / "run")
        started = Engines([spec], [[place]], gpu_fraction=1, actors=AdoptableActors(outlive_driver=False))
        host = FakeStop()
        started._hosts[0, 0] = cast("ActorHandle", host)
        if is_lost:
            write(tmp_path / "run", replace(ELSEWHERE, token=99))
        await started.stop()
    assert (host.tokens, killed) == (([], []) if is_lost else ([holder.token], [host]))


async def test_the_host_of_an_engine_refuses_a_driver_that_another_has_followed() -> None:
    host = EngineHost()
    await host.stop(2)
    for call in (host.stop(1), host.serving(1), host.start(1, cast("EngineSpec", None)), host.wait_end(1)):
        with pytest.raises(MachineError, match="driver 2 has taken over"):
            await call


PROMPT = tuple(range(3, 12))
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def two_nodes(
    real_ray: None, engine_template: EngineTemplate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Place]]:
    """Two devices of a real Ray that pass for two nodes: SGLang's processes meet through addresses alone."""
    tmp_path = tmp_path_factory.mktemp("nodes")
    make_arithmetic(tmp_path / "arithmetic", num_train=8, num_sft=8, num_eval=8)
    recipe = load_recipe(write_recipe(tmp_path, "nodes"))
    recipe.run_folder.mkdir(parents=True)
    with (
        quick_ray(engine_template.address),
        private_ray(),
        open_cluster(recipe.run, recipe.pools, address=None) as cluster,
    ):
        pools = cluster.reserve({name: PoolConfig(gpus_per_node=1) for name in ("first", "second")})
        places = [place for name in pools for place in pools[name]]
        for name, place in zip(pools, places, strict=True):
            place.bundle.node = name
        yield places


async def test_an_engine_of_two_nodes_is_one_engine_that_is_started_again_as_a_whole(
    two_nodes: list[Place], tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "model", "qwen2", tied=False, layers=2, seed=1)
    expected = greedy_tokens(tmp_path / "model", PROMPT, NUM_TOKENS)
    spec = engine_spec(tmp_path / "model", tmp_path / "run", tensor=2)

    started, (endpoint,) = await start_engines([spec], two_nodes, gpu_fraction=1.0)
    try:
        assert (len(endpoint.node_hosts), endpoint.host_of(1)) == (2, endpoint.node_hosts[1])
        assert await _answer(endpoint) == expected
        assert await _num_ranks_asked(endpoint) == 2
        (part,) = _processes_of_node(1, tmp_path)
        os.killpg(os.getpgid(part.pid), signal.SIGKILL)
        async with asyncio.timeout(300):
            assert (await started.wait_end(0)).startswith("node ")
        await started.end(0)
        async with asyncio.timeout(60):
            while any(_processes_of_node(node, tmp_path) for node in range(2)):  # what was killed may still be ending
                await asyncio.sleep(0.05)
        assert await _answer(await started.start(0)) == expected
    finally:
        await started.stop()


def test_nodes_have_equal_parts_of_an_engine_in_the_order_of_its_ranks(two_nodes: list[Place]) -> None:
    first, second = two_nodes
    assert on_nodes([first, first, second, second]) == [[first, first], [second, second]]
    with pytest.raises(AssertionError, match="unequal parts"):
        on_nodes([first, first, second])
    with pytest.raises(AssertionError, match="alternate"):
        on_nodes([first, second, first, second])


async def _answer(endpoint: EngineEndpoint) -> list[int]:
    client = EngineClient(endpoint, request_timeout_s=REQUEST_TIMEOUT_S)
    try:
        request = GenerateRequest(rid="nodes", input_ids=PROMPT, max_new_tokens=NUM_TOKENS, temperature=0.0)
        version = PolicyVersion(0)
        expected = Expectation(
            vocab=99,
            max_response_tokens=NUM_TOKENS,
            eos_ids=frozenset({EOS}),
            version=version,
            newest_version=version,
        )
        tokens: list[int] = read_response((await client.generate(request)).content, expected).token_ids.tolist()
        return tokens
    finally:
        await client.close()


async def _num_ranks_asked(endpoint: EngineEndpoint) -> int:
    """How many TP ranks reply to a command of a publish."""
    fleet = Fleet([EngineClient(endpoint, request_timeout_s=60)], max_outstanding=1, publish_timeout_s=60)
    try:
        return len(await EngineControl(fleet, timeout_s=COMMAND_TIMEOUT_S).inspect())
    finally:
        await fleet.close()


def _processes_of_node(node: int, folder: Path) -> list[psutil.Process]:
    """The servers of engines with the model in `folder`, without their workers; a template has forked them."""
    found = []
    for process in psutil.process_iter():
        words = command_of(process).split()  # a forked engine has its command line as one word
        if words[1:3] != ["-m", "megarl.engine.cpu"] or not {"--node-rank", str(folder / "model")} <= set(words):
            continue
        if words[words.index("--node-rank") + 1] == str(node):
            found.append(process)
    return found


async def test_an_engine_that_was_left_inside_an_update_serves_again(qwen2_tp1: ServedModel) -> None:
    """Paused, with an update open and a request under way, as a driver leaves it that dies in a publish."""
    endpoint = qwen2_tp1.process.endpoint
    request = GenerateRequest(rid="left", input_ids=(5, 6), max_new_tokens=64, temperature=1.0)

    client = EngineClient(endpoint, request_timeout_s=REQUEST_TIMEOUT_S)
    try:
        await admin.pause(client, admin.PauseMode.IN_PLACE)
        left = asyncio.create_task(client.generate(request))
        await client.control("begin", "/begin_weight_update", {})
        with pytest.raises(EngineError, match="already open"):
            await client.control("begin", "/begin_weight_update", {})

        version = await take_over(endpoint, timeout_s=REQUEST_TIMEOUT_S)

        assert version == str((await admin.model_info(client))["weight_version"])
        await left
        await client.control("begin", "/begin_weight_update", {})
        await client.control("end", "/end_weight_update", {})
        await take_over(endpoint, timeout_s=REQUEST_TIMEOUT_S)  # nothing is left: nothing changes
        await client.generate(request)
    finally:
        await client.close()


def _adoption(notes: list[str], *, is_possible: bool = True) -> Adoption:
    actors = AdoptableActors(outlive_driver=False)
    actors.left = {name: object() for name in ("engine-0-0", "engine-0-1", "engine-1-0", "engine-1-1", "actor-0")}
    return Adoption(actors, RolloutRoleConfig(pool="rollout"), 3, is_possible=is_possible, noted=notes.append)


def test_engines_that_cannot_be_used_are_counted_once_all_were_asked() -> None:
    notes: list[str] = []
    adoption = _adoption(notes)

    async def refuse() -> EngineEndpoint:
        raise EngineError("was not running")

    assert asyncio.run(adoption.take_over(0, refuse)) is None
    assert notes == []
    assert asyncio.run(adoption.take_over(1, refuse)) is None
    assert notes == ["adopted 0 engines of 3"]


def test_engines_that_the_operator_had_added_are_ended_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr(ray, "kill", ended.append)
    actors, notes = AdoptableActors(outlive_driver=False), list[str]()
    actors.left = {"engine-0-0": "kept", "engine-1-0": "added"}
    adoption = Adoption(actors, RolloutRoleConfig(pool="rollout"), 1, is_possible=False, noted=notes.append)

    async def never() -> EngineEndpoint:
        raise AssertionError

    asyncio.run(adoption.take_over(0, never))
    assert (ended, list(actors.left), notes) == (["added"], ["engine-0-0"], ["adopted 0 engines of 1"])


def test_engines_whose_memory_is_unknown_are_not_asked() -> None:
    async def never() -> EngineEndpoint:
        raise AssertionError

    assert asyncio.run(_adoption([], is_possible=False).take_over(0, never)) is None


def test_an_actor_is_taken_once() -> None:
    actors = _adoption([]).actors
    assert actors.take("actor-0") is not None
    assert actors.take("actor-0") is None
    assert actors.options("actor-0") == {}
