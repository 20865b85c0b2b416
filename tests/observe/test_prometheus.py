from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from megarl.errors import DataError, MachineError
from megarl.observe.prometheus import LINKS_FOLDER, TARGETS_FILE, MetricsEndpoint, Targets, read_targets
from tests.observe.samples import engine_changed, records


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "sample"


def addresses(folder: Path) -> dict[str, str]:
    """By job and engine, as Prometheus reads the file."""
    entries = json.loads((folder / TARGETS_FILE).read_text())
    assert all(entry["labels"]["run"] == "sample" for entry in entries)
    return {
        entry["labels"]["job"] + entry["labels"].get("engine", ""): address
        for entry in entries
        for address in entry["targets"]
    }


def test_engines_come_and_go_with_their_processes(folder: Path) -> None:
    targets = Targets(folder, run="sample", exporter="127.0.0.1:9464")
    assert addresses(folder) == {"megarl": "127.0.0.1:9464"}
    for record in records([engine_changed(0), engine_changed(1), engine_changed(1, "stale")]):
        targets.record(record)
    everybody = {"megarl": "127.0.0.1:9464", "sglang0": "127.0.0.1:30000", "sglang1": "127.0.0.1:30001"}
    assert addresses(folder) == everybody
    for record in records([engine_changed(0, "dead")]):
        targets.record(record)
    assert addresses(folder) == {key: value for key, value in everybody.items() if key != "sglang0"}
    for record in records([engine_changed(0)]):
        targets.record(record)
    assert addresses(folder) == everybody
    targets.close()
    assert addresses(folder) == {}


def test_a_run_without_an_exporter_names_its_engines_only(folder: Path) -> None:
    targets = Targets(folder, run="sample", exporter=None)
    for record in records([engine_changed(0)]):
        targets.record(record)
    assert addresses(folder) == {"sglang0": "127.0.0.1:30000"}


def test_all_runs_are_found_through_one_folder(folder: Path, tmp_path: Path) -> None:
    for _ in range(2):  # a run of the same name takes the link over
        Targets(folder, run="sample", exporter="127.0.0.1:9464")
    Targets(folder.with_name("other"), run="other", exporter="127.0.0.1:9465")
    links = sorted((folder.parent / LINKS_FOLDER).iterdir())
    assert [path.name for path in links] == ["other.json", "sample.json"]
    moved = folder.parent.rename(tmp_path / "elsewhere")
    assert read_targets(moved / LINKS_FOLDER / "sample.json")[0].targets == ["127.0.0.1:9464"]


def test_a_file_that_is_not_there_or_something_else_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read: No such file or directory; a run writes it when it starts$"):
        read_targets(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"targets": []}')
    with pytest.raises(DataError, match=r"bad.json is not a list of Prometheus targets: "):
        read_targets(tmp_path / "bad.json")


def test_a_port_in_use_is_one_line_that_names_the_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError) as caught:
            MetricsEndpoint(CollectorRegistry(), port=port)
    assert str(caught.value) == (
        f"observe.metrics_port: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose another port, 0 for any free one, or null for none"
    )


def test_only_loopback_is_listened_on() -> None:
    endpoint = MetricsEndpoint(CollectorRegistry(), port=0)
    endpoint.close()
    assert endpoint.url.startswith("http://127.0.0.1:")


def test_a_closed_endpoint_frees_its_port() -> None:
    endpoint = MetricsEndpoint(CollectorRegistry(), port=0)
    port = httpx.URL(endpoint.url).port
    assert port is not None
    endpoint.close()
    MetricsEndpoint(CollectorRegistry(), port=port).close()
