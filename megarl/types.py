"""The values that travel through one step, in the order they appear. Numpy only: no torch, no engine.

    Prompt -> RolloutGroup -> ScoredGroup -> TrainSample -> TrainBatch -> UpdateResult

Shapes: T tokens of one response, P tokens of its prompt, N packed tokens of one micro-batch, S sequences in it.
All numbers per token are listed in `tokens.COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from megarl.routes import PackedRoutes
from megarl.tokens import ContentHandle, PackedColumns, PackedRows, RolloutSums

TokenArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

PolicyVersion = NewType("PolicyVersion", int)
"""How many optimizer steps made these weights; 0 is the model the run started from."""

ONE_POLICY = ""
"""The name of the policy in a run that trains no other."""

DEMONSTRATION = PolicyVersion(-1)
"""The version of tokens that no policy chose: they come from a data set or an environment."""

JsonValue: TypeAlias = "str | int | float | bool | list[JsonValue] | dict[str, JsonValue] | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlace:
    """An image among tokens, and its tokens there: rows of columns, one after the other."""

    digest: str
    """A digest of its pixels, by which the run's store names it."""
    start: int
    """The first of its tokens."""
    num_rows: int
    num_columns: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.num_columns

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task, tokenised, at one place of the (shuffled, repeated) stream."""

    uid: str
    """Names the row of the data set; the same in every epoch."""
    position: int
    """Number of prompts drawn before this one since the run began."""
    epoch: int
    token_ids: TokenArray
    """[P]"""
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, JsonValue]
    messages: tuple[Mapping[str, JsonValue], ...] = ()
    """The chat that `token_ids` render, for rewards."""
    demonstration: TokenArray | None = None
    """The response of the data set, end token included."""
    demonstration_mask: BoolArray | None = None
    """[T], True where it is imitated; None: all of it."""
    rejected: TokenArray | None = None
    """An answer that is worse than the demonstration, end token included."""
    images: tuple[ImagePlace, ...] = ()
    """Images among the tokens, in their order."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


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
    shared: tuple[tuple[int, int], ...] = ()
    """An earlier row of the episode for every row, -1 for none, and the tokens with which both begin; () is nothing."""
    turns: tuple[Turn, ...] = ()
    """In the order of their tokens; empty for a single response, which is one sampled turn."""
    ending: Ending | None = None
    """None for a single response, whose finish reason says it."""
    num_retries: int = 0
    """Attempts that infrastructure ended before this one."""
    began: float | None = None
    """When its first turn began, in seconds since the epoch; None for a single response."""

    @property
    def num_rows(self) -> int:
        """Sequences of the trainer."""
        return len(self.rows) + (0 not in self.rows)

    @property
    def num_calls(self) -> int:
        """Turns that return the results of calls, or report a malformed one."""
        return sum(turn.kind is TurnKind.GIVEN for turn in self.turns)


