"""Turns prompts into checked rollout groups with the engines that are live. Knows no weights and no processes.

A rollout is a function of (weights, prompt, seed): engine, time and attempt do not matter. The random numbers of a
token follow from (seed, position). A rollout that is interrupted, by a publish, at its deadline or because its engine
is retired, continues with the same seed: tokens that it keeps are not drawn again, and only the choice of weights for
each position depends on timing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import KW_ONLY, dataclass
from functools import partial
from uuid import uuid4

import numpy as np

from megarl.config.roles import InFlight
from megarl.engine.client import GenerateRequest
from megarl.engine.dispatch import Throughput
from megarl.engine.fleet import Engine, Fleet
from megarl.engine.reply import BadReplyError, Expectation, Response, WrongVersionError, read_response
from megarl.episodes.play import Player
from megarl.errors import DataError, EngineError, EngineLostError, MegarlError, QuarantineError
from megarl.rollout.task import Sampling, Vocabulary
from megarl.rollout.turns import Context, TurnSampler, hear
from megarl.routes import RouteRequest, prompt_digest
from megarl.system.faults import reach
from megarl.tokens import Content, repeated, shared_if_equal
from megarl.types import ONE_POLICY, FinishReason, Prompt, Rollout, RolloutGroup

logger = logging.getLogger(__name__)


_LEAST_PROGRESS = 1 / 32
"""Share of the longest response that a late request must have added; with less it counts as a failed attempt."""
_MAX_LOSSES = 2
"""Engines that may die during one request: the request itself may be the cause, and would end the whole fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    response: Response
    is_late: bool
    """The request was cut at its deadline; another one continues the response."""


