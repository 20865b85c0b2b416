"""Agents inside of boxes: they reach the model and nothing else, and the task's tests grade what they left."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.environment import HarborEnvironmentConfig
from megarl.data.tokenizer import Tokenizer
from megarl.episodes.build import check_environment, open_agents
from megarl.episodes.play import tools_of
from megarl.errors import EnvironmentLostError
from megarl.types import JsonValue, Score
from tests.episodes.harbor.small_tasks import write_tasks
from tests.episodes.scripted import ScriptedSession
from tests.episodes.templates import family_tokenizer

_ROW: dict[str, JsonValue] = {"uid": "1", "prompt": "Greet 'all'.", "extra_info": {"task": "hello"}}
_AGENT = """
import json, os, subprocess, sys, urllib.request
asked = sys.stdin.read()
body = json.dumps({"messages": [{"role": "user", "content": asked}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
with urllib.request.urlopen(request) as reply:
    said = json.load(reply)["choices"][0]["message"]["content"]
sys.exit(subprocess.run(["sh", "-c", said]).returncode)
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return family_tokenizer(tmp_path_factory.mktemp("qwen"), "qwen2.5", tools=())


@pytest.fixture
def config(tmp_path: Path) -> HarborEnvironmentConfig:
    tasks = write_tasks(tmp_path / "tasks")
    environment = tasks / "hello" / "environment"
    (environment / "agent.py").write_text(_AGENT)
    with (environment / "Dockerfile").open("a") as dockerfile:
        dockerfile.write("COPY agent.py /opt/agent.py\n")
    values = {
        "kind": "harbor",
        "tasks": tasks,
        "agent": "python3 /opt/agent.py",
        "sandbox": "bubblewrap",
        "images": {"*": "host"},
        "cache": tmp_path / "cache",
    }
    return HarborEnvironmentConfig.model_validate(values)


async def _play(config: HarborEnvironmentConfig, session: ScriptedSession, tokenizer: Tokenizer) -> Score | None:
    agents = await open_agents(config, tokenizer)
    try:
        return await agents.run(_ROW, session)
    finally:
        await agents.close()


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize(
    ("said", "value"), [("echo 'Hello, world!' > hello.txt", 1.0), ("exit 3", 0.0), ("kill -9 -1", 0.0)]
)
async def test_an_agent_in_a_box_asks_the_model_and_the_tests_grade_its_work(
    said: str, value: float, config: HarborEnvironmentConfig, tokenizer: Tokenizer
) -> None:
    session = ScriptedSession(tokenizer, [said])
    score = await _play(config, session, tokenizer)
    assert score is not None
    assert score.value == value
    assert "<|im_start|>user\nGreet 'all'.<|im_end|>" in tokenizer.decode(session.script.histories[0])
    assert session.num_sampled == 1


@pytest.mark.needs("bubblewrap")
async def test_an_agent_that_does_not_start_in_its_box_is_no_score(
    config: HarborEnvironmentConfig, tokenizer: Tokenizer
) -> None:
    without = config.model_copy(update={"agent": "no-such-agent"})
    with pytest.raises(EnvironmentLostError, match=r"agent did not ask the model: .*no-such-agent"):
        await _play(without, ScriptedSession(tokenizer, []), tokenizer)


def test_an_agent_in_a_container_needs_a_network(config: HarborEnvironmentConfig) -> None:
    assert tools_of(config) == ()
    inside = config.model_copy(update={"sandbox": "docker", "images": {}})
    (problem,) = check_environment(inside)
    assert str(problem).startswith("environment.allows_network: an agent inside of a container of docker")
