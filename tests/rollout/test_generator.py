from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.engine import admin
from megarl.engine.client import EngineClient
from megarl.engine.fleet import Fleet
from megarl.engine.lifecycle import EngineState, Retired
from megarl.errors import DataError, FleetError
from megarl.rollout.following import RequestCounts
from megarl.rollout.generator import evaluation_seed, sampling_seed
from megarl.tokens import SampledTokens
from megarl.types import FinishReason, Prompt, RolloutGroup
from tests.engine.engines import (
    EOS,
    ScriptedEngine,
    ServedModel,
    generator_of,
    prompt_of,
    reply_of,
    scripted,
    scripted_client,
    scripted_fleet,
)


def generate(fleet: Fleet, prompt: Prompt | None = None, *, num_rollouts: int = 1) -> RolloutGroup:
    generator = generator_of(fleet, num_rollouts=num_rollouts)
    return asyncio.run(generator.generate(prompt or prompt_of(5, 6)))


def test_a_group_has_all_rollouts_with_text_versions_and_reasons() -> None:
    engine = ScriptedEngine(reply_of(7, 8, EOS))
    group = generate(scripted_fleet(engine), num_rollouts=3)
    assert len(group.rollouts) == 3
    for rollout in group.rollouts:
        assert rollout.token_ids.tolist() == [7, 8, EOS]
        assert rollout.text == f"7 8 {EOS}"
        assert rollout.versions.tolist() == [0, 0, 0]
        assert rollout.loss_mask.all()
        assert rollout.finish_reason is FinishReason.STOP


def test_what_is_the_same_for_all_tokens_takes_no_memory_for_each() -> None:
    (rollout,) = generate(scripted_fleet(ScriptedEngine(reply_of(7, 8, EOS)))).rollouts
    assert (rollout.versions.strides, rollout.loss_mask.strides) == ((0,), (0,))
    assert (rollout.versions.dtype, rollout.loss_mask.dtype) == (np.dtype(np.int32), np.dtype(np.bool_))
    again = pickle.loads(pickle.dumps(rollout))
    assert (again.versions.tolist(), again.loss_mask.tolist()) == ([0, 0, 0], [True, True, True])


def test_every_rollout_is_a_request_of_its_own_with_its_own_seed() -> None:
    engine = ScriptedEngine(reply_of(EOS))
    generate(scripted_fleet(engine), num_rollouts=4)
    assert len({request["rid"] for request in engine.requests}) == 4  # type: ignore[misc]
    parameters = [request["sampling_params"] for request in engine.requests]
    seeds = {item["sampling_seed"] for item in parameters}  # type: ignore[index]
    assert seeds == {sampling_seed(7, "row-0", epoch=0, index=index) for index in range(4)}
    assert all("n" not in item for item in parameters)  # type: ignore[operator]
    assert all(item["stop_token_ids"] == [EOS] for item in parameters)  # type: ignore[index]


async def test_turns_of_an_episode_name_their_session_and_ask_for_the_tokens_that_were_seen() -> None:
    def echo(reply: httpx.Response, *seen: int) -> httpx.Response:
        return httpx.Response(200, json={**reply.json(), "prompt_token_ids": list(seen)})

    engine = ScriptedEngine(echo(reply_of(7, EOS), 5, 6), echo(reply_of(8, EOS), 5, 6, 9), echo(reply_of(8, EOS), 5, 6))
    fleet = scripted_fleet(engine)
    fleet.requests = counts = RequestCounts()
    generator, prompt = generator_of(fleet), prompt_of(5, 6)

    async def play(index: int, *history: int) -> SampledTokens:
        token_ids = np.array(history, np.int32)
        return await generator.turns(prompt, index).sample(token_ids, max_tokens=12, row=0)

    assert (await play(3, 5, 6)).token_ids.tolist() == [7, EOS]
    # The second reply is to other tokens: it is asked for again.
    assert (await play(3, 5, 6)).token_ids.tolist() == [8, EOS]
    await play(4, 5, 6)
    sessions = [request["session_id"] for request in engine.requests]
    assert sessions == [sessions[0]] * 3 + [sessions[3]]
    assert sessions[3] != sessions[0]
    assert all(request["return_prompt_token_ids"] for request in engine.requests)
    assert counts.causes == {"BadReplyError": 1}


