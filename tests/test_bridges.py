"""Bridges to other environments' packages, each in a virtual environment of its own, against the real endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from megarl.config.environment import ChatEnvironmentConfig
from megarl.data.tokenizer import Tokenizer
from megarl.episodes.build import open_agents
from megarl.episodes.protocol import Agents
from megarl.errors import EnvironmentLostError
from megarl.types import JsonValue
from tests.episodes.scripted import ScriptedSession
from tests.episodes.servers import free_port
from tests.episodes.templates import family_tokenizer
from tests.repository import ROOT

pytestmark = pytest.mark.slow

UV = Path(sys.executable).parent / "uv"
BRIDGES = ROOT / "examples" / "bridges"
_TASKSET = """
import verifiers.v1 as vf


class AddingData(vf.TaskData):
    answer: str


class AddingTask(vf.Task[AddingData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.assistant_messages[-1].content or "").strip() == self.data.answer)


class AddingTaskset(vf.Taskset[AddingTask]):
    def load(self):
        for number in range(4):
            data = AddingData(idx=number, prompt=f"{number}+4=", answer=str(number + 4))
            yield AddingTask(data, self.config.task)


__all__ = ["AddingTaskset"]
"""


def test_an_environment_of_verifiers_plays_through_its_bridge(tmp_path: Path) -> None:
    python = installed(tmp_path, sys.executable, "verifiers==0.4.0")
    (tmp_path / "adding").mkdir()
    (tmp_path / "adding" / "__init__.py").write_text(_TASKSET)
    with bridge(tmp_path, [str(python), str(BRIDGES / "verifiers_bridge.py"), "adding"]) as (agent, rows):
        assert rows == [{"prompt": f"{number}+4=", "answer": str(number)} for number in range(4)]
        asyncio.run(play_sums(agent, tmp_path))


def test_an_environment_of_nemo_gym_plays_through_its_bridge(tmp_path: Path) -> None:
    python = installed(tmp_path, python_of("3.12"), "nemo-gym==0.4.0")
    folder = "resources_servers/example_multi_step"
    data = next((tmp_path / "bridge" / "lib").glob(f"python*/site-packages/{folder}/data/example.jsonl"))
    tasks = [json.loads(line) for line in data.read_text().splitlines()]
    command = [str(python), str(BRIDGES / "nemo_gym_bridge.py"), f"{folder}/configs/example_multi_step.yaml"]
    with bridge(tmp_path, [*command, "--data", f"{folder}/data/example.jsonl"]) as (agent, rows):
        assert [row["answer"] for row in rows] == [str(number) for number in range(len(tasks))]
        assert rows[0]["prompt"] == tasks[0]["responses_create_params"]["input"][-1]["content"]
        asyncio.run(play_synonyms(agent, tmp_path, tasks[1]))


def python_of(version: str) -> str:
    """Return an interpreter of another version than this one."""
    found = subprocess.run([UV, "python", "find", version], capture_output=True, text=True)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    pythons = [found.stdout.strip()] if not found.returncode else sorted(map(str, pyenv.glob(f"{version}*/bin/python")))
    if not pythons:
        pytest.skip(f"needs Python {version}")
    return pythons[0]


def installed(folder: Path, base: str, package: str) -> Path:
    """Return the interpreter of a fresh virtual environment with a package."""
    venv = folder / "bridge"
    python = venv / "bin" / "python"
    subprocess.run([UV, "venv", "--quiet", "--python", base, venv], check=True)
    tried = subprocess.run(
        [UV, "pip", "install", "--quiet", "--python", python, package], capture_output=True, text=True
    )
    if "error sending request" in tried.stderr or "dns error" in tried.stderr:
        pytest.skip("needs a package index")
    assert tried.returncode == 0, tried.stderr
    return python


@contextmanager
def bridge(folder: Path, command: Sequence[str]) -> Iterator[tuple[Path, list[dict[str, str]]]]:
    """Run a bridge; yields the agent that talks to it, and its tasks."""
    port = free_port()
    agent = folder / "agent.py"
    shutil.copy(BRIDGES / "bridged_agent.py", agent)
    agent.write_text(agent.read_text().replace("127.0.0.1:8765", f"127.0.0.1:{port}"))
    environment = {**os.environ, "PYTHONPATH": str(folder), "PATH": f"{UV.parent}:{os.environ['PATH']}"}
    with (folder / "bridge.log").open("wb") as log:
        process = subprocess.Popen([*command, "--port", str(port)], env=environment, stdout=log, stderr=log, cwd=folder)
    try:
        yield agent, tasks_of(port, process)
    finally:
        process.kill()
        process.wait()


def tasks_of(port: int, bridge: subprocess.Popen[bytes]) -> list[dict[str, str]]:
    """Return the tasks of a bridge as soon as it serves."""
    deadline = time.monotonic() + 600
    while True:
        assert bridge.poll() is None, "the bridge ended; see bridge.log"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/tasks") as reply:
                return [json.loads(line) for line in reply.read().splitlines()]
        except OSError:
            assert time.monotonic() < deadline, "the bridge does not serve"
            time.sleep(0.5)


def row_of(number: str) -> dict[str, JsonValue]:
    return {"uid": number, "ground_truth": number, "prompt": "", "messages": []}


@asynccontextmanager
async def agents_of(agent: Path, tokenizer: Tokenizer) -> AsyncIterator[Agents]:
    config = ChatEnvironmentConfig.model_validate({"kind": "chat", "path": agent, "workers": 1})
    agents = await open_agents(config, tokenizer)
    try:
        yield agents
    finally:
        await agents.close()


async def play_sums(agent: Path, folder: Path) -> None:
    """Play a right answer, a wrong one, and a task that there is not."""
    tokenizer = family_tokenizer(folder / "qwen", "qwen2.5", tools=())
    async with agents_of(agent, tokenizer) as agents:
        for number, said, score in (("3", "7", 1.0), ("2", "7", 0.0)):
            session = ScriptedSession(tokenizer, [said])
            scored = await agents.run(row_of(number), session)
            assert scored is not None
            assert scored.value == score
            history = tokenizer.decode(session.token_ids)
            assert history.endswith(f"user\n{number}+4=<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>")
        with pytest.raises(EnvironmentLostError, match="there is no task 9"):
            await agents.run(row_of("9"), session)


async def play_synonyms(agent: Path, folder: Path, task: dict[str, Any]) -> None:
    """Play right calls, then wrong ones, then a task that there is not."""
    tokenizer = family_tokenizer(folder / "qwen", "qwen2.5", tools=())
    word, right = task["expected_synonyms"][0], task["expected_synonym_values"]
    async with agents_of(agent, tokenizer) as agents:
        for values, score in ((right, 1.0), (right[1:], 0.0)):
            texts = [
                call_of("get_synonym_value", synonym=word),
                call_of("extract_synonym_values", synonym_values=values),
            ]
            session = ScriptedSession(tokenizer, [*texts, "Done."])
            scored = await agents.run(row_of("1"), session)
            assert scored is not None
            assert (scored.value, scored.components["accuracy"]) == (score, score)
            history = tokenizer.decode(session.token_ids)
            assert '{"synonym_value":' + str(sum(map(ord, word))) + "}" in history
            assert history.endswith(
                '{"success":true}\n</tool_response><|im_end|>\n<|im_start|>assistant\nDone.<|im_end|>'
            )
            assert session.num_rows == 1, "every turn continues the tokens of the one before"
        with pytest.raises(EnvironmentLostError, match="there is no task 99"):
            await agents.run(row_of("99"), session)


def call_of(name: str, **arguments: JsonValue) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
