"""Tools of a real server of the Model Context Protocol, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megarl.config.environment import McpEnvironmentConfig
from megarl.episodes.build import open_environments
from megarl.episodes.protocol import Call, Transcript
from megarl.errors import ConfigError, DataError, EnvironmentLostError
from megarl.types import JsonValue
from tests.episodes.servers import free_port, running

Run = Callable[[Any], Any]
_server = partial(running, "tests.episodes.mcp_server")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a server."""
    port = free_port()
    with _server(port):
        yield port


def _config(port: int, **keys: object) -> McpEnvironmentConfig:
    servers = {"numbers": f"http://127.0.0.1:{port}/mcp"}
    return McpEnvironmentConfig.model_validate({"kind": "mcp", "servers": servers, "call_deadline_s": 30, **keys})


def _call(name: str, **arguments: JsonValue) -> Call:
    return Call(name=name, arguments=arguments, id="call_0")


def test_tools_of_a_server_are_called_and_fail_as_observations(port: int, run: Run) -> None:
    environments = run(open_environments(_config(port)))
    assert [tool.name for tool in environments.tools] == ["add", "fail", "wait", "draw"]
    assert environments.tools[0].parameters["required"] == ["a", "b"]
    environment = run(environments.open({}))
    assert run(environment.call(_call("add", a=2, b=3))).text == "5"
    failed = run(environment.call(_call("fail", reason="no such number")))
    assert failed.is_error
    assert failed.text.startswith("error: Error executing tool fail")
    assert run(environment.call(_call("add", a="two", b=3))).is_error
    drawn = run(environment.call(_call("draw", side=3)))
    assert drawn.is_error
    assert drawn.text == "error: draw answered with an image (image/png), and results are text alone"
    assert "there is no tool subtract" in run(environment.call(_call("subtract"))).text
    assert run(environment.score(Transcript(prompt=(), messages=(), ending="answered"))) is None
    run(environment.close())
    run(environment.close())


@pytest.mark.patient
@pytest.mark.fault("a tool server hangs, dies, or changes its tools", "told, lost and retried, or the end of the run")
def test_a_server_that_hangs_dies_or_changes(run: Run, tmp_path: Path) -> None:
    port, mark = free_port(), tmp_path / "mark"
    with _server(port, str(mark)) as server:
        environments = run(open_environments(_config(port, call_deadline_s=4)))
        before = environments.tools
        environment = run(environments.open({}))
        hung = run(environment.call(_call("wait", seconds=60)))
        assert hung.text == "error: wait gave no result within 4 s"
        server.kill()
        server.wait()
        with pytest.raises(EnvironmentLostError):
            run(environment.call(_call("add", a=1, b=1)))
        run(environment.close())
        with pytest.raises(EnvironmentLostError):
            run(environments.open({}))
    mark.touch()
    with _server(port, str(mark)):
        with pytest.raises(DataError, match=r"environment\.servers\.numbers: its tools changed during the run"):
            run(environments.open({}))
        assert run(open_environments(_config(port))).tools != before


def test_a_server_that_does_not_answer_is_refused_in_one_line(run: Run) -> None:
    with pytest.raises(ConfigError) as refused:
        run(open_environments(_config(free_port(), call_deadline_s=10)))
    (problem,) = refused.value.problems
    assert problem.key == "environment.servers.numbers"
    assert "does not answer" in problem.message
    assert "\n" not in problem.message


def test_two_tools_of_one_name_are_refused(port: int, run: Run) -> None:
    url = f"http://127.0.0.1:{port}/mcp"
    config = McpEnvironmentConfig.model_validate({"kind": "mcp", "servers": {"one": url, "two": url}})
    with pytest.raises(ConfigError, match="two tools have the name add: of one and two"):
        run(open_environments(config))
