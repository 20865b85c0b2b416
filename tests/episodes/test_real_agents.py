"""Clients and agents from PyPI, unmodified, in an environment of their own: the endpoint records what they do."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.environment import CommandEnvironmentConfig
from megarl.data.tokenizer import Tokenizer
from megarl.episodes.build import open_agents
from megarl.episodes.chat_endpoint import ChatEndpoint
from megarl.types import Ending, Rollout
from tests.episodes.scripted import ScriptedSession
from tests.episodes.templates import family_tokenizer

pytestmark = pytest.mark.slow

_PACKAGES = ("anthropic==2.10.0", "litellm==1.106.2", "smolagents[openai]==1.26.0", "mini-swe-agent==2.4.6", "mcp")
_CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return family_tokenizer(tmp_path_factory.mktemp("qwen"), "qwen2.5", tools=())


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment with the agents."""
    folder = tmp_path_factory.mktemp("agents") / "venv"
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, folder], check=True)
    install = [str(uv), "pip", "install", "-q", "--python", str(folder / "bin" / "python"), *_PACKAGES]
    installed = subprocess.run(install, check=False, capture_output=True, text=True)
    if "error sending request" in installed.stderr or "dns error" in installed.stderr:
        pytest.skip("needs a package index")
    assert installed.returncode == 0, installed.stderr
    return folder / "bin"


async def _play(session: ScriptedSession, tokenizer: Tokenizer, folder: Path, *command: str | Path) -> str:
    """Run a program as the agent of an episode; return what it printed."""
    endpoint = ChatEndpoint(tokenizer, call_format="auto")
    await endpoint.start()
    try:
        async with endpoint.episode(session) as access:
            settings = {
                "HOME": str(folder),
                "LITELLM_LOCAL_MODEL_COST_MAP": "true",
            }
            process = await asyncio.create_subprocess_exec(
                *map(str, command),
                cwd=folder,
                env={"PATH": os.environ["PATH"], **settings, **access.variables},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            printed = (await process.communicate())[0].decode()
    finally:
        await endpoint.close()
    assert process.returncode == 0, printed
    return printed


def _sampled(tokenizer: Tokenizer, rollout: Rollout) -> str:
    return tokenizer.decode(rollout.token_ids[rollout.loss_mask])


_ANTHROPIC = """
import anthropic
client = anthropic.Anthropic(max_retries=0)
tool = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}
asked = [{"role": "user", "content": "2+3?"}]
keys = {"model": "policy", "max_tokens": 99, "tools": [tool]}
with client.messages.stream(messages=asked, **keys) as stream:
    print("streamed:", "|".join(stream.text_stream))
    first = stream.get_final_message()
call = first.content[-1]
result = {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] + call.input["b"])}
chat = [*asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
print("answered:", client.messages.create(messages=chat, **keys).content[0].text)
try:
    anthropic.Anthropic(api_key="other", max_retries=0).messages.create(messages=asked, **keys)
except anthropic.AuthenticationError as error:
    print("refused:", error.body["error"]["type"])
"""

_LITELLM = """
import litellm
tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
chat = [{"role": "user", "content": "2+3?"}]
chunks = list(litellm.completion(model="openai/policy", messages=chat, tools=[tool], stream=True))
message = litellm.stream_chunk_builder(chunks, messages=chat).choices[0].message
print("streamed:", len(chunks), message.content, message.tool_calls[0].function.name)
chat += [message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}]
reply = litellm.completion(model="openai/policy", messages=chat, tools=[tool])
print("answered:", reply.choices[0].message.content)
"""


@pytest.mark.parametrize("client", ["anthropic", "litellm"])
async def test_a_client_streams_a_call_and_goes_on_after_its_result(
    client: str, tokenizer: Tokenizer, programs: Path, tmp_path: Path
) -> None:
    session = ScriptedSession(tokenizer, [_CALL, "It is 5."])
    script = _ANTHROPIC if client == "anthropic" else _LITELLM
    printed = await _play(session, tokenizer, tmp_path, programs / "python", "-c", script)
    assert "answered: It is 5." in printed
    if client == "anthropic":
        assert "|" in printed.partition("answered")[0], "the text came in one piece"
        assert "refused: authentication_error" in printed
    rollout = session.finish(Ending.ANSWERED, None)
    assert _sampled(tokenizer, rollout) == f"{_CALL}<|im_end|>It is 5.<|im_end|>"
    assert session.num_rows == 1


_SMOLAGENTS = """
import os
from smolagents import CodeAgent, OpenAIServerModel, tool

@tool
def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: One.
        b: The other.
    '''
    return a + b

model = OpenAIServerModel(
    model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = CodeAgent(tools=[add], model=model, max_steps=4, stream_outputs=True)
print("answered:", agent.run("What is 2+3?"))
"""


async def test_a_code_agent_of_smolagents_calls_its_tool_and_is_recorded(
    tokenizer: Tokenizer, programs: Path, tmp_path: Path
) -> None:
    texts = ["Thought: I add.\n<code>\nprint(add(2, 3))\n</code>", "Thought: done.\n<code>\nfinal_answer(5)\n</code>"]
    session = ScriptedSession(tokenizer, list(texts))
    script = tmp_path / "agent.py"
    script.write_text(_SMOLAGENTS)
    printed = await _play(session, tokenizer, tmp_path, programs / "python", script)
    assert "answered: 5" in printed
    rollout = session.finish(Ending.ANSWERED, None)
    assert _sampled(tokenizer, rollout) == "".join(f"{text}<|im_end|>" for text in texts)


_MINI = """
export HOME=$PWD MSWEA_GLOBAL_CONFIG_DIR=$PWD MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors
export LITELLM_LOCAL_MODEL_COST_MAP=true
"$0" --yolo --exit-immediately --cost-limit 0 --model openai/policy --task "$(cat)"
test "$(cat answer.txt)" = 5
echo $((! $?)) > score
"""


async def test_mini_swe_agent_is_a_command_that_runs_what_the_model_says_and_is_recorded(
    tokenizer: Tokenizer, programs: Path, tmp_path: Path
) -> None:
    commands = ("expr 2 + 3 > answer.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    texts = [
        f'I work.\n<tool_call>\n{{"name": "bash", "arguments": {{"command": "{each}"}}}}\n</tool_call>'
        for each in commands
    ]
    session = ScriptedSession(tokenizer, list(texts))
    config = CommandEnvironmentConfig(
        kind="command", command=("sh", "-c", _MINI, str(programs / "mini")), result="score", workers=1
    )
    agents = await open_agents(config, tokenizer, log_path=tmp_path / "log")
    try:
        score = await agents.run({"uid": "1", "prompt": "Write 2+3 into answer.txt."}, session)
    finally:
        await agents.close()
    assert score is not None
    assert score.value == 1, (tmp_path / "log").read_text()
    rollout = session.finish(Ending.ANSWERED, score)
    assert _sampled(tokenizer, rollout) == "".join(f"{text}<|im_end|>" for text in texts)
    assert session.num_rows == 1