@dataclass(eq=False)
class FleetGenerator:
    """The Generator of a run (see `stages`). The fleet limits the number of outstanding requests."""

    fleet: Fleet
    _: KW_ONLY
    sampling: Sampling
    vocabulary: Vocabulary
    seed: int
    max_attempts: int
    policy: str = ONE_POLICY
    in_flight: InFlight | None = None
    """How engines are paused where weights may change during a request."""
    player: Player | None = None
    """With one a rollout is an episode of turns, else one response."""
    has_routes: bool = False
    """Whether rollouts have the experts that the engines chose."""

    def __post_init__(self) -> None:
        self._routes = self.vocabulary.routes if self.has_routes else None

    async def generate(self, prompt: Prompt) -> RolloutGroup:
        """Return all rollouts of one prompt, in the order of their seeds."""
        self._check(prompt)
        try:
            async with asyncio.TaskGroup() as tasks:
                rollouts = [tasks.create_task(self._rollout(prompt, i)) for i in range(self.sampling.num_rollouts)]
        except* MegarlError as group:
            # A group needs all its rollouts; the other requests are cancelled.
            raise group.exceptions[0] from None
        return RolloutGroup(prompt=prompt, rollouts=tuple(task.result() for task in rollouts))

    def _check(self, prompt: Prompt) -> None:
        """Refuse a prompt that would end the engine: one token id outside the vocabulary does."""
        token_ids, size = prompt.token_ids, self.vocabulary.size
        if not len(token_ids):
            raise DataError(f"prompt {prompt.uid} has no tokens")
        for token_id in (int(token_ids.min()), int(token_ids.max())):
            if not 0 <= token_id < size:
                raise DataError(f"prompt {prompt.uid}: token id {token_id} is not in the vocabulary of {size}")
        num_tokens = len(token_ids) + self.sampling.max_response_tokens
        if num_tokens > self.vocabulary.max_context_tokens:
            raise DataError(
                f"prompt {prompt.uid}: {len(token_ids)} tokens and a response of up to "
                f"{self.sampling.max_response_tokens} exceed the context of {self.vocabulary.max_context_tokens}"
            )

    async def _rollout(self, prompt: Prompt, index: int) -> Rollout:
        max_tokens = self.sampling.max_response_tokens
        if self.player is not None:
            return await self.player.rollout(prompt, self.turns(prompt, index), max_tokens=max_tokens)
        context = Context(
            prompt=prompt,
            index=index,
            token_ids=prompt.token_ids,
            max_tokens=max_tokens,
            seed=sampling_seed(self.seed, prompt.uid, epoch=prompt.epoch, index=index),
            prefixes=(prompt.uid,),
        )
        return self._finished(await self._continued(context))

    def turns(self, prompt: Prompt, index: int) -> TurnSampler:
        """Return what samples the turns of one episode."""
        seed_of = partial(sampling_seed, self.seed, epoch=prompt.epoch, index=index)
        return TurnSampler(prompt, index, seed_of=seed_of, continued=self._continued)

    async def _continued(self, context: Context) -> Response:
        """Return the whole response, from as many engines as it takes."""
        prompt, index = context.prompt, context.index
        so_far = Response.nothing()
        failures: list[str] = []
        losses: list[str] = []
        tried: set[int] = set()
        while len(failures) < self.max_attempts and len(losses) < _MAX_LOSSES:
            try:
                async with self.fleet.lease(avoid=tried, prefixes=context.prefixes, policy=self.policy) as engine:
                    try:
                        rest = await self._respond(engine, context, so_far)
                        so_far = so_far.then(rest.response)
                        if rest.is_late:
                            tried.add(engine.index)
                            failures += self._late(context, len(rest.response.token_ids))
                    except EngineError as error:
                        tried.add(engine.index)
                        failures.append(str(error))
                        logger.info("rollout failed prompt=%s index=%d reason=%s", prompt.uid, index, error)
                        self.fleet.requests.request_retried(type(error).__name__)
                        await self._report(engine, error)
            except EngineLostError as error:
                # Not counted as an attempt: the request is rarely at fault, and lost engines are restarted.
                losses.append(str(error))
                self.fleet.requests.request_retried(type(error).__name__)
                logger.info("rollout lost prompt=%s index=%d reason=%s", prompt.uid, index, error)
            if so_far.finish_reason is not FinishReason.ABORT:
                return so_far
        reasons = "; ".join([*failures, *losses])
        what = f"{len(losses)} engines were lost" if len(losses) == _MAX_LOSSES else f"{len(failures)} attempts failed"
        raise QuarantineError(f"prompt {prompt.uid}, rollout {index}: {what}: {reasons}")

    def _late(self, context: Context, num_tokens: int) -> list[str]:
        """Return the failure if the cut request made too little progress, else []."""
        self.fleet.requests.request_retried("late")
        logger.info("rollout late prompt=%s index=%d tokens=%d", context.prompt.uid, context.index, num_tokens)
        if num_tokens >= _LEAST_PROGRESS * context.max_tokens:
            return []
        return [f"{num_tokens} tokens at its deadline (roles.rollout.request_timeout_s)"]

    async def _report(self, engine: Engine, error: EngineError) -> None:
        """Report a failed request to the fleet, which decides whether the engine gets another one."""
        if isinstance(error, WrongVersionError):
            await self.fleet.mark_stale(engine, str(error))
        elif not isinstance(error, BadReplyError):
            await self.fleet.doubt(engine, str(error))

    async def _respond(self, engine: Engine, context: Context, so_far: Response) -> _Rest:
        """Return the rest of a response that begins with `so_far`."""
        sampling, in_flight, served = self.sampling, self.in_flight, engine.serves(self.policy)
        base_version = None if served.adapter is None else engine.weights_version
        num_pauses = engine.num_pauses
        max_new_tokens = context.max_tokens - len(so_far.token_ids)
        num_sent = len(context.token_ids) + len(so_far.token_ids)
        routes = None
        if self._routes is not None:
            routes = RouteRequest.after(self._routes, context.num_routed, so_far.routes, num_sent=num_sent)
        request = GenerateRequest(
            # All rids have one length: SGLang treats a rid as a prefix when it aborts.
            rid=uuid4().hex,
            input_ids=(*context.token_ids.tolist(), *so_far.token_ids.tolist()),
            max_new_tokens=max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=self.vocabulary.eos_ids,
            sampling_seed=context.seed,
            # Where the cache is kept during a publish, prefixes must not be shared between versions.
            adapter=served.adapter,
            session_id=context.prefixes[0] if context.is_echoed else None,
            cache_key=str(served.version) if in_flight == "in_place" else None,
            returns_prompt=context.is_echoed,
            routes=routes,
            images=context.prompt.images,
        )
        began = time.monotonic()
        heard = None
        if context.heard is not None:
            heard = partial(hear, context.heard, so_far.token_ids, num_untold=0 if in_flight is None else 1)
        reply = await engine.client.generate(request, heard=heard)
        seconds = time.monotonic() - began
        is_interrupted = in_flight is not None and engine.num_pauses != num_pauses
        if is_interrupted and not engine.is_live:
            raise EngineError(f"{engine}: a publish failed during the request: {engine.reason}")
        expected = Expectation(
            vocab=self.vocabulary.size,
            max_response_tokens=max_new_tokens,
            eos_ids=frozenset(self.vocabulary.eos_ids),
            version=served.version,
            newest_version=engine.serves(self.policy).version if is_interrupted else served.version,
            base_version=base_version,
            is_interrupted=is_interrupted or reply.is_cut or engine.status.hands_over,
            in_flight=in_flight,
            echo=request.input_ids if context.is_echoed else None,
            routes=routes,
            images=tuple(image.digest for image in context.prompt.images),
            num_prompt=num_sent if context.prompt.images else None,
        )
        reach("generating", step=engine.serves(self.policy).version, engine=engine.index)
        try:
            response = read_response(reply.content, expected)
        except BadReplyError as error:
            raise type(error)(f"{engine}: {error}") from error
        self._count(engine, response, num_sent=num_sent, seconds=seconds)
        return _Rest(response=response, is_late=reply.is_cut and response.finish_reason is FinishReason.ABORT)

    def _count(self, engine: Engine, response: Response, *, num_sent: int, seconds: float) -> None:
        num_tokens = len(response.token_ids)
        self.fleet.answered(engine, Throughput(num_requests=1, num_tokens=num_tokens, seconds=seconds))
        self.fleet.requests.prompt_read(num_sent, num_cached=response.num_cached)
        if response.num_passes:
            self.fleet.requests.draft_checked(num_tokens, num_passes=response.num_passes)

    def _finished(self, response: Response) -> Rollout:
        return Rollout(
            content=Content(text=self.vocabulary.decode(response.token_ids), **response.columns()),
            versions=shared_if_equal(response.versions),
            loss_mask=repeated(np.True_, len(response.token_ids)),
            finish_reason=response.finish_reason,
            prompt_routes="" if response.routes is None else prompt_digest(response.routes, len(response.token_ids)),
        )


def sampling_seed(run_seed: int, prompt_uid: str, *, epoch: int, index: int) -> int:
    """Return a seed of 63 bits, the same in every process and on every machine."""
    return _seed(f"{run_seed}/{epoch}/{index}/{prompt_uid}")


def evaluation_seed(run_seed: int) -> int:
    """Return the seed of evaluations: a prompt that is also trained on gets other random numbers there."""
    return _seed(f"{run_seed}/evaluation")


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
