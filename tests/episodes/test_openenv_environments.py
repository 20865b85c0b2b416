"""A real WebSocket server with OpenEnv's messages, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megarl.config.environment import OpenEnvEnvironmentConfig
from megarl.episodes.build import open_environments
from megarl.episodes.openenv_environments import schema_url
from megarl.episodes.protocol import Call, Transcript
from megarl.errors import ConfigError, EnvironmentLostError
from megarl.types import JsonValue
from tests.episodes.servers import free_port, running

Run = Callable[[Any], Any]
_SERVER = "tests.episodes.openenv_server"
_OVER = Transcript(prompt=(), messages=(), ending="answered")


def _config(port: int, **keys: object) -> OpenEnvEnvironmentConfig:
    url = f"ws://127.0.0.1:{port}/ws"
    return OpenEnvEnvironmentConfig.model_validate({"kind": "openenv", "url": url, "call_deadline_s": 20, **keys})


def _step(guess: JsonValue) -> Call:
    return Call(name="step", arguments={"guess": guess}, id="call_0")


def test_an_episode_is_reset_stepped_and_scored(run: Run) -> None:
    port = free_port()
    with running(_SERVER, port):
        environments = run(open_environments(_config(port)))
        (tool,) = environments.tools
        assert (tool.name, tool.description) == ("step", "A guess.")
        assert tool.parameters["properties"] == {"guess": {"type": "integer"}}
        one = run(environments.open({"extra_info": {"secret": 5}}))
        other = run(environments.open({"extra_info": {}}))
        assert one.opening == "Guess my number."
        low = run(one.call(_step(3)))
        assert (low.text, low.ended, low.reward) == ("higher", False, -0.25)
        wrong = run(one.call(_step("five")))
        assert (wrong.text, wrong.is_error) == ("error: guess must be an integer", True)
        right = run(one.call(_step(5)))
        assert (right.text, right.ended, right.reward) == ("right", True, None)
        # The last reward is the score, those before it are of their turns: none counts twice.
        score = run(one.score(_OVER))
        assert (score.value, score.components) == (1.0, {"return": 0.75, "step_count": 2.0})
        assert run(other.score(_OVER)) is None
        assert run(other.call(_step(5))).text == "higher"
        assert "there is no tool look" in run(other.call(Call(name="look", arguments={}, id="0"))).text
        for environment in (one, other, other):
            run(environment.close())
        run(environments.close())


@pytest.mark.patient
def test_a_server_that_dies_or_hangs_is_a_lost_environment(run: Run) -> None:
    port = free_port()
    with running(_SERVER, port):
        environments = run(open_environments(_config(port, call_deadline_s=2)))
        hung = run(environments.open({}))
        with pytest.raises(EnvironmentLostError, match="no answer to step within 2 s"):
            run(hung.call(_step(-2)))
        run(hung.close())
        dead = run(environments.open({}))
        with pytest.raises(EnvironmentLostError, match=r"closed the connection|Cannot|reset"):
            run(dead.call(_step(-1)))
        run(dead.close())
        with pytest.raises(EnvironmentLostError):
            run(environments.open({}))
        run(environments.close())


def test_an_observation_with_an_image_is_refused_in_one_line(run: Run) -> None:
    port = free_port()
    told = f"ws://127.0.0.1:{port}/ws: an observation is or has pixels, and observations are text alone"
    with running(_SERVER, port):
        environments = run(open_environments(_config(port)))
        environment = run(environments.open({}))
        with pytest.raises(EnvironmentLostError) as refused:
            run(environment.call(_step(-3)))
        assert str(refused.value) == told
        run(environment.close())
        with pytest.raises(EnvironmentLostError) as refused:
            run(environments.open({"extra_info": {"secret": -3}}))
        assert str(refused.value) == told
        run(environments.close())


def test_a_server_that_is_none_is_refused_in_one_line(run: Run) -> None:
    with pytest.raises(ConfigError, match="is it an OpenEnv server") as refused:
        run(open_environments(_config(free_port())))
    (problem,) = refused.value.problems
    assert problem.key == "environment.url"
    assert "\n" not in problem.message


def test_the_schema_is_beside_the_socket() -> None:
    assert schema_url("ws://games:8000/ws") == "http://games:8000/schema"
    assert schema_url("wss://games/arena/ws/") == "https://games/arena/schema"
