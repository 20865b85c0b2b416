"""A frozen model on engines: from chats to token ids, requests to the fleet, and checked numbers.

A `reward.judge.FrozenModel`. A request that an engine loses is asked again elsewhere, or when the engine is back; a
reply that is not the answer to its request is never used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar, cast
from uuid import uuid4

import msgspec
import numpy as np
import ray
from ray.actor import ActorHandle

from megarl.cluster.tasks import task_group
from megarl.config.roles import Teaching, teacher_of
from megarl.data.tokenizer import Chat, Tokenizer, load_tokenizer
from megarl.engine.client import EngineClient, EngineEndpoint
from megarl.engine.dispatch import Throughput
from megarl.engine.fleet import Fleet
from megarl.errors import DataError, EngineError, EngineLostError, QuarantineError, ScoreError
from megarl.families.shape import ModelShape
from megarl.reward.judge import RETRY_TEMPERATURE, WrittenReply
from megarl.reward.pool import MachineFaultError
from megarl.rollout.following import EngineView, FollowingFleet
from megarl.rollout.teacher import token_scores
from megarl.stages import Generator
from megarl.system.foreign import finite32, map_texts, one_line
from megarl.types import FloatArray, JsonValue, Prompt, Rollout, RolloutGroup, TokenArray

_MAX_LOSSES = 20
"""Engines that may be lost with one request: it may be the cause."""
_MAX_TOKEN_CHARACTERS = 64
"""Characters of a token at most; a text that has more for every place of the context is not encoded to count them."""
_MAX_LOGPROB = 1e-3
"""A probability is at most 1, up to the rounding of a kernel."""

Reply = TypeVar("Reply")
Decoded = TypeVar("Decoded", bound=msgspec.Struct)
_FOLLOW_EVERY_S = 0.5


class _Meta(msgspec.Struct):
    id: str
    prompt_tokens: int
    finish_reason: dict[str, object] | None = None
    output_token_ids_logprobs: list[list[tuple[float, int, str | None]]] = []


class _Classified(msgspec.Struct):
    embedding: list[float]
    meta_info: _Meta


class _Labelled(msgspec.Struct):
    meta_info: _Meta


class _Generated(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


@dataclass(eq=False)
class FrozenEngines:
    fleet: Fleet
    tokenizer: Tokenizer
    shape: ModelShape
    _: KW_ONLY
    role: str
    """Its key below `roles`."""
    max_attempts: int
    _labels: dict[tuple[str, ...], list[int]] = field(default_factory=dict, init=False)

    async def classify(self, chat: Sequence[Mapping[str, object]]) -> float:
        token_ids = await self._encode(self.tokenizer.render_answered, cast("Chat", chat))
        return await self._ask(lambda client: classify(client, token_ids))

    async def probabilities(self, question: str, answers: Sequence[str]) -> Sequence[float]:
        labels = self.labels(answers)
        token_ids = await self._encode(self.tokenizer.render_chat, [{"role": "user", "content": question}])
        logprobs = np.array(await self._ask(lambda client: label_logprobs(client, token_ids, labels)))
        shares = np.exp(logprobs - logprobs.max())
        return (shares / shares.sum()).tolist()  # type: ignore[no-any-return]

    async def write(self, question: str, *, schema: str, max_tokens: int, attempt: int) -> WrittenReply:
        chat: Chat = [{"role": "user", "content": question}]
        token_ids = await self._encode(self.tokenizer.render_chat, chat, room=max_tokens)
        sampling: dict[str, JsonValue] = {
            "json_schema": schema,
            "max_new_tokens": max_tokens,
            "temperature": RETRY_TEMPERATURE if attempt else 0.0,
            "sampling_seed": attempt,
        }
        output_ids, is_cut = await self._ask(lambda client: generate(client, token_ids, sampling, self.shape.vocab))
        text = self.tokenizer.decode_response(np.array(output_ids, dtype=np.int32))
        return WrittenReply(text=text, num_tokens=len(token_ids) + len(output_ids), is_cut=is_cut)

    async def token_scores(
        self, token_ids: TokenArray, *, first: int, num_top: int, vocab: int, prefix: str
    ) -> FloatArray:
        """Return a teacher's numbers of every token from `first` on. [N - first, 1 + 2K]

        Requests with the same `prefix` share an engine's cache. Raise a ScoreError where the tokens do not fit the
        model or no engine answers.
        """
        shape, num_spare = self.shape, max(0, self.shape.vocab - vocab)
        if len(token_ids) >= shape.max_context_tokens or token_ids.max() >= shape.vocab:
            given = f"{len(token_ids)} tokens up to id {token_ids.max()} do not fit roles.{self.role}"
            raise ScoreError(f"{given}: {shape.max_context_tokens} tokens of context, {shape.vocab} of vocabulary")
        asked = partial(
            token_scores, token_ids=token_ids, first=first, num_top=num_top, num_spare=num_spare, vocab=vocab
        )
        return await self._ask(asked, prefixes=(prefix,))

    def labels(self, answers: Sequence[str]) -> list[int]:
        """Return the first token of each answer; a ScoreError if two answers begin with the same."""
        key = tuple(answers)
        if key not in self._labels:
            firsts = [int(token_ids[0]) for token_ids in self.tokenizer.encode(answers)]
            if len(set(firsts)) < len(firsts):
                raise ScoreError(f"two of the answers {', '.join(answers)} begin with the same token of the judge")
            self._labels[key] = firsts
        return self._labels[key]

    def has_control(self, text: str) -> bool:
        return self.tokenizer.has_control(text)

    async def _encode(self, render: Callable[[Chat], str], chat: Chat, *, room: int = 0) -> list[int]:
        """Return the tokens of a chat whose texts are plain to this model: the policy wrote some of them."""
        try:
            text = render(cast("Chat", map_texts(chat, self.tokenizer.plain)))
        except DataError as error:
            raise ScoreError(str(error)) from error
        limit, reply = self.shape.max_context_tokens, f" and a reply of {room}" if room else ""
        does_not_fit = f"{reply} do not fit into the context of roles.{self.role}, {limit}"
        if len(text) > limit * _MAX_TOKEN_CHARACTERS:
            raise ScoreError(f"{len(text)} characters{does_not_fit} tokens")
        token_ids: list[int] = (await self.tokenizer.encode_aside(text)).tolist()
        # A request that fills the context leaves the engine no place for a token.
        if not 0 < len(token_ids) < limit - room:
            raise ScoreError(f"{len(token_ids)} tokens{does_not_fit}")
        return token_ids

    async def _ask(self, ask: Callable[[EngineClient], Awaitable[Reply]], *, prefixes: Sequence[str] = ()) -> Reply:
        failures: list[str] = []
        losses: list[str] = []
        tried: set[int] = set()
        while len(failures) < self.max_attempts and len(losses) < _MAX_LOSSES:
            try:
                async with self.fleet.lease(avoid=tried, prefixes=prefixes) as engine:
                    try:
                        reply = await ask(engine.client)
                        self.fleet.answered(engine, Throughput(num_requests=1))
                        return reply
                    except EngineError as error:
                        tried.add(engine.index)
                        failures.append(str(error))
                        await self.fleet.doubt(engine, str(error))
            except EngineLostError as error:
                # Not counted as an attempt: the request is rarely at fault, and lost engines are restarted.
                losses.append(str(error))
        raise MachineFaultError(f"roles.{self.role} gave no answer: {'; '.join([*failures, *losses])}")


@dataclass(eq=False)
class TaughtGenerator:
    """A `stages.Generator` whose rollouts have the numbers of a teacher."""

    generator: Generator
    teaching: Teaching
    models: Mapping[str, FrozenEngines]

    async def generate(self, prompt: Prompt) -> RolloutGroup:
        model = self.models[teacher_of(prompt.data_source, dict(self.teaching.sources))]
        group = await self.generator.generate(prompt)
        try:
            async with task_group() as tasks:
                taught = [tasks.create_task(self._taught(prompt, each, model)) for each in group.rollouts]
        except ScoreError as error:
            raise QuarantineError(f"prompt {prompt.uid}: {error}") from None
        return replace(group, rollouts=tuple(task.result() for task in taught))

    async def _taught(self, prompt: Prompt, rollout: Rollout, model: FrozenEngines) -> Rollout:
        content, teaching = rollout.content.load(), self.teaching
        numbers = np.zeros((rollout.num_tokens, teaching.width), np.float32)
        for token_ids, num_given, place in _sequences(prompt, rollout):
            part = slice(place, place + len(token_ids) - num_given)
            if rollout.loss_mask[part].any():
                numbers[part] = await model.token_scores(
                    token_ids,
                    first=num_given,
                    num_top=teaching.num_top,
                    vocab=teaching.vocab,
                    prefix=prompt.uid,
                )
        return replace(rollout, content=replace(content, teacher=numbers))


def _sequences(prompt: Prompt, rollout: Rollout) -> Iterator[tuple[TokenArray, int, int]]:
    """Yield the tokens of each row as the trainer sees them, the number of those that it does not predict, and the
    place of the first that it predicts among the rollout's tokens."""
    tokens, starts = rollout.token_ids, rollout.episode.rows
    bounds = (*starts, len(tokens))
    if bounds[0]:
        yield np.concatenate([prompt.token_ids, tokens[: bounds[0]]]), len(prompt.token_ids), 0
    for start, end in pairwise(bounds):
        yield tokens[start:end], 1, start + 1


