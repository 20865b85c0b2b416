"""The tokens of one episode as they come: histories that only grow, and what of them the policy chose.

Ids go to the engine and come back; no text is tokenised here, so a row is what the engine saw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from megarl.episodes.protocol import SampledTurn
from megarl.errors import RewardError
from megarl.routes import join_routes
from megarl.tokens import Content, RouteArray, SampledTokens, join_tokens, shared_if_equal
from megarl.types import (
    DEMONSTRATION,
    BoolArray,
    Ending,
    Episode,
    FinishReason,
    Rollout,
    Score,
    TokenArray,
    Turn,
    TurnKind,
)


class Sampler(Protocol):
    """The engines, for one episode."""

    async def sample(self, history: TokenArray, *, max_tokens: int, row: int, num_routed: int) -> SampledTokens:
        """Return the model's continuation of these tokens; `row` counts the histories of the episode.

        The experts of the first `num_routed` tokens are known from turns before.
        """
        ...


@dataclass(slots=True)
class _Tokens:
    """The tokens of one turn with their numbers."""

    turn: Turn
    tokens: SampledTokens


class Session:
    """Records an episode (a `TokenSession`). A row has at most `max_tokens` tokens after as many as the prompt has.

    After `max_turns` responses a further one is empty and cut.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompt_ids: TokenArray,
        *,
        max_tokens: int,
        max_turns: int,
        decode: Callable[[TokenArray], str],
    ) -> None:
        self._sampler = sampler
        self._history = prompt_ids
        self._num_prompt_tokens = len(prompt_ids)
        self._routes: list[tuple[int, RouteArray]] = []
        self._num_routed = 0
        self._max_row_tokens = len(prompt_ids) + max_tokens
        self._max_turns = max_turns
        self._decode = decode
        self._parts: list[_Tokens] = []
        self._rows: list[int] = []
        self._num_tokens = 0
        self._last_text = ""
        self._began: float | None = None

    @property
    def token_ids(self) -> TokenArray:
        return self._history

    @property
    def num_left(self) -> int:
        """Tokens that the present row may still get."""
        return max(self._max_row_tokens - len(self._history), 0)

    @property
    def num_sampled(self) -> int:
        return sum(part.turn.kind is TurnKind.SAMPLED for part in self._parts)

    @property
    def sampled_ids(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each sampled turn."""
        parts = (part for part in self._parts if part.turn.kind is TurnKind.SAMPLED)
        return tuple(tuple(part.tokens.token_ids.tolist()) for part in parts)

    async def sample(self, *, max_tokens: int | None = None) -> SampledTurn:
        limit = self.num_left if max_tokens is None else min(max_tokens, self.num_left)
        if limit == 0 or self.num_sampled >= self._max_turns:
            return SampledTurn(token_ids=np.empty(0, np.int32), text="", is_cut=True)
        began = time.monotonic()
        self._began = time.time() if self._began is None else self._began
        sampled = await self._sampler.sample(
            self._history, max_tokens=limit, row=len(self._rows), num_routed=self._num_routed
        )
        versions = sampled.versions
        if sampled.routes is not None:
            row_start = self._num_prompt_tokens + self._num_tokens - len(self._history)
            self._routes.append((row_start + self._num_routed, sampled.routes))
            self._num_routed += len(sampled.routes)
        self._add(
            Turn(
                start=self._num_tokens,
                end=self._num_tokens + len(sampled.token_ids),
                kind=TurnKind.SAMPLED,
                seconds=time.monotonic() - began,
                versions=(int(versions.min()), int(versions.max())),
            ),
            sampled,
        )
        self._last_text = self._decode(sampled.token_ids)
        return SampledTurn(token_ids=sampled.token_ids, text=self._last_text, is_cut=sampled.is_cut)

    def append(self, token_ids: TokenArray, *, seconds: float = 0.0) -> None:
        self._give(token_ids, TurnKind.GIVEN, seconds)

    def begin_row(self, token_ids: TokenArray) -> None:
        """Where the history is the beginning of `token_ids`, the row goes on with the rest."""
        known = len(self._history)
        if np.array_equal(token_ids[:known], self._history):
            self.append(token_ids[known:])
            return
        self._rows.append(self._num_tokens)
        self._history, self._num_routed = token_ids[:0], 0
        self._give(token_ids, TurnKind.CONTEXT, 0.0)

    def reward(self, value: float) -> None:
        """Add to the reward of the last sampled turn."""
        for part in reversed(self._parts):
            if part.turn.kind is TurnKind.SAMPLED:
                part.turn = replace(part.turn, reward=part.turn.reward + value)
                return

    def _give(self, token_ids: TokenArray, kind: TurnKind, seconds: float) -> None:
        if len(token_ids) == 0:
            return
        start, end = self._num_tokens, self._num_tokens + len(token_ids)
        given = SampledTokens(
            token_ids=token_ids,
            logprobs=np.broadcast_to(np.float32(0), len(token_ids)),
            versions=np.broadcast_to(np.int32(DEMONSTRATION), len(token_ids)),
        )
        self._add(Turn(start=start, end=end, kind=kind, seconds=seconds), given)

    def _add(self, turn: Turn, tokens: SampledTokens) -> None:
        self._parts.append(_Tokens(turn, tokens))
        self._history = np.concatenate([self._history, tokens.token_ids])
        self._num_tokens += len(tokens.token_ids)

    def finish(self, ending: Ending, score: Score | None, *, num_retries: int = 0) -> Rollout:
        """Return the episode. What followed the last sampled turn is left out: nothing was learnt from it."""
        if score is not None and score.turns is not None:
            self._reward_turns(score.turns)
        parts = list(self._parts)
        while parts and parts[-1].turn.kind is not TurnKind.SAMPLED:
            parts.pop()
        if not parts:
            return self._empty(ending, score, num_retries)
        num_tokens = parts[-1].turn.end
        episode = Episode(
            rows=tuple(row for row in self._rows if row < num_tokens),
            turns=tuple(part.turn for part in parts),
            ending=ending,
            num_retries=num_retries,
            began=self._began,
        )
        columns = join_tokens([part.tokens for part in parts])
        versions = columns.pop("versions")
        routes = join_routes(self._routes, self._num_prompt_tokens + num_tokens - 1)
        return Rollout(
            content=Content(text=self._last_text, routes=routes, **columns),
            versions=shared_if_equal(versions),
            loss_mask=_mask(parts),
            finish_reason=FinishReason.LENGTH if ending is Ending.LENGTH else FinishReason.STOP,
            episode=episode,
            score=score,
        )

    def _empty(self, ending: Ending, score: Score | None, num_retries: int) -> Rollout:
        """Return an episode in which the model had no turn, as one token that is not trained on."""
        return Rollout(
            content=Content(token_ids=self._history[-1:], logprobs=np.zeros(1, np.float32), text=""),
            versions=np.full(1, DEMONSTRATION, np.int32),
            loss_mask=np.zeros(1, np.bool_),
            finish_reason=FinishReason.LENGTH if ending is Ending.LENGTH else FinishReason.STOP,
            episode=Episode(turns=(Turn(start=0, end=1, kind=TurnKind.GIVEN),), ending=ending, num_retries=num_retries),
            score=score,
        )

    def _reward_turns(self, rewards: Sequence[float]) -> None:
        sampled = [part for part in self._parts if part.turn.kind is TurnKind.SAMPLED]
        if len(rewards) != len(sampled):
            raise RewardError(
                f"the environment's score has {len(rewards)} rewards in `turns` for an episode of {len(sampled)} "
                "responses; return one for each"
            )
        for part, reward in zip(sampled, rewards, strict=True):
            part.turn = replace(part.turn, reward=part.turn.reward + reward)


def _mask(parts: Sequence[_Tokens]) -> BoolArray:
    num_tokens = parts[-1].turn.end
    if all(part.turn.kind is TurnKind.SAMPLED for part in parts):
        return np.broadcast_to(np.True_, num_tokens)
    mask = np.zeros(num_tokens, np.bool_)
    for part in parts:
        mask[part.turn.start : part.turn.end] = part.turn.kind is TurnKind.SAMPLED
    return mask
