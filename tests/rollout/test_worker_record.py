"""The driver's record of a rollout worker, with a host that only writes down the calls it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from megarl.cluster.local_ray import private_ray
from megarl.config.reward import ExactRewardConfig
from megarl.data.group_encoding import ContentArrays
from megarl.engine.fleet import Fleet
from megarl.errors import QuarantineError
from megarl.rollout.following import FollowingFleet, WorkerReport
from megarl.rollout.task import AnsweredPrompt, RolloutTask, Sampling
from megarl.types import PolicyVersion, Prompt
from tests.observe.samples import scored_group
from tests.rollout.endpoints import ENDPOINTS, connect

with private_ray():
    from megarl.rollout.host import (
        REPORT_EVERY_S,
        DeliveredGroup,
        Delivery,
        FailedAnswer,
        PromptChanges,
        WorkerSetup,
        gather_s,
    )
    from megarl.rollout.workers import GATHER_S, WorkerLostError, WorkerRecord

TASK = RolloutTask(sampling=Sampling.greedy(max_response_tokens=8), seed=1)
SETUP = WorkerSetup(
    index=5,
    node="node",
    own=(0,),
    model_folder=Path(),
    shape=cast("object", None),  # type: ignore[arg-type]
    reward=ExactRewardConfig(kind="exact"),
    episodes=None,
    num_on_node=1,
    num_workers=1,
    log_path=Path(),
    max_outstanding=2,
    max_attempts=3,
    publish_timeout_s=60,
    request_timeout_s=60,
    silence_timeout_s=60,
)
REPORT = WorkerReport(
    complaints=(),
    probes=(),
    answered={},
    num_requests={},
    adapters={},
    retries={},
    num_prompt_tokens=0,
    num_cached_tokens=0,
    num_drafted_tokens=0,
    num_draft_passes=0,
    score_seconds=(),
    failed_scores={},
    num_addressed=0,
    judges=(),
)


class Host:
    def __init__(self) -> None:
        self.asked: list[Mapping[int, Prompt]] = []
        self.dropped: list[tuple[int, ...]] = []
        self.take = SimpleNamespace(remote=self._take)

    def _take(self, changes: PromptChanges) -> None:
        self.asked += [prompts for _, prompts in changes.added]
        self.dropped += [changes.cancelled] if changes.cancelled else []


def link(fleet: Fleet, host: Host) -> WorkerRecord:
    return WorkerRecord(setup=SETUP, engines=fleet.engines, host=host, is_reporting=True)


def fleet() -> Fleet:
    return Fleet([connect(endpoint) for endpoint in ENDPOINTS[:1]], max_outstanding=2, publish_timeout_s=60)


async def test_prompts_of_one_moment_are_one_call_and_answers_find_those_who_wait() -> None:
    groups = [scored_group([0.0, 1.0], lengths=[2, 4], number=number) for number in range(3)]
    with_tokens = tuple(replace(score, tokens=(0.5, 0.25)) for score in groups[0].scores)
    groups[0] = replace(groups[0], scores=with_tokens)
    stored_groups = (groups[2].group, groups[0].group)
    arrays = ContentArrays.of([each.content.load() for group in stored_groups for each in group.rollouts])

    host = Host()
    worker = link(fleet(), host)
    asked = [asyncio.ensure_future(worker.ask(scored.group.prompt, TASK)) for scored in groups]
    while not host.asked:
        await asyncio.sleep(0.01)
    ((numbers),) = host.asked
    assert list(numbers.values()) == [scored.group.prompt for scored in groups]
    first, second, third = numbers
    answers = (
        (third, DeliveredGroup.of(AnsweredPrompt(scored=groups[2], seconds=1.0))),
        (second, FailedAnswer(error=QuarantineError("no answer"), detail="")),
        (first, DeliveredGroup.of(AnsweredPrompt(scored=groups[0], seconds=1.0))),
    )
    reference = cast("object", None)
    worker.take(Delivery(report=REPORT, answers=answers, node="node"), reference)
    with pytest.raises(QuarantineError, match="no answer"):
        await asked[1]
    for place, begin in ((0, 2), (2, 0)):
        scored = (await asked[place]).scored
        assert scored.scores == groups[place].scores
        for index, (found, wanted) in enumerate(zip(scored.group.rollouts, groups[place].group.rollouts, strict=True)):
            np.testing.assert_array_equal(found.versions, wanted.versions)
            np.testing.assert_array_equal(found.loss_mask, wanted.loss_mask)
            stored, where = found.content.locate()
            assert where == begin + index
            assert len(arrays.content(where).token_ids) == wanted.num_tokens
            assert stored is not None


async def test_prompts_that_wait_go_with_the_next_call_and_only_with_it() -> None:
    prompt = scored_group([0.0], lengths=[2]).group.prompt

    host = Host()
    worker = link(fleet(), host)
    asked = asyncio.ensure_future(worker.ask(prompt, TASK))
    await asyncio.sleep(0)
    ((task, prompts),) = worker.changes().added
    assert (task, list(prompts.values())) == (TASK, [prompt])
    await asyncio.sleep(5 * GATHER_S)
    assert host.asked == []
    worker.lose("killed")
    with pytest.raises(WorkerLostError):
        await asked


async def test_prompts_wait_for_the_next_report_while_none_is_under_way() -> None:
    prompts = [scored_group([0.0], lengths=[2], number=number).group.prompt for number in range(2)]

    host = Host()
    worker = link(fleet(), host)
    worker.is_reporting = False
    asked = [asyncio.ensure_future(worker.ask(prompt, TASK)) for prompt in prompts]
    await asyncio.sleep(5 * GATHER_S)
    assert host.asked == []
    ((_, told),) = worker.changes().added
    assert list(told.values()) == prompts
    worker.lose("killed")
    await asyncio.gather(*asked, return_exceptions=True)


def test_answers_wait_for_others_as_long_as_engines_have_prompts_and_in_proportion_to_their_time() -> None:
    assert gather_s(400.0, num_done=1, num_open=0, least_s=0.5) == 0
    assert gather_s(400.0, num_done=16, num_open=32, least_s=0.5) == 0
    assert gather_s(0.1, num_done=1, num_open=32, least_s=0.5) == 0.5
    assert gather_s(50.0, num_done=1, num_open=32, least_s=0.5) == pytest.approx(2.0)
    assert gather_s(4000.0, num_done=1, num_open=32, least_s=0.5) == REPORT_EVERY_S


async def test_a_lost_worker_ends_its_prompts_and_a_cancelled_prompt_is_told() -> None:
    prompt = scored_group([0.0], lengths=[2]).group.prompt

    host = Host()
    worker = link(fleet(), host)
    kept, dropped = (asyncio.ensure_future(worker.ask(prompt, TASK)) for _ in range(2))
    while not host.asked:
        await asyncio.sleep(0.01)
    dropped.cancel()
    while not host.dropped:
        await asyncio.sleep(0.01)
    assert host.dropped == [(list(host.asked[0])[1],)]
    worker.lose("killed")
    with pytest.raises(WorkerLostError, match="killed"):
        await kept


async def test_an_adapter_is_held_until_the_worker_uses_another_and_no_request_has_it() -> None:
    drivers = fleet()
    (engine,) = drivers.engines
    worker = link(drivers, Host())
    following = FollowingFleet(
        ENDPOINTS[:1], connect=connect, lent=frozenset(), max_outstanding=2, publish_timeout_s=60
    )

    async def report() -> None:
        worker.note_adapters(await following.report(within_s=0))

    async def tell(name: str, number: int) -> None:
        await drivers.committed(PolicyVersion(number), [engine], adapter=name)
        view = worker.view_of(engine, number=number)
        assert view is not None
        await following.follow([view])

    await tell("policy@1", 1)
    async with following.fleet.lease() as leased:
        assert leased.serves().adapter == "policy@1"
        stale = await following.report(within_s=0)
        await tell("policy@2", 2)
        worker.note_adapters(replace(stale, adapters={0: (0, ())}))  # made before it knew any
        assert engine.held_adapters == {"policy@1", "policy@2"}
        await report()
        assert engine.held_adapters == {"policy@1", "policy@2"}
    await report()
    assert engine.held_adapters == {"policy@2"}
    worker.lose("killed")
    assert engine.held_adapters == set()
    await drivers.close()