def test_seeds_depend_on_run_prompt_epoch_and_rollout_and_fit_an_engine() -> None:
    seeds = {
        sampling_seed(run, uid, epoch=epoch, index=index)
        for run in (1, 2)
        for uid in ("a", "b")
        for epoch in (0, 1)
        for index in (0, 1)
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sampling_seed(1, "a", epoch=0, index=0) == 3707216131063291683


def test_an_evaluation_throws_other_dice_than_training() -> None:
    seeds = {evaluation_seed(1), evaluation_seed(2), 1, 2}
    assert len({sampling_seed(seed, "a", epoch=0, index=0) for seed in seeds}) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.fault("answers that are no answers", "refused and asked of another engine")
@pytest.mark.fault("replies that no engine should give", "retried and counted, never trained on, never a crash")
@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (reply_of(7, 8, kind="abort"), "BadReplyError"),
        (reply_of(7, 99, EOS), "BadReplyError"),
        (reply_of(7, 8, EOS, version="3"), "WrongVersionError"),
        (httpx.Response(200, content=b"not json"), "BadReplyError"),
        (httpx.Response(500, content=b"out of memory"), "EngineError"),
        (httpx.ReadTimeout("late"), "EngineError"),
        (httpx.RemoteProtocolError("disconnected"), "EngineError"),
    ],
    ids=["aborted", "bad id", "other version", "no json", "status 500", "late", "disconnected"],
)
def test_a_bad_answer_is_counted_and_tried_again_on_another_engine(
    bad: httpx.Response | httpx.HTTPError, cause: str
) -> None:
    """tests/engine has all kinds of them: test_reply.py for what is in a reply, test_client.py for how it comes."""
    first, second = ScriptedEngine(bad), ScriptedEngine(reply_of(9, EOS))
    fleet = scripted_fleet(first, second)
    fleet.requests = retries = RequestCounts()
    group = generate(fleet)
    assert group.rollouts[0].token_ids.tolist() == [9, EOS]
    assert retries.causes == {cause: 1}
    assert len(first.requests) == len(second.requests) == 1
    # The same seed at every attempt: a retry changes nothing about the run.
    assert first.requests[0]["sampling_params"] == second.requests[0]["sampling_params"]


def test_after_the_last_attempt_the_error_has_every_reason() -> None:
    engine = ScriptedEngine(reply_of(7, kind="abort"), reply_of(99, EOS), httpx.Response(500, content=b"broken"))
    with pytest.raises(FleetError, match=r"3 attempts failed: .*aborted.*token id 99.*status 500: broken"):
        generate(scripted_fleet(engine))


@pytest.mark.parametrize(
    ("engine", "state"),
    [
        (ScriptedEngine(httpx.ConnectError("refused"), is_healthy=False), EngineState.DEAD),
        pytest.param(
            ScriptedEngine(reply_of(EOS, version="3")),
            EngineState.STALE,
            marks=pytest.mark.fault("an engine that serves other weights", "stale: no request until it has caught up"),
        ),
    ],
    ids=["gone", "other weights"],
)
def test_an_engine_that_cannot_be_used_gets_nothing_more(engine: ScriptedEngine, state: EngineState) -> None:
    fleet = scripted_fleet(engine, ScriptedEngine(reply_of(EOS)))
    generate(fleet)
    generate(fleet, num_rollouts=4)
    assert len(engine.requests) == 1
    assert fleet.engines[0].state is state


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "has no tokens"),
        ([5, 99], "token id 99 is not in the vocabulary of 99"),
        ([-1, 5], "token id -1 is not in the vocabulary"),
        ([5] * 501, "501 tokens and a response of up to 12 exceed the context of 512"),
    ],
)
def test_a_prompt_that_would_end_an_engine_is_never_sent(token_ids: Sequence[int], message: str) -> None:
    engine = ScriptedEngine(reply_of(EOS))
    with pytest.raises(DataError, match=f"prompt row-0.*{message}"):
        generate(scripted_fleet(engine), prompt_of(*token_ids))
    assert not engine.requests


def many_prompts(count: int) -> list[Prompt]:
    random = np.random.default_rng(0)
    return [
        prompt_of(*random.integers(3, 99, size=random.integers(1, 30)).tolist(), uid=f"row-{index}")
        for index in range(count)
    ]


