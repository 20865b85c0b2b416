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
from pathlib import Path

import pytest

from megarl.config.environment import ChatEnvironmentConfig
from megarl.episodes.build import open_agents
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
    venv, port = tmp_path / "bridge", free_port()
    python = venv / "bin" / "python"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, venv], check=True)
    installed = subprocess.run(
        [UV, "pip", "install", "--quiet", "--python", python, "verifiers==0.4.0"], capture_output=True, text=True
    )
    if "error sending request" in installed.stderr or "dns error" in installed.stderr:
        pytest.skip("needs a package index")
    assert installed.returncode == 0, installed.stderr
    (tmp_path / "adding").mkdir()
    (tmp_path / "adding" / "__init__.py").write_text(_TASKSET)
    agent = tmp_path / "agent.py"
    shutil.copy(BRIDGES / "bridged_agent.py", agent)
    agent.write_text(agent.read_text().replace("127.0.0.1:8765", f"127.0.0.1:{port}"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PATH": f"{UV.parent}:{os.environ['PATH']}"}
    command = [str(python), str(BRIDGES / "verifiers_bridge.py"), "adding", "--port", str(port)]
    with (tmp_path / "bridge.log").open("wb") as log:
        bridge = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path)
    try:
        rows = tasks_of(port, bridge)
        assert rows == [{"prompt": f"{number}+4=", "answer": str(number)} for number in range(4)]
        asyncio.run(play(agent, tmp_path))
    finally:
        bridge.kill()
        bridge.wait()


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


async def play(agent: Path, folder: Path) -> None:
    """Play a right answer, a wrong one, and a task that there is not."""
    tokenizer = family_tokenizer(folder / "qwen", "qwen2.5", tools=())
    config = ChatEnvironmentConfig.model_validate({"kind": "chat", "path": agent, "workers": 1})
    agents = await open_agents(config, tokenizer)
    try:
        for number, said, score in (("3", "7", 1.0), ("2", "7", 0.0)):
            row: dict[str, JsonValue] = {"uid": number, "ground_truth": number, "prompt": "", "messages": []}
            session = ScriptedSession(tokenizer, [said])
            assert (await agents.run(row, session)).value == score
            history = tokenizer.decode(session.token_ids)
            assert history.endswith(f"user\n{number}+4=<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>")
        with pytest.raises(EnvironmentLostError, match="there is no task 9"):
            await agents.run({"uid": "9", "ground_truth": "9", "prompt": "", "messages": []}, session)
    finally:
        await agents.close()
