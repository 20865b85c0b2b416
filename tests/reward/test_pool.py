from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from megarl.config.reward import FunctionRewardConfig, MathRewardConfig
from megarl.errors import RewardError, ScoreError
from megarl.reward.build import scoring_task
from megarl.reward.pool import MachineFaultError, WorkerPool, score_of
from megarl.reward.protocol import Request
from megarl.system.proc import ZOMBIE, read_stat
from megarl.system.user_process import UserProcess

MakeReward = Callable[..., FunctionRewardConfig]

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


def pool_of(config: FunctionRewardConfig) -> WorkerPool:
    return WorkerPool(scoring_task(config))


def request(text: str, pids: Path | str = "") -> Request:
    return Request(data_source="x", solution_str=text, ground_truth="", extra_info={"pids": str(pids)})


def is_running(pid: int) -> bool:
    try:
        return read_stat(pid).state != ZOMBIE
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pids: list[int], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"of {pids} still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.02)


async def read_pids(path: Path) -> list[int]:
    async with asyncio.timeout(120):
        while not (path.exists() and len(path.read_text().split()) == 2):
            await asyncio.sleep(0.02)
    return [int(word) for word in path.read_text().split()]


@pytest.mark.fault("a reward function that hangs", "killed at its deadline with its children, replaced")
def test_a_late_worker_is_killed_with_its_children_and_replaced(tmp_path: Path, make_reward: MakeReward) -> None:
    pool = pool_of(make_reward(HANGS_ON_REQUEST, deadline_s=3))

    async def scenario() -> tuple[float, float]:
        first = await pool.score(request("go"))
        with pytest.raises(RewardError, match="within 3 s"):
            await pool.score(request("hang", tmp_path / "pids"))
        return first.value, (await pool.score(request("go"))).value

    first, second = asyncio.run(scenario())
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert pids[0] == first
    assert second != first
    wait_for_end(pids)
    pool.close()
    wait_for_end([int(second)])


@pytest.mark.parametrize("cpu_s", [0.0, 100.0])
def test_a_late_sample_gets_the_late_score_only_if_its_worker_has_computed(
    cpu_s: float, tmp_path: Path, make_reward: MakeReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = iter([0.0, cpu_s])
    monkeypatch.setattr(UserProcess, "cpu_s", property(lambda _process: next(used)))
    task = replace(scoring_task(make_reward(HANGS_ON_REQUEST, deadline_s=1)), late_score=0.0)
    pool = WorkerPool(task)
    try:
        if cpu_s:
            assert asyncio.run(pool.score(request("hang", tmp_path / "pids"))).value == 0.0
        else:
            with pytest.raises(MachineFaultError, match="the machine is at fault"):
                asyncio.run(pool.score(request("hang", tmp_path / "pids")))
    finally:
        pool.close()


def test_workers_are_reused_and_no_more_than_asked_for(make_reward: MakeReward) -> None:
    config = make_reward(HANGS_ON_REQUEST, workers=2)
    pool = pool_of(config)

    async def scenario() -> list[float]:
        return [score.value for score in await asyncio.gather(*(pool.score(request("go")) for _ in range(12)))]

    pids = {int(pid) for pid in asyncio.run(scenario())}
    assert 1 <= len(pids) <= 2
    assert all(is_running(pid) for pid in pids)
    pool.close()
    pool.close()
    wait_for_end(list(pids))


def test_a_cancelled_request_frees_its_worker(tmp_path: Path, make_reward: MakeReward) -> None:
    pool = pool_of(make_reward(HANGS_ON_REQUEST))

    async def scenario() -> tuple[list[int], float]:
        task = asyncio.create_task(pool.score(request("hang", tmp_path / "pids")))
        pids = await read_pids(tmp_path / "pids")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pids, (await pool.score(request("go"))).value

    pids, next_pid = asyncio.run(scenario())
    wait_for_end(pids)
    assert next_pid not in pids
    pool.close()


def test_closing_ends_a_busy_worker_and_wakes_who_waits(tmp_path: Path, make_reward: MakeReward) -> None:
    pool = pool_of(make_reward(HANGS_ON_REQUEST, deadline_s=60))

    async def scenario() -> list[int]:
        task = asyncio.create_task(pool.score(request("hang", tmp_path / "pids")))
        pids = await read_pids(tmp_path / "pids")
        pool.close()
        with pytest.raises(RewardError, match="SIGKILL"):
            async with asyncio.timeout(60):
                await task
        return pids

    wait_for_end(asyncio.run(scenario()))


@pytest.mark.fault("SIGSTOP of a reward worker", "killed at its deadline")
def test_a_stopped_worker_does_not_outlast_its_deadline(make_reward: MakeReward) -> None:
    pool = pool_of(make_reward(HANGS_ON_REQUEST, deadline_s=1.5))

    async def scenario() -> int:
        pid = int((await pool.score(request("go"))).value)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RewardError, match=r"within 1\.5 s"):
            # More than the socket holds: sending blocks too.
            await pool.score(request("x" * 4_000_000))
        return pid

    wait_for_end([asyncio.run(scenario())])
    pool.close()


