"""The seam between the turns of an episode and its surroundings: tools, scores, the model by tokens.

Knows neither engines nor processes. An *environment* answers the model's calls and the loop decides what comes next;
an *agent* decides itself and asks the model through a session.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from megarl.types import JsonValue, Prompt, Score, TokenArray

Row: TypeAlias = Mapping[str, JsonValue]
"""The facts of a task that an environment or an agent is opened with, by name."""

ChatMessage: TypeAlias = Mapping[str, JsonValue]
"""`role`, `content`, and `tool_calls` or `tool_call_id` where they belong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    name: str
    description: str
    parameters: Mapping[str, JsonValue]
    """JSON Schema of the arguments, an object."""

    @property
    def as_function(self) -> dict[str, JsonValue]:
        """The form that chat templates and OpenAI-style servers take."""
        function: dict[str, JsonValue] = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One use of a tool, as the model wrote it; the arguments are not checked yet."""

    name: str
    arguments: Mapping[str, JsonValue]
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """A response that begins a call and does not end it properly."""

    text: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The answer to a call. An error of the tool is one as well: the model reads it and may try again."""

    text: str
    ended: bool = False
    """The environment allows no further call."""
    reward: float | None = None
    """The reward of the turn that made the call, where the environment gives one at once."""
    is_error: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """All that was said in an episode, as texts."""

    prompt: tuple[ChatMessage, ...]
    messages: tuple[ChatMessage, ...]
    """Responses and observations after the prompt, in their order."""
    ending: str
    token_ids: tuple[tuple[int, ...], ...] = ()
    """The tokens of each response of the model."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The responses of the model."""
        return tuple(str(message["content"]) for message in self.messages if message["role"] == "assistant")

    @property
    def last_text(self) -> str:
        """The last response; empty where there is none."""
        return self.texts[-1] if self.texts else ""


class Environment(Protocol):
    """The surroundings of one episode. Its methods are called one at a time."""

    @property
    def tools(self) -> Sequence[ToolSchema]: ...

    @property
    def opening(self) -> str | None:
        """The text that the environment shows before the first turn; None where the prompt says all."""
        ...

    async def call(self, call: Call) -> Observation:
        """Answer a call; raise EnvironmentLostError when the environment itself is gone."""
        ...

    async def score(self, transcript: Transcript) -> Score | None:
        """Return the score, None where the recipe's `reward` scores; raise ScoreLostError when there is none."""
        ...

    async def close(self) -> None:
        """Free what the episode holds. May be called twice, and after an error."""
        ...


class PreparedTool(ABC):
    """A class of tools that have to be made ready before a call, outside of the call's deadline."""

    @abstractmethod
    def prepare(self) -> None:
        """Make ready, if that was not done yet; an error with `is_machine_fault` loses the episode."""


class Environments(Protocol):
    """Opens the environments of a run; one object per rollout worker."""

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """The tools of every episode: they are part of the prompt, which is rendered before an episode begins."""
        ...

    async def open(self, row: Row) -> Environment:
        """Raise EnvironmentLostError when none can be had."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """One response of the model."""

    token_ids: TokenArray
    text: str
    """Without the end token."""
    is_cut: bool
    """It reached a limit of tokens before it ended."""


Heard: TypeAlias = Callable[[Callable[[], TokenArray]], None]
"""Is called while a response is sampled, whenever there are more tokens, with a function that returns all so far."""


class TokenRow(Protocol):
    """One history of tokens of an episode, which only grows. It has one turn at a time, beside those of other rows."""

    @property
    def token_ids(self) -> TokenArray: ...

    async def sample(
        self, *, given: TokenArray | None = None, max_tokens: int | None = None, heard: Heard | None = None
    ) -> SampledTurn:
        """Let the model write a turn after the history and `given`, and append both; only the turn is trained on.

        A turn that is cancelled leaves nothing behind.
        """
        ...


class TokenSession(Protocol):
    """The model's side of one episode: a history of tokens that only grows, or is begun anew as another row."""

    @property
    def token_ids(self) -> TokenArray:
        """The whole history of the present row."""
        ...

    async def sample(self, *, max_tokens: int | None = None) -> SampledTurn:
        """Let the model write a turn after the history, and append it with its log-probabilities and versions."""
        ...

    def append(self, token_ids: TokenArray) -> None:
        """Append tokens that the policy did not choose; they are not trained on."""
        ...

    def begin_row(self, token_ids: TokenArray) -> None:
        """Begin a row with another history; the rows before it stay part of the episode."""
        ...

    def open_row(self, token_ids: TokenArray) -> TokenRow:
        """Return a row with this history, for callers that have several at a time."""
        ...

    @property
    def num_sampled(self) -> int:
        """Turns that the model has written."""
        ...

    @property
    def has_turn(self) -> bool:
        """Whether the model may write another turn."""
        ...

    @property
    def max_turns(self) -> int: ...

    @property
    def max_row_tokens(self) -> int:
        """Tokens of the longest history."""
        ...


class Agents(Protocol):
    """Runs agents that decide themselves what they ask the model; one object per rollout worker."""

    async def run(self, row: Row, session: TokenSession) -> Score | None:
        """Return the score, None where the recipe's `reward` scores.

        Raise EnvironmentLostError when the agent failed, ScoreLostError when it gave no score.
        """
        ...

    async def close(self) -> None: ...


def row_of(prompt: Prompt) -> Row:
    """Return the facts of a prompt under the names that rewards use too."""
    return {
        "uid": prompt.uid,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra_info),
        "prompt": str(prompt.messages[-1]["content"]) if prompt.messages else "",
        "messages": [dict(message) for message in prompt.messages],
    }
