"""Episodes of Harbor tasks in real boxes: what solutions and idleness score, and whose fault a missing reward is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from megarl.config.environment import HarborEnvironmentConfig
from megarl.episodes.build import check_environment
from megarl.episodes.harbor.build import open_harbor
from megarl.episodes.harbor.environments import HarborEnvironment, HarborEnvironments, read_rewards
from megarl.episodes.protocol import Call, Observation, Transcript
from megarl.errors import DataError, ScoreLostError
from tests.episodes.harbor.small_tasks import TASKS, write_tasks

pytestmark = pytest.mark.needs("bubblewrap")

_T = TypeVar("_T")
Run = Callable[[Awaitable[_T]], _T]
DONE = Transcript(prompt=(), messages=(), ending="answered")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("boxes")


@pytest.fixture
def config(tmp_path: Path, cache: Path) -> HarborEnvironmentConfig:
    values = {
        "kind": "harbor",
        "tasks": write_tasks(tmp_path / "tasks"),
        "sandbox": "bubblewrap",
        "images": {"*": "host"},
        "cache": cache,
        "call_deadline_s": 60,
    }
    return HarborEnvironmentConfig.model_validate(values)


async def called(environment: HarborEnvironment, command: str) -> Observation:
    return await environment.call(Call(name="bash", arguments={"command": command}, id="call_0"))


async def played(environments: HarborEnvironments, task: str, *commands: str) -> tuple[list[Observation], float]:
    """Return the observations of an episode of these commands, and its score."""
    environment = await environments.open({"uid": "row", "extra_info": {"task": task}})
    try:
        observations = [await called(environment, command) for command in commands]
        score = await environment.score(DONE)
        return observations, score.value
    finally:
        await environment.close()


@pytest.mark.patient
def test_every_task_is_solved_by_its_solution_and_not_by_doing_nothing(config: HarborEnvironmentConfig) -> None:
    async def scores() -> dict[str, tuple[float, float]]:
        environments = await open_harbor(config)
        try:
            return {
                name: (
                    (await played(environments, name, task.solution))[1],
                    (await played(environments, name, "true"))[1],
                )
                for name, task in TASKS.items()
            }
        finally:
            await environments.close()

    assert asyncio.run(scores()) == dict.fromkeys(TASKS, (1.0, 0.0))
    assert list((config.cache / "scratch").iterdir()) == []


def test_files_stay_and_the_folder_does_not(config: HarborEnvironmentConfig) -> None:
    async def observed() -> list[Observation]:
        environments = await open_harbor(config)
        try:
            commands = ("cd /tmp; pwd; x=1", 'pwd; echo "x=$x" > kept', "cat kept; false", "cat nothing")
            return (await played(environments, "hello", *commands))[0]
        finally:
            await environments.close()

    first, second, third, fourth = asyncio.run(observed())
    assert first.text == "/tmp"
    assert second.text == "/app"
    assert third.text == "x=\n[exit status 1]"
    assert third.is_error
    assert "No such file" in fourth.text


def test_calls_that_are_none_are_told(config: HarborEnvironmentConfig) -> None:
    async def told() -> list[Observation]:
        environments = await open_harbor(config)
        environment = await environments.open({"uid": "row", "extra_info": {"task": "hello"}})
        try:
            return [
                await environment.call(Call(name="python", arguments={}, id="call_0")),
                await environment.call(Call(name="bash", arguments={"code": "ls"}, id="call_0")),
            ]
        finally:
            await environment.close()
            await environments.close()

    assert [each.text for each in asyncio.run(told())] == [
        "error: there is no tool python; there is: bash",
        'error: bash takes one argument, {"command": "..."}',
    ]


def test_an_episode_that_breaks_its_box_scores_0_and_a_task_without_a_reward_is_lost(
    config: HarborEnvironmentConfig,
) -> None:
    (config.tasks / "sum" / "tests" / "test.sh").write_text("echo no reward here\n")

    async def broken() -> tuple[float, str]:
        environments = await open_harbor(config)
        try:
            # Nothing that is not in /usr is left: neither /bin/sh nor a place for rewards.
            _, score = await played(environments, "hello", "rm /bin && rm -rf /logs && touch /logs", "echo gone")
            with pytest.raises(ScoreLostError) as lost:
                await played(environments, "sum", "true")
            return score, str(lost.value)
        finally:
            await environments.close()

    score, message = asyncio.run(broken())
    assert score == 0.0
    assert message.startswith("task sum: its tests give no reward in a fresh box either: tests/test.sh wrote no reward")
    assert "no reward here" in message


def test_the_time_of_a_task_ends_an_episode_which_is_scored(config: HarborEnvironmentConfig) -> None:
    path = config.tasks / "hello" / "task.toml"
    path.write_text(path.read_text().replace("timeout_sec = 120.0", "timeout_sec = 2.0"))

    async def late() -> tuple[list[Observation], float]:
        environments = await open_harbor(config)
        try:
            return await played(environments, "hello", "echo 'Hello, world!' > hello.txt; sleep 600")
        finally:
            await environments.close()

    (observation,), score = asyncio.run(late())
    assert observation.ended
    assert "the task's time of 2 s is used up" in observation.text
    assert score == 1.0


def test_a_row_without_a_task_and_a_task_outside_of_the_folder_are_refused(config: HarborEnvironmentConfig) -> None:
    async def opened(extra: dict[str, str]) -> None:
        environments = await open_harbor(config)
        try:
            await environments.open({"uid": "row-3", "extra_info": dict(extra)})
        finally:
            await environments.close()

    with pytest.raises(DataError, match=r"row row-3 names no task .* megarl data prepare harbor"):
        asyncio.run(opened({}))
    with pytest.raises(DataError, match=r"task \.\./x is not below"):
        asyncio.run(opened({"task": "../x"}))


def test_the_section_is_checked_before_a_run(config: HarborEnvironmentConfig) -> None:
    assert check_environment(config) == []
    (config.tasks / "sum" / "tests" / "test.sh").unlink()
    (config.tasks / "json" / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    problems = [str(problem) for problem in check_environment(config.model_copy(update={"images": {}}))]
    assert len(problems) == 3
    assert any("docker-compose" in each for each in problems)
    assert any("tests/test.sh does not exist" in each for each in problems)
    assert any(each.startswith("environment.images") for each in problems)


@pytest.mark.parametrize(
    ("text", "rewards"),
    [
        ("1\n", {"reward": 1.0}),
        (".5", {"reward": 0.5}),
        ('{"reward": 0.25, "style": 1}', {"reward": 0.25, "style": 1.0}),
    ],
)
def test_rewards_are_a_number_or_numbers_by_name(text: str, rewards: dict[str, float]) -> None:
    assert read_rewards(text) == rewards


@pytest.mark.parametrize("text", ["", "nan", "one", '{"reward": "1"}', '{"reward": true}', "{}", '{"reward": 1e999}'])
def test_what_is_no_finite_number_is_no_reward(text: str) -> None:
    with pytest.raises(Exception, match="reward") as refused:
        read_rewards(text)
    assert type(refused.value).__name__ == "_NoRewardError"
