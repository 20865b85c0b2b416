"""Prompts in, checked rollout groups out, from whichever engines are live. Knows no weights and no processes.

A rollout is a function of (weights, prompt, seed): it does not matter which engine makes it, when, or at which attempt.
The dice of a token are those of (seed, position). So one that is interrupted by a publish goes on with the same seed:
no dice are thrown twice for tokens it keeps, and which weights meet which dice is all that depends on timing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from uuid import uuid4

import numpy as np

from megarl.config.model import ModelShape
from megarl.config.recipe import SampledEvaluationConfig, SamplingConfig
from megarl.data.tokenizer import Tokenizer
from megarl.errors import DataError, EngineError, FleetError
from megarl.rollout.client import GenerateRequest
from megarl.rollout.fleet import Engine, EngineLostError, Fleet
from megarl.rollout.in_flight import Pauses
from megarl.rollout.reply import BadReplyError, Expectation, Response, WrongVersionError, read_response
from megarl.system.faults import reach
from megarl.types import FinishReason, Prompt, Rollout, RolloutGroup, TokenArray

logger = logging.getLogger(__name__)


_NEARLY_ZERO = 1e-4
"""A temperature at which a token that is 0.01 nats behind is never chosen, and that SGLang does not take for zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How responses are drawn, and how many per prompt."""

    num_rollouts: int
    temperature: float
    top_p: float
    top_k: int | None
    max_response_tokens: int

    @classmethod
    def of(cls, config: SamplingConfig | SampledEvaluationConfig, *, max_response_tokens: int) -> Sampling:
        return cls(
            num_rollouts=config.rollouts_per_prompt,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_response_tokens=max_response_tokens,
        )

    @classmethod
    def greedy(cls, *, max_response_tokens: int) -> Sampling:
        """The likeliest token each time: one rollout. Not beside rollouts that are sampled: see `nearly_greedy`."""
        return cls(num_rollouts=1, temperature=0.0, top_p=1.0, top_k=None, max_response_tokens=max_response_tokens)

    @classmethod
    def nearly_greedy(cls, *, max_response_tokens: int) -> Sampling:
        """The likeliest token but for ties, and sampled like any other.

        One greedy request sends SGLang's whole batch another way, in which seeds mean other tokens: then what the
        others sample would depend on who is in their batch.
        """
        return replace(cls.greedy(max_response_tokens=max_response_tokens), temperature=_NEARLY_ZERO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What the generator has to know of the tokenizer and the model."""

    size: int
    """Rows of the embedding: every token id is below it."""
    eos_ids: tuple[int, ...]
    max_context_tokens: int
    decode: Callable[[TokenArray], str]
    """The text of a response."""

    @classmethod
    def of(cls, shape: ModelShape, tokenizer: Tokenizer) -> Vocabulary:
        return cls(
            size=shape.vocab,
            eos_ids=tokenizer.eos_ids,
            max_context_tokens=shape.max_context_tokens,
            decode=tokenizer.decode_response,
        )


