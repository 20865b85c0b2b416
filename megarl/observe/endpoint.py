"""Where Prometheus finds the metrics of a run: the HTTP endpoint, and the file that lists it beside the engines.

`<run>/prometheus_targets.json` has the format of Prometheus's `file_sd_configs`, which reads it again when it changes.
`.prometheus/`, next to the run folders, has a link to each of these files: Prometheus takes a `*` only in the last part
of a path.
"""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from pydantic import BaseModel, TypeAdapter, ValidationError

from megarl.errors import DataError, MachineError, writing
from megarl.system.network import LOOPBACK


class MetricsEndpoint:
    """Serves one registry at `http://<host>:<port>/metrics`, from construction to `close`."""

    def __init__(self, registry: CollectorRegistry, *, port: int, host: str = LOOPBACK) -> None:
        self._host = host
        self._server, self._thread = _listen(registry, host, port)

    @property
    def address(self) -> str:
        return f"{self._host}:{self._server.server_port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def _listen(registry: CollectorRegistry, host: str, port: int) -> tuple[WSGIServer, Thread]:
    try:
        return start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise MachineError(
            f"observe.metrics_port: cannot listen on {host}:{port}: {error.strerror}; "
            "choose another port, 0 for any free one, or null for none"
        ) from error


TARGETS_FILE = "prometheus_targets.json"


LINKS_FOLDER = ".prometheus"


class Target(BaseModel):
    """One entry of the targets file."""

    targets: list[str]
    labels: dict[str, str]


def write_targets(path: Path, targets: list[Target]) -> None:
    """Replace the file in one operation: Prometheus never reads half of it."""
    text = json.dumps([target.model_dump() for target in targets], indent=2) + "\n"
    partial = path.with_name(f".{path.name}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)


def link_targets(path: Path) -> None:
    """Link the file in `.prometheus/`. The link is relative: Prometheus may see the folders under another path."""
    run_folder = path.parent
    links = run_folder.parent / LINKS_FOLDER
    partial = links / f".{run_folder.name}.tmp"
    with writing(links):
        links.mkdir(exist_ok=True)
        partial.unlink(missing_ok=True)
        partial.symlink_to(Path("..") / run_folder.name / TARGETS_FILE)
        partial.replace(links / f"{run_folder.name}.json")


def read_targets(path: Path) -> list[Target]:
    try:
        return _TARGETS.validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; a run writes it when it starts") from error
    except ValidationError as error:
        detail = error.errors()[0]
        raise DataError(f"{path} is not a list of Prometheus targets: {detail['msg']}") from None


_TARGETS: TypeAdapter[list[Target]] = TypeAdapter(list[Target])
