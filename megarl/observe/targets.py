"""Where Prometheus finds a run: `<run>/prometheus_targets.json`, kept in step with the engines that come and go.

The format is that of Prometheus's `file_sd_configs`, which reads the file again when it changes. Beside the folders of
the runs, `.prometheus/` has a link to each of their files: Prometheus takes a `*` only in the last part of a path.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, TypeAdapter, ValidationError

from megarl.errors import DataError, MachineError
from megarl.observe.events import EngineChanged, Record

TARGETS_FILE = "prometheus_targets.json"
LINKS_FOLDER = ".prometheus"
EXPORTER_JOB = "megarl"
ENGINE_JOB = "sglang"


class Target(BaseModel):
    """One entry of the file."""

    targets: list[str]
    labels: dict[str, str]


class Targets:
    """The sink that writes the file; empty once the run has ended, so that nobody is asked who is not there."""

    def __init__(self, run_folder: Path, *, run: str, exporter: str | None) -> None:
        self._path = run_folder / TARGETS_FILE
        self._run = run
        self._exporter = exporter
        self._engines: dict[int, str] = {}
        self._write()
        _link(self._path)

    def record(self, record: Record) -> None:
        match record.event:
            case EngineChanged(index=index, is_running=False):
                if self._engines.pop(index, None) is not None:
                    self._write()
            case EngineChanged(index=index, address=address):
                if self._engines.get(index) != address:
                    self._engines[index] = address
                    self._write()

    def close(self) -> None:
        self._exporter = None
        self._engines = {}
        self._write()

    def _write(self) -> None:
        found = [] if self._exporter is None else [self._target(self._exporter, job=EXPORTER_JOB)]
        for index, address in sorted(self._engines.items()):
            found.append(self._target(address, job=ENGINE_JOB, engine=str(index)))
        write_targets(self._path, found)

    def _target(self, address: str, **labels: str) -> Target:
        return Target(targets=[address], labels={"run": self._run, **labels})


def write_targets(path: Path, targets: list[Target]) -> None:
    """All or nothing: Prometheus never reads half a file."""
    text = json.dumps([target.model_dump() for target in targets], indent=2) + "\n"
    partial = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise MachineError(f"{path}: cannot be written: {error.strerror}") from error


def _link(path: Path) -> None:
    """Relative: what Prometheus sees may be mounted elsewhere."""
    run_folder = path.parent
    links = run_folder.parent / LINKS_FOLDER
    partial = links / f".{run_folder.name}.tmp"
    try:
        links.mkdir(exist_ok=True)
        partial.unlink(missing_ok=True)
        partial.symlink_to(Path("..") / run_folder.name / TARGETS_FILE)
        partial.replace(links / f"{run_folder.name}.json")
    except OSError as error:
        raise MachineError(f"{links}: cannot be written: {error.strerror}") from error


def read_targets(path: Path) -> list[Target]:
    try:
        return _TARGETS.validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; a run writes it when it starts") from error
    except ValidationError as error:
        detail = error.errors()[0]
        raise DataError(f"{path} is not a list of Prometheus targets: {detail['msg']}") from None


_TARGETS: TypeAdapter[list[Target]] = TypeAdapter(list[Target])
