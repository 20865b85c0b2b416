from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from megarl.config.reward import FunctionRewardConfig
from megarl.errors import RewardError, ScoreError
from megarl.reward.build import scoring_task
from megarl.reward.pool import MachineFaultError, WorkerPool, score_of
from megarl.reward.protocol import Request
from megarl.system.proc import ZOMBIE, read_stat
from megarl.system.user_process import UserProcess
from megarl.types import Score
from tests.waiting import wait_until

MakeReward = Callable[..., FunctionRewardConfig]
OpenPool = Callable[..., WorkerPool]

HANGS_ON_REQUEST = """
import os, subprocess, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        child = subprocess.Popen(["sleep", "600"])
        with open(extra_info["pids"], "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    return os.getpid()
"""


@pytest.fixture
def open_pool(make_reward: MakeReward) -> Iterator[OpenPool]:
    """Write a reward function and open its pool, which is closed after the test."""
    pools: list[WorkerPool] = []

    def open_one(
        source: str, *, log_path: Path | None = None, late_score: float | None = None, **keys: object
    ) -> WorkerPool:
        config = make_reward(source).model_copy(update=keys)
        pools.append(WorkerPool(replace(scoring_task(config), late_score=late_score), log_path=log_path))
        return pools[-1]

    yield open_one
    for pool in pools:
        pool.close()


def request(text: str, pids: Path | str = "") -> Request:
    return Request(data_source="x", solution_str=text, ground_truth="", extra_info={"pids": str(pids)})


async def score(pool: WorkerPool, sample: Request) -> Score:
    (answer,) = await pool.answers([sample])
    return score_of(answer)


def is_running(pid: int) -> bool:
    try:
        return read_stat(pid).state != ZOMBIE
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)), told=lambda: [pid for pid in pids if is_running(pid)])


async def read_pids(path: Path) -> list[int]:
    async with asyncio.timeout(120):
        while not (path.exists() and len(path.read_text().split()) == 2):
            await asyncio.sleep(0.02)
    return [int(word) for word in path.read_text().split()]


@pytest.mark.patient
@pytest.mark.fault("a reward function that hangs", "killed at its deadline with its children, replaced")
async def test_a_late_worker_is_killed_with_its_children_and_replaced(tmp_path: Path, open_pool: OpenPool) -> None:
    pool = open_pool(HANGS_ON_REQUEST, deadline_s=3)
    first = (await score(pool, request("go"))).value
    with pytest.raises(RewardError, match=r"gave no score within 3 s \(reward.deadline_s\)"):
        await score(pool, request("hang", tmp_path / "pids"))
    second = (await score(pool, request("go"))).value
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert pids[0] == first
    assert second != first
    wait_for_end(pids)
    pool.close()
    wait_for_end([int(second)])


@pytest.mark.parametrize("cpu_s", [0.0, 100.0])
def test_a_late_sample_gets_the_late_score_only_if_its_worker_has_computed(
    cpu_s: float, tmp_path: Path, open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = iter([0.0, cpu_s])
    monkeypatch.setattr(UserProcess, "cpu_s", property(lambda _process: next(used)))
    pool = open_pool(HANGS_ON_REQUEST, deadline_s=1, late_score=0.0)
    if cpu_s:
        assert asyncio.run(score(pool, request("hang", tmp_path / "pids"))).value == 0.0
    else:
        with pytest.raises(MachineFaultError, match="the machine is at fault"):
            asyncio.run(score(pool, request("hang", tmp_path / "pids")))


async def test_workers_are_reused_and_no_more_than_asked_for(open_pool: OpenPool) -> None:
    pool = open_pool(HANGS_ON_REQUEST, workers=2)
    scores = await asyncio.gather(*(score(pool, request("go")) for _ in range(12)))
    pids = {int(each.value) for each in scores}
    assert 1 <= len(pids) <= 2
    assert all(is_running(pid) for pid in pids)
    pool.close()
    pool.close()
    wait_for_end(list(pids))


async def test_a_cancelled_request_frees_its_worker(tmp_path: Path, open_pool: OpenPool) -> None:
    pool = open_pool(HANGS_ON_REQUEST)
    task = asyncio.create_task(score(pool, request("hang", tmp_path / "pids")))
    pids = await read_pids(tmp_path / "pids")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    next_pid = (await score(pool, request("go"))).value
    wait_for_end(pids)
    assert next_pid not in pids


def test_closing_ends_a_busy_worker_and_wakes_who_waits(tmp_path: Path, open_pool: OpenPool) -> None:
    pool = open_pool(HANGS_ON_REQUEST, deadline_s=60)

    async def scenario() -> list[int]:
        task = asyncio.create_task(score(pool, request("hang", tmp_path / "pids")))
        pids = await read_pids(tmp_path / "pids")
        pool.close()
        with pytest.raises(RewardError, match="SIGKILL"):
            async with asyncio.timeout(60):
                await task
        return pids

    wait_for_end(asyncio.run(scenario()))


@pytest.mark.patient
@pytest.mark.fault("SIGSTOP of a reward worker", "killed at its deadline")
def test_a_stopped_worker_does_not_outlast_its_deadline(open_pool: OpenPool) -> None:
    pool = open_pool(HANGS_ON_REQUEST, deadline_s=1.5)

    async def scenario() -> int:
        pid = int((await score(pool, request("go"))).value)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RewardError, match=r"within 1\.5 s"):
            # More than the socket holds: sending blocks too.
            await score(pool, request("x" * 4_000_000))
        return pid

    wait_for_end([asyncio.run(scenario())])


