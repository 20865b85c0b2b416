"""Environments of a user's class: tools, scores, and every way in which such code goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.config.environment import ClassEnvironmentConfig
from megarl.episodes.build import open_environments
from megarl.episodes.protocol import Call, Environment, Environments, Transcript
from megarl.errors import ConfigError, EnvironmentLostError, RewardError, ScoreLostError
from megarl.system.user_process import _report
from megarl.types import JsonValue
from tests.episodes.conftest import CALCULATOR
from tests.processes import command_of

Run = Callable[[Any], Any]
_ROW: dict[str, JsonValue] = {"uid": "1", "ground_truth": "5", "data_source": "sums", "extra_info": {}}


def _config(path: Path, **keys: object) -> ClassEnvironmentConfig:
    return ClassEnvironmentConfig.model_validate({"kind": "class", "path": path, "workers": 2, **keys})


def _call(name: str, **arguments: JsonValue) -> Call:
    return Call(name=name, arguments=arguments, id="call_0")


def _answered(text: str) -> Transcript:
    return Transcript(prompt=(), messages=({"role": "assistant", "content": text},), ending="answered")


WORKER = "megarl.episodes.worker"


def _workers_alive() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True) if WORKER in command_of(child)}


@pytest.mark.patient
def test_methods_are_tools_and_the_instance_keeps_its_state(write_class: Callable[[str], Path], run: Run) -> None:
    environments: Environments = run(open_environments(_config(write_class(CALCULATOR))))
    assert [tool.name for tool in environments.tools] == ["add", "repeat"]
    add = environments.tools[0]
    assert add.description == "Add two numbers."
    assert add.parameters["properties"] == {"a": {"type": "integer"}, "b": {"default": 1, "type": "integer"}}
    assert add.parameters["required"] == ["a"]
    one: Environment = run(environments.open(_ROW))
    other: Environment = run(environments.open(_ROW))
    assert run(one.call(_call("add", a=2, b=3))).text == "5"
    assert run(other.call(_call("repeat"))).text == "0"
    assert run(one.call(_call("repeat"))).text == "5"
    assert run(one.score(_answered(" 5 "))).value == 1
    assert run(other.score(_answered("6"))).value == 0
    run(one.close())
    # A process that is used again has a fresh instance.
    again: Environment = run(environments.open(_ROW))
    assert run(again.call(_call("repeat"))).text == "0"
    for environment in (other, again, again):
        run(environment.close())
    run(environments.close())
    assert not _workers_alive()


@pytest.mark.patient
def test_wrong_calls_are_observations(write_class: Callable[[str], Path], run: Run) -> None:
    environments = run(open_environments(_config(write_class(CALCULATOR))))
    environment = run(environments.open(_ROW))
    for call, told in [
        (_call("subtract", a=1), "there is no tool subtract; there are: add, repeat"),
        (_call("add", a="two"), "a: Input should be a valid integer"),
        (_call("add"), "a: Field required"),
        (_call("add", a=1, c=2), "c: Extra inputs are not permitted"),
        (_call("score", transcript=""), "there is no tool score"),
    ]:
        observation = run(environment.call(call))
        assert observation.is_error
        assert told in observation.text
    run(environments.close())


_MISCHIEF = '''
import os, subprocess, sys, threading, time
from megarl.episodes.protocol import Observation

class Mischief:
    def __init__(self, ground_truth, uid): self.truth = ground_truth
    def raises(self) -> str:
        """Raise."""
        raise KeyError("missing")
    def leaves(self) -> str:
        """Leave."""
        sys.exit(3)
    def hangs(self) -> str:
        """Hang."""
        time.sleep(600)
        return ""
    def floods(self) -> str:
        """Flood."""
        return "x" * 30_000_000
    def prints(self) -> str:
        """Print."""
        print("y" * 1_000_000)
        return "printed"
    def allocates(self) -> str:
        """Allocate."""
        return str(len(bytearray(20 << 30)))
    def ends(self) -> Observation:
        """End."""
        return Observation(text="over", ended=True, reward=0.5)
    async def waits(self) -> dict:
        """Wait."""
        return {"a": [1]}
    def dies(self) -> str:
        """Die."""
        os._exit(1)
    def spawns(self) -> str:
        """Start a process in a session of its own."""
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        return str(child.pid)
    def forks(self) -> str:
        """Fork."""
        os.fork()
        return "forked"
    def freezes(self) -> str:
        """Ignore the alarm."""
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(600)
        return ""
    def score(self, transcript):
        tokens = [0.5 for ids in transcript.token_ids for _ in ids]
        return {"score": 1, "turns": [0.5, 1], "length": 3, "tokens": tokens}
'''


@pytest.mark.patient
def test_a_tool_that_misbehaves_is_an_observation(write_class: Callable[[str], Path], run: Run, tmp_path: Path) -> None:
    config = _config(write_class(_MISCHIEF), call_deadline_s=3)
    environments = run(open_environments(config, log_path=tmp_path / "environment.log"))
    environment = run(environments.open(_ROW))
    for name, told in [
        ("raises", "error: raises raised KeyError: 'missing'"),
        ("leaves", "error: leaves raised SystemExit: 3"),
        ("hangs", "error: hangs gave no result within 3 s"),
        ("allocates", "error: allocates raised MemoryError: the limit is environment.memory_gib"),
        ("prints", "printed"),
        ("waits", '{"a": [1]}'),
        ("forks", "forked"),
    ]:
        assert run(environment.call(_call(name))).text == told
    flood = run(environment.call(_call("floods"))).text
    assert len(flood) < 1_100_000
    assert flood.endswith("characters more]")
    ended = run(environment.call(_call("ends")))
    assert (ended.text, ended.ended, ended.reward) == ("over", True, 0.5)
    score = run(environment.score(replace(_answered(""), token_ids=((4, 5), (6,)))))
    assert (score.value, score.turns, score.tokens) == (1.0, (0.5, 1.0), (0.5,) * 3)
    assert score.components == {"length": 3.0}
    run(environments.close())


_CAMERA = '''
import asyncio

from PIL import Image

from megarl.episodes.protocol import Observation


class Camera:
    def look(self) -> Image.Image:
        """Look."""
        return Image.new("RGB", (8, 8))

    async def look_later(self):
        """Look later."""
        await asyncio.sleep(0)
        return Observation(text=[{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}])

    def name(self) -> str:
        """Say what this is."""
        return "a camera"

    def score(self, transcript):
        return 1
'''


@pytest.mark.patient
@pytest.mark.parametrize("episodes", [None, 2])
def test_an_observation_with_an_image_is_refused_in_one_line(
    episodes: int | None, write_class: Callable[[str], Path], run: Run
) -> None:
    environments = run(open_environments(_config(write_class(_CAMERA), episodes_per_process=episodes)))
    environment = run(environments.open(_ROW))
    assert run(environment.call(_call("name"))).text == "a camera"
    for name, kind in [("look", "an image of Pillow"), ("look_later", "a part of type image_url")]:
        with pytest.raises(EnvironmentLostError) as refused:
            run(environment.call(_call(name)))
        assert str(refused.value) == f"{name} gave {kind}, and observations are text alone"
    run(environment.close())
    run(environments.close())


@pytest.mark.patient
@pytest.mark.fault("an environment's process dies or hangs in a call", "its episode is lost, others go on")
def test_a_process_that_dies_or_freezes_is_a_lost_environment(
    write_class: Callable[[str], Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.episodes.class_environments._GRACE_S", 1.0)
    environments = run(open_environments(_config(write_class(_MISCHIEF), call_deadline_s=2)))
    for name, told in [("dies", "exited with status 1"), ("freezes", "no answer within")]:
        environment = run(environments.open(_ROW))
        spawned = int(run(environment.call(_call("spawns"))).text)
        with pytest.raises(EnvironmentLostError, match=told):
            run(environment.call(_call(name)))
        run(environment.close())
        deadline = time.monotonic() + 30
        while psutil.pid_exists(spawned) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not psutil.pid_exists(spawned)
    fresh = run(environments.open(_ROW))
    assert run(fresh.call(_call("prints"))).text == "printed"
    run(environments.close())
    assert not _workers_alive()


@pytest.mark.patient
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise ValueError('no')", "raised ValueError: no"),
        ("return None", "returned a NoneType"),
        ("return float('nan')", "must be finite"),
        ("return {'score': 1, 'turns': 'all'}", "for turns"),
        ("import os; os._exit(2)", "exited with status 2"),
    ],
)
def test_an_episode_without_a_score_is_lost(body: str, told: str, write_class: Callable[[str], Path], run: Run) -> None:
    text = f"class Sums:\n    def score(self, transcript):\n        {body}\n"
    environments = run(open_environments(_config(write_class(text))))
    environment = run(environments.open(_ROW))
    with pytest.raises(ScoreLostError, match=told):
        run(environment.score(_answered("")))
    run(environment.close())
    run(environments.close())


@pytest.mark.patient
def test_a_change_of_the_file_is_an_error(write_class: Callable[[str], Path], run: Run) -> None:
    path = write_class(CALCULATOR)
    environments = run(open_environments(_config(path)))
    run(run(environments.open(_ROW)).close())
    path.write_text(CALCULATOR + "\n# changed\n")
    with pytest.raises(RewardError, match="changed during the run"):
        run(environments.open(_ROW))
    run(environments.close())


@pytest.mark.patient
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("class A:\n    pass\n", "has a method score(self, transcript)"),
        (
            "class A:\n    def add(self, a: int) -> str:\n        return ''\n    def score(self, t): return 0\n",
            "the tool A.add has no docstring",
        ),
        (
            "class A:\n    def add(self, a) -> str:\n        '''Add.'''\n    def score(self, t): return 0\n",
            "the tool A.add has no type for a",
        ),
        (
            "class A:\n    def add(self, *a: int) -> str:\n        '''Add.'''\n    def score(self, t): return 0\n",
            "a model gives arguments by name",
        ),
        (
            "class A:\n    def add(self, a: object()) -> str:\n        '''Add.'''\n    def score(self, t): return 0\n",
            "the tool A.add has a type that",
        ),
        (
            "class A:\n    def __init__(self, level): ...\n    def score(self, t): return 0\n",
            "takes level, which no row",
        ),
        ("class A:\n    def score(self, t): ...\nclass B(A): ...\n", "name one of A, B"),
        ("import nowhere_at_all\n", "importing it raised ModuleNotFoundError"),
        ("1 +\n", "SyntaxError"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_in_one_line(
    text: str, told: str, write_class: Callable[[str], Path], run: Run
) -> None:
    with pytest.raises(ConfigError) as refused:
        run(open_environments(_config(write_class(text))))
    (problem,) = refused.value.problems
    assert told in problem.message
    assert "\n" not in problem.message
    assert problem.key.startswith("environment.")


def test_two_tools_of_one_name_are_refused(write_class: Callable[[str], Path], run: Run, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    documents = tmp_path / "documents.parquet"
    pq.write_table(pa.table({"text": ["one"]}), documents)
    text = (
        "class A:\n    def search(self, query: str) -> str:\n        '''Search.'''\n        return ''\n"
        "    def score(self, t): return 0\n"
    )
    tools = {"search": {"documents": [str(documents)]}}
    with pytest.raises(ConfigError, match="two tools have the name search: of Search and A"):
        run(open_environments(_config(write_class(text), tools=tools)))


def test_missing_files_and_columns_are_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.py is not a file"):
        run(open_environments(_config(tmp_path / "nowhere.py")))
    with pytest.raises(ConfigError, match="neither a path nor tools"):
        run(open_environments(ClassEnvironmentConfig(kind="class")))


@pytest.mark.patient
@pytest.mark.needs("bubblewrap")
def test_built_in_tools_stand_beside_a_class(write_class: Callable[[str], Path], run: Run, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    documents = tmp_path / "documents.parquet"
    pq.write_table(pa.table({"text": ["The moon orbits the earth.", "Bread is baked."]}), documents)
    tools = {"search": {"documents": [str(documents)]}, "python": {"memory_gib": 0.5}}
    environments = run(open_environments(_config(write_class(CALCULATOR), tools=tools)))
    assert [tool.name for tool in environments.tools] == ["python", "search", "add", "repeat"]
    environment = run(environments.open(_ROW))
    assert run(environment.call(_call("python", code="x = 3"))).text == ""
    assert run(environment.call(_call("python", code="x ** 3"))).text == "27\n"
    assert "The moon" in run(environment.call(_call("search", query="moon"))).text
    assert run(environment.call(_call("add", a=1))).text == "2"
    assert run(environment.score(_answered("5"))).value == 1
    run(environments.close())
    assert not _workers_alive()


@pytest.mark.patient
@pytest.mark.needs("bubblewrap")
def test_without_a_class_the_recipes_reward_scores(run: Run) -> None:
    config = ClassEnvironmentConfig.model_validate({"kind": "class", "tools": {"python": {}}})
    environments = run(open_environments(config))
    environment = run(environments.open(_ROW))
    assert run(environment.score(_answered("5"))) is None
    run(environments.close())


@pytest.mark.patient
@pytest.mark.parametrize("reward", ["10**400", "1e308", "float('nan')"])
def test_a_tool_whose_reward_is_not_finite_in_32_bits_has_failed(
    reward: str, write_class: Callable[[str], Path], run: Run
) -> None:
    text = (
        "from megarl.episodes.protocol import Observation\n"
        "class Sums:\n"
        '    def look(self) -> str:\n        """Look."""\n'
        f"        return Observation(text='here', reward={reward})\n"
        "    def score(self, transcript): return 1.0\n"
    )
    environments = run(open_environments(_config(write_class(text))))
    environment = run(environments.open(_ROW))
    observed = run(environment.call(_call("look")))
    assert (observed.is_error, observed.reward) == (True, None)
    assert "a reward that is not finite" in observed.text
    run(environment.close())
    run(environments.close())


@pytest.mark.parametrize("first", ["[]", "5", "{}", '{"error": 1}', '{"sources": 3}', "[" * 5000])
def test_code_that_writes_to_its_channel_on_import_cannot_be_loaded(first: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        _report(first.encode())
