"""Judges and reward models in the world: a policy that writes anything, and engines that answer with anything.

The package's own question, tokenizer, fleet and checks of replies run; simulated are the engines.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import aiohttp

from megarl.config.reward import EngineJudgeRewardConfig, RewardModelRewardConfig
from megarl.data.tokenizer import Tokenizer
from megarl.engine.client import EngineClient, EngineEndpoint, EngineKeys
from megarl.engine.fleet import Fleet
from megarl.engine.http import HttpReply
from megarl.errors import ScoreError
from megarl.observe.observer import Observer
from megarl.reward.judge import EngineJudgeBackend, RewardModelBackend
from megarl.reward.pool import MachineFaultError
from megarl.reward.protocol import Request
from megarl.rollout.frozen import FrozenEngines
from megarl.types import PolicyVersion
from tests.engine.engines import one_by_one
from tests.episodes.templates import family_tokenizer
from tests.simulation import hostile
from tests.simulation.fleets import play_alone
from tests.simulation.sample_run import sample_shape

_RESPONSES = 4
_ANSWERS = {"yes": 1.0, "no": 0.0, "maybe": 0.5}
_PLAIN = "seven"


@cache
def _tokenizer() -> Tokenizer:
    with TemporaryDirectory(prefix="megarl-world-") as folder:
        return family_tokenizer(Path(folder), "qwen2.5", tools=())


class _Uncounted(Observer):
    def __init__(self) -> None:
        pass

    def judge_addressed(self, num_responses: int = 1) -> None:
        pass


@dataclass(eq=False)
class Bench:
    """Responses of one policy and what their judge is asked."""

    seed: int
    chance: random.Random = field(init=False)
    num_controls: list[int] = field(default_factory=list)
    """Control tokens of each request that an engine got."""
    num_nonsense: int = 0
    broken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    async def send(self, _method: str, url: str, _headers: Mapping[str, str], content: bytes | None) -> HttpReply:
        await asyncio.sleep(self.chance.random())
        body = json.loads(content) if content else {}
        if "input_ids" not in body:
            return HttpReply(status_code=200, content=b"{}")
        added = _tokenizer()._inner.added_tokens_decoder
        self.num_controls.append(sum(token_id in added for token_id in body["input_ids"]))
        if self.chance.random() < 0.1:
            self.num_nonsense += 1
            return self._nonsense(body)
        return HttpReply(status_code=200, content=json.dumps(self._reply(body)).encode())

    def _reply(self, body: dict[str, Any]) -> dict[str, Any]:
        meta: dict[str, Any] = {"id": body["rid"], "prompt_tokens": len(body["input_ids"])}
        if "sampling_params" not in body:
            return {"embedding": [self.chance.uniform(-3.0, 3.0)], "meta_info": meta}
        if "token_ids_logprob" in body:
            labels = [[-self.chance.random(), label, None] for label in body["token_ids_logprob"]]
            return {"meta_info": {**meta, "output_token_ids_logprobs": [labels]}}
        chosen = self.chance.choice((*_ANSWERS, hostile.text(self.chance)))
        (ids,) = _tokenizer().encode([json.dumps({"reasoning": hostile.text(self.chance), "answer": chosen})])
        return {"output_ids": ids.tolist(), "meta_info": {**meta, "finish_reason": {"type": "stop"}}}

    def _nonsense(self, body: dict[str, Any]) -> HttpReply:
        good, kind = self._reply(body), self.chance.randrange(5)
        if kind == 0:
            raise aiohttp.ServerDisconnectedError
        if kind == 1:
            return HttpReply(status_code=500, content=hostile.text(self.chance).encode(errors="replace"))
        if kind == 2:
            good["meta_info"]["id"] = "another request"
        elif kind == 3:
            good["embedding"] = [hostile.number(self.chance)]
            good["output_ids"] = [10**12]
        else:
            good["meta_info"] = hostile.value(self.chance)
        return HttpReply(status_code=200, content=json.dumps(good).encode())

    async def play(self) -> None:
        fleet = Fleet([self._client(index) for index in range(2)], max_outstanding=4, publish_timeout_s=60.0)
        await fleet.committed(PolicyVersion(0), fleet.engines)
        model = FrozenEngines(
            fleet, _tokenizer(), sample_shape(max_context_tokens=1 << 14), role="judge.sim", max_attempts=3
        )
        judge = self._judge(model)
        expected = await self._asked(judge, _PLAIN)
        for _ in range(_RESPONSES):
            response = hostile.response(self.chance, "add", 1)
            for count in (await self._asked(judge, response))[:1]:
                if expected and count != expected[0]:
                    self.broken.append(f"no foreign control token: the judge of {response!r} got {count - expected[0]}")
        await fleet.close()

    def _judge(self, model: FrozenEngines) -> RewardModelBackend | EngineJudgeBackend:
        if self.chance.random() < 0.3:
            return RewardModelBackend(RewardModelRewardConfig(kind="reward_model"), model, _Uncounted())
        template, max_tokens = "Is {response} right for {prompt}?", self.chance.choice((None, 512))
        config = EngineJudgeRewardConfig(
            kind="engine_judge", template=template, answers=_ANSWERS, max_tokens=max_tokens, is_expected=True
        )
        return EngineJudgeBackend(config, model, _Uncounted())

    async def _asked(self, judge: RewardModelBackend | EngineJudgeBackend, response: str) -> list[int]:
        """Return the control tokens of the requests about a response, and look at its score."""
        self.num_controls, before = [], self.num_nonsense
        messages = [{"role": "user", "content": "3+4="}]
        request = cast(
            "Request", {"solution_str": response, "response": response, "prompt": "3+4=", "messages": messages}
        )
        try:
            (answer,) = await judge.answers([request])
            if not abs(answer["score"]) <= 3.0:
                self.broken.append(f"numbers are finite: {answer['score']!r}")
        except MachineFaultError as error:
            if self.num_nonsense == before:
                self.broken.append(f"no text loses a score: {error}")
        except ScoreError:
            pass  # the judge wrote no answer of the recipe's
        return self.num_controls

    def _client(self, index: int) -> EngineClient:
        keys = EngineKeys(api="api-key", admin="admin-key")
        endpoint = EngineEndpoint(index=index, host="sim", port=30000 + index, tensor=1, device="cpu", keys=keys)
        return EngineClient(endpoint, request_timeout_s=20.0, send=one_by_one(self.send))


def run_judge(seed: int) -> Bench:
    """Return a judge's history with what it broke."""
    bench = Bench(seed)
    play_alone(seed, "worker", bench.play, survives="one response ends no run", broken=bench.broken)
    return bench