async def classify(client: EngineClient, token_ids: Sequence[int]) -> float:
    """Return the classifier's output after the last token; an EngineError if the reply is not this answer."""
    rid = uuid4().hex
    body: Mapping[str, JsonValue] = {"rid": rid, "input_ids": list(token_ids)}
    reply = _decode(client, await client.post("classify", "/classify", body), _Classified)
    _check(client, reply.meta_info, rid, token_ids)
    score = finite32(reply.embedding[0]) if len(reply.embedding) == 1 else None
    if score is None:
        raise EngineError(f"{client.endpoint}: classify: {reply.embedding[:4]} is not one finite number")
    return score


async def label_logprobs(client: EngineClient, token_ids: Sequence[int], labels: Sequence[int]) -> list[float]:
    """Return the log-probability of each label as the next token."""
    rid = uuid4().hex
    body: Mapping[str, JsonValue] = {
        "rid": rid,
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "token_ids_logprob": list(labels),
    }
    reply = _decode(client, await client.post("judge", "/generate", body), _Labelled)
    _check(client, reply.meta_info, rid, token_ids)
    listed = [entry for place in reply.meta_info.output_token_ids_logprobs[:1] for entry in place]
    found = {label: number for logprob, label, _ in listed if (number := finite32(logprob)) is not None}
    if any(label not in found or found[label] > _MAX_LOGPROB for label in labels):
        raise EngineError(f"{client.endpoint}: judge: the reply lacks an answer's log-probability")
    return [found[label] for label in labels]


