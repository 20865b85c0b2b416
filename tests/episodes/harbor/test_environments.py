"""Episodes of Harbor tasks in real boxes: what solutions and idleness score, and whose fault a missing reward is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from megarl.config.environment import HarborEnvironmentConfig
from megarl.episodes.build import check_environment
from megarl.episodes.harbor.build import open_harbor
from megarl.episodes.harbor.environments import HarborEnvironment, HarborEnvironments, read_rewards
from megarl.episodes.protocol import Call, Observation, Transcript
from megarl.errors import DataError, ScoreLostError
from tests.episodes.harbor.small_tasks import TASKS, write_tasks

pytestmark = pytest.mark.needs("bubblewrap")

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


@asynccontextmanager
async def opened(config: HarborEnvironmentConfig) -> AsyncIterator[HarborEnvironments]:
    environments = await open_harbor(config)
    try:
        yield environments
    finally:
        await environments.close()


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
async def test_every_task_is_solved_by_its_solution_and_not_by_doing_nothing(config: HarborEnvironmentConfig) -> None:
    async with opened(config) as environments:
        for name, task in TASKS.items():
            scores = [(await played(environments, name, command))[1] for command in (task.solution, "true")]
            assert scores == [1.0, 0.0], name
    assert list((config.cache / "scratch").iterdir()) == []


async def test_files_stay_and_the_folder_does_not(config: HarborEnvironmentConfig) -> None:
    commands = ("cd /tmp; pwd; x=1", 'pwd; echo "x=$x" > kept', "cat kept; false", "cat nothing")
    async with opened(config) as environments:
        (first, second, third, fourth), _ = await played(environments, "hello", *commands)
    assert first.text == "/tmp"
    assert second.text == "/app"
    assert third.text == "x=\n[exit status 1]"
    assert third.is_error
    assert "No such file" in fourth.text


async def test_calls_that_are_none_are_told(config: HarborEnvironmentConfig) -> None:
    async with opened(config) as environments:
        environment = await environments.open({"uid": "row", "extra_info": {"task": "hello"}})
        calls = (
            Call(name="python", arguments={}, id="call_0"),
            Call(name="bash", arguments={"code": "ls"}, id="call_0"),
        )
        told = [(await environment.call(call)).text for call in calls]
        await environment.close()
    assert told == [
        "error: there is no tool python; there is: bash",
        'error: bash takes one argument, {"command": "..."}',
    ]


async def test_an_episode_that_breaks_its_box_scores_0_and_a_task_without_a_reward_is_lost(
    config: HarborEnvironmentConfig,
) -> None:
    (config.tasks / "sum" / "tests" / "test.sh").write_text("echo no reward here\n")
    async with opened(config) as environments:
        # Nothing that is not in /usr is left: neither /bin/sh nor a place for rewards.
        _, score = await played(environments, "hello", "rm /bin && rm -rf /logs && touch /logs", "echo gone")
        assert score == 0.0
        with pytest.raises(ScoreLostError) as lost:
            await played(environments, "sum", "true")
    message = str(lost.value)
    assert message.startswith("task sum: its tests give no reward in a fresh box either: tests/test.sh wrote no reward")
    assert "no reward here" in message


@pytest.mark.patient
async def test_the_time_of_a_task_ends_an_episode_which_is_scored(config: HarborEnvironmentConfig) -> None:
    path = config.tasks / "hello" / "task.toml"
    path.write_text(path.read_text().replace("timeout_sec = 120.0", "timeout_sec = 2.0"))
    async with opened(config) as environments:
        (observation,), score = await played(environments, "hello", "echo 'Hello, world!' > hello.txt; sleep 600")
    assert observation.ended
    assert "the task's time of 2 s is used up" in observation.text
    assert score == 1.0


async def test_a_row_without_a_task_and_a_task_outside_of_the_folder_are_refused(
    config: HarborEnvironmentConfig,
) -> None:
    async with opened(config) as environments:
        with pytest.raises(DataError, match=r"row row-3 names no task .* megarl data prepare harbor"):
            await environments.open({"uid": "row-3", "extra_info": {}})
        with pytest.raises(DataError, match=r"task \.\./x is not below"):
            await environments.open({"uid": "row-3", "extra_info": {"task": "../x"}})


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