def test_a_long_text_arrives_whole(open_pool: OpenPool) -> None:
    pool = open_pool("def compute_score(**sample): return len(sample['solution_str'])")
    assert asyncio.run(score(pool, request("ä" * 3_000_000))).value == 3_000_000


def test_workers_die_with_a_parent_that_was_killed(tmp_path: Path, make_reward: MakeReward) -> None:
    config = make_reward(HANGS_ON_REQUEST)
    script = tmp_path / "parent.py"
    script.write_text(
        dedent(f"""
        import asyncio
        from megarl.config.reward import FunctionRewardConfig
        from megarl.reward.pool import WorkerPool
        from megarl.reward.protocol import Request
        from megarl.reward.build import scoring_task

        pool = WorkerPool(scoring_task(FunctionRewardConfig(kind="function", path={str(config.path)!r})))
        pids = {str(tmp_path / "pids")!r}
        sample = Request(data_source="", solution_str="hang", ground_truth="", extra_info={{"pids": pids}})
        asyncio.run(pool.answers([sample]))
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script)])
    try:
        pids = asyncio.run(read_pids(tmp_path / "pids"))
    finally:
        parent.kill()
        parent.wait(60)
    wait_for_end(pids)


def test_a_file_that_broke_after_the_check_is_an_error(open_pool: OpenPool) -> None:
    pool = open_pool("raise RuntimeError('no licence')")
    with pytest.raises(RewardError, match=r"importing it raised RuntimeError: no licence \(.*my_reward.py:1\)"):
        asyncio.run(score(pool, request("go")))


@pytest.mark.fault("kill -9 of a reward worker", "replaced, its sample scored, others unharmed")
async def test_a_killed_worker_is_replaced_and_its_sample_scored(tmp_path: Path, open_pool: OpenPool) -> None:
    pool = open_pool(
        """
        import os, time
        from pathlib import Path

        def compute_score(data_source, solution_str, ground_truth, extra_info):
            if solution_str == "slow" and not Path(extra_info["pids"]).exists():
                Path(extra_info["pids"]).write_text(f"{os.getpid()}\\n")
                time.sleep(600)
            return os.getpid()
        """,
        workers=2,
        deadline_s=600,
    )
    pids = tmp_path / "pids"

    slow = asyncio.create_task(score(pool, request("slow", pids)))
    async with asyncio.timeout(120):
        while not (pids.exists() and pids.read_text().endswith("\n")):
            await asyncio.sleep(0.02)
    victim = int(pids.read_text())
    other = (await score(pool, request("go"))).value
    os.kill(victim, signal.SIGKILL)
    second = (await slow).value
    assert second != victim
    assert other != victim
    assert is_running(int(second))
    pool.close()
    wait_for_end([victim, int(second), int(other)])


GIVES_PIDS = """
import os

def compute_score(samples):
    return [os.getpid()] * len(samples)
"""


@pytest.mark.parametrize("size", [1, 2])
async def test_a_worker_makes_room_for_a_fresh_one_after_its_samples(size: int, open_pool: OpenPool) -> None:
    pool = open_pool(GIVES_PIDS, samples_per_worker=4, scores_groups=True)
    groups = [await pool.answers([request("go")] * size) for _ in range(6 // size)]
    pids = [int(score_of(answer).value) for group in groups for answer in group]
    assert [len(set(pids[:4])), len(set(pids[4:])), len(set(pids))] == [1, 1, 2]
    wait_for_end(pids[:4])


@pytest.mark.patient
@pytest.mark.fault("a reward function that eats memory or time", "ends at its limit")
async def test_memory_and_cpu_of_a_worker_are_limited(open_pool: OpenPool) -> None:
    pool = open_pool(
        """
        def compute_score(data_source, solution_str, ground_truth):
            if solution_str == "memory":
                return len(bytearray(4 << 30))
            while solution_str == "cpu":
                pass
            return 1
        """,
        memory_gib=1,
        cpu_s=1,
    )

    with pytest.raises(ScoreError, match=r"raised MemoryError: the limit is reward.memory_gib \(.*my_reward.py:4\)"):
        await score(pool, request("memory"))
    with pytest.raises(ScoreError, match=r"used more than 1 s of CPU \(reward.cpu_s\)"):
        await score(pool, request("cpu"))
    assert (await score(pool, request("go"))).value == 1


@pytest.mark.fault("a reward file that changes during the run", "an error, not another reward")
@pytest.mark.parametrize("name", ["my_reward.py", "my_parsing.py"])
async def test_a_file_that_changes_during_the_run_is_an_error(name: str, tmp_path: Path, open_pool: OpenPool) -> None:
    (tmp_path / "my_parsing.py").write_text("SCORE = 1")
    pool = open_pool("from my_parsing import SCORE\ndef compute_score(**sample): return SCORE")
    await score(pool, request("go"))
    path = tmp_path / name
    # The same content written again is no change.
    path.write_text(path.read_text())
    await score(pool, request("go"))
    path.write_text(path.read_text() + "\n")
    with pytest.raises(RewardError, match=f"{name} changed during the run") as caught:
        await score(pool, request("go"))
    assert not isinstance(caught.value, ScoreError)


FORKS = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "2" and os.fork() == 0:
        return 99
    return int(solution_str)
"""


@pytest.mark.fault("a reward function that forks", "the child's answer is no sample's score")
async def test_a_function_that_forks_moves_no_score_to_another_sample(open_pool: OpenPool) -> None:
    pool = open_pool(FORKS)
    assert [(await score(pool, request(text))).value for text in "123456"] == [1, 2, 3, 4, 5, 6]


WRITES_TO_THE_CHANNEL = """
import json, os, stat, struct

def compute_score(data_source, solution_str, ground_truth, extra_info):
    payload = PAYLOAD
    for descriptor in range(3, 4096):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, struct.pack("!I", SIZE) + payload)
        except OSError:
            pass
    return 1.0
"""
FOREIGN = "got an answer that is not its own"


@pytest.mark.parametrize(
    ("payload", "size", "complaint"),
    [
        ("b'x' * 1000", "0xFFFFFFFF", "ended its worker process"),
        ("b'no JSON'", "len(payload)", FOREIGN),
        ("b'[' * 100_000", "len(payload)", FOREIGN),
        *(
            (f"json.dumps({{'id': {number}, 'answers': {answers}}}).encode()", "len(payload)", FOREIGN)
            for number, answers in (
                (0, "[{'score': 1.0, 'components': {}}]"),
                (1, "[]"),
                (1, "[{'score': 'NaN', 'components': {}}]"),
                (1, "[{'score': float('nan'), 'components': {}}]"),
            )
        ),
    ],
)
def test_an_answer_that_is_not_the_samples_own_is_no_score(
    payload: str, size: str, complaint: str, open_pool: OpenPool
) -> None:
    """The user's code shares a process with the channel, and finds it if it looks for it."""
    pool = open_pool(WRITES_TO_THE_CHANNEL.replace("PAYLOAD", payload).replace("SIZE", size))
    with pytest.raises(ScoreError, match=complaint):
        asyncio.run(score(pool, request("")))


LEAVES_CHILDREN = """
import os, subprocess, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    daemon = subprocess.Popen(["sh", "-c", "setsid sleep 600 & echo $!"], stdout=subprocess.PIPE, text=True)
    with open(extra_info["pids"], "w") as file:
        file.write(f"{child.pid} {int(daemon.stdout.readline())}")
    if solution_str == "exit":
        os._exit(3)
    time.sleep(600 if solution_str == "hang" else 0)
    return 1.0
"""


@pytest.mark.patient
@pytest.mark.fault("children of a reward function in sessions of their own", "end with their worker, however it ends")
@pytest.mark.parametrize("ending", ["hang", "exit", "close"])
async def test_children_that_left_the_session_end_with_their_worker(
    ending: str, tmp_path: Path, open_pool: OpenPool
) -> None:
    pool = open_pool(LEAVES_CHILDREN, deadline_s=3 if ending == "hang" else 60)
    if ending == "close":
        assert (await score(pool, request(ending, tmp_path / "pids"))).value == 1
        assert all(map(is_running, await read_pids(tmp_path / "pids")))
    else:
        with pytest.raises(RewardError):
            await score(pool, request(ending, tmp_path / "pids"))
    pool.close()
    wait_for_end([int(word) for word in (tmp_path / "pids").read_text().split()])


WRITES_MUCH = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    for _ in range(100):
        print("x" * 100_000)
    print("the last line")
    return 1.0
"""


@pytest.mark.fault("a reward function that floods its log", "the newest part is kept, within a limit")
def test_the_log_of_workers_has_a_bound(tmp_path: Path, open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.system.user_process.MAX_LOG_BYTES", 2 << 20)
    log = tmp_path / "reward.log"
    pool = open_pool(WRITES_MUCH, log_path=log)
    assert asyncio.run(score(pool, request("go"))).value == 1
    wait_until(lambda: log.exists() and log.read_text().endswith("the last line\n"))
    pool.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("reward.log*")) <= 2 << 20