class FleetGenerator:
    """The Generator of a run (see `stages`). The fleet bounds how many requests are out at a time."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        sampling: Sampling,
        vocabulary: Vocabulary,
        seed: int,
        max_attempts: int,
        pauses: Pauses | None = None,
    ) -> None:
        """With `pauses`, weights may change under a request."""
        self._fleet = fleet
        self._sampling = sampling
        self._vocabulary = vocabulary
        self._seed = seed
        self._max_attempts = max_attempts
        self._pauses = pauses

    async def generate(self, prompt: Prompt) -> RolloutGroup:
        """All rollouts of one prompt, in the order of their seeds."""
        self._check(prompt)
        try:
            async with asyncio.TaskGroup() as tasks:
                rollouts = [tasks.create_task(self._rollout(prompt, i)) for i in range(self._sampling.num_rollouts)]
        except* FleetError as group:
            # One rollout that cannot be had is enough to give the group up; the others were cancelled.
            raise group.exceptions[0] from None
        return RolloutGroup(prompt=prompt, rollouts=tuple(task.result() for task in rollouts))

    def _check(self, prompt: Prompt) -> None:
        """One id outside the vocabulary ends a whole engine."""
        token_ids, size = prompt.token_ids, self._vocabulary.size
        if not len(token_ids):
            raise DataError(f"prompt {prompt.uid} has no tokens")
        for token_id in (int(token_ids.min()), int(token_ids.max())):
            if not 0 <= token_id < size:
                raise DataError(f"prompt {prompt.uid}: token id {token_id} is not in the vocabulary of {size}")
        num_tokens = len(token_ids) + self._sampling.max_response_tokens
        if num_tokens > self._vocabulary.max_context_tokens:
            raise DataError(
                f"prompt {prompt.uid}: {len(token_ids)} tokens and a response of up to "
                f"{self._sampling.max_response_tokens} exceed the context of {self._vocabulary.max_context_tokens}"
            )

    async def _rollout(self, prompt: Prompt, index: int) -> Rollout:
        so_far = Response.nothing()
        failures: list[str] = []
        tried: set[int] = set()
        while len(failures) < self._max_attempts:
            try:
                async with self._fleet.lease(avoid=tried, prefix=prompt.uid) as engine:
                    try:
                        so_far = so_far.then(await self._respond(engine, prompt, index, so_far))
                    except EngineError as error:
                        tried.add(engine.index)
                        failures.append(str(error))
                        logger.info("rollout failed prompt=%s index=%d reason=%s", prompt.uid, index, error)
                        self._fleet.requests.request_retried(type(error).__name__)
                        await self._judge(engine, error)
            except EngineLostError as error:
                # No attempt: it says nothing of the request, and engines are not lost for ever.
                self._fleet.requests.request_retried(type(error).__name__)
                logger.info("rollout lost prompt=%s index=%d reason=%s", prompt.uid, index, error)
            if so_far.finish_reason is not FinishReason.ABORT:
                return self._finished(so_far)
        reasons = "; ".join(failures)
        raise FleetError(f"prompt {prompt.uid}, rollout {index}: {len(failures)} attempts failed: {reasons}")

    async def _judge(self, engine: Engine, error: EngineError) -> None:
        """Whether an engine that failed once may be asked again."""
        if isinstance(error, WrongVersionError):
            await self._fleet.mark_stale(engine, str(error))
        elif not isinstance(error, BadReplyError):
            await self._fleet.doubt(engine, str(error))

    async def _respond(self, engine: Engine, prompt: Prompt, index: int, so_far: Response) -> Response:
        """What comes after `so_far`."""
        sampling, pauses, version = self._sampling, self._pauses, engine.version
        num_pauses = 0 if pauses is None else pauses.count(engine)
        max_new_tokens = sampling.max_response_tokens - len(so_far.token_ids)
        request = GenerateRequest(
            # Of one length: SGLang takes a rid for a prefix when it aborts.
            rid=uuid4().hex,
            input_ids=(*prompt.token_ids.tolist(), *so_far.token_ids.tolist()),
            max_new_tokens=max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=self._vocabulary.eos_ids,
            sampling_seed=sampling_seed(self._seed, prompt.uid, epoch=prompt.epoch, index=index),
            # Where the cache outlives a publish, a prefix must not outlive its version.
            cache_key=str(version) if pauses is not None and pauses.mode == "in_place" else None,
        )
        reply = await engine.client.generate(request)
        is_interrupted = pauses is not None and pauses.count(engine) != num_pauses
        if is_interrupted and not engine.is_live:
            raise EngineError(f"{engine}: a publish to it failed while it answered: {engine.reason}")
        expected = Expectation(
            vocab=self._vocabulary.size,
            max_response_tokens=max_new_tokens,
            eos_ids=frozenset(self._vocabulary.eos_ids),
            version=version,
            newest_version=engine.version if is_interrupted else version,
            is_interrupted=is_interrupted,
            in_flight=None if pauses is None else pauses.mode,
        )
        reach("generating", step=engine.version, engine=engine.index)
        try:
            return read_response(reply, expected)
        except BadReplyError as error:
            raise type(error)(f"{engine}: {error}") from error

    def _finished(self, response: Response) -> Rollout:
        return Rollout(
            token_ids=response.token_ids,
            logprobs=response.logprobs,
            versions=response.versions,
            loss_mask=np.ones(len(response.token_ids), dtype=np.bool_),
            finish_reason=response.finish_reason,
            text=self._vocabulary.decode(response.token_ids),
        )


def sampling_seed(run_seed: int, prompt_uid: str, *, epoch: int, index: int) -> int:
    """63 bits, the same in every process and on every machine."""
    return _seed(f"{run_seed}/{epoch}/{index}/{prompt_uid}")


def evaluation_seed(run_seed: int) -> int:
    """In place of the run's seed: a prompt that is trained on as well is not answered by the same dice."""
    return _seed(f"{run_seed}/evaluation")


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
