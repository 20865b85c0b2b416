"""Workers of a local Ray in tests: they are forked, by processes that have imported what they need.

`quick_ray` makes a local Ray begin its workers with this file instead of Ray's own `setup_worker.py`, which sets the
variables of a worker and executes it. Here that process only stays in the worker's place as a child of Ray. Ray itself
is forked from a template that has imported Megatron, or executed. Two forks of it, in the session of this Ray, fork its
workers: one of them ranks, the other one the rest. Neither has imported Ray, which reads variables of the worker then.
A third one has, and forks the agent that prepares variables. Engines are forked from a template of their own
(tests/engine/template.py). Nobody asks the dashboard of such a Ray: it is not started, and in the place of its agent is
`cat`, which ends with the raylet as well.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

from megarl.env import TRAINER_ENVIRONMENT, trainer_environment
from megarl.system import guard
from megarl.system.guard import GuardLease, die_with_parent
from tests.processes import (
    ForkedCommands,
    ForkedGuard,
    asked,
    end_with,
    fork_for_each,
    listening_socket,
    path_of,
    receive_number,
    receive_request,
    send_number,
    serve_guards,
    template_address,
)

_ENGINES = "MEGARL_TEST_ENGINES"
_RANKS = "MEGARL_TEST_RANKS"
_WORKERS = "MEGARL_TEST_WORKERS"
_AGENTS = "MEGARL_TEST_AGENTS"
"""Variables with the names of sockets, in hexadecimal digits: where engines, ranks, other workers and agents fork."""
_SERVE, _START, _AGENT = "serve", "start", "agent"
_RAY = "ray.scripts.scripts"
RAYS = "tests.cluster.worker_setup"
"""The script of the template of Rays: this one."""
_DASHBOARD_AGENT = "--dashboard_agent_command="
_VARIABLES_AGENT = "--runtime_env_agent_command="
_PIPES = {"RAY_enable_pipe_based_agent_to_parent_health_check": "1"}
"""A raylet sets it for its agents: one ends with the raylet at the other end of its input, not with its parent."""
_WATCH = {"RAY_health_check_period_ms": "500"}
"""A node that is gone refuses to be asked how it is; after five times, it is lost."""


@contextmanager
def quick_ray(engines: bytes = b"", *, rays: bytes | None = None) -> Iterator[None]:
    """Let every Ray that this process starts fork its workers, and its engines from the template at `engines`.

    `rays` is the address of the template in a process that does not share those of the session; with an empty one Ray
    is executed, so that all of it is below this process.
    """
    from megarl.cluster import local_ray

    forked = ForkedCommands(template_address(RAYS) if rays is None else rays, _RAY)

    def start(
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: IO[bytes] | int,
        lease: GuardLease | None = None,
    ) -> subprocess.Popen[bytes] | ForkedGuard:
        variables = {**environment, **_WATCH, _ENGINES: engines.hex(), "PYTHONPATH": path_of(environment)}
        if rays == b"":
            words = [RAYS if word == _RAY else word for word in command]
            return guard.start_guarded(words, environment=variables, output=output, lease=lease)
        return forked.start_guarded(command, environment=variables, output=output, lease=lease)

    executed = vars(local_ray)["start_guarded"]
    vars(local_ray)["start_guarded"] = start
    try:
        yield
    finally:
        vars(local_ray)["start_guarded"] = executed


def _import_all() -> None:
    """Import what ranks and other workers need."""
    _import_megatron()
    _import_rollouts()


def _import_megatron() -> None:
    os.environ.update(trainer_environment("cpu"))
    import megarl.train.actor
    import megarl.train.critic  # noqa: F401 - for what is forked


def _import_rollouts() -> None:
    import megarl.data.rollout_files
    import megarl.engine.process
    import megarl.episodes.play
    import megarl.reward.build  # noqa: F401 - for what is forked


def _start_ray() -> int:
    """Be `ray start`."""
    _start_forking(_RANKS, _import_megatron, _run_ray_worker)
    _start_forking(_WORKERS, _import_rollouts, _run_worker_with_engines)
    os.environ.update(_PIPES)
    from ray._private import ray_constants, services
    from ray._private.node import Node
    from ray.scripts.scripts import main

    _start_forking(_AGENTS, lambda: None, _run_ray_worker)
    started = services.start_ray_process

    def start(command: list[str], *rest: object, **options: object) -> object:
        return started([_with_cheap_agents(word) for word in command], *rest, **options)

    def name_dashboard(node: Node, **_options: object) -> None:
        node._webui_url = "127.0.0.1:8265"  # a worker has to know one

    services.start_ray_process = start
    Node.start_api_server = name_dashboard
    ray_constants.SETUP_WORKER_FILENAME = __file__
    main()
    return 0


def _with_cheap_agents(word: str) -> str:
    """Change what a raylet executes as an agent, if the word says it."""
    if word.startswith(_DASHBOARD_AGENT):
        raylet = importlib.import_module("ray._raylet")
        ports = (
            raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
            raylet.METRICS_AGENT_PORT_NAME,
            raylet.METRICS_EXPORT_PORT_NAME,
        )
        options = dict(option.split("=", 1) for option in word.split(" --")[1:] if "=" in option)
        for name in ports:
            raylet.persist_port(options["session-dir"], options["node-id"], name, -1)  # nobody listens there
        return f"{_DASHBOARD_AGENT}cat"
    if word.startswith(_VARIABLES_AGENT):
        return word.replace(" -u ", f" {__file__} {_AGENT} ", 1)
    return word


def _start_forking(variable: str, load: Callable[[], None], program: Callable[[list[str]], int]) -> None:
    """Start a process that forks workers, at the address in a variable."""
    with listening_socket() as listener:
        os.environ[variable] = listener.getsockname().hex()
        ray = os.getpid()
        if os.fork() == 0:
            die_with_parent(ray)
            load()
            fork_for_each(listener, partial(_keep_worker, program))


def _stand_in_for_worker() -> NoReturn:
    """Have a worker forked elsewhere, with the variables that Ray's own setup would set, and end with it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    options, words = parser.parse_known_args()
    variables = json.loads(options.serialized_runtime_env_context).get("env_vars", {})
    os.environ.update(variables)
    _stand_in(_RANKS if variables.keys() >= TRAINER_ENVIRONMENT.keys() else _WORKERS, words)


