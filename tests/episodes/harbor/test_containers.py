"""Boxes of a container engine: what its client is asked for, and whose fault its answers are.

The client is a script that runs commands on this machine: what a daemon does with them is not tested here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import pytest

from megarl.episodes.harbor.boxes import Box
from megarl.episodes.harbor.containers import ContainerBoxes
from megarl.episodes.harbor.tasks import BoxLimits, read_task
from megarl.errors import ConfigError, DataError, EnvironmentLostError
from tests.episodes.harbor.small_tasks import write_tasks

LIMITS = BoxLimits(memory_bytes=1 << 30, disk_bytes=1 << 30, cpus=2, max_processes=24)
_CLIENT = """#!/usr/bin/env python3
import json, os, sys
words, folder = sys.argv[1:], {folder!r}
with open(folder + "/asked", "a") as file:
    file.write(json.dumps(words) + "\\n")
failing = open(folder + "/failing").read().split() if os.path.exists(folder + "/failing") else []
if words[0] in failing:
    print(f"Error response from daemon: {{words[0]}} is not possible", file=sys.stderr)
    sys.exit(125 if words[0] in ("run", "exec") else 1)
if words[:2] == ["image", "inspect"]:
    sys.exit(1)
if words[0] == "exec":
    os.execvp("sh", words[3:])
"""


class Client:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fail(self, *words: str) -> None:
        (self._folder / "failing").write_text(" ".join(words))

    @property
    def asked(self) -> list[list[str]]:
        return [json.loads(line) for line in (self._folder / "asked").read_text().splitlines()]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    folder = tmp_path / "client"
    folder.mkdir()
    program = folder / "docker"
    program.write_text(_CLIENT.format(folder=str(folder)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return Client(folder)


def in_box(tmp_path: Path, use: Callable[[Box], Awaitable[None]]) -> None:
    tasks = write_tasks(tmp_path / "tasks")

    async def opened() -> None:
        boxes = ContainerBoxes("docker", max_cache_bytes=1 << 30, allows_network=False)
        box = await boxes.open(read_task(tasks, "hello", LIMITS))
        try:
            await use(box)
        finally:
            await box.close()

    asyncio.run(opened())


@pytest.mark.patient
def test_an_image_is_built_and_a_container_with_limits_is_run_and_removed(tmp_path: Path, client: Client) -> None:
    async def use(box: Box) -> None:
        result = await box.run("echo $GIVEN; exit 3", variables={"GIVEN": "a 'b'"}, timeout_s=60)
        assert (result.code, result.output, result.stopped) == (3, "a 'b'\n", None)
        late = await box.run("sleep 600", variables={}, timeout_s=1)
        assert (late.code, late.stopped) == (None, "it ran longer than 1 s")

    in_box(tmp_path, use)
    verbs = [words[0] if words[0] != "image" else f"image {words[1]}" for words in client.asked]
    assert verbs == ["image inspect", "build", "image ls", "run", "exec", "exec", "rm"]
    build, run, remove = client.asked[1], client.asked[3], client.asked[-1]
    assert build[-1] == str(tmp_path / "tasks" / "hello" / "environment")
    options = dict(pairwise(run))
    assert options["--network"] == "none"
    assert options["--memory"] == options["--memory-swap"] == str(512 << 20)
    assert options["--cpus"] == "1"
    assert options["--pids-limit"] == "24"
    assert remove == ["rm", "--force", options["--name"]]


@pytest.mark.patient
def test_a_daemon_that_fails_loses_the_episode_and_a_build_that_fails_is_the_tasks(
    tmp_path: Path, client: Client
) -> None:
    async def nothing(box: Box) -> None:
        pass

    async def use(box: Box) -> None:
        client.fail("exec")
        with pytest.raises(EnvironmentLostError, match="docker exec: Error response from daemon"):
            await box.run("true", variables={}, timeout_s=60)

    in_box(tmp_path, use)
    client.fail("run")
    with pytest.raises(EnvironmentLostError, match="docker started no container: Error response from daemon"):
        in_box(tmp_path, nothing)
    client.fail("build")
    with pytest.raises(DataError, match="task hello: docker build fails: Error response from daemon"):
        in_box(tmp_path, nothing)


def test_an_engine_that_does_not_answer_is_a_mistake_of_the_recipe(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes = ContainerBoxes("docker", max_cache_bytes=1, allows_network=False)
    asyncio.run(boxes.check(LIMITS))
    client.fail("version")
    with pytest.raises(ConfigError, match=r"docker cannot be used here: .*; start it, or set bubblewrap"):
        asyncio.run(boxes.check(LIMITS))
    monkeypatch.setenv("PATH", str(tmp_path))
    absent = ContainerBoxes("podman", max_cache_bytes=1, allows_network=False)
    with pytest.raises(ConfigError, match=r"podman cannot be used here"):
        asyncio.run(absent.check(LIMITS))
