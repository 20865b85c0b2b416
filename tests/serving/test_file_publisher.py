"""Publishing by files to an engine that the test starts, outside megarl's run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from megarl.checkpoint.manifest import MODEL_FOLDER, FileDigest
from megarl.config.roles import EndpointConfig
from megarl.engine import admin
from megarl.engine.admin import endpoints_of
from megarl.engine.client import EngineClient
from megarl.engine.fleet import Fleet
from megarl.engine.lifecycle import EngineState
from megarl.engine.process import EngineProcess
from megarl.errors import CheckpointError, MachineError, WeightSyncError
from megarl.serving.file_publisher import FilePublisher
from megarl.tools.quickstart.arithmetic import make_arithmetic
from megarl.types import PolicyVersion
from tests.engine.engines import (
    REQUEST_TIMEOUT_S,
    Handler,
    ServedModel,
    control_of,
    engine_spec,
    fingerprints_from_disk,
    scripted_fleet,
)
from tests.ranks.local_ranks import LocalRanks
from tests.run.runs import run
from tests.tiny_models import write_tiny_model


class FolderRanks:
    """Ranks whose weights at every version are those of another seed."""

    def __init__(self, family: str) -> None:
        self._family = family
        self.num_exports = 0
        self.fails = False

    async def export(self, folder: Path, source_folder: Path) -> Mapping[str, FileDigest]:
        if self.fails:
            raise CheckpointError("the disk is full")
        self.num_exports += 1
        write_tiny_model(folder / MODEL_FOLDER, self._family, layers=2, seed=100 + self.num_exports)
        return {"model/model.safetensors": FileDigest(num_bytes=1000, xxh3_128="")}


def publisher_to(fleet: Fleet, ranks: FolderRanks, folder: Path, source_folder: Path) -> FilePublisher:
    return FilePublisher(
        ranks=LocalRanks(ranks),
        fleet=fleet,
        folder=folder,
        source_folder=source_folder,
        timeout_s=REQUEST_TIMEOUT_S,
    )


async def test_an_engine_loads_each_version_and_old_folders_are_removed(qwen2_tp1: ServedModel, tmp_path: Path) -> None:
    async with qwen2_tp1.fleet() as fleet:
        publisher = publisher_to(fleet, FolderRanks("qwen2"), tmp_path / "published", qwen2_tp1.folder)
        await publisher.connect()
        control = control_of(fleet)
        for version in (1, 2):
            result = await publisher.publish(PolicyVersion(version))
            assert (result.num_engines, result.num_bytes) == (1, 1000)
            served = await control.fingerprints()
            write_tiny_model(tmp_path / "same", "qwen2", layers=2, seed=100 + version)
            assert served == await fingerprints_from_disk(control, fleet, tmp_path / "same")
            assert fleet.committed_version() == version
            assert [path.name for path in (tmp_path / "published").iterdir()] == [f"version_0000000{version}"]


async def test_a_version_that_cannot_be_written_changes_nothing(qwen2_tp1: ServedModel, tmp_path: Path) -> None:
    async with qwen2_tp1.fleet() as fleet:
        ranks = FolderRanks("qwen2")
        publisher = publisher_to(fleet, ranks, tmp_path / "published", qwen2_tp1.folder)
        before = await control_of(fleet).fingerprints()
        ranks.fails = True
        with pytest.raises(WeightSyncError, match="was not written; engines keep what they have: the disk is full"):
            await publisher.publish(PolicyVersion(1))
        assert await control_of(fleet).fingerprints() == before
        assert fleet.engines[0].is_live


def serving(architecture: str, *, version: int = 1, fails: bool = False) -> Handler:
    loaded: dict[str, str] = {}

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/update_weights_from_disk":
            loaded["path"] = httpx.Response(200, content=request.content).json()["model_path"]
            return httpx.Response(400 if fails else 200, text="no such tensor")
        info = {
            "is_generation": True,
            "architectures": [architecture],
            "weight_version": str(version),
            "model_path": loaded.get("path"),
        }
        return httpx.Response(200, json=info)

    return handle


async def test_an_engine_that_does_not_confirm_the_version_is_stale(tmp_path: Path) -> None:
    name = "Qwen2ForCausalLM"
    write_tiny_model(tmp_path / "model", "qwen2", layers=2)

    fleet = scripted_fleet(serving(name), serving(name, version=0), serving(name, fails=True))
    publisher = publisher_to(fleet, FolderRanks("qwen2"), tmp_path / "published", tmp_path / "model")
    await publisher.connect()
    assert (await publisher.publish(PolicyVersion(1))).num_engines == 1
    states, reasons = ([engine.state for engine in fleet.engines], [engine.reason for engine in fleet.engines])
    assert states[1:] == [EngineState.STALE, EngineState.STALE]
    assert "reports version 0" in reasons[1]
    assert "load weights from disk: status 400: no such tensor" in reasons[2]


def test_an_engine_of_another_model_is_refused_at_the_start(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", "qwen2", layers=2)

    async def scenario() -> None:
        fleet = scripted_fleet(serving("LlamaForCausalLM"), lambda _: httpx.Response(401, text="who are you"))
        await publisher_to(fleet, FolderRanks("qwen2"), tmp_path, tmp_path / "model").connect()

    with pytest.raises(MachineError, match=r"serves \['LlamaForCausalLM'\], .*; .*status 401: who are you"):
        asyncio.run(scenario())


def test_keys_are_read_from_files_and_the_admins_may_be_the_same(tmp_path: Path) -> None:
    (tmp_path / "api").write_text("one\n")
    (tmp_path / "admin").write_text("two\n")
    configs = [
        EndpointConfig(url="http://10.0.0.7:30000"),
        EndpointConfig(url="https://engines.example:443", api_key_file=tmp_path / "api"),
        EndpointConfig(url="http://10.0.0.8:1", api_key_file=tmp_path / "api", admin_key_file=tmp_path / "admin"),
    ]
    endpoints = endpoints_of(configs, device="cpu")
    assert [endpoint.url for endpoint in endpoints] == [config.url for config in configs]
    assert [(endpoint.keys.api, endpoint.keys.admin) for endpoint in endpoints] == [
        ("", ""),
        ("one", "one"),
        ("one", "two"),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticEngine:
    """An engine that serves the model a run starts from."""

    folder: Path
    process: EngineProcess


@pytest.fixture
def arithmetic_engine(whole_run: None, real_engines: None, tmp_path: Path) -> Iterator[ArithmeticEngine]:
    make_arithmetic(tmp_path / "arithmetic", num_train=64, num_sft=16, num_eval=16)
    process = EngineProcess(engine_spec(tmp_path / "arithmetic" / "model", tmp_path / "engine"))
    process.start()
    try:
        asyncio.run(process.wait_ready())
        yield ArithmeticEngine(folder=tmp_path, process=process)
    finally:
        process.stop()


@pytest.mark.slow
def test_a_run_trains_with_an_engine_that_it_did_not_start(arithmetic_engine: ArithmeticEngine) -> None:
    folder, endpoint = arithmetic_engine.folder, arithmetic_engine.process.endpoint
    (folder / "api").write_text(endpoint.keys.api)
    (folder / "admin").write_text(endpoint.keys.admin)
    engine = f"{{url: '{endpoint.url}', api_key_file: {folder}/api, admin_key_file: {folder}/admin}}"
    done = run(
        folder,
        "files",
        f"roles.rollout={{endpoints: [{engine}]}}",
        "pools={train: {gpus_per_node: 2}}",
    )
    assert done.exit_code == 0, done.output
    assert len(done.steps) == 2
    assert [path.name for path in (done.folder / "published").iterdir()] == ["version_00000002"]

    async def serves() -> str:
        client = EngineClient(endpoint, request_timeout_s=REQUEST_TIMEOUT_S)
        try:
            return str((await admin.model_info(client))["weight_version"])
        finally:
            await client.close()

    assert asyncio.run(serves()) == "2"
