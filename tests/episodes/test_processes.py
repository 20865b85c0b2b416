"""Processes that episodes share: what they have apart, and what becomes of the others when one goes wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from megarl.config.environment import ClassEnvironmentConfig, CommandEnvironmentConfig
from megarl.data.tokenizer import Tokenizer
from megarl.episodes.build import check_environment, open_agents, open_environments
from megarl.episodes.class_environments import ClassEnvironment, ClassEnvironments
from megarl.episodes.protocol import Call, Observation, Transcript
from megarl.errors import EnvironmentLostError, NeighbourError
from megarl.types import JsonValue
from tests.episodes.conftest import CALCULATOR
from tests.episodes.scripted import ScriptedSession
from tests.episodes.templates import family_tokenizer
from tests.processes import command_of

WORKER = "megarl.episodes.worker"
_SCORED = Transcript(prompt=(), messages=({"role": "assistant", "content": "5"},), ending="answered")

_SHARED = '''
import asyncio, mmap, os, sys, time

class Shared:
    def __init__(self, uid): self.uid, self.count = uid, 0
    async def counts(self) -> str:
        """Count the calls of this episode."""
        self.count += 1
        return f"{self.uid} {self.count} {os.getpid()}"
    async def waits(self, seconds: float) -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "waited"
    async def waits_in_thread(self, seconds: float) -> str:
        """Wait in a thread."""
        await asyncio.to_thread(time.sleep, seconds)
        return "waited"
    async def sleeps(self) -> str:
        """Keep all others waiting."""
        time.sleep(600)
        return ""
    async def ignores(self) -> str:
        """Refuse to end."""
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass
    async def computes(self, seconds: float) -> str:
        """Use CPU time, also in another task."""
        async def work():
            began = time.thread_time()
            while time.thread_time() - began < seconds:
                sum(range(1000))
                await asyncio.sleep(0)
        await asyncio.gather(work())
        return "computed"
    async def leaves(self) -> str:
        """Leave."""
        sys.exit(3)
    async def forks(self) -> str:
        """Fork."""
        os.fork()
        return "forked"
    async def dies(self) -> str:
        """Die."""
        os._exit(7)
    async def allocates(self) -> str:
        """Allocate."""
        return str(len(bytearray(20 << 30)))
    async def maps(self) -> str:
        """Take address space."""
        self.taken = mmap.mmap(-1, 2 << 30)
        return "mapped"
    async def score(self, transcript):
        return {"score": self.count}
'''


@asynccontextmanager
async def _opened(path: Path, **keys: object) -> AsyncIterator[ClassEnvironments]:
    config = ClassEnvironmentConfig.model_validate({"kind": "class", "path": path, "workers": 1, **keys})
    environments = await open_environments(config)
    assert isinstance(environments, ClassEnvironments)
    try:
        yield environments
    finally:
        await environments.close()


async def _episode(environments: ClassEnvironments, uid: str) -> ClassEnvironment:
    return await environments.open({"uid": uid, "ground_truth": "5"})


async def _ask(environment: ClassEnvironment, name: str, **arguments: JsonValue) -> Observation:
    return await environment.call(Call(name=name, arguments=arguments, id="call_0"))


def _begun(name: str, environment: ClassEnvironment) -> asyncio.Task[Observation]:
    return asyncio.create_task(_ask(environment, name, seconds=1.0))


def _processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if WORKER in command_of(child)]


@pytest.mark.patient
async def test_episodes_of_async_code_share_a_process_and_have_their_own_instances(
    write_class: Callable[[str], Path],
) -> None:
    async with _opened(write_class(_SHARED)) as environments:
        assert environments.most_open is None
        episodes = await asyncio.gather(*(_episode(environments, f"p{number}") for number in range(40)))
        await _ask(episodes[3], "counts")
        texts = [(await _ask(each, "counts")).text.split() for each in episodes]
        assert [text[0] for text in texts] == [f"p{number}" for number in range(40)]
        assert [text[1] for text in texts] == ["2" if number == 3 else "1" for number in range(40)]
        assert len({text[2] for text in texts}) == 1
        for name in ("waits", "waits_in_thread"):
            began = time.monotonic()
            assert {(await one).text for one in [*map(partial(_begun, name), episodes)]} == {"waited"}
            assert time.monotonic() - began < 20, "one after the other"
        score = await episodes[3].score(_SCORED)
        assert score is not None
        assert score.value == 2
        for each in episodes:
            await each.close()
        assert len(_processes()) == 1


@pytest.mark.patient
async def test_a_rush_of_episodes_starts_no_more_processes_than_there_are_cores(
    write_class: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    async with _opened(write_class(_SHARED), workers=8) as environments:
        await asyncio.gather(*(_episode(environments, f"p{number}") for number in range(200)))
        assert len(_processes()) == 2


@pytest.mark.patient
async def test_what_one_episode_does_reaches_no_other(write_class: Callable[[str], Path]) -> None:
    async with _opened(write_class(_SHARED), call_deadline_s=4) as environments:
        one, other = await _episode(environments, "one"), await _episode(environments, "other")
        assert (await _ask(one, "leaves")).text == "error: leaves raised SystemExit: 3"
        assert (await _ask(one, "forks")).text == "forked"
        assert (await _ask(one, "waits", seconds=60)).text == "error: waits gave no result within 4 s"
        # Another one's wait of three seconds holds although the loop stands still for four of them.
        waiting = asyncio.create_task(_ask(other, "waits", seconds=3.0))
        await asyncio.sleep(0.5)
        assert (await _ask(one, "sleeps")).text == "error: sleeps gave no result within 4 s"
        assert (await waiting).text == "waited"
        assert (await _ask(other, "counts")).text.startswith("other 1")


@pytest.mark.patient
async def test_cpu_time_is_counted_for_each_episode(write_class: Callable[[str], Path]) -> None:
    async with _opened(write_class(_SHARED), call_deadline_s=300, cpu_s=1) as environments:
        one, other = await _episode(environments, "one"), await _episode(environments, "other")
        calls = [asyncio.create_task(_ask(each, "computes", seconds=0.6)) for each in (one, other)]
        assert [(await call).text for call in calls] == ["computed", "computed"]
        with pytest.raises(EnvironmentLostError, match=r"more CPU time than environment\.cpu_s"):
            await _ask(one, "computes", seconds=2.0)
        assert (await _ask(other, "counts")).text.startswith("other 1")


@pytest.mark.patient
async def test_a_process_whose_code_does_not_end_takes_no_more_episodes(write_class: Callable[[str], Path]) -> None:
    async with _opened(write_class(_SHARED), workers=2, call_deadline_s=1) as environments:
        one = await _episode(environments, "one")
        assert (await _ask(one, "ignores")).text == "error: ignores gave no result within 1 s"
        await asyncio.sleep(2)  # its next sign of life says so
        fresh = await _episode(environments, "two")
        first, second = (await _ask(one, "counts")).text.split()[2], (await _ask(fresh, "counts")).text.split()[2]
        assert first != second
        await one.close()
        assert not psutil.pid_exists(int(first))


@pytest.mark.patient
@pytest.mark.fault("an episode ends the process that others share", "it is lost, the others are played again")
@pytest.mark.parametrize("end", ["dies", "allocates"])
async def test_an_episode_that_ends_its_process_is_blamed_and_plays_alone_then(
    end: str, write_class: Callable[[str], Path]
) -> None:
    async with _opened(write_class(_SHARED), workers=2) as environments:
        guilty = await _episode(environments, "guilty")
        others = [await _episode(environments, f"p{number}") for number in range(3)]
        pids = [(await _ask(each, "counts")).text.split()[2] for each in (guilty, *others)]
        neighbours = [each for each, pid in zip(others, pids[1:], strict=True) if pid == pids[0]]
        assert neighbours, "nobody shares with it"
        waiting = asyncio.create_task(_ask(neighbours[0], "waits", seconds=600))
        await asyncio.sleep(0.2)
        with pytest.raises(EnvironmentLostError, match="ended its worker process: it exited with status") as lost:
            await _ask(guilty, end)
        assert not isinstance(lost.value, NeighbourError)
        with pytest.raises(NeighbourError):
            await waiting
        with pytest.raises(NeighbourError):
            await _ask(neighbours[0], "counts")
        with pytest.raises(NeighbourError):
            await neighbours[0].score(_SCORED)
        for each in (guilty, *others):
            await each.close()
        again = [await _episode(environments, uid) for uid in ("guilty", "p0", "p1", "p2")]
        alone, *shared = [(await _ask(each, "counts")).text.split()[2] for each in again]
        assert alone not in shared
        with pytest.raises(EnvironmentLostError, match="exited with status"):
            await _ask(again[0], "dies")
        assert (await _ask(again[1], "counts")).text.startswith("p0 2")


@pytest.mark.patient
async def test_code_that_does_not_give_way_and_code_that_asks_for_it_have_a_process_for_each_episode(
    write_class: Callable[[str], Path],
) -> None:
    for text, keys in ((CALCULATOR, {}), (_SHARED, {"episodes_per_process": 1})):
        async with _opened(write_class(text), workers=3, **keys) as environments:
            assert environments.most_open == 3
            for uid in ("one", "two"):
                await _episode(environments, uid)
            assert len(_processes()) == 2


async def test_sync_code_shares_where_the_recipe_says_so(write_class: Callable[[str], Path]) -> None:
    async with _opened(write_class(CALCULATOR), episodes_per_process=3) as environments:
        assert environments.most_open == 3
        one, other, _ = [await _episode(environments, uid) for uid in ("one", "other", "third")]
        assert (await _ask(one, "add", a=2, b=3)).text == "5"
        assert (await _ask(other, "repeat")).text == "0"
        assert len(_processes()) == 1
        fourth = asyncio.create_task(_episode(environments, "fourth"))
        await asyncio.sleep(0.2)
        assert not fourth.done()
        await one.close()
        assert (await _ask(await fourth, "repeat")).text == "0"


@pytest.mark.patient
async def test_a_process_whose_memory_is_half_used_takes_no_more_and_ends_with_its_last_episode(
    write_class: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    async with _opened(write_class(_SHARED), workers=2, memory_gib=4) as environments:
        one, two = [await _episode(environments, uid) for uid in ("one", "two")]
        assert len(_processes()) == 1
        (full,) = _processes()
        await _ask(one, "maps")
        await asyncio.sleep(2)  # its next sign of life says so
        third = await _episode(environments, "three")
        assert (await _ask(third, "counts")).text.split()[2] != str(full.pid)
        await one.close()
        assert full.is_running()
        await two.close()
        assert not full.is_running()


def test_a_sandbox_of_one_episode_is_not_shared() -> None:
    config = ClassEnvironmentConfig.model_validate(
        {"kind": "class", "tools": {"python": {}}, "episodes_per_process": 4}
    )
    problems = check_environment(config)
    assert [problem.key for problem in problems] == ["environment.episodes_per_process"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return family_tokenizer(tmp_path_factory.mktemp("qwen"), "qwen2.5", tools=())


@pytest.mark.patient
async def test_programs_have_one_process_that_watches_them_and_each_ends_alone(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text = 'read -r seconds; (setsid sleep 300 &) ; echo $$ >> "$0.pids"; sleep "$seconds"; [ "$seconds" != 2 ]'
    script = tmp_path / "agent.sh"
    script.write_text(text)
    config = CommandEnvironmentConfig.model_validate(
        {"kind": "command", "command": ["sh", str(script)], "workers": 8, "wall_s": 120}
    )
    agents = await open_agents(config, tokenizer)
    waits = ("600", "1", "2", "30")
    playing = [
        asyncio.create_task(agents.run({"uid": "1", "prompt": f"{seconds}\n"}, ScriptedSession(tokenizer, [])))
        for seconds in waits
    ]
    assert await playing[1] is None
    with pytest.raises(EnvironmentLostError, match="exited with status 1"):
        await playing[2]
    assert not playing[0].done()
    supervisors = _processes()
    assert len(supervisors) <= 2, "one for each core at most"
    playing[0].cancel()
    await asyncio.wait([playing[0]])
    deadline = time.monotonic() + 20
    while _sleepers(supervisors, "600") and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    assert not _sleepers(supervisors, "600")
    assert _sleepers(supervisors, "30"), "another program goes on"
    await agents.close()
    with pytest.raises(EnvironmentLostError):
        await playing[3]


def _sleepers(supervisors: list[psutil.Process], seconds: str) -> list[str]:
    found = [child for each in supervisors if each.is_running() for child in each.children(recursive=True)]
    return [text for child in found if (text := command_of(child)) == f"sleep {seconds}"]
