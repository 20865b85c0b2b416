"""A real Prometheus for a test: on loopback, with a data folder of its own, gone afterwards."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from scripts.dashboards.panels import Query
from tests.packages import program

_START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    url: str
    client: httpx.Client

    def ask(self, text: str) -> list[dict[str, object]]:
        """The answer to a query, now."""
        answer = self.client.get(f"{self.url}/api/v1/query", params={"query": text}).json()
        assert answer["status"] == "success", f"{text}: {answer.get('error')}"
        result: list[dict[str, object]] = answer["data"]["result"]
        return result

    def unanswered(self, queries: Sequence[Query]) -> list[Query]:
        """Those that have no data, for any run."""
        return [query for query in queries if not self.ask(filled(query.text))]


def filled(text: str) -> str:
    """As Grafana would send it."""
    return text.replace("$run", ".+").replace("$__rate_interval", "1m")


@contextmanager
def prometheus(folder: Path, *, targets: Sequence[Path], rules: Path | None = None) -> Iterator[Prometheus]:
    """Scrapes every other second what the target files name."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)] if rules is not None else [],
        "scrape_configs": [
            {
                "job_name": "megarl",
                "file_sd_configs": [{"files": [str(path) for path in targets], "refresh_interval": "1s"}],
            }
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        with httpx.Client(timeout=60) as client:
            server = Prometheus(url=f"http://127.0.0.1:{port}", client=client)
            _wait_ready(server, process, folder / "prometheus.log")
            yield server
    finally:
        process.terminate()
        process.wait(timeout=120)


def _wait_ready(server: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if server.client.get(f"{server.url}/-/ready").is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"Prometheus is not ready: {log.read_text()}")
