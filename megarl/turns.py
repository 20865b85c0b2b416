"""The turns of an episode: which of its tokens the policy chose, and what the environment put between them.

An episode is one attempt at a prompt. Its tokens lie end to end; credit counts episodes and reads these tokens. Rows
are where a trainer or an engine cuts them: a row begins anew where the history of a conversation could not be extended.
Below `types`: no numpy, no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TurnKind(StrEnum):
    SAMPLED = "sampled"
    """Chosen by the policy."""
    GIVEN = "given"
    """Results of tools and other messages, as the chat template renders them."""
    CONTEXT = "context"
    """The history, rendered again at the beginning of a new row."""


class Ending(StrEnum):
    """Why an episode ended; there is no other reason."""

    ANSWERED = "answered"
    """The policy gave an answer without a call, or the environment ended the episode."""
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    TOOL_LIMIT = "tool_limit"
    """It made more calls than `environment.max_calls`."""
    MALFORMED_CALL = "malformed_call"
    WALL = "wall"
    ENV_LOST = "env_lost"
    SCORE_LOST = "score_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    start: int
    """Index of its first token among those of the episode."""
    end: int
    kind: TurnKind
    reward: float = 0.0
    """Credited to the last token of a sampled turn, beside the score of the episode."""
    seconds: float = 0.0
    """Time to sample it, or to run the calls that it answers."""
    versions: tuple[int, int] | None = None
    """Oldest and newest policy that chose its tokens; None where none did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """How the tokens of a rollout came about."""

    rows: tuple[int, ...] = ()
    """Where rows begin that carry their whole context. Tokens before the first of them continue the group's prompt."""
    turns: tuple[Turn, ...] = ()
    """In the order of their tokens; empty for a single response, which is one sampled turn."""
    ending: Ending | None = None
    """None for a single response, whose finish reason says it."""
    num_retries: int = 0
    """Attempts that were lost before this one."""
    began: float | None = None
    """When its first turn began, in seconds since the epoch; None for a single response."""

    @property
    def num_rows(self) -> int:
        """Sequences of the trainer."""
        return len(self.rows) + (0 not in self.rows)

    @property
    def num_calls(self) -> int:
        """Turns whose calls were answered, or that were told of a mistake."""
        return sum(turn.kind is TurnKind.GIVEN for turn in self.turns)


SINGLE = Episode()
"""A single response."""
