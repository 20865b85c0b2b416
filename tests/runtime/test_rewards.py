"""Reward workers on a real Ray of two nodes on this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from megarl.config.reward import FunctionRewardConfig
from megarl.errors import ScoreError
from megarl.reward.build import scoring_task
from megarl.reward.protocol import Request
from megarl.runtime.launch import private_ray
from megarl.types import Score

with private_ray():
    # Ray reads its environment when it is imported, here as in a run.
    import ray

    from megarl.runtime import rewards
    from megarl.runtime.local_ray import LocalRay, local_ray
    from megarl.runtime.rewards import SpreadPool

REWARD = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.3)
    if solution_str == "bad":
        raise ValueError("broken on purpose")
    return {"score": float(solution_str), "host": os.getppid(), "worker": os.getpid()}
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRay]:
    with ExitStack() as stack:
        stack.enter_context(private_ray())
        nodes = LocalRay(device="cpu", log_folder=tmp_path_factory.mktemp("nodes"), has_several_nodes=True)
        stack.enter_context(local_ray(nodes, num_slots=1))
        nodes.start_node(num_slots=1)
        nodes.wait_started()
        ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
        stack.callback(ray.shutdown)
        yield nodes


def request(text: str) -> Request:
    return Request(data_source="", solution_str=text, ground_truth="", extra_info={})


def test_every_node_scores_and_a_lost_node_takes_no_response_with_it(
    nodes: LocalRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards, "_REST_S", 0.1)
    (tmp_path / "reward.py").write_text(REWARD)
    config = FunctionRewardConfig(kind="function", path=tmp_path / "reward.py", workers=1)
    ids = {str(node["NodeManagerAddress"]): str(node["NodeID"]) for node in ray.nodes()}
    head = ids[nodes.address.partition(":")[0]]
    used = [head]
    pool = SpreadPool(scoring_task(config), find_nodes=lambda: used, run_folder=tmp_path)

    async def score(numbers: range) -> list[Score]:
        return await asyncio.gather(*(pool.score(request(str(number))) for number in numbers))

    async def run() -> set[int]:
        alone = await score(range(4))
        assert {int(found.components["host"]) for found in alone} == {os.getpid()}
        used[:] = ids.values()
        await asyncio.sleep(0.2)
        first = await score(range(12))
        assert [found.value for found in first] == list(range(12))
        hosts = {int(found.components["host"]) for found in first}
        assert len(hosts) == 2
        assert os.getpid() in hosts
        with pytest.raises(ScoreError, match="broken on purpose"):
            await asyncio.gather(*(pool.score(request("bad")) for _ in range(4)))
        monkeypatch.setattr(rewards, "_REST_S", 30.0)
        await score(range(1))
        away = next(address for address in ids if address != nodes.address.partition(":")[0])
        under_way = asyncio.ensure_future(score(range(12)))
        await asyncio.sleep(0.5)
        nodes.kill_node(away)
        second = await under_way
        assert [found.value for found in second] == list(range(12))
        return {int(found.components["worker"]) for found in (*first, *second)}

    workers = asyncio.run(run())
    pool.close()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)], timeout=60)
    assert not alive
    assert len(list(tmp_path.glob("reward*.log"))) == 2
