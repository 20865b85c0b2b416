"""Every kind of environment with its real server or process on real engines, and what is killed under episodes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from pydantic import TypeAdapter

from megarl.config.environment import ClassEnvironmentConfig, EnvironmentConfig
from megarl.config.roles import RolloutRoleConfig
from megarl.engine import admin
from megarl.engine.client import EngineClient
from megarl.engine.fleet import Fleet
from megarl.engine.process import EngineProcess
from megarl.episodes.admission import Admission
from megarl.episodes.dialogue import Dialogue
from megarl.episodes.play import EpisodeSetup, Player, Tools, tools_of
from megarl.episodes.protocol import Call, Malformed, Observation, Row, ToolSchema, Transcript
from megarl.observe.observer import Observer
from megarl.results import PublishResult
from megarl.reward.scorer import ExactScorer
from megarl.rollout.following import RequestCounts
from megarl.rollout.generator import FleetGenerator
from megarl.rollout.task import RolloutTask, Sampling, Vocabulary
from megarl.rollout.worker import RolloutWorker, cache_sizes
from megarl.types import Ending, PolicyVersion, Prompt, Rollout, Score, ScoredGroup, TurnKind
from tests.engine.engines import REQUEST_TIMEOUT_S, engine_spec
from tests.episodes.chain_model import (
    CALL_ADD,
    RIGHT_COMMAND,
    RIGHT_STEP,
    WRONG_COMMAND,
    WRONG_STEP,
    ChainModel,
    write_babble,
    write_chain,
)
from tests.episodes.harbor.small_tasks import write_tasks
from tests.episodes.servers import free_port, running
from tests.episodes.templates import ADD
from tests.processes import command_of
from tests.repository import ROOT
from tests.serving.pauses import pausing

pytestmark = pytest.mark.slow

ANSWERS = {CALL_ADD: 0.6, "7": 0.3, "eight": 0.1}
"""Calls mostly, so that episodes have turns, and answers enough that they end."""


@dataclass(frozen=True, kw_only=True)
class Engines:
    processes: tuple[EngineProcess, EngineProcess]

    @asynccontextmanager
    async def fleet(self, model: ChainModel, *, num_engines: int = 1) -> AsyncIterator[Fleet]:
        """A fleet that serves the model as version 0."""
        clients = [EngineClient(each.endpoint, request_timeout_s=REQUEST_TIMEOUT_S) for each in self.processes]
        for client in clients[:num_engines]:
            await admin.load_weights_from_disk(
                client, model.folder, version=PolicyVersion(0), timeout_s=REQUEST_TIMEOUT_S
            )
            await client.flush_cache()
        fleet = Fleet(clients[:num_engines], max_outstanding=64, publish_timeout_s=60)
        fleet.requests = RequestCounts()
        try:
            yield fleet
        finally:
            await fleet.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, real_engines: None) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("engines")
    model = write_chain(folder / "model", "qwen2.5", ANSWERS)
    spec = engine_spec(model.folder, folder / "run")
    processes = [EngineProcess(replace(spec, index=index)) for index in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        asyncio.run(process.wait_ready())
    yield Engines(processes=(processes[0], processes[1]))
    for process in processes:
        process.stop()


def prompts_of(model: ChainModel, config: EnvironmentConfig, count: int) -> list[Prompt]:
    tokenizer = model.tokenizer(tuple(tool.as_function for tool in tools_of(config)))
    messages = ({"role": "user", "content": "3+4="},)
    (token_ids,) = tokenizer.encode([tokenizer.render_chat(messages)])
    return [
        Prompt(
            uid=f"row-{number}",
            position=number,
            epoch=0,
            token_ids=token_ids,
            data_source="",
            ground_truth="7",
            extra_info={"secret": 7},
            messages=messages,
        )
        for number in range(count)
    ]


async def play(
    fleet: Fleet,
    model: ChainModel,
    config: EnvironmentConfig,
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    size: int = 4,
) -> list[ScoredGroup]:
    """Return the groups of some prompts, as a rollout worker of a run makes them."""
    tokenizer = model.tokenizer(tuple(tool.as_function for tool in await asyncio.to_thread(tools_of, config)))
    setup = EpisodeSetup.of(config, tokenizer, RolloutRoleConfig(pool="rollout"), max_context_tokens=1024)

    async def sizes() -> list[int | None]:
        return await cache_sizes(fleet.engines)

    retried = fleet.requests.request_retried
    worker = RolloutWorker(
        fleet,
        vocabulary=Vocabulary.of(model.shape, tokenizer),
        scorer=ExactScorer(Observer(())),
        max_attempts=3,
        open_player=setup.opener(tokenizer, cache_sizes=sizes, retried=retried, log_path=folder / "log"),
    )
    sampling = Sampling(num_rollouts=size, temperature=1.0, top_p=1.0, top_k=None, max_response_tokens=1024)
    task = RolloutTask(sampling=sampling, seed=1, in_flight="abort")
    try:
        answers = await asyncio.gather(*(worker.answer(prompt, task) for prompt in prompts))
    finally:
        await worker.close()
    return [answered.scored for answered in answers]


def pairs_of(groups: Sequence[ScoredGroup]) -> list[tuple[Rollout, Score]]:
    return [pair for scored in groups for pair in zip(scored.group.rollouts, scored.scores, strict=True)]


_AGENTS = """
import json
from openai import AsyncOpenAI

TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}

async def run(task, base_url, api_key):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(4):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return float(message.content == task["ground_truth"])
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})
    return 0.0

async def turns(row, session, tokenizer):
    for _ in range(4):
        turn = await session.sample()
        if "tool_call" not in turn.text:
            return float(turn.text == row["ground_truth"])
        given = "\\n<|im_start|>user\\n<tool_response>\\n7\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n"
        session.append(tokenizer.encode([given])[0])
    return 0.0
"""


def config_of(kind: str, folder: Path, stack: ExitStack) -> EnvironmentConfig:
    """Return the section of a kind; its server, where it has one, runs until the stack is closed."""
    (folder / "agents.py").write_text(_AGENTS)
    keys: dict[str, object] = {"kind": kind, "max_turns": 4}
    match kind:
        case "mcp":
            port = free_port()
            stack.enter_context(running("tests.episodes.mcp_server", port))
            keys |= {"servers": {"numbers": f"http://127.0.0.1:{port}/mcp"}, "call_deadline_s": 60}
        case "openenv":
            port = free_port()
            stack.enter_context(running("tests.episodes.openenv_server", port))
            keys |= {"url": f"ws://127.0.0.1:{port}/ws", "call_deadline_s": 60}
        case "chat":
            keys |= {"path": folder / "agents.py", "workers": 4}
        case "command":
            keys |= {"command": ["python3", str(ROOT / "examples" / "tool_agent.py")], "workers": 4}
        case "function":
            keys |= {"code": f"{folder / 'agents.py'}:turns"}
    config: EnvironmentConfig = TypeAdapter(EnvironmentConfig).validate_python(keys)
    return config


def check_turns(model: ChainModel, prompt: Prompt, rollout: Rollout) -> None:
    assert rollout.episode.ending in (Ending.ANSWERED, Ending.MAX_TURNS)
    kinds = [turn.kind for turn in rollout.episode.turns]
    # The opening of an environment, or the tools of an agent, are not in the prompt.
    first = [TurnKind.CONTEXT] if rollout.episode.rows == (0,) else []
    assert rollout.episode.rows in ((), (0,))
    num_calls = (len(kinds) - len(first)) // 2
    assert kinds == [*first, *[TurnKind.SAMPLED, TurnKind.GIVEN] * num_calls, TurnKind.SAMPLED]
    assert model.largest_error(prompt.token_ids, rollout) < 1e-3


@pytest.mark.parametrize("kind", ["mcp", "openenv", "chat", "function", "command"])
def test_a_kind_plays_on_a_real_engine(kind: str, engines: Engines, tmp_path: Path) -> None:
    said = {WRONG_STEP: 0.5, RIGHT_STEP: 0.3, "7": 0.2} if kind == "openenv" else ANSWERS
    model = write_chain(tmp_path / "model", "qwen2.5", said)

    async def scenario(config: EnvironmentConfig, prompts: Sequence[Prompt]) -> tuple[list[ScoredGroup], Counter[str]]:
        async with engines.fleet(model) as fleet:
            groups = await play(fleet, model, config, prompts, tmp_path)
            assert isinstance(fleet.requests, RequestCounts)
            return groups, fleet.requests.causes

    with ExitStack() as stack:
        config = config_of(kind, tmp_path, stack)
        prompts = prompts_of(model, config, 8)
        groups, retries = asyncio.run(scenario(config, prompts))
    assert not retries
    decode = model.tokenizer().decode
    num_results = num_right = 0
    for rollout, score in pairs_of(groups):
        check_turns(model, prompts[0], rollout)
        text = decode(rollout.token_ids)
        rewards = [turn.reward for turn in rollout.episode.turns if turn.kind is TurnKind.SAMPLED]
        if kind == "openenv":
            num_results += text.count("lower") + text.count("higher")
            is_right = rollout.text == RIGHT_STEP
            assert rewards[:-1] == [-0.25] * len(rewards[:-1])
            # Without any reward of the environment the recipe's reward scores: the text "7" is right.
            is_paid = is_right if rewards[:-1] or is_right else rollout.text == "7"
            assert score.value == float(is_paid and rollout.episode.ending is Ending.ANSWERED)
        else:
            num_results += text.count("<tool_response>\n7\n</tool_response>")
            is_right = rollout.text == "7"
            assert score.value == float(is_right)
        num_right += is_right
    assert num_results >= 8, "hardly a call was made: the test says nothing"
    assert 0 < num_right < 32


_BOX_AGENT = """
import json, os, subprocess, sys, urllib.request
tool = {"name": "bash", "description": "Run.", "parameters": {"type": "object", "properties": {"command": {}}}}
messages = [{"role": "user", "content": sys.stdin.read()}]
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
for turn in range(4):
    body = json.dumps({"messages": messages, "tools": [{"type": "function", "function": tool}]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        messages.append(json.load(reply)["choices"][0]["message"])
    calls = messages[-1].get("tool_calls", [])
    if not calls or turn == 3:
        break
    for call in calls:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
"""


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize("agent", ["bash", "python3 /opt/agent.py"])
def test_tasks_in_boxes_are_played_on_a_real_engine_and_graded_by_their_tests(
    agent: str, engines: Engines, tmp_path: Path
) -> None:
    model = write_chain(tmp_path / "model", "qwen2.5", {RIGHT_COMMAND: 0.3, WRONG_COMMAND: 0.4, "7": 0.3})
    keys = {
        "kind": "harbor",
        "tasks": write_tasks(tmp_path / "tasks"),
        "agent": agent,
        "sandbox": "bubblewrap",
        "images": {"*": "host"},
        "cache": tmp_path / "cache",
        "max_turns": 4,
        "max_result_tokens": 64,
    }
    config: EnvironmentConfig = TypeAdapter(EnvironmentConfig).validate_python(keys)
    names = ("hello", "sum", "json", "delete")
    for name in names if agent != "bash" else ():
        environment = tmp_path / "tasks" / name / "environment"
        (environment / "agent.py").write_text(_BOX_AGENT)
        with (environment / "Dockerfile").open("a") as dockerfile:
            dockerfile.write("COPY agent.py /opt/agent.py\n")
    prompts = [
        replace(prompt, extra_info={"task": name})
        for prompt, name in zip(prompts_of(model, config, len(names)), names, strict=True)
    ]

    async def scenario() -> list[ScoredGroup]:
        async with engines.fleet(model) as fleet:
            return await play(fleet, model, config, prompts, tmp_path, size=8)

    groups = asyncio.run(scenario())
    decode = model.tokenizer().decode
    num_right = 0
    for name, group in zip(names, groups, strict=True):
        for rollout, score in pairs_of([group]):
            check_turns(model, prompts[0], rollout)
            calls = [
                decode(rollout.token_ids[turn.start : turn.end])
                for turn in rollout.episode.turns
                if turn.kind is TurnKind.SAMPLED
            ]
            # A call in the last response is not run.
            run = [call for call in calls[:3] if "command" in call]
            is_right = name == "hello" and bool(run) and run[-1].startswith(RIGHT_COMMAND)
            assert score.value == float(is_right), (name, calls)
            num_right += is_right
            if any(call.startswith(WRONG_COMMAND) for call in run):
                assert "total" in decode(rollout.token_ids)  # what ls printed in the box
    assert 0 < num_right < 8 * len(names)


class _AnyCall(Dialogue):
    """Takes every response for a call."""

    def calls(self, text: str) -> list[Call] | Malformed:
        return [Call(name="add", arguments={}, id="call_0")]


@dataclass
class _Numbers:
    """Environments in this process that answer everything."""

    tools: Sequence[ToolSchema] = (ADD,)
    opening: str | None = None
    texts: list[str] = field(default_factory=lambda: ["7", "There are 12.\n", "<tool_call> é \u2028 </s>", ""])
    num_calls: int = 0

    async def open(self, row: Row) -> _Numbers:
        return self

    async def call(self, call: Call) -> Observation:
        self.num_calls += 1
        return Observation(text=self.texts[self.num_calls % len(self.texts)])

    async def score(self, transcript: Transcript) -> Score | None:
        return Score(value=0.0, components={})

    async def close(self) -> None: ...


@pytest.mark.parametrize("family", ["llama", "qwen2.5", "qwen3"])
async def test_engines_see_the_tokens_that_are_trained_on_in_ten_thousand_turns(
    family: str, engines: Engines, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    model = write_babble(tmp_path / "model", family, end=0.35)
    num_turns, num_episodes = 20, 168
    config = ClassEnvironmentConfig(kind="class", max_turns=num_turns, max_result_tokens=16)
    tokenizer = model.tokenizer((ADD.as_function,))
    (prompt_ids,) = tokenizer.encode([tokenizer.render_chat([{"role": "user", "content": "3+4="}])])
    sampling = Sampling(
        num_rollouts=num_episodes // 2, temperature=1.0, top_p=1.0, top_k=None, max_response_tokens=3000
    )

    async with engines.fleet(model) as fleet:
        rollouts: list[Rollout] = []
        for kind, text_field in ((_AnyCall, None), (Dialogue, "text")):
            dialogue = kind(tokenizer, max_result_tokens=16, call_format="hermes", text_field=text_field)
            decode = tokenizer.decode_response
            tools = Tools(_Numbers(), dialogue, config)
            player = Player(
                tools, config, admission=Admission(max_running=24, max_open=24), decode=decode, retried=lambda _: None
            )
            vocabulary = Vocabulary.of(model.shape, tokenizer)
            generator = FleetGenerator(
                fleet, sampling=sampling, vocabulary=vocabulary, seed=5, max_attempts=3, player=player
            )
            prompt = Prompt(
                uid=f"{family}-{text_field}",
                position=0,
                epoch=0,
                token_ids=prompt_ids,
                data_source="",
                ground_truth="",
                extra_info={},
                messages=({"role": "user", "content": "3+4="},),
            )
            rollouts += (await generator.generate(prompt)).rollouts
        assert isinstance(fleet.requests, RequestCounts)
        retries = fleet.requests.causes
    turns = [turn for rollout in rollouts for turn in rollout.episode.turns if turn.kind is TurnKind.SAMPLED]
    num_rows = sum(rollout.episode.num_rows for rollout in rollouts)
    record_property("seen", f"{family}: {len(turns)} turns in {num_rows} rows, {sum(retries.values())} mismatches")
    assert len(turns) >= 3334
    # A reply to other tokens than those that were sent is a BadReplyError and counted here.
    assert not retries
    for rollout in rollouts:
        assert model.largest_error(prompt_ids, rollout) < 1e-3


_SLOW_CALCULATOR = '''
import os, time
from pathlib import Path

FOLDER = Path(__file__).parent

class Calculator:
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        with (FOLDER / "calls").open("a") as calls:
            calls.write("+")
        time.sleep(0.1)
        while (FOLDER / "hold").exists():
            (FOLDER / f"held-{os.getpid()}").touch()
            time.sleep(0.02)
        return str(a + b)

    def score(self, transcript) -> float:
        return float(transcript.last_text == "7")
'''


class _FoldersPublisher:
    """Lets all live engines load the folder of a version."""

    def __init__(self, fleet: Fleet, folders: Mapping[int, Path]) -> None:
        self._fleet, self._folders = fleet, folders

    async def publish(self, version: PolicyVersion) -> PublishResult:
        live = [engine for engine in self._fleet.engines if engine.is_live]
        for engine in live:
            folder = self._folders[version]
            await admin.load_weights_from_disk(engine.client, folder, version=version, timeout_s=REQUEST_TIMEOUT_S)
            await engine.client.flush_cache()
        await self._fleet.committed(version, live)
        return PublishResult(version=version, num_bytes=0, seconds=0.0, num_engines=len(live))


def _environment_workers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "megarl.episodes.worker" in command_of(child)]


async def _kill_workers(count: int) -> int:
    """Kill some processes of environments, one after the other; return how many were there."""
    num_killed = 0
    for _ in range(count):
        await asyncio.sleep(0.2)
        for process in _environment_workers()[:1]:
            with suppress(psutil.Error):
                process.kill()
                num_killed += 1
    return num_killed


@pytest.mark.fault(
    "kill -9 of environment workers and of an engine, and a publish, during episodes",
    "no episode is lost, and no token is trained that its version did not choose",
)
async def test_nothing_is_lost_when_workers_and_an_engine_are_killed_and_weights_change(
    engines: Engines, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    (tmp_path / "calculator.py").write_text(_SLOW_CALCULATOR)
    config = ClassEnvironmentConfig(
        kind="class", path=tmp_path / "calculator.py", max_turns=8, max_attempts=8, workers=8, call_deadline_s=60
    )
    first = write_chain(tmp_path / "first", "qwen2.5", {CALL_ADD: 0.85, "7": 0.1, "eight": 0.05})
    second = write_chain(tmp_path / "second", "qwen2.5", {CALL_ADD: 0.7, "7": 0.05, "eight": 0.25})
    prompts, calls = await asyncio.to_thread(prompts_of, first, config, 24), tmp_path / "calls"

    async with engines.fleet(first, num_engines=2) as fleet:
        playing = asyncio.create_task(play(fleet, first, config, prompts, tmp_path))
        while not calls.exists() or calls.stat().st_size < 16:  # episodes are under way
            await asyncio.sleep(0.05)
        num_killed = await _kill_workers(4)
        (tmp_path / "hold").touch()  # the publish falls into six episodes: four workers at most are killed after it
        while len(list(tmp_path.glob("held-*"))) < 6:
            await asyncio.sleep(0.05)
        folders = {1: second.folder}
        publisher = pausing(_FoldersPublisher(fleet, folders), fleet, "abort")
        await publisher.publish(PolicyVersion(1))
        (tmp_path / "hold").unlink()
        os.killpg(engines.processes[1].pid, signal.SIGKILL)
        num_killed += await _kill_workers(4)
        groups = await playing
        assert isinstance(fleet.requests, RequestCounts)
        assert [engine.is_live for engine in fleet.engines] == [True, False]
        retries = fleet.requests.causes
    pairs = pairs_of(groups)
    assert len(pairs) == 24 * 4
    num_tokens, num_wrong = 0, 0
    for rollout, score in pairs:
        assert score.value == float(rollout.text == "7")
        whole = np.concatenate([prompts[0].token_ids, rollout.token_ids])
        start = len(prompts[0].token_ids)
        tables = [model.logprobs[whole[start - 1 : -1], whole[start:]] for model in (first, second)]
        expected = np.where(rollout.versions == 0, tables[0], tables[1])
        mask = rollout.loss_mask
        num_tokens += int(mask.sum())
        num_wrong += int((np.abs(rollout.logprobs - expected)[mask] > 1e-3).sum())
    num_replayed = sum(rollout.episode.num_retries for rollout, _ in pairs)
    both = sum(len(set(rollout.versions[rollout.loss_mask].tolist())) == 2 for rollout, _ in pairs)
    record_property("seen", f"{num_killed} workers killed, {num_replayed} episodes again, {both} of 96 of two versions")
    assert num_wrong == 0, f"{num_wrong} of {num_tokens} tokens are not of their version"
    assert num_killed >= 4
    assert num_replayed >= 1
    assert both >= 2
    assert retries["env_lost"] + retries["score_lost"] == num_replayed
