"""A run checks its Ray before it joins or starts it: nodes, address and token."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster import local_ray
from megarl.config.recipe import ClusterConfig
from megarl.config.roles import PoolConfig
from megarl.env import RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH
from megarl.errors import ConfigError, DataError, MachineError, MegarlError, PreemptedError
from megarl.run import begin, launch
from megarl.run.launch import find_token, ray_environment, refuse_nodes_without_cluster, train
from megarl.system.guard import start_guarded
from megarl.system.proc import ZOMBIE, ProcessStat, all_processes
from megarl.system.run_lock import run_lock
from tests.observe.samples import ListSink, make_recipe
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and no token in the environment."""
    for variable in (RAY_AUTH_TOKEN_PATH, RAY_AUTH_TOKEN):
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_cluster_is_joined_with_its_token(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("0" * 64)
    assert find_token(allows_none=False)
    (home / ".ray" / "auth_token").unlink()
    monkeypatch.setenv(RAY_AUTH_TOKEN.name, "0" * 64)
    assert find_token(allows_none=False)


def test_a_token_file_that_is_missing_or_empty_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = home / "token"
    monkeypatch.setenv(RAY_AUTH_TOKEN_PATH.name, str(token))
    expected = rf"^RAY_AUTH_TOKEN_PATH: {token} cannot be read \(No such file or directory\); copy the token file .*$"
    # Also where none is needed: the file was named on purpose.
    for allows_none in (False, True):
        with pytest.raises(MachineError, match=expected):
            find_token(allows_none=allows_none)
    token.touch()
    with pytest.raises(MachineError, match="is empty"):
        find_token(allows_none=False)


def test_a_cluster_without_a_token_is_joined_only_if_the_recipe_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(MachineError, match=r"^no token .* RAY_AUTH_TOKEN_PATH, or set cluster.allows_no_token: true "):
        ray_environment("10.0.0.1:6379", ClusterConfig())
    with ray_environment("10.0.0.1:6379", ClusterConfig(allows_no_token=True)):
        assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_a_run_that_goes_on_is_refused_before_model_and_data_are_read(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "runs")
    with (
        run_lock(recipe.run_folder),
        pytest.raises(MachineError, match="is running this run now; wait for it or end it"),
    ):
        train(recipe, display=ListSink())


@pytest.mark.parametrize("place", ["check_start", "choose"])
def test_a_signal_before_ray_starts_is_a_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Reading data takes long, and so do fetching a checkpoint and waiting for a driver elsewhere."""

    def wait(*_words: object, **_options: object) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(60)

    train_data = SimpleNamespace(prompts=range(8))
    inputs = SimpleNamespace(tools_digest=None, train=train_data, code="")
    monkeypatch.setattr(launch, "check_start", lambda *_words, **_options: inputs)
    monkeypatch.setattr(launch if place == "check_start" else begin, place, wait)
    with pytest.raises(PreemptedError, match="stopped by SIGUSR1"):
        train(make_recipe(tmp_path / "runs"), display=ListSink())


@pytest.mark.usefixtures("real_ray")
@pytest.mark.parametrize("error", [DataError("row 3 has no answer"), PreemptedError("stopped by SIGTERM")], ids=type)
def test_of_a_ray_that_started_while_the_run_was_refused_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: MegarlError
) -> None:
    guards: list[subprocess.Popen[bytes]] = []

    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        guards.append(start_guarded(command, **options))
        return guards[0]

    def refuse(*_words: object, **_options: object) -> None:
        wait_until(lambda: "gcs_server" in {each.name for each in below(guards[0])})
        raise error

    def below(guard: subprocess.Popen[bytes]) -> list[ProcessStat]:
        return [process for process in all_processes() if process.session == guard.pid and process.state != ZOMBIE]

    monkeypatch.setattr(local_ray, "start_guarded", start)
    monkeypatch.setattr(launch, "check_start", refuse)
    with pytest.raises(type(error), match=str(error)):
        train(make_recipe(tmp_path / "runs"), display=ListSink())
    wait_until(lambda: not below(guards[0]))
    assert not (tmp_path / "runs").exists()
    assert not Path(RAY_AUTH_TOKEN_PATH.read()).parent.exists()


def test_several_nodes_need_a_cluster() -> None:
    pools = {"train": PoolConfig(nodes=2, gpus_per_node=8), "rollout": PoolConfig(gpus_per_node=8)}
    with pytest.raises(ConfigError) as caught:
        refuse_nodes_without_cluster(pools, None)
    assert [problem.key for problem in caught.value.problems] == ["pools.train.nodes"]
    refuse_nodes_without_cluster(pools, "10.0.0.1:6379")
    refuse_nodes_without_cluster({"rollout": pools["rollout"]}, None)
