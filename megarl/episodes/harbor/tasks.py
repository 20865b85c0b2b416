"""Task folders in Harbor's format: what a task asks, the limits of its box, and the tests that grade it. Runs nothing.

A folder has `instruction.md`, `task.toml`, `environment/` with a Dockerfile or the name of an image in task.toml, and
`tests/test.sh`, which writes a number to /logs/verifier/reward.txt or numbers by name to /logs/verifier/reward.json.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from megarl.config.section import MIB
from megarl.errors import DataError

_CONFIG = "task.toml"
_NOT_SUPPORTED: Mapping[tuple[str, ...], str] = {
    ("steps",): "tasks of several steps",
    ("environment", "tpu"): "TPUs",
    ("environment", "mcp_servers"): "MCP servers of a task",
    ("environment", "healthcheck"): "health checks",
    ("verifier", "environment"): "a verifier in a box of its own",
    ("verifier", "collect"): "commands before the verifier",
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMG])", re.IGNORECASE)
_MB_PER_UNIT = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_DEFAULT_VERIFIER_S = 600.0
_DEFAULT_BUILD_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxLimits:
    """Limits on all processes of a box together."""

    memory_bytes: int
    disk_bytes: int
    cpus: float
    max_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    name: str
    folder: Path
    instruction: str
    limits: BoxLimits
    agent_s: float | None
    """Time for all commands of an episode together; None sets no limit."""
    verifier_s: float
    build_s: float
    image: str | None
    """A built image; None where `environment/Dockerfile` describes one."""
    workdir: str | None
    """None is the image's own."""
    variables: Mapping[str, str]
    verifier_variables: Mapping[str, str]

    @property
    def context(self) -> Path:
        return self.folder / "environment"

    @property
    def dockerfile(self) -> Path | None:
        path = self.context / "Dockerfile"
        return path if path.is_file() else None

    @property
    def tests(self) -> Path:
        return self.folder / "tests"


def task_names(folder: Path) -> list[str]:
    """Return the names of the tasks below a folder, in order; a DataError where there is none."""
    found = sorted(path.parent.relative_to(folder).as_posix() for path in folder.glob(f"**/{_CONFIG}"))
    if not found:
        raise DataError(f"{folder} has no folder with a {_CONFIG}; name a folder of Harbor tasks")
    return found


def read_task(folder: Path, name: str, defaults: BoxLimits) -> HarborTask:
    """Return a task; a DataError names its file and what is wrong with it. `defaults` hold where it sets no limit."""
    root = (folder / name).resolve()
    if not root.is_relative_to(folder.resolve()):
        raise DataError(f"task {name} is not below {folder}")
    config = _Config(root / _CONFIG)
    config.refuse_unsupported()
    instruction = _text(root / "instruction.md")
    if not instruction.strip():
        raise DataError(f"{root / 'instruction.md'} is empty; it is what the model is asked")
    if not (root / "tests" / "test.sh").is_file():
        raise DataError(f"{root / 'tests' / 'test.sh'} does not exist; it grades the task")
    image = config.text("environment", "docker_image")
    if image is None and not (root / "environment" / "Dockerfile").is_file():
        raise DataError(f"{root}: neither environment/Dockerfile nor environment.docker_image in {_CONFIG}")
    if any((root / "environment").glob("docker-compose.y*ml")):
        raise DataError(f"{root}: tasks of several containers (docker-compose) are not supported; leave the task out")
    memory_mb = config.megabytes("memory_mb", "memory")
    storage_mb = config.megabytes("storage_mb", "storage")
    return HarborTask(
        name=name,
        folder=root,
        instruction=instruction,
        limits=BoxLimits(
            memory_bytes=defaults.memory_bytes if memory_mb is None else int(memory_mb * MIB),
            disk_bytes=defaults.disk_bytes if storage_mb is None else int(storage_mb * MIB),
            cpus=config.number("environment", "cpus") or defaults.cpus,
            max_processes=defaults.max_processes,
        ),
        agent_s=config.number("agent", "timeout_sec"),
        verifier_s=config.number("verifier", "timeout_sec") or _DEFAULT_VERIFIER_S,
        build_s=config.number("environment", "build_timeout_sec") or _DEFAULT_BUILD_S,
        image=image,
        workdir=config.text("environment", "workdir"),
        variables=config.variables("environment"),
        verifier_variables=config.variables("verifier"),
    )


class _Config:
    """The values of one task.toml, of the types that they must have."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._values: dict[str, object] = tomllib.loads(_text(path))
        except tomllib.TOMLDecodeError as error:
            raise DataError(f"{path}: {error}") from None

    def refuse_unsupported(self) -> None:
        for keys, what in _NOT_SUPPORTED.items():
            if self._get(*keys):
                raise DataError(f"{self._path}: {'.'.join(keys)}: {what} are not supported; leave the task out")
        if str(self._get("environment", "os") or "linux").lower() != "linux":
            raise DataError(f"{self._path}: environment.os: only linux is supported; leave the task out")
        if self._get("environment", "gpus"):
            raise DataError(f"{self._path}: environment.gpus: boxes have no GPUs; leave the task out")

    def text(self, *keys: str) -> str | None:
        value = self._get(*keys)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong(keys, value, "a string")

    def number(self, *keys: str) -> float | None:
        value = self._get(*keys)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._wrong(keys, value, "a number above 0")
        return float(value)

    def megabytes(self, key: str, old_key: str) -> float | None:
        """Return a size; old tasks write it as `"2G"` under another key."""
        old = self.text("environment", old_key)
        if old is None:
            return self.number("environment", key)
        found = _SIZE.fullmatch(old.strip())
        if found is None:
            raise self._wrong(("environment", old_key), old, 'a size such as "2G"')
        return float(found[1]) * _MB_PER_UNIT[found[2].upper()]

    def variables(self, section: str) -> dict[str, str]:
        value = self._get(section, "env") or {}
        if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
            raise self._wrong((section, "env"), value, "strings by name")
        hosts = [name for name, each in value.items() if "${" in each]
        if hosts:
            # The host's variables are secrets more often than not, and the model reads what is in its box.
            raise DataError(f"{self._path}: {section}.env.{hosts[0]} takes a variable of the host; write its value")
        return dict(value)

    def _get(self, *keys: str) -> object:
        value: object = self._values
        for key in keys:
            if not isinstance(value, dict):
                raise self._wrong(keys[:-1], value, "a section")
            value = cast("dict[str, object]", value).get(key)
            if value is None:
                return None
        return value

    def _wrong(self, keys: tuple[str, ...], value: object, wanted: str) -> DataError:
        return DataError(f"{self._path}: {'.'.join(keys)} is {value!r}; it must be {wanted}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text") from None


def check_tasks(folder: Path, defaults: BoxLimits) -> Iterator[str]:
    """Yield what is wrong with the tasks below a folder, one line each."""
    try:
        names = task_names(folder)
    except DataError as error:
        yield str(error)
        return
    for name in names:
        try:
            read_task(folder, name, defaults)
        except DataError as error:
            yield str(error)