SINGLE = Episode()
"""A single response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at a prompt: a response, or an episode of several turns. A step is decided without its content."""

    versions: npt.NDArray[np.int32]
    """[T], which policy chose each token."""
    loss_mask: BoolArray
    """[T], True where the policy chose the token."""
    finish_reason: FinishReason
    content: ContentHandle
    episode: Episode = SINGLE
    prompt_routes: str = ""
    """Digest of the experts that the engine chose in the prompt; empty where it named none."""
    score: Score | None = None
    """The score that its environment gave; None where the recipe's reward scores it."""

    @property
    def num_tokens(self) -> int:
        return len(self.versions)

    @property
    def token_ids(self) -> TokenArray:
        return self.content.load().token_ids

    @property
    def logprobs(self) -> FloatArray:
        return self.content.load().logprobs

    @property
    def text(self) -> str:
        return self.content.load().text


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All rollouts of one prompt."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    baseline: Rollout | None = None
    """A greedy rollout to compare with, where the algorithm needs one; it is not trained on."""

    @property
    def with_baseline(self) -> tuple[Rollout, ...]:
        """The rollouts, and the baseline, if there is one, as the last."""
        return self.rollouts if self.baseline is None else (*self.rollouts, self.baseline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    value: float
    components: Mapping[str, float]
    prediction: str | None = None
    """The final answer that the scorer read from the response, if it names one."""
    is_masked: bool = False
    """The rollout could not be scored: it is left out of its group's statistics and of the loss."""
    turns: tuple[float, ...] | None = None
    """The reward of each turn, where an environment gives them."""
    tokens: tuple[float, ...] | None = None
    """The reward of each token that the policy chose, added to `value`, where a scorer gives them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    group: RolloutGroup
    scores: tuple[Score, ...]
    baseline: Score | None = None
    """The score of the group's baseline."""

    def __post_init__(self) -> None:
        num_scores, num_rollouts = len(self.scores), len(self.group.rollouts)
        assert num_scores == num_rollouts, f"{num_scores} scores, {num_rollouts} rollouts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Per-token numbers of a step's B rollouts, of [T_i] each, computed before training; None if not needed."""

    logprobs: tuple[FloatArray, ...] | None = None
    """Log-probabilities of the policy before the step."""
    reference_logprobs: tuple[FloatArray, ...] | None = None
    values: tuple[FloatArray, ...] | None = None
    """The return that the critic expects before each token."""
    sums: RolloutSums | None = None
    """Sums over the rollouts that have a score, where the numbers per token stay on the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One rollout with its credit assigned."""

    prompt_ids: TokenArray
    """[P]"""
    rollout: Rollout
    advantages: FloatArray
    """[T], 0 where the policy did not choose the token."""
    old_logprobs: FloatArray | None = None
    """[T], of the policy before the step, if the algorithm needs them."""
    reference_logprobs: FloatArray | None = None
    """[T], if the loss has a KL term."""
    values: FloatArray | None = None
    """[T], of the critic before the step, if there is one."""
    returns: FloatArray | None = None
    """[T], what the critic learns."""
    images: tuple[ImagePlace, ...] = ()
    """Images of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPositions:
    """The positions of a micro-batch that are computed; others are equal to one of them in all that a model reads."""

    computed: npt.NDArray[np.int64]
    """[M], ascending."""
    places: npt.NDArray[np.int32]
    """[N], where each position, or its equal, is among those computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch(PackedColumns[FloatArray, npt.NDArray[np.int32], npt.NDArray[np.bool_]]):
    """Whole sequences, packed end to end. Position n predicts `targets[n]`, the next token of its sequence.

    Padding, where the micro-batch has some, is one more sequence at the end with an empty loss mask. For context
    parallelism every sequence also ends with padding of its own, which no other position sees.
    """

    token_ids: TokenArray
    """[N]"""
    sequence_starts: npt.NDArray[np.int32]
    """[S + 1], ends with N."""
    last_ids: TokenArray
    """[S], what the last position of each sequence predicts; 0 if that is padding."""
    sample_ids: npt.NDArray[np.int32]
    """[S], index into the step's samples, -1 for padding."""
    response_starts: npt.NDArray[np.int32]
    """[S], the position that predicts the first response token; N for padding."""
    response_ends: npt.NDArray[np.int32]
    """[S], after the position that predicts the last response token; N for padding."""
    rows: PackedRows | None = None
    """None where every sequence is a whole sample."""
    routes: PackedRoutes | None = None
    """The experts of each position, where an engine's choice is to be followed."""
    shared: SharedPositions | None = None
    """None where every position is computed."""
    images: tuple[ImagePlace, ...] = ()
    """Images among the tokens, in their order."""

    @property
    def targets(self) -> TokenArray:
        """[N], the next token of the same sequence."""
        targets = np.roll(self.token_ids, -1)
        targets[self.sequence_starts[1:] - 1] = self.last_ids
        return targets

    @property
    def positions(self) -> TokenArray:
        """[N], restart at 0 with each sequence."""
        starts = self.sequence_starts
        return np.arange(len(self.token_ids), dtype=np.int32) - np.repeat(starts[:-1], np.diff(starts))


def with_short_images(token_ids: TokenArray, images: Sequence[ImagePlace]) -> TokenArray:
    """Return the tokens with one for each image, as people read them; all tokens of an image are equal."""
    is_kept = np.ones(len(token_ids), np.bool_)
    for image in images:
        is_kept[image.start + 1 : image.end] = False
    return token_ids[is_kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """One data-parallel rank's share of the samples of one optimizer update.

    The denominators are global: no rank or micro-batch divides by a count of its own.
    """

    micro_batches: tuple[MicroBatch, ...]
    """Every rank has equally many; those of all ranks compute the same number of positions."""
    num_loss_tokens: int
    num_sequences: int
    """Episodes with a loss token, of however many rows: one that left the loss is not in its denominator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One data-parallel rank's share of everything that a step trains on."""

    mini_batches: tuple[MiniBatch, ...]
    temperature: float
    """Log-probabilities are of logits divided by this, as the engine sampled them."""
