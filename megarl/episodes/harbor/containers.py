"""Boxes of docker or podman: a container per episode, from an image that is pulled or built once per node."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shlex
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal
from uuid import uuid4

from megarl.episodes.harbor.boxes import MAX_OUTPUT_BYTES, Box, CommandResult, script_of, shown_output
from megarl.episodes.harbor.tasks import BoxLimits, HarborTask
from megarl.errors import ConfigError, DataError, EnvironmentLostError, Problem
from megarl.system.foreign import one_line

Engine = Literal["docker", "podman"]

_LABEL = "megarl.task"
_OWNER = "megarl.owner"
"""Label of a container with the process that made it."""
_COMMAND_TIMEOUT_S = 120.0
_HALF = MAX_OUTPUT_BYTES // 2
_NOT_RUN = (125, 126, 127)
"""Exit statuses of the client for a command that it could not run: the daemon's fault, or a missing program."""
_DAEMON_STATUS = 125
_TIMED_OUT = 124
_KILL_GRACE_S = 5.0
_RUN = 'if command -v timeout >/dev/null; then exec timeout -k 1 "$0" {shell}; else exec {shell}; fi'
_SHELL = "$(command -v bash || echo sh) -s"


class ContainerBoxes:
    """`Boxes` of a container engine; its command line is all that is used of it."""

    def __init__(self, engine: Engine, *, max_cache_bytes: int, allows_network: bool) -> None:
        self._engine = engine
        self._max_cache_bytes = max_cache_bytes
        self._network = "bridge" if allows_network else "none"
        self._building: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._images: dict[str, str] = {}
        """By the task's name."""

    async def check(self, limits: BoxLimits) -> None:
        try:
            code, output = await _client(self._engine, "version", timeout_s=_COMMAND_TIMEOUT_S)
        except EnvironmentLostError as error:
            code, output = 1, str(error)
        if code != 0:
            why = one_line(output.strip().splitlines()[-1] if output.strip() else f"exit status {code}")
            message = f"{self._engine} cannot be used here: {why}; start it, or set bubblewrap"
            raise ConfigError("recipe", (Problem(key="environment.sandbox", message=message),))

    async def open(self, task: HarborTask) -> Box:
        async with self._building[task.name]:
            if task.name not in self._images:
                self._images[task.name] = await self._image(task)
        limits, name = task.limits, f"megarl-{uuid4().hex}"
        memory = str(limits.memory_bytes)
        code, output = await _client(
            self._engine,
            *("run", "--detach", "--init", "--name", name, "--network", self._network, "--pull", "never"),
            *("--label", f"{_OWNER}={os.getpid()}", "--security-opt", "no-new-privileges"),
            *("--memory", memory, "--memory-swap", memory, "--cpus", f"{limits.cpus:g}"),
            *("--pids-limit", str(limits.max_processes), "--ulimit", f"fsize={limits.disk_bytes}"),
            *(("--workdir", task.workdir) if task.workdir else ()),
            *(word for key, value in task.variables.items() for word in ("--env", f"{key}={value}")),
            *("--entrypoint", "sleep", self._images[task.name], "infinity"),
            timeout_s=_COMMAND_TIMEOUT_S,
        )
        if code != 0:
            with suppress(EnvironmentLostError):
                await _client(self._engine, "rm", "--force", name, timeout_s=_COMMAND_TIMEOUT_S)
            raise EnvironmentLostError(f"{self._engine} started no container: {one_line(output.strip())}")
        return Container(self._engine, name)

    async def close(self) -> None:
        """Containers are removed by their episodes."""

    async def _image(self, task: HarborTask) -> str:
        if task.image is not None:
            code, _ = await _client(self._engine, "image", "inspect", task.image, timeout_s=_COMMAND_TIMEOUT_S)
            if code != 0:
                code, output = await _client(self._engine, "pull", task.image, timeout_s=task.build_s)
                if code != 0:
                    raise EnvironmentLostError(f"{self._engine} pull {task.image}: {one_line(output[-400:])}")
            return task.image
        tag = f"megarl-task:{await asyncio.to_thread(_digest, task.context)}"
        code, _ = await _client(self._engine, "image", "inspect", tag, timeout_s=_COMMAND_TIMEOUT_S)
        if code != 0:
            words = ("build", "--tag", tag, "--label", f"{_LABEL}={task.name}", str(task.context))
            code, output = await _client(self._engine, *words, timeout_s=task.build_s)
            if code != 0:
                raise DataError(f"task {task.name}: {self._engine} build fails: {one_line(output[-400:].strip())}")
            await self._shrink()
        return tag

    async def _shrink(self) -> None:
        """Remove built images, the oldest first, until they are within the bound; one that is in use stays."""
        words = ("image", "ls", "--quiet", "--filter", f"label={_LABEL}")
        _, listed = await _client(self._engine, *words, timeout_s=_COMMAND_TIMEOUT_S)
        ids = list(dict.fromkeys(listed.split()))
        if not ids:
            return
        _, described = await _client(self._engine, "image", "inspect", *ids, timeout_s=_COMMAND_TIMEOUT_S)
        with suppress(ValueError, KeyError, TypeError):
            images = [(str(each["Created"]), int(each["Size"]), str(each["Id"])) for each in json.loads(described)]
            total = sum(num_bytes for _, num_bytes, _ in images)
            for _, num_bytes, uid in sorted(images)[:-1]:
                if total <= self._max_cache_bytes:
                    return
                code, _ = await _client(self._engine, "image", "rm", uid, timeout_s=_COMMAND_TIMEOUT_S)
                total -= num_bytes if code == 0 else 0


