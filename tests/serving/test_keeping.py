"""Real engines on a real Ray of several nodes on this machine, whose nodes come and go."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from megarl.cluster.local_ray import private_ray
from megarl.config.recipe import NetworkConfig, RunConfig
from megarl.config.roles import FrozenRoleConfig, PoolConfig
from megarl.observe.observer import Observer
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from megarl.types import Score
from tests.rollout.test_frozen import group_of, written_question

with private_ray():
    # Ray reads its environment when it is imported, here as in a run.
    from megarl.cluster.cluster import Cluster, Pool, joined
    from megarl.cluster.local_ray import LocalRay, local_ray
    from megarl.reward.build import build_scorer
    from megarl.serving.frozen import models_of, start_frozen

NODE_LOST_S = 600.0


@pytest.mark.slow
@pytest.mark.usefixtures("real_ray")
@pytest.mark.fault(
    "loss of the node of a judge's engine, with a spare node in the Ray cluster",
    "the engine starts on the spare node; the judge gives the same scores",
)
def test_the_engines_of_a_frozen_model_leave_a_lost_node(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", TinyShape(), seed=3)

    async def scenario(nodes: LocalRay, cluster: Cluster) -> None:
        pools = {"judge": Pool(cluster.reserve({"judge": PoolConfig(gpus_per_node=1)})["judge"], 1)}
        config = FrozenRoleConfig(pool="judge", model=tmp_path / "model")
        run = RunConfig(name="test", device="cpu", folder=tmp_path)
        observer = Observer([])
        async with AsyncExitStack() as stack:
            started = await start_frozen(
                {"judge.tiny": config},
                pools,
                stack,
                run=run,
                network=NetworkConfig(),
                observer=observer,
                longest_reply=40,
            )
            scorer = build_scorer(written_question(max_tokens=40), observer=observer, frozen=models_of(started))

            async def scores() -> list[Score]:
                return list((await scorer.score(group_of("4", "12"))).scores)

            before = await scores()
            (engine,) = started["judge.tiny"].fleet.engines
            first = engine.client.endpoint.host
            nodes.kill_node(first)
            async with asyncio.timeout(NODE_LOST_S):
                while not (engine.is_live and engine.client.endpoint.host != first):
                    await asyncio.sleep(0.5)
            assert await scores() == before

    with private_ray():
        nodes = LocalRay(device="cpu", log_folder=tmp_path, has_several_nodes=True)
        with local_ray(nodes, num_slots=0):
            for _ in range(2):
                nodes.start_node(num_slots=1)
            nodes.wait_started()
            with joined(nodes.address):
                cluster = Cluster("cpu")
                try:
                    asyncio.run(scenario(nodes, cluster))
                finally:
                    cluster.release()