def _stand_in(place: str, words: list[str]) -> NoReturn:
    """Have a process forked at the address in a variable, and end with it."""
    code = receive_number(asked(bytes.fromhex(os.environ[place]), words, os.environ, descriptors=[0, 1, 2]))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _run_worker_with_engines(words: list[str]) -> int:
    from megarl.engine import process
    from tests.engine.template import EngineTemplate

    if os.environ[_ENGINES]:
        vars(process)["start_guarded"] = EngineTemplate(bytes.fromhex(os.environ[_ENGINES])).start_guarded
    return _run_ray_worker(words)


def _run_ray_worker(words: list[str]) -> int:
    import ray._raylet
    from setproctitle import setproctitle

    # Ray's own looks for the command line by the place of the variables, which are others since the fork.
    vars(ray._raylet)["setproctitle"] = setproctitle
    sys.path[0] = str(Path(words[0]).parent)  # instead of this file's
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


def _keep_worker(program: Callable[[list[str]], int], connection: socket.socket) -> int:
    """Fork a worker; end it with the process in its place, and that process with it."""
    request = receive_request(connection)
    pid = os.fork()
    if pid == 0:
        connection.close()
        request.enter(*request.descriptors)
        end_with(partial(program, request.words))
    request.close()
    ends = os.pidfd_open(pid)
    readable, _, _ = select.select([connection.fileno(), ends], [], [])
    if ends not in readable:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        send_number(connection, code)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == _SERVE:
        serve_guards(_RAY, load=_import_all, program=_start_ray)
    elif sys.argv[1] == _START:
        _start_ray()
    elif sys.argv[1] == _AGENT:
        _stand_in(_AGENTS, sys.argv[2:])
    else:
        _stand_in_for_worker()