class Container:
    """One container; each command is an `exec` in it."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._is_open = True

    async def run(self, command: str, *, variables: Mapping[str, str], timeout_s: float) -> CommandResult:
        shell = _RUN.format(shell=_SHELL)
        words = ("exec", "--interactive", self._name, "sh", "-c", shell, f"{timeout_s:g}")
        script = script_of(command, variables).encode(errors="replace")
        try:
            code, output = await _client(self._engine, *words, given=script, timeout_s=timeout_s + _KILL_GRACE_S)
        except _LateError:
            code, output = _TIMED_OUT, ""
        if code == _TIMED_OUT:
            return CommandResult(code=None, output=output, stopped=f"it ran longer than {timeout_s:g} s")
        if code == _DAEMON_STATUS or (code in _NOT_RUN and not await self._is_running()):
            raise EnvironmentLostError(f"{self._engine} exec: {one_line(output[-400:].strip())}")
        return CommandResult(code=code, output=output)

    async def put(self, folder: Path, target: str) -> None:
        await self.run(f"rm -rf {shlex.quote(target)}", variables={}, timeout_s=_COMMAND_TIMEOUT_S)
        words = ("cp", f"{folder}/.", f"{self._name}:{target}")
        code, output = await _client(self._engine, *words, timeout_s=_COMMAND_TIMEOUT_S)
        if code != 0:
            raise EnvironmentLostError(f"{self._engine} cp: {one_line(output[-400:].strip())}")

    async def listener(self) -> None:
        """It has a network of the engine."""

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            await _client(self._engine, "rm", "--force", self._name, timeout_s=_COMMAND_TIMEOUT_S)

    async def _is_running(self) -> bool:
        words = ("inspect", "--format", "{{.State.Running}}", self._name)
        code, output = await _client(self._engine, *words, timeout_s=_COMMAND_TIMEOUT_S)
        return code == 0 and output.strip() == "true"


class _LateError(EnvironmentLostError):
    pass


async def _client(engine: Engine, *words: str, timeout_s: float, given: bytes = b"") -> tuple[int, str]:
    """Run the engine's client; return its exit status and its output, of which the middle may be missing."""
    try:
        process = await asyncio.create_subprocess_exec(
            engine,
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentLostError(f"{engine}: {error.strerror}") from None
    assert process.stdin is not None
    assert process.stdout is not None
    head, tail, num_bytes = b"", b"", 0
    try:
        async with asyncio.timeout(timeout_s):
            with suppress(ConnectionError):
                process.stdin.write(given)
                await process.stdin.drain()
            process.stdin.close()
            while chunk := await process.stdout.read(_HALF):
                num_bytes += len(chunk)
                room = _HALF - len(head)
                head += chunk[:room]
                tail = (tail + chunk[room:])[-_HALF:]
            return await process.wait(), shown_output(head, tail, num_bytes)
    except TimeoutError:
        raise _LateError(f"{engine} {words[0]} gave no answer within {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _digest(context: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(context.rglob("*")):
        digest.update(f"{path.relative_to(context)}\0".encode())
        if path.is_file():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]
