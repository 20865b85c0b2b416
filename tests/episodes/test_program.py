"""Programs as agents: unmodified, watched, ended with all that they started; a failure is never a score."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megarl.config.environment import CommandEnvironmentConfig, EnvironmentConfig
from megarl.config.load import read_recipe
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.episodes.admission import Admission
from megarl.episodes.build import check_environment, open_agents
from megarl.episodes.play import open_player, tools_of
from megarl.errors import EnvironmentLostError
from megarl.system.proc import read_stat
from megarl.tools.quickstart.calculator import SHAPE, call_text
from megarl.tools.quickstart.tiny_model import write_config
from megarl.types import JsonValue, Score, TokenArray
from tests.episodes.scripted import ScriptedSession
from tests.episodes.templates import family_tokenizer, sum_prompt
from tests.episodes.test_play import ScriptedSampler
from tests.repository import ROOT

_ROW: dict[str, JsonValue] = {"uid": "1", "ground_truth": "5", "prompt": "2+3?", "messages": []}
_PLAY = """
import json, os, sys, urllib.request
def ask(text, url=os.environ["OPENAI_BASE_URL"] + "/chat/completions"):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return family_tokenizer(tmp_path_factory.mktemp("qwen"), "qwen2.5", tools=())


def _config(folder: Path, code: str, **keys: object) -> CommandEnvironmentConfig:
    """Return the section of a program in Python."""
    path = folder / "agent.py"
    path.write_text(_PLAY + code)
    values = {"kind": "command", "command": [sys.executable, str(path)], "workers": 1, **keys}
    return CommandEnvironmentConfig.model_validate(values)


async def _play(
    config: CommandEnvironmentConfig, tokenizer: Tokenizer, texts: Sequence[str]
) -> tuple[Score | None, ScriptedSession]:
    session = ScriptedSession(tokenizer, list(texts))
    agents = await open_agents(config, tokenizer)
    try:
        return await agents.run(_ROW, session), session
    finally:
        await agents.close()


