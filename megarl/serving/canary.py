"""A canary: after some publishes the engines' log-probabilities are compared with the trainer's.

Digests show that the bytes arrived; the canary shows that the engine computes with them. Each engine answers a fixed
prompt with a few tokens, the trainer computes their log-probabilities, and an engine that differs is stale. Where
training follows the engine's experts, so does the comparison: one expert that rounding exchanges changes every token
after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

import numpy as np

from megarl.config.recipe import Recipe
from megarl.engine.client import GenerateRequest
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.reply import Expectation, Response, read_response
from megarl.errors import EngineError, WeightSyncError
from megarl.families.shape import ModelShape
from megarl.routes import RouteRequest
from megarl.stages import Phases
from megarl.tokens import Content
from megarl.types import FloatArray, PolicyVersion, Rollout, TokenArray, TrainSample

logger = logging.getLogger(__name__)

LogprobsOf: TypeAlias = Callable[[Sequence[TrainSample]], Awaitable[tuple[FloatArray, ...]]]
"""Returns the trainer's log-probabilities of every token of the samples' responses."""

TOLERANCES: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1, "fp8": 0.5}
"""Allowed median difference of log-probabilities, by the dtype of both or the engine's precision: wrong weights or
scales differ by several units at every token, kernels now and then at one that neither side expects. Both sides round
logits to bfloat16, those from 16 to 32 to eighths: on an H200 healthy runs of a 135M model had medians of 0.02 to
0.101, and in FP8 five tokens differed by 0.503 in the mean."""

MAX_PROMPT_TOKENS = 16
MAX_RESPONSE_TOKENS = 8
_TOKEN_STEP = 7919
"""A prime, so that the prompt's tokens are spread over the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryProbe:
    """The request that every engine gets."""

    prompt_ids: TokenArray  # [P]
    max_response_tokens: int
    temperature: float
    """The temperature that the trainer divides its logits by."""
    vocab: int
    eos_ids: tuple[int, ...]
    dtype: str
    routes: RouteRequest | None = None
    """Requests the experts that the trainer follows; None where its router chooses."""

    @classmethod
    def of(cls, recipe: Recipe, shape: ModelShape, *, eos_ids: tuple[int, ...], dtype: str) -> CanaryProbe:
        """Return a probe within the length limits of the run."""
        num_tokens = min(MAX_PROMPT_TOKENS, recipe.data.max_prompt_tokens)
        routes = None
        if shape.routes is not None and recipe.replays_routing(shape):
            routes = RouteRequest(shape=shape.routes, first=0, num_sent=num_tokens)
        return cls(
            prompt_ids=(np.arange(1, num_tokens + 1, dtype=np.int64) * _TOKEN_STEP % shape.vocab).astype(np.int32),
            max_response_tokens=min(MAX_RESPONSE_TOKENS, recipe.sampling.max_response_tokens),
            temperature=recipe.sampling.temperature if recipe.algorithm.needs.has_engines else 1.0,
            vocab=shape.vocab,
            eos_ids=eos_ids,
            dtype=dtype,
            routes=routes,
        )

    def request(self, version: PolicyVersion, adapter: str | None) -> GenerateRequest:
        return GenerateRequest(
            rid=f"canary-{version}",
            adapter=adapter,
            input_ids=tuple(self.prompt_ids.tolist()),
            max_new_tokens=self.max_response_tokens,
            temperature=self.temperature,
            stop_token_ids=self.eos_ids,
            sampling_seed=int(version),
            routes=self.routes,
        )

    def sample(self, response: Response) -> TrainSample:
        num_tokens = len(response.token_ids)
        rollout = Rollout(
            content=Content(token_ids=response.token_ids, logprobs=response.logprobs, text="", routes=response.routes),
            versions=response.versions,
            loss_mask=np.ones(num_tokens, np.bool_),
            finish_reason=response.finish_reason,
        )
        return TrainSample(prompt_ids=self.prompt_ids, rollout=rollout, advantages=np.zeros(num_tokens, np.float32))


@dataclass(eq=False)
class Canary:
    """Compares the live engines of a fleet with the trainer."""

    fleet: Fleet
    _: KW_ONLY
    probe: CanaryProbe
    logprobs: LogprobsOf
    phases: Phases
    warn: Callable[[str], None]
    every: int = 1
    """The first and then every `every`-th publish is checked."""

    async def check(self, version: PolicyVersion) -> None:
        """Mark the engines that differ from the trainer as stale; WeightSyncError if all do."""
        engines = [engine for engine in self.fleet.engines if engine.is_live]
        reasons = await self.differences(engines, version)
        for engine in engines:
            if engine.index in reasons:
                reason = reasons[engine.index]
                await self.fleet.mark_stale(engine, reason)
                self.warn(f"{reason}; it gets no request until the next publish reaches it")
        if engines and len(reasons) == len(engines):
            raise WeightSyncError(
                f"version {version}: no engine computes what the trainer computes: {'; '.join(reasons.values())}; "
                "megarl diagnose mismatch finds the module; roles.rollout.canary_every: null disables the check"
            )

    async def differences(
        self, engines: Sequence[Engine], version: PolicyVersion, adapter: str | None = None
    ) -> dict[int, str]:
        """Return the reason for each engine, by index, that does not compute what the trainer computes.

        Without the name of an `adapter` each engine computes with the one that it serves.
        """
        async with self.phases.generating():
            answers = await asyncio.gather(
                *(self._send(engine, version, adapter or engine.serves().adapter) for engine in engines)
            )
        answered = [
            (engine, answer) for engine, answer in zip(engines, answers, strict=True) if isinstance(answer, Response)
        ]
        async with self.phases.comparing():
            trained = await self.logprobs([self.probe.sample(answer) for _, answer in answered])
        reasons = {
            engine.index: str(answer)
            for engine, answer in zip(engines, answers, strict=True)
            if isinstance(answer, EngineError)
        }
        for (engine, answer), of_trainer in zip(answered, trained, strict=True):
            reason = self._compare(answer, of_trainer)
            if reason is not None:
                reasons[engine.index] = f"{engine}: {reason}"
        return {index: f"canary at version {version}: {reason}" for index, reason in reasons.items()}

    async def _send(self, engine: Engine, version: PolicyVersion, adapter: str | None) -> Response | EngineError:
        probe = self.probe
        expected = Expectation(
            vocab=probe.vocab,
            max_response_tokens=probe.max_response_tokens,
            eos_ids=frozenset(probe.eos_ids),
            version=version,
            newest_version=version,
            base_version=None if adapter is None else PolicyVersion(0),
            routes=probe.routes,
        )
        try:
            reply = await engine.client.generate(probe.request(version, adapter))
            return read_response(reply.content, expected)
        except EngineError as error:
            return error

    def _compare(self, answer: Response, of_trainer: FloatArray) -> str | None:
        difference = float(np.median(np.abs(answer.logprobs - of_trainer)))
        tolerance = TOLERANCES[self.probe.dtype]
        logger.info("canary difference=%.3g tolerance=%g", difference, tolerance)
        # Not `>`: NaN must count as a difference.
        if difference <= tolerance:
            return None
        return (
            f"log-probabilities of {len(of_trainer)} tokens differ from the trainer's by {difference:.3g} (median), "
            f"at most {tolerance:g} is allowed in {self.probe.dtype}"
        )