def test_a_long_text_arrives_whole(make_reward: MakeReward) -> None:
    pool = pool_of(make_reward("def compute_score(**sample): return len(sample['solution_str'])"))
    assert asyncio.run(pool.score(request("ä" * 3_000_000))).value == 3_000_000
    pool.close()


def test_workers_die_with_a_parent_that_was_killed(tmp_path: Path, make_reward: MakeReward) -> None:
    config = make_reward(HANGS_ON_REQUEST)
    script = tmp_path / "parent.py"
    script.write_text(
        dedent(f"""
        import asyncio
        from megarl.config.reward import FunctionRewardConfig
        from megarl.reward.pool import MachineFaultError, WorkerPool, score_of
        from megarl.reward.protocol import Request
        from megarl.reward.build import scoring_task

        pool = WorkerPool(scoring_task(FunctionRewardConfig(kind="function", path={str(config.path)!r})))
        extra_info = {{"pids": {str(tmp_path / "pids")!r}}}
        asyncio.run(pool.score(Request(data_source="", solution_str="hang", ground_truth="", extra_info=extra_info)))
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script)])
    try:
        pids = asyncio.run(read_pids(tmp_path / "pids"))
    finally:
        parent.kill()
        parent.wait(60)
    wait_for_end(pids)


def test_a_file_that_broke_after_the_check_is_an_error(make_reward: MakeReward) -> None:
    pool = pool_of(make_reward("raise RuntimeError('no licence')"))
    with pytest.raises(RewardError, match=r"importing it raised RuntimeError: no licence \(.*my_reward.py:1\)"):
        asyncio.run(pool.score(request("go")))
    pool.close()


@pytest.mark.fault("kill -9 of a reward worker", "replaced, its sample scored, others unharmed")
def test_a_killed_worker_is_replaced_and_its_sample_scored(tmp_path: Path, make_reward: MakeReward) -> None:
    config = make_reward(
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
    pool = pool_of(config)
    pids = tmp_path / "pids"

    async def scenario() -> tuple[int, float, float]:
        slow = asyncio.create_task(pool.score(request("slow", pids)))
        async with asyncio.timeout(120):
            while not (pids.exists() and pids.read_text().endswith("\n")):
                await asyncio.sleep(0.02)
        victim = int(pids.read_text())
        other = (await pool.score(request("go"))).value
        os.kill(victim, signal.SIGKILL)
        return victim, other, (await slow).value

    victim, other, second = asyncio.run(scenario())
    assert second != victim
    assert other != victim
    assert is_running(int(second))
    pool.close()
    wait_for_end([victim, int(second), int(other)])


def test_a_worker_makes_room_for_a_fresh_one(make_reward: MakeReward) -> None:
    config = make_reward(HANGS_ON_REQUEST).model_copy(update={"samples_per_worker": 3})
    pool = pool_of(config)

    async def scenario() -> list[int]:
        return [int((await pool.score(request("go"))).value) for _ in range(7)]

    pids = asyncio.run(scenario())
    assert [len(set(pids[:3])), len(set(pids[3:6])), len(set(pids))] == [1, 1, 3]
    wait_for_end(pids[:6])
    pool.close()


def test_the_samples_of_a_group_count_one_by_one(make_reward: MakeReward) -> None:
    config = make_reward(
        """
        import os

        def compute_score(samples):
            return [os.getpid()] * len(samples)
        """
    ).model_copy(update={"samples_per_worker": 4, "scores_groups": True})
    pool = pool_of(config)

    async def scenario() -> list[int]:
        return [int(score_of(answer).value) for _ in range(3) for answer in await pool.answers([request("go")] * 2)]

    pids = asyncio.run(scenario())
    pool.close()
    assert [len(set(pids[:4])), len(set(pids[4:])), len(set(pids))] == [1, 1, 2]


@pytest.mark.fault("a reward function that eats memory or time", "ends at its limit")
def test_memory_and_cpu_of_a_worker_are_limited(make_reward: MakeReward) -> None:
    config = make_reward(
        """
        def compute_score(data_source, solution_str, ground_truth):
            if solution_str == "memory":
                return len(bytearray(4 << 30))
            while solution_str == "cpu":
                pass
            return 1
        """
    ).model_copy(update={"memory_gib": 1, "cpu_s": 1})
    pool = pool_of(config)

    async def scenario() -> float:
        with pytest.raises(
            ScoreError, match=r"raised MemoryError: the limit is reward.memory_gib \(.*my_reward.py:4\)"
        ):
            await pool.score(request("memory"))
        with pytest.raises(ScoreError, match=r"used more than 1 s of CPU \(reward.cpu_s\)"):
            await pool.score(request("cpu"))
        return (await pool.score(request("go"))).value

    assert asyncio.run(scenario()) == 1
    pool.close()


@pytest.mark.fault("a reward file that changes during the run", "an error, not another reward")
@pytest.mark.parametrize("name", ["my_reward.py", "my_parsing.py"])
def test_a_file_that_changes_during_the_run_is_an_error(name: str, tmp_path: Path, make_reward: MakeReward) -> None:
    (tmp_path / "my_parsing.py").write_text("SCORE = 1")
    pool = pool_of(make_reward("from my_parsing import SCORE\ndef compute_score(**sample): return SCORE"))

    async def scenario() -> None:
        await pool.score(request("go"))
        path = tmp_path / name
        # The same content written again is no change.
        path.write_text(path.read_text())
        await pool.score(request("go"))
        path.write_text(path.read_text() + "\n")
        with pytest.raises(RewardError, match=f"{name} changed during the run") as caught:
            await pool.score(request("go"))
        assert not isinstance(caught.value, ScoreError)

    asyncio.run(scenario())
    pool.close()


def test_what_math_cannot_judge_in_time_is_wrong() -> None:
    pool = WorkerPool(scoring_task(MathRewardConfig(kind="math", workers=1, deadline_s=300)))

    async def scenario() -> list[float]:
        texts = (r"\boxed{\frac12}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{0.5}")
        return [(await pool.score(sample(text))).value for text in texts]

    def sample(text: str) -> Request:
        return Request(data_source="x", solution_str=text, ground_truth="1/2", extra_info={})

    assert asyncio.run(scenario()) == [1, 0, 1]
    pool.close()


def test_an_answer_that_claims_to_be_huge_is_none(make_reward: MakeReward) -> None:
    """The user's code shares a process with the channel, and finds it if it looks for it."""
    pool = pool_of(
        make_reward(
            """
            import os, stat, struct

            def compute_score(data_source, solution_str, ground_truth, extra_info):
                for descriptor in range(3, 4096):
                    try:
                        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                            os.write(descriptor, struct.pack("!I", 0xFFFFFFFF) + b"x" * 1000)
                    except OSError:
                        pass
                return 1.0
            """
        )
    )
    with pytest.raises(ScoreError, match="ended its worker process"):
        asyncio.run(pool.score(request("")))
    pool.close()


FORKS = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "2" and os.fork() == 0:
        return 99
    return int(solution_str)
"""


@pytest.mark.fault("a reward function that forks", "the child's answer is no sample's score")
def test_a_function_that_forks_moves_no_score_to_another_sample(make_reward: MakeReward) -> None:
    pool = pool_of(make_reward(FORKS))

    async def scenario() -> list[float]:
        return [(await pool.score(request(text))).value for text in "123456"]

    assert asyncio.run(scenario()) == [1, 2, 3, 4, 5, 6]
    pool.close()


WRITES_TO_THE_CHANNEL = """
import json, os, stat, struct

def compute_score(data_source, solution_str, ground_truth, extra_info):
    payload = PAYLOAD
    for descriptor in range(3, 4096):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, struct.pack("!I", len(payload)) + payload)
        except OSError:
            pass
    return 1.0
"""


@pytest.mark.parametrize(
    "payload",
    [
        "b'no JSON'",
        "b'[' * 100_000",
        "json.dumps({'id': 0, 'answers': [{'score': 1.0, 'components': {}}]}).encode()",
        "json.dumps({'id': 1, 'answers': []}).encode()",
        "json.dumps({'id': 1, 'answers': [{'score': 'NaN', 'components': {}}]}).encode()",
        "json.dumps({'id': 1, 'answers': [{'score': float('nan'), 'components': {}}]}).encode()",
    ],
)
def test_an_answer_that_is_not_the_samples_own_is_no_score(payload: str, make_reward: MakeReward) -> None:
    pool = pool_of(make_reward(WRITES_TO_THE_CHANNEL.replace("PAYLOAD", payload)))
    with pytest.raises(ScoreError, match="got an answer that is not its own"):
        asyncio.run(pool.score(request("")))
    pool.close()


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


@pytest.mark.fault("children of a reward function in sessions of their own", "end with their worker, however it ends")
@pytest.mark.parametrize("ending", ["hang", "exit", "close"])
def test_children_that_left_the_session_end_with_their_worker(
    ending: str, tmp_path: Path, make_reward: MakeReward
) -> None:
    pool = pool_of(make_reward(LEAVES_CHILDREN, deadline_s=3 if ending == "hang" else 60))

    async def scenario() -> None:
        if ending == "close":
            assert (await pool.score(request(ending, tmp_path / "pids"))).value == 1
            assert all(map(is_running, await read_pids(tmp_path / "pids")))
        else:
            with pytest.raises(RewardError):
                await pool.score(request(ending, tmp_path / "pids"))
        pool.close()

    asyncio.run(scenario())
    wait_for_end([int(word) for word in (tmp_path / "pids").read_text().split()])


WRITES_MUCH = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    for _ in range(100):
        print("x" * 100_000)
    print("the last line")
    return 1.0
"""


@pytest.mark.fault("a reward function that floods its log", "the newest part is kept, within a limit")
def test_the_log_of_workers_has_a_bound(
    tmp_path: Path, make_reward: MakeReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.system.user_process.MAX_LOG_BYTES", 2 << 20)
    log = tmp_path / "reward.log"
    pool = WorkerPool(scoring_task(make_reward(WRITES_MUCH)), log_path=log)
    assert asyncio.run(pool.score(request("go"))).value == 1
    deadline = time.monotonic() + 60
    while not log.exists() or not log.read_text().endswith("the last line\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pool.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("reward.log*")) <= 2 << 20
