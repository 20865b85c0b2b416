"""Agents that decide their turns: a real OpenAI client in a process against the endpoint, and a function by tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config.environment import ChatEnvironmentConfig, FunctionEnvironmentConfig
from megarl.data.tokenizer import Tokenizer
from megarl.episodes.build import check_environment, open_agents
from megarl.errors import ConfigError, EnvironmentLostError, FleetError, ScoreLostError
from megarl.types import JsonValue
from tests.episodes.scripted import ScriptedSession
from tests.episodes.templates import family_tokenizer

Run = Callable[[Any], Any]
_ROW: dict[str, JsonValue] = {"uid": "1", "ground_truth": "5", "prompt": "2+3?", "messages": []}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return family_tokenizer(tmp_path_factory.mktemp("qwen"), "qwen2.5", tools=())


_AGENT = """
import json
from openai import AsyncOpenAI

TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}

async def run(task, base_url, api_key):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(4):
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL], max_tokens=64, temperature=0.5)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return {"score": float(message.content.strip() == task["ground_truth"]), "turns": [0.0, 1.0]}
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})
    return 0.0
"""


def _agent(tmp_path: Path, text: str, **keys: object) -> ChatEnvironmentConfig:
    path = tmp_path / "agent.py"
    path.write_text(text)
    return ChatEnvironmentConfig.model_validate({"kind": "chat", "path": path, "workers": 1, **keys})


@pytest.mark.patient
def test_an_agent_of_the_openai_library_is_recorded_token_by_token_and_not_blamed_for_engines(
    tokenizer: Tokenizer, run: Run, tmp_path: Path
) -> None:
    agents = run(open_agents(_agent(tmp_path, _AGENT), tokenizer))
    called = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    session = ScriptedSession(tokenizer, [called, "5"])
    score = run(agents.run(_ROW, session))
    assert (score.value, score.turns) == (1.0, (0.0, 1.0))
    assert session.script.limits == [64, 64]
    assert session.num_rows == 1
    history = tokenizer.decode(session.token_ids)
    assert history.count("<|im_start|>system") == 1
    assert history.endswith(
        f"<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n{called}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n5<|im_end|>"
    )
    with pytest.raises(FleetError, match="no engine is left"):
        run(agents.run(_ROW, ScriptedSession(tokenizer, [], error=FleetError("no engine is left"))))
    run(agents.close())


_REWRITER = """
from openai import AsyncOpenAI

async def run(task, base_url, api_key):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    for text in ("one", "two"):
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])
    return 1
"""


@pytest.mark.patient
async def test_agents_run_at_the_same_time_and_a_request_that_does_not_continue_begins_a_row(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    agents = await open_agents(_agent(tmp_path, _REWRITER, workers=2), tokenizer)
    sessions = [ScriptedSession(tokenizer, ["a", f"b{number}"]) for number in range(4)]
    scores = await asyncio.gather(*(agents.run(_ROW, session) for session in sessions))
    await agents.close()
    assert [score is not None and score.value for score in scores] == [1.0] * 4
    for number, session in enumerate(sessions):
        assert session.num_rows == 2
        assert f"b{number}" in tokenizer.decode(session.token_ids)
        assert "one" not in tokenizer.decode(session.token_ids)


@pytest.mark.patient
def test_an_agent_that_fails_is_lost_and_others_go_on(tokenizer: Tokenizer, run: Run, tmp_path: Path) -> None:
    text = (
        "import os, time\n"
        "async def run(task, base_url, api_key):\n"
        "    match task['uid']:\n"
        "        case 'raises': raise KeyError('answer')\n"
        "        case 'dies': os._exit(3)\n"
        "        case 'hangs': time.sleep(600)\n"
        "        case 'nothing': return None\n"
        "    return 1.0\n"
    )
    agents = run(open_agents(_agent(tmp_path, text, wall_s=5), tokenizer))
    for uid, told in [("raises", "KeyError"), ("dies", "exited with status 3"), ("hangs", "no answer within 5 s")]:
        with pytest.raises(EnvironmentLostError, match=told):
            run(agents.run({"uid": uid}, ScriptedSession(tokenizer, [])))
    with pytest.raises((ScoreLostError, EnvironmentLostError), match="returned a NoneType"):
        run(agents.run({"uid": "nothing"}, ScriptedSession(tokenizer, [])))
    assert run(agents.run({"uid": "fine"}, ScriptedSession(tokenizer, []))).value == 1
    run(agents.close())


_ODD = """
import httpx

def run(task, base_url, api_key):
    def post(key=api_key, **body):
        reply = httpx.post(f"{base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        return reply.status_code
    chat = [{"role": "user", "content": "hi"}]
    found = [
        post("another", messages=chat), post(messages=[]), post(messages=chat, stream="yes"), post(messages=chat, n=2),
        post(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), post(messages=[{"content": "hi"}]),
    ]
    assert found == [401, 400, 400, 400, 400, 400], found
    assert base_url.startswith("http://127.0.0.1:")
    return 1
"""


@pytest.mark.patient
def test_odd_requests_are_refused(tokenizer: Tokenizer, run: Run, tmp_path: Path) -> None:
    agents = run(open_agents(_agent(tmp_path, _ODD), tokenizer))
    assert run(agents.run(_ROW, ScriptedSession(tokenizer, []))).value == 1
    run(agents.close())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("async def go(task): ...\n", "has no function run(task, base_url, api_key)"),
        ("async def run(task): ...\n", "must take task, base_url and api_key"),
        ("import nowhere_at_all\n", "ModuleNotFoundError"),
    ],
)
def test_an_agent_that_cannot_be_run_is_refused(text: str, told: str, tmp_path: Path) -> None:
    (problem,) = check_environment(_agent(tmp_path, text))
    assert told in problem.message
    assert problem.key in ("environment.path", "environment.name")


_FUNCTION = """
async def count(row, session, tokenizer):
    session.begin_row(tokenizer.encode([tokenizer.render_chat([{"role": "user", "content": row["prompt"]}])])[0])
    turn = await session.sample(max_tokens=8)
    return {"score": float(turn.text == row["ground_truth"]), "length": len(turn.token_ids)}

async def breaks(row, session, tokenizer):
    raise IndexError("none")

def late(row, session, tokenizer): ...
async def few(row): ...
"""


def _function(tmp_path: Path, name: str) -> FunctionEnvironmentConfig:
    path = tmp_path / "turns.py"
    path.write_text(_FUNCTION)
    return FunctionEnvironmentConfig.model_validate({"kind": "function", "code": f"{path}:{name}"})


def test_a_function_has_the_tokens_in_its_hand(tokenizer: Tokenizer, run: Run, tmp_path: Path) -> None:
    agents = run(open_agents(_function(tmp_path, "count"), tokenizer))
    session = ScriptedSession(tokenizer, ["5"])
    score = run(agents.run(_ROW, session))
    assert (score.value, score.components) == (1.0, {"length": 2.0})
    assert session.script.limits == [8]
    broken = run(open_agents(_function(tmp_path, "breaks"), tokenizer))
    with pytest.raises(EnvironmentLostError, match="IndexError: none"):
        run(broken.run(_ROW, session))


@pytest.mark.parametrize(
    ("name", "told"), [("late", "async"), ("few", "must take row"), ("cont", "did you mean count")]
)
def test_a_function_that_cannot_be_run_is_refused(
    name: str, told: str, tokenizer: Tokenizer, run: Run, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        run(open_agents(_function(tmp_path, name), tokenizer))