async def generate(
    client: EngineClient, token_ids: Sequence[int], sampling: Mapping[str, JsonValue], vocab: int
) -> tuple[list[int], bool]:
    """Return the tokens of a reply, and whether its limit ended it."""
    rid = uuid4().hex
    body: Mapping[str, JsonValue] = {"rid": rid, "input_ids": list(token_ids), "sampling_params": dict(sampling)}
    reply = _decode(client, await client.post("judge", "/generate", body), _Generated)
    _check(client, reply.meta_info, rid, token_ids)
    end = reply.meta_info.finish_reason or {}
    if end.get("type") not in ("stop", "length"):
        raise EngineError(f"{client.endpoint}: judge: the reply was not finished: {one_line(end.get('message'))}")
    if not all(0 <= token_id < vocab for token_id in reply.output_ids):
        raise EngineError(f"{client.endpoint}: judge: a token of the reply is not in the vocabulary of {vocab}")
    return reply.output_ids, end["type"] == "length"


def _decode(client: EngineClient, content: bytes, kind: type[Decoded]) -> Decoded:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise EngineError(f"{client.endpoint}: not a reply to the request: {error}") from error


def _check(client: EngineClient, meta: _Meta, rid: str, token_ids: Sequence[int]) -> None:
    if meta.id != rid or meta.prompt_tokens != len(token_ids):
        raise EngineError(f"{client.endpoint}: the reply is to another request")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSetup:
    """All that a process needs to ask the engines of one frozen role."""

    role: str
    folder: Path
    shape: ModelShape
    max_attempts: int
    max_outstanding: int
    request_timeout_s: float
    patience_s: float
    endpoints: tuple[EngineEndpoint, ...]

    def model(self, fleet: Fleet) -> FrozenEngines:
        is_teacher = self.role.startswith("teacher.")  # given tokens, never a chat
        tokenizer = load_tokenizer(self.folder, vocab=self.shape.vocab, template="raw" if is_teacher else "chat")
        return FrozenEngines(fleet, tokenizer, self.shape, role=self.role, max_attempts=self.max_attempts)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenAccess:
    """The frozen models of a run for rollout workers in other processes."""

    directory: ActorHandle
    setups: tuple[FrozenSetup, ...]