async def test_a_program_reads_the_prompt_and_the_reward_scores_its_last_response(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    code = "ask(' '.join([sys.stdin.read(), str(os.listdir()), os.getcwd(), os.environ['ANTHROPIC_BASE_URL']]))"
    score, session = await _play(_config(tmp_path, code), tokenizer, ["five"])
    assert score is None
    _, _, asked = tokenizer.decode(session.script.histories[0]).rpartition("<|im_start|>user\n")
    prompt, listed, folder, url = asked.partition("<|im_end|>")[0].split()
    assert (prompt, listed) == ("2+3?", "[]")
    assert not Path(folder).exists()
    assert url.startswith("http://127.0.0.1:")


async def test_a_program_that_scores_itself_reads_the_row_and_writes_a_file(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    code = (
        "row = json.load(sys.stdin)\n"
        "right = ask(row['prompt']) == row['ground_truth']\n"
        "json.dump({'score': float(right), 'turns': [0.5]}, open('score.json', 'w'))\n"
    )
    score, _ = await _play(_config(tmp_path, code, given="row", result="score.json"), tokenizer, ["5"])
    assert score is not None
    assert (score.value, score.turns) == (1.0, (0.5,))


@pytest.mark.parametrize(
    ("code", "keys", "told"),
    [
        ("ask('hi'); print('what'); sys.exit(3)", {}, "agent exited with status 3: what"),
        ("os.kill(os.getpid(), 9)", {}, "agent was ended by SIGKILL"),
        ("", {"result": "score.json"}, r"agent wrote no file score\.json \(environment\.result\)"),
        ("open('score', 'w').write('good')", {"result": "score"}, "agent wrote score, which is neither a number"),
        ("open('score', 'w').write('[1]')", {"result": "score"}, "agent returned a list"),
    ],
)
async def test_a_program_that_fails_loses_its_episode(
    code: str, keys: dict[str, object], told: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentLostError, match=told):
        await _play(_config(tmp_path, code, **keys), tokenizer, ["x"])


@pytest.mark.patient
@pytest.mark.parametrize(
    ("code", "keys", "told"),
    [
        ("held = bytearray(b'1') * (200 << 20); time.sleep(600)", {"memory_gib": 0.1}, "used more than 102.4 MiB"),
        ("[os.fork() for _ in range(3)]; time.sleep(600)", {"max_processes": 4}, "had more than 4 processes"),
        ("time.sleep(600)", {"wall_s": 1}, "gave no answer within 1 s"),
        ("while True: pass", {"cpu_s": 1}, "used more CPU time than environment.cpu_s"),
    ],
)
async def test_a_program_is_ended_at_its_limits(
    code: str, keys: dict[str, object], told: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentLostError, match=told):
        await _play(_config(tmp_path, f"import time\n{code}", **keys), tokenizer, [])


async def test_what_a_program_leaves_running_ends_with_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    left = tmp_path / "left"
    code = (
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        f"    open({str(left)!r}, 'w').write(str(os.getpid()))\n"
        "    import time; time.sleep(600)\n"
        f"while not os.path.exists({str(left)!r}) or not open({str(left)!r}).read(): pass\n"
    )
    assert (await _play(_config(tmp_path, code), tokenizer, []))[0] is None
    async with asyncio.timeout(60):
        while _is_running(int(left.read_text())):  # until the kernel has ended it
            await asyncio.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return read_stat(pid).state != "Z"
    except OSError:
        return False


def test_a_program_that_is_not_there_is_refused_before_the_run_and_no_score_during_it(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = CommandEnvironmentConfig(kind="command", command=("no-such-agent",))
    (problem,) = check_environment(config)
    assert str(problem).startswith("environment.command: there is no program no-such-agent here")
    (problem,) = check_environment(CommandEnvironmentConfig(kind="command", command=("sh", "-x", "agent.py", "a")))
    assert str(problem).startswith("environment.command: agent.py is not a file")
    script = tmp_path / "agent"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    there = CommandEnvironmentConfig(kind="command", command=(str(script),), workers=1)
    assert check_environment(there) == []
    with pytest.raises(EnvironmentLostError, match=r"agent cannot be started: .*agent: No such file"):
        asyncio.run(_play(there, tokenizer, []))


_SAID = [(call_text((3, 4)), "7"), ("?",), (call_text((3, 4)), call_text((4, 3)), "7")]
"""Answers of the quickstart's model in three episodes."""


async def _histories(config: EnvironmentConfig, folder: Path) -> list[TokenArray]:
    """Play episodes of the quickstart's model; return what it had read before each of its turns."""
    write_config(folder, SHAPE)
    plain = load_tokenizer(folder, vocab=SHAPE.vocab)
    tokenizer = plain.with_tools([tool.as_function for tool in await asyncio.to_thread(tools_of, config)])
    player = await open_player(
        config, tokenizer, admission=Admission(max_running=1, max_open=1), retried=lambda _: None
    )
    found = []
    try:
        for texts in _SAID:
            sampler = ScriptedSampler(tokenizer, *texts)
            rollout = await player.rollout(sum_prompt(tokenizer), sampler, max_tokens=240)
            assert rollout.text == texts[-1]
            found += sampler.histories
    finally:
        await player.close()
    return found


@pytest.mark.patient
async def test_the_quickstart_agent_shows_the_model_the_tokens_that_its_warm_start_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    histories = []
    for name in ("quickstart_tools", "quickstart_agent"):
        config = read_recipe(ROOT / "recipes" / f"{name}.yaml", []).recipe.environment
        assert config is not None
        histories.append(await _histories(config, tmp_path / name))
    assert len(histories[0]) == len(histories[1]) == sum(map(len, _SAID))
    assert all(np.array_equal(tools, agent) for tools, agent in zip(*histories, strict=True))