def rollouts_of(groups: Sequence[RolloutGroup]) -> dict[str, tuple[list[int], list[float]]]:
    return {
        group.prompt.uid: (group.rollouts[0].token_ids.tolist(), group.rollouts[0].logprobs.tolist())
        for group in groups
    }


async def test_a_rollout_is_the_same_alone_reordered_and_among_many(served: ServedModel) -> None:
    prompts = many_prompts(32)
    async with served.fleet() as fleet:
        generator = generator_of(fleet, max_response_tokens=16)

        async def together(chosen: Sequence[Prompt]) -> dict[str, tuple[list[int], list[float]]]:
            return rollouts_of(await asyncio.gather(*(generator.generate(prompt) for prompt in chosen)))

        among = await together(prompts)
        assert await together(prompts[::-1]) == among
        for prompt in prompts[:4]:
            assert (await together([prompt]))[prompt.uid] == among[prompt.uid]
    assert len({tuple(token_ids) for token_ids, _ in among.values()}) > 16


async def test_log_probabilities_are_those_of_transformers(served: ServedModel) -> None:
    temperature = 0.7

    async with served.fleet() as fleet:
        generator = generator_of(fleet, num_rollouts=4, temperature=temperature, max_response_tokens=24)
        group = await generator.generate(prompt_of(5, 17, 33, 90, 8))
    model = AutoModelForCausalLM.from_pretrained(served.folder, dtype=torch.float32).eval()
    for rollout in group.rollouts:
        ids = torch.tensor([[5, 17, 33, 90, 8, *rollout.token_ids.tolist()]])
        with torch.no_grad():
            logprobs = (model(ids).logits[0, 4:-1] / temperature).log_softmax(-1)
        expected = logprobs.gather(1, ids[0, 5:, None])[:, 0].numpy()
        np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-4)


async def test_greedy_rollouts_are_the_likeliest_tokens(qwen2_tp1: ServedModel) -> None:
    async with qwen2_tp1.fleet() as fleet:
        (rollout,) = (await generator_of(fleet, temperature=0.0).generate(prompt_of(5, 17, 33))).rollouts
    model = AutoModelForCausalLM.from_pretrained(qwen2_tp1.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[5, 17, 33, *rollout.token_ids.tolist()]])).logits[0, 2:-1]
    assert rollout.token_ids.tolist() == logits.argmax(-1).tolist()


async def test_responses_end_with_their_end_token_or_at_the_limit(qwen2_tp1: ServedModel) -> None:
    async with qwen2_tp1.fleet() as fleet:
        group = await generator_of(fleet, num_rollouts=48, max_response_tokens=100).generate(prompt_of(5, 6))
    reasons = {rollout.finish_reason for rollout in group.rollouts}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    for rollout in group.rollouts:
        if rollout.finish_reason is FinishReason.STOP:
            assert rollout.token_ids[-1] == EOS
        else:
            assert len(rollout.token_ids) == 100


class SlowEngine:
    """Generates one token per `token_s` seconds of a given response, and returns those it has when it is aborted."""

    def __init__(self, *response: int, token_s: float) -> None:
        self.requests: list[dict[str, Any]] = []
        self._response = response
        self._token_s = token_s
        self._aborted: dict[str, asyncio.Event] = {}

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or b"{}")
        match request.url.path:
            case "/abort_request":
                for rid, aborted in self._aborted.items():
                    if body.get("abort_all") or rid == body.get("rid"):
                        aborted.set()
                return httpx.Response(200, json={})
            case "/generate":
                self.requests.append(body)
                return await self._generate(body)
            case _:
                return httpx.Response(200)

    async def _generate(self, body: dict[str, Any]) -> httpx.Response:
        aborted = self._aborted[body["rid"]] = asyncio.Event()
        given = body["input_ids"][2:]
        assert given == list(self._response[: len(given)]), "a continuation begins with the tokens that were kept"
        tokens: list[int] = []
        for token_id in self._response[len(given) :]:
            with suppress(TimeoutError):
                await asyncio.wait_for(aborted.wait(), self._token_s)
                return reply_of(*tokens, kind="abort")
            tokens.append(token_id)
        return reply_of(*tokens)


