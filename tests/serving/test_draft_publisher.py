"""A draft that has learned reaches all engines, each of its versions once, and no engine waits for it."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from megarl.engine.fleet import Engine
from megarl.engine.lifecycle import EngineState
from megarl.serving.draft_publisher import DraftPublisher
from megarl.system.network import LOOPBACK
from megarl.types import PolicyVersion
from tests.engine.engines import scripted_client, scripted_fleet
from tests.ranks.local_ranks import LocalRanks
from tests.serving.test_publisher import TRANSFER, FakeControl, FakeRanks, Mischief, arrives

OK = httpx.Response(200)


class Scene:
    """Two engines that answer, and the publisher of their drafts; the drafter is at version 4."""

    def __init__(self, mischief: Mischief = arrives) -> None:
        self.calls: list[str] = []
        self.failures: list[str] = []
        self.fleet = scripted_fleet(lambda _: OK, lambda _: OK)
        self.ranks = FakeRanks(self.calls)
        self.publisher = DraftPublisher(
            ranks=LocalRanks(self.ranks, role="drafter"),
            fleet=self.fleet,
            control=FakeControl(self.fleet, self.calls, mischief),
            transfer=lambda: TRANSFER,
            timeout_s=5,
            host=LOOPBACK,
            failed=lambda _, reason: self.failures.append(reason),
        )

    @property
    def states(self) -> list[EngineState]:
        return [engine.state for engine in self.fleet.engines]


async def test_every_version_is_sent_once_and_no_engine_serves_another_policy_for_it() -> None:
    scene = Scene()
    for held in (4, 4, 5):
        scene.ranks.held = held
        await scene.publisher.publish_new()
    assert scene.calls == ["join 0 1", "send", "receive 0 1", "send", "receive 0 1"]
    assert [engine.version for engine in scene.fleet.engines] == [0, 0]
    assert scene.failures == []


async def test_the_draft_of_the_folder_is_in_the_engines_from_their_start() -> None:
    scene = Scene()
    scene.ranks.held = 0
    await scene.publisher.publish_new()
    assert scene.calls == []


async def test_what_does_not_arrive_is_reported_and_sent_with_the_next_publish() -> None:
    is_spoiled = True

    def arrives_or_not(engines: Sequence[Engine]) -> int:
        return 0 if is_spoiled else arrives(engines)

    scene = Scene(arrives_or_not)
    await scene.publisher.publish_new()
    assert scene.calls.count("send") == 4  # to both twice, then to each alone
    assert all("w has digest" in failure for failure in scene.failures)
    assert scene.failures
    assert scene.states == [EngineState.HEALTHY, EngineState.HEALTHY]
    is_spoiled = False
    scene.calls.clear()
    await scene.publisher.publish_new()
    assert scene.calls == ["join 0 1", "send", "receive 0 1"]


async def test_an_engine_that_was_started_again_gets_its_draft_before_the_policy() -> None:
    scene = Scene()
    await scene.publisher.publish_new()
    second = scene.fleet.engines[1]
    scene.fleet.replace_client(second, scripted_client(lambda _: OK, index=1))
    scene.calls.clear()

    async def catch_up(engine: Engine) -> bool:
        scene.calls.append(f"policy {engine.index}")
        return True

    both = scene.publisher.before(catch_up)
    assert await both(second)
    assert await both(second)
    assert scene.calls == ["join 1", "send", "receive 1", "policy 1", "policy 1"]
    await scene.publisher.publish_new()
    assert scene.calls[-1] == "policy 1", "it has what the others have"
    scene.ranks.held = PolicyVersion(5)
    await scene.publisher.publish_new()
    assert scene.calls[-3:] == ["join 0 1", "send", "receive 0 1"]