class FollowedModels:
    """The frozen models in the process of a rollout worker."""

    def __init__(self, access: FrozenAccess) -> None:
        self._directory = access.directory
        self._fleets = {
            setup.role: FollowingFleet(
                setup.endpoints,
                connect=partial(EngineClient, request_timeout_s=setup.request_timeout_s),
                lent=frozenset(),
                max_outstanding=setup.max_outstanding,
                publish_timeout_s=setup.patience_s,
            )
            for setup in access.setups
        }
        self.models = {setup.role: setup.model(self._fleets[setup.role].fleet) for setup in access.setups}
        self._following: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Begin to follow the driver's fleets, unless this was done before."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        number = 0
        while True:
            views: dict[str, list[EngineView]] = await self._directory.views.remote()
            number += 1
            for role, of_role in views.items():
                # Numbered again: a state that only this process changed is told again as well.
                await self._fleets[role].follow([replace(view, number=number) for view in of_role])
            await asyncio.sleep(_FOLLOW_EVERY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenRole:
    """The engines of one role in the driver."""

    setup: FrozenSetup
    fleet: Fleet
    is_shared: bool
    """Whether it is time-shared with other roles of its pool."""


def models_of(roles: Mapping[str, FrozenRole]) -> dict[str, FrozenEngines]:
    """Return the models for a rollout worker in the driver's process."""
    return {name: role.setup.model(role.fleet) for name, role in roles.items()}


class FrozenDirectory:
    """The actor from which rollout workers read the engines of frozen models as the driver records them."""

    def __init__(self) -> None:
        self._views: dict[str, list[EngineView]] = {}

    async def put(self, role: str, views: list[EngineView]) -> None:
        self._views[role] = views

    async def views(self) -> dict[str, list[EngineView]]:
        return self._views


def open_access(roles: Mapping[str, FrozenRole], stack: AsyncExitStack) -> FrozenAccess | None:
    """Return the access of rollout workers to frozen engines; None where there are none."""
    if not roles:
        return None
    directory = ray.remote(num_cpus=0)(FrozenDirectory).remote()
    stack.callback(ray.kill, directory)

    def announce(role: FrozenRole) -> None:
        directory.put.remote(role.setup.role, [EngineView.of(engine, number=1) for engine in role.fleet.engines])

    for role in roles.values():
        role.fleet.listen(lambda _engine, _before, role=role: announce(role))  # type: ignore[misc]
        announce(role)
    return FrozenAccess(directory=directory, setups=tuple(role.setup for role in roles.values()))
