"""The tokens of one episode as they come: rows that only grow, and what of them the policy chose.

Ids go to the engine and come back; no text is tokenised here, so a row is what the engine saw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Protocol

import numpy as np

from megarl.data.row_prefixes import row_prefixes
from megarl.episodes.protocol import Heard, SampledTurn
from megarl.errors import RewardError
from megarl.routes import join_routes, prompt_digest
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

    async def sample(
        self, history: TokenArray, *, max_tokens: int, row: int, num_routed: int, heard: Heard | None = None
    ) -> SampledTokens:
        """Return the model's continuation of these tokens; `row` counts the histories of the episode.

        The experts of the first `num_routed` tokens are known from turns before. `heard` is called as tokens come.
        """
        ...


@dataclass(slots=True)
class _Tokens:
    """The tokens of one turn with their numbers."""

    turn: Turn
    """Placed from the beginning of its row."""
    tokens: SampledTokens


class SessionRow:
    """One history of an episode (a `TokenRow`)."""

    def __init__(self, session: Session, history: TokenArray, *, index: int) -> None:
        self._session = session
        self._history = history
        self._index = index
        self._num_routed = 0
        self.routes: list[tuple[int, RouteArray]] = []
        """By the place in the history where they begin."""
        self.parts: list[_Tokens] = []
        self.num_tokens = 0

    @property
    def token_ids(self) -> TokenArray:
        return self._history

    @property
    def is_first(self) -> bool:
        """Whether it continues the prompt."""
        return self._index == 0

    async def sample(
        self, *, given: TokenArray | None = None, max_tokens: int | None = None, heard: Heard | None = None
    ) -> SampledTurn:
        session, known = self._session, self._history
        history = known if given is None else np.concatenate([known, given])
        num_left = max(session.max_row_tokens - len(history), 0)
        limit = num_left if max_tokens is None else min(max_tokens, num_left)
        if limit == 0 or not session.has_turn:
            session.refuse_turn(is_full=limit == 0)
            return SampledTurn(token_ids=np.empty(0, np.int32), text="", is_cut=True)
        began, num_routed = time.monotonic(), self._num_routed
        with session.taking_turn():
            sampled = await session.sampler.sample(
                history, max_tokens=limit, row=self._index, num_routed=num_routed, heard=heard
            )
        assert self._history is known, "a row has one turn at a time"
        if given is not None:
            self.append(given)
        versions = sampled.versions
        if sampled.routes is not None:
            self.routes.append((num_routed, sampled.routes))
            self._num_routed += len(sampled.routes)
        part = self._add(
            Turn(
                start=self.num_tokens,
                end=self.num_tokens + len(sampled.token_ids),
                kind=TurnKind.SAMPLED,
                seconds=time.monotonic() - began,
                versions=(int(versions.min()), int(versions.max())),
            ),
            sampled,
        )
        text = session.note(self, part)
        return SampledTurn(token_ids=sampled.token_ids, text=text, is_cut=sampled.is_cut)

    def append(self, token_ids: TokenArray, *, seconds: float = 0.0) -> None:
        self.give(token_ids, TurnKind.GIVEN, seconds)

    def give(self, token_ids: TokenArray, kind: TurnKind, seconds: float) -> None:
        """Append tokens that the policy did not choose."""
        if len(token_ids) == 0:
            return
        given = SampledTokens(
            token_ids=token_ids,
            logprobs=np.broadcast_to(np.float32(0), len(token_ids)),
            versions=np.broadcast_to(np.int32(DEMONSTRATION), len(token_ids)),
        )
        start, end = self.num_tokens, self.num_tokens + len(token_ids)
        self._add(Turn(start=start, end=end, kind=kind, seconds=seconds), given)

    def _add(self, turn: Turn, tokens: SampledTokens) -> _Tokens:
        part = _Tokens(turn, tokens)
        self.parts.append(part)
        self._history = np.concatenate([self._history, tokens.token_ids])
        self.num_tokens += len(tokens.token_ids)
        return part

    def learnt(self) -> list[_Tokens]:
        """Return its turns without what followed the last sampled one: nothing was learnt from that."""
        parts = list(self.parts)
        while parts and parts[-1].turn.kind is not TurnKind.SAMPLED:
            parts.pop()
        return parts


class Session:
    """Records an episode (a `TokenSession`). A row has at most `max_tokens` tokens after as many as the prompt has.

    After `max_turns` responses, or as many that were given up, a further one is empty and cut.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompt_ids: TokenArray,
        *,
        max_tokens: int,
        max_turns: int,
        decode: Callable[[TokenArray], str],
        turning: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`turning` encloses each turn while the engines have it."""
        self.sampler = sampler
        self._turning = turning
        self.max_row_tokens = len(prompt_ids) + max_tokens
        self._num_prompt_tokens = len(prompt_ids)
        self._max_turns = max_turns
        self._decode = decode
        self._row = SessionRow(self, prompt_ids, index=0)
        """The present one: the last that was begun or had a turn."""
        self._rows = [self._row]
        self._sampled: list[_Tokens] = []
        """In the order in which they were sampled."""
        self._num_open = 0
        self._num_given_up = 0
        self._is_full = False
        self._last_text = ""
        self._began: float | None = None

    @property
    def token_ids(self) -> TokenArray:
        return self._row.token_ids

    @property
    def num_left(self) -> int:
        """Tokens that the present row may still get; 0 where its last turn had no room."""
        return 0 if self._is_full else max(self.max_row_tokens - len(self.token_ids), 0)

    @property
    def num_sampled(self) -> int:
        return len(self._sampled)

    @property
    def max_turns(self) -> int:
        return self._max_turns

    @property
    def has_turn(self) -> bool:
        return self.num_sampled + self._num_open < self._max_turns and self._num_given_up <= self._max_turns

    @property
    def sampled_ids(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each sampled turn."""
        return tuple(tuple(part.tokens.token_ids.tolist()) for part in self._sampled)

    async def sample(self, *, max_tokens: int | None = None) -> SampledTurn:
        return await self._row.sample(max_tokens=max_tokens)

    def append(self, token_ids: TokenArray, *, seconds: float = 0.0) -> None:
        self._row.append(token_ids, seconds=seconds)

    def begin_row(self, token_ids: TokenArray) -> None:
        """Where the history is the beginning of `token_ids`, the row goes on with the rest."""
        known = len(self._row.token_ids)
        if np.array_equal(token_ids[:known], self._row.token_ids):
            self.append(token_ids[known:])
        else:
            self._row = self._new_row(token_ids)

    def open_row(self, token_ids: TokenArray) -> SessionRow:
        """Where nothing followed the prompt yet and it is the beginning of `token_ids`, the row is the prompt's."""
        first = self._rows[0]
        known = self._num_prompt_tokens
        if first.num_tokens or len(self._rows) > 1 or not np.array_equal(token_ids[:known], first.token_ids):
            return self._new_row(token_ids)
        first.append(token_ids[known:])
        return first

    def _new_row(self, token_ids: TokenArray) -> SessionRow:
        row = SessionRow(self, token_ids[:0], index=len(self._rows))
        row.give(token_ids, TurnKind.CONTEXT, 0.0)
        self._rows.append(row)
        return row

    @contextmanager
    def taking_turn(self) -> Iterator[None]:
        """Count a turn that is under way, and one that is given up."""
        self._began = time.time() if self._began is None else self._began
        self._num_open += 1
        try:
            with self._turning():
                yield
        except BaseException:
            self._num_given_up += 1
            raise
        finally:
            self._num_open -= 1

    def refuse_turn(self, *, is_full: bool) -> None:
        """Record that a row was asked for a turn that it cannot have, because it is full or turns are used up."""
        self._is_full = is_full

    def note(self, row: SessionRow, part: _Tokens) -> str:
        """Record that a turn was sampled; return its text."""
        self._row, self._is_full = row, False
        self._sampled.append(part)
        self._last_text = self._decode(part.tokens.token_ids)
        return self._last_text

    def reward(self, value: float) -> None:
        """Add to the reward of the last sampled turn."""
        for part in self._sampled[-1:]:
            part.turn = replace(part.turn, reward=part.turn.reward + value)

    def finish(self, ending: Ending, score: Score | None, *, num_retries: int = 0) -> Rollout:
        """Return the episode: the rows in which something was sampled, in the order in which they began."""
        if score is not None and score.turns is not None:
            self._reward_turns(score.turns)
        if not self._sampled:
            return self._empty(ending, score, num_retries)
        parts: list[_Tokens] = []
        starts: list[int] = []
        routes: list[tuple[int, RouteArray]] = []
        num_tokens = 0
        for row in self._rows:
            if not (learnt := row.learnt()):
                continue
            if not row.is_first:
                starts.append(num_tokens)
            parts += (_Tokens(_moved(part.turn, num_tokens), part.tokens) for part in learnt)
            before = 0 if row.is_first else self._num_prompt_tokens + num_tokens
            routes += ((before + place, each) for place, each in row.routes)
            num_tokens += learnt[-1].turn.end
        if score is not None and score.tokens is not None:
            score = replace(score, tokens=self._in_rows(score.tokens, parts))
        columns = join_tokens([part.tokens for part in parts])
        versions = columns.pop("versions")
        joined = join_routes(routes, self._num_prompt_tokens + num_tokens - 1)
        prompt_ids = self._rows[0].token_ids[: self._num_prompt_tokens]
        episode = Episode(
            rows=tuple(starts),
            shared=row_prefixes(prompt_ids, columns["token_ids"], starts, joined) if starts else (),
            turns=tuple(part.turn for part in parts),
            ending=ending,
            num_retries=num_retries,
            began=self._began,
        )
        return Rollout(
            content=Content(text=self._last_text, routes=joined, **columns),
            versions=shared_if_equal(versions),
            loss_mask=_mask(parts),
            finish_reason=FinishReason.LENGTH if ending is Ending.LENGTH else FinishReason.STOP,
            episode=episode,
            prompt_routes="" if joined is None else prompt_digest(joined, num_tokens),
            score=score,
        )

    def _empty(self, ending: Ending, score: Score | None, num_retries: int) -> Rollout:
        """Return an episode in which the model had no turn, as one token that is not trained on."""
        return Rollout(
            content=Content(token_ids=self.token_ids[-1:], logprobs=np.zeros(1, np.float32), text=""),
            versions=np.full(1, DEMONSTRATION, np.int32),
            loss_mask=np.zeros(1, np.bool_),
            finish_reason=FinishReason.LENGTH if ending is Ending.LENGTH else FinishReason.STOP,
            episode=Episode(turns=(Turn(start=0, end=1, kind=TurnKind.GIVEN),), ending=ending, num_retries=num_retries),
            score=score,
        )

    def _reward_turns(self, rewards: Sequence[float]) -> None:
        if len(rewards) != len(self._sampled):
            raise RewardError(
                f"the environment's score has {len(rewards)} rewards in `turns` for an episode of {len(self._sampled)} "
                "responses; return one for each"
            )
        for part, reward in zip(self._sampled, rewards, strict=True):
            part.turn = replace(part.turn, reward=part.turn.reward + reward)

    def _in_rows(self, rewards: tuple[float, ...], parts: Sequence[_Tokens]) -> tuple[float, ...]:
        """Return rewards of the sampled tokens, which are in the order of sampling, in the order of the rows.

        Those of another number of tokens stay as they are.
        """
        if len(rewards) != sum(len(part.tokens.token_ids) for part in self._sampled):
            return rewards
        left = iter(rewards)
        by_turn = {id(part.tokens): tuple(islice(left, len(part.tokens.token_ids))) for part in self._sampled}
        return tuple(chain.from_iterable(by_turn.get(id(part.tokens), ()) for part in parts))


def _moved(turn: Turn, by: int) -> Turn:
    return replace(turn, start=turn.start + by, end=turn.end + by) if by else turn


def _mask(parts: Sequence[_Tokens]) -> BoolArray:
    num_tokens = parts[-1].turn.end
    if all(part.turn.kind is TurnKind.SAMPLED for part in parts):
        return np.broadcast_to(np.True_, num_tokens)
    mask = np.zeros(num_tokens, np.bool_)
    for part in parts:
        mask[part.turn.start : part.turn.end] = part.turn.kind is TurnKind.SAMPLED
    return mask