def late_fleet(*engines: SlowEngine, request_timeout_s: float) -> Fleet:
    clients = [
        EngineClient(
            scripted_client(engine, index=index).endpoint,
            request_timeout_s=request_timeout_s,
            send=scripted(engine),
        )
        for index, engine in enumerate(engines)
    ]
    return Fleet(clients, max_outstanding=8, publish_timeout_s=5)


@pytest.mark.patient
@pytest.mark.fault("a response that takes longer than a request may", "its tokens are kept and another continues it")
def test_a_late_response_keeps_its_tokens_and_is_continued_elsewhere() -> None:
    response = (*range(10, 20), EOS)
    engines = [SlowEngine(*response, token_s=0.1) for _ in range(2)]
    fleet = late_fleet(*engines, request_timeout_s=0.6)
    fleet.requests = retries = RequestCounts()
    (rollout,) = generate(fleet).rollouts
    assert rollout.token_ids.tolist() == list(response)
    assert (len(rollout.logprobs), rollout.versions.tolist()) == (11, [0] * 11)
    assert rollout.finish_reason is FinishReason.STOP
    assert set(retries.causes) == {"late"}
    requests = [*engines[0].requests, *engines[1].requests]
    assert all(engine.requests for engine in engines), "another engine goes on"
    assert len({request["sampling_params"]["sampling_seed"] for request in requests}) == 1
    # Each asks only for what is missing.
    assert all(
        request["sampling_params"]["max_new_tokens"] + len(request["input_ids"]) == 2 + 12 for request in requests
    )
    assert [engine.state for engine in fleet.engines] == [EngineState.HEALTHY] * 2


@pytest.mark.fault("an engine that the operator retires", "its requests keep their tokens and go on elsewhere")
async def test_a_retired_engine_hands_its_responses_over() -> None:
    response = (*range(10, 20), EOS)
    engines = [SlowEngine(*response, token_s=0.1) for _ in range(2)]
    fleet = late_fleet(*engines, request_timeout_s=60)

    generating = asyncio.create_task(generator_of(fleet).generate(prompt_of(5, 6)))
    await asyncio.sleep(0.55)
    fleet.report(fleet.engines[0], Retired())
    await admin.abort_all(fleet.engines[0].client)
    (rollout,) = (await generating).rollouts
    assert rollout.token_ids.tolist() == list(response)
    assert len(engines[0].requests) == len(engines[1].requests) == 1
    # Some tokens were kept: the other engine was not asked for all of them.
    assert len(engines[1].requests[0]["input_ids"]) > 2


def test_a_response_that_does_not_get_on_is_a_failure() -> None:
    engine = SlowEngine(*range(10, 20), EOS, token_s=30)
    with pytest.raises(FleetError, match=r"3 attempts failed: 0 tokens at its deadline \(roles\.rollout\.request_t"):
        generate(late_fleet(engine, request_timeout_s=0.2))


async def test_a_late_response_of_a_real_engine_is_that_of_a_patient_one(qwen2_tp1: ServedModel) -> None:
    """The tokens of every position follow from the seed, so that a cut changes nothing."""

    async with qwen2_tp1.fleet() as fleet:
        patient = await generator_of(fleet, num_rollouts=4, max_response_tokens=400).generate(prompt_of(5, 6))
        began = time.monotonic()
        await generator_of(fleet, num_rollouts=4, max_response_tokens=400).generate(prompt_of(5, 6))
        seconds = time.monotonic() - began
        impatient = Fleet(
            [EngineClient(qwen2_tp1.process.endpoint, request_timeout_s=seconds / 3)],
            max_outstanding=8,
            publish_timeout_s=60,
        )
        impatient.requests = retries = RequestCounts()
        try:
            generator = generator_of(impatient, num_rollouts=4, max_response_tokens=400, max_attempts=50)
            hasty = await generator.generate(prompt_of(5, 6))
        finally:
            await impatient.close()
    assert "late" in retries.causes
    for before, after in zip(patient.rollouts, hasty.rollouts, strict=True):
        assert after.token_ids.tolist() == before.token_ids.tolist()
        np.testing.assert_allclose(after.logprobs, before.logprobs, atol=1e-4)
        assert after.finish_reason is before.finish_reason
