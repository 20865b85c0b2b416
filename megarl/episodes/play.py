"""Plays episodes: turns and calls until one of the endings, then the score; a lost episode is played again.

An episode whose environment or score is lost, that takes too long or that fails in a way nobody expected is not the
policy's: it is played again in a fresh environment, and after too many of these its whole group is given up. Knows no
engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from megarl.config.environment import (
    AgentEnvironmentConfig,
    EnvironmentConfig,
    HarborEnvironmentConfig,
    ToolEnvironmentConfig,
    has_agent,
)
from megarl.config.roles import RolloutRoleConfig
from megarl.data.tokenizer import Template, Tokenizer, ToolFunction
from megarl.episodes.admission import Admission, most_open
from megarl.episodes.agents import ChatAgents
from megarl.episodes.build import build_dialogue, open_agents, open_environments
from megarl.episodes.class_environments import ClassEnvironments
from megarl.episodes.dialogue import Dialogue
from megarl.episodes.protocol import (
    Agents,
    Call,
    ChatMessage,
    Environment,
    Environments,
    Malformed,
    SampledTurn,
    ToolSchema,
    Transcript,
    row_of,
)
from megarl.episodes.session import Sampler, Session
from megarl.errors import (
    DataError,
    EnvironmentLostError,
    MegarlError,
    NeighbourError,
    QuarantineError,
    RewardError,
    ScoreLostError,
)
from megarl.stages import Scorer
from megarl.system.foreign import one_line
from megarl.system.network import LOOPBACK, address_in
from megarl.types import Ending, Prompt, Rollout, RolloutGroup, Score, ScoredGroup, TokenArray

logger = logging.getLogger(__name__)

MAX_LOST_IN_A_ROW = 256
"""Above it the environment or its score is broken: the run stops, whatever `on_error` says about single episodes."""
_NEIGHBOUR = "neighbour_lost"
_MAX_TRACES = 16
"""Unexpected errors of a worker that are logged with their stack."""


class _LostError(Exception):
    """A failure of the infrastructure; the episode is retried."""

    def __init__(self, ending: Ending, reason: str, *, is_own: bool = True) -> None:
        """`is_own`: it was not another episode that ended a process which both shared."""
        super().__init__(ending, reason)
        self.ending = ending
        self.is_own = is_own
        self.reason = one_line(reason)  # a server may have written it, and it reaches logs and terminals


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    ending: Ending
    score: Score | None
    """None where the recipe's reward scores."""


class Player:
    """The episodes of one rollout worker; `admission` decides how many of them are open."""

    def __init__(
        self,
        surroundings: Tools | Agency,
        config: ToolEnvironmentConfig | AgentEnvironmentConfig,
        *,
        admission: Admission,
        decode: Callable[[TokenArray], str],
        retried: Callable[[str], None],
    ) -> None:
        """`decode` returns a response's text; `retried` is told the ending of each attempt that is played again."""
        self._surroundings = surroundings
        self._config = config
        self.admission = admission
        self._decode = decode
        self._retried = retried
        self._num_lost = 0
        """Attempts of any episode since the last one that was not lost."""
        self._num_unexpected = 0

    async def rollout(self, prompt: Prompt, sampler: Sampler, *, max_tokens: int) -> Rollout:
        """Return one episode; raise QuarantineError where all attempts are lost, or what `on_error` demands.

        A RewardError or an EnvironmentLostError ends the run where no episode is played to its end any more.
        """
        config, lost = self._config, list[_LostError]()
        while True:
            place = self.admission.place()
            session = Session(
                sampler,
                prompt.token_ids,
                max_tokens=max_tokens,
                max_turns=config.max_turns,
                decode=self._decode,
                turning=place.turn,
            )
            try:
                async with place:
                    played = await self._attempt(prompt, session)
                self._num_lost = 0
                return session.finish(played.ending, played.score, num_retries=len(lost))
            except _LostError as error:
                if not error.is_own:
                    logger.info("episode lost its neighbour prompt=%s reason=%s", prompt.uid, error.reason)
                    self._retried(_NEIGHBOUR)
                    continue
                lost.append(error)
                logger.info("episode lost prompt=%s ending=%s reason=%s", prompt.uid, error.ending, error.reason)
                self._count(error)
            if config.on_error == "fail":
                raise EnvironmentLostError(f"prompt {prompt.uid}: {_described(lost)} (environment.on_error)")
            if config.on_error == "mask":
                masked = Score(value=0.0, components={}, is_masked=True)
                return session.finish(lost[-1].ending, masked)
            if len(lost) == config.max_attempts:
                raise QuarantineError(f"prompt {prompt.uid}: {len(lost)} episodes were lost: {_described(lost)}")
            self._retried(lost[-1].ending.value)

    def _count(self, error: _LostError) -> None:
        self._num_lost += 1
        if self._config.on_error != "fail" and self._num_lost > MAX_LOST_IN_A_ROW:
            message = f"environment: {self._num_lost} episodes in a row were lost; the last: {_described([error])}"
            raise RewardError(message) if error.ending is Ending.SCORE_LOST else EnvironmentLostError(message)

    async def close(self) -> None:
        """End the processes of all environments."""
        await self._surroundings.close()

    async def _attempt(self, prompt: Prompt, session: Session) -> Played:
        wall_s = self._config.wall_s
        scope = asyncio.timeout(wall_s)
        try:
            async with scope:
                return await self._surroundings.play(prompt, session)
        except NeighbourError as error:
            raise _LostError(Ending.ENV_LOST, str(error), is_own=False) from error
        except EnvironmentLostError as error:
            raise _LostError(Ending.ENV_LOST, str(error)) from error
        except ScoreLostError as error:
            raise _LostError(Ending.SCORE_LOST, str(error)) from error
        except MegarlError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and scope.expired():
                raise _LostError(Ending.WALL, f"not over after {wall_s:g} s (environment.wall_s)") from None
            # One episode, with what its model, its tools and its servers wrote, must not end the run.
            self._num_unexpected += 1
            if self._num_unexpected <= _MAX_TRACES:
                logger.warning("an episode failed unexpectedly prompt=%s", prompt.uid, exc_info=error)
            raise _LostError(Ending.ENV_LOST, f"unexpected {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSetup:
    """All that a rollout worker needs to play episodes."""

    environment: EnvironmentConfig
    template: Template
    tools: tuple[ToolFunction, ...]
    """The tools that the prompts name."""
    max_running: int
    """Requests that an engine computes at once."""
    max_context_tokens: int
    bind: str | None = None
    """`network.bind` of the recipe: where agents reach the model."""

    @classmethod
    def of(
        cls,
        environment: EnvironmentConfig,
        tokenizer: Tokenizer,
        rollout: RolloutRoleConfig,
        *,
        max_context_tokens: int,
        bind: str | None = None,
    ) -> EpisodeSetup:
        return cls(
            environment=environment,
            template=tokenizer.template,
            tools=tokenizer.tools,
            max_running=rollout.running_requests,
            max_context_tokens=max_context_tokens,
            bind=bind,
        )

    def num_running(self, cached_tokens: int | None) -> int:
        """Return how many turns an engine computes at once whose cache holds so many tokens; None is not known.

        With more than fit into its cache, it would have to give up some and compute them again. A history is taken to
        have half of the longest context: the mean over the turns of an episode that reaches it.
        """
        if cached_tokens is None:
            return self.max_running
        return max(1, min(self.max_running, 2 * cached_tokens // self.max_context_tokens))

    def opener(
        self,
        tokenizer: Tokenizer,
        *,
        cache_sizes: Callable[[], Awaitable[Sequence[int | None]]],
        retried: Callable[[str], None],
        log_path: Path,
        num_on_node: int = 1,
    ) -> Callable[[], Awaitable[Player]]:
        """Return a function that opens the player of one worker; `cache_sizes` are those of its engines, in tokens.

        The workers of the node, `num_on_node`, share its memory.
        """

        async def open_one() -> Player:
            sizes = await cache_sizes()
            # An engine that does not answer now is one of the same kind.
            smallest = min((size for size in sizes if size is not None), default=None)
            in_memory = most_open(psutil.virtual_memory().available // num_on_node, self.max_context_tokens)
            admission = Admission(
                max_running=sum(self.num_running(smallest if size is None else size) for size in sizes),
                max_open=min(in_memory, self.environment.most_open or in_memory),
            )
            logger.info(
                "turns under way=%d episodes open at most=%d cached tokens by engine=%s",
                admission.max_running,
                admission.max_open,
                list(sizes),
            )
            return await open_player(
                self.environment,
                tokenizer,
                admission=admission,
                retried=retried,
                host=LOOPBACK if self.bind is None else address_in(self.bind),
                log_path=log_path,
            )

        return open_one


async def open_player(
    config: EnvironmentConfig,
    tokenizer: Tokenizer,
    *,
    admission: Admission,
    retried: Callable[[str], None],
    host: str = LOOPBACK,
    log_path: Path | None = None,
) -> Player:
    """Return the player of a rollout worker. The tools of the tokenizer are those of the environment."""
    if has_agent(config):
        assert isinstance(config, AgentEnvironmentConfig | HarborEnvironmentConfig)
        agents = await open_agents(config, tokenizer, host=host, log_path=log_path)
        if isinstance(agents, ChatAgents):
            admission.limit(agents.most_open)
        surroundings: Tools | Agency = Agency(agents, max_turns=config.max_turns)
    else:
        assert isinstance(config, ToolEnvironmentConfig)
        environments = await open_environments(config, log_path=log_path)
        if isinstance(environments, ClassEnvironments):
            admission.limit(environments.most_open)
        if tuple(tool.as_function for tool in environments.tools) != tuple(tokenizer.tools):
            await environments.close()
            raise DataError("environment: its tools are not those that the prompts name; start the run again")
        surroundings = Tools(environments, build_dialogue(config, tokenizer), config)
    return Player(surroundings, config, admission=admission, decode=tokenizer.decode_response, retried=retried)


def tools_of(config: EnvironmentConfig) -> tuple[ToolSchema, ...]:
    """Return the tools that the prompts of a run name; a ConfigError if the environment cannot be had."""
    if has_agent(config):
        return ()  # an agent names its own
    assert isinstance(config, ToolEnvironmentConfig)

    async def look() -> tuple[ToolSchema, ...]:
        environments = await open_environments(config)
        try:
            return tuple(environments.tools)
        finally:
            await environments.close()

    return asyncio.run(look())


class Tools:
    """Surroundings that answer calls; megarl decides the turns."""

    def __init__(self, environments: Environments, dialogue: Dialogue, config: ToolEnvironmentConfig) -> None:
        self._environments = environments
        self._dialogue = dialogue
        self._config = config

    async def play(self, prompt: Prompt, session: Session) -> Played:
        environment = await self._environments.open(row_of(prompt))
        try:
            messages: list[ChatMessage] = list(prompt.messages)
            if environment.opening is not None:
                with _rendering():
                    messages.append(await self._dialogue.opening(environment.opening))
                    session.begin_row(await self._dialogue.whole(messages))
            num_given = len(messages)
            ending = await self._turns(environment, session, messages)
            transcript = Transcript(
                prompt=tuple(messages[:num_given]),
                messages=tuple(messages[num_given:]),
                ending=ending.value,
                token_ids=session.sampled_ids,
            )
            return Played(ending=ending, score=await environment.score(transcript))
        finally:
            await environment.close()

    async def close(self) -> None:
        await self._environments.close()

    async def _turns(self, environment: Environment, session: Session, messages: list[ChatMessage]) -> Ending:
        config = self._config
        dialogue = self._dialogue
        num_calls = 0
        for turn in range(1, config.max_turns + 1):
            sampled = await session.sample()
            messages.append({"role": "assistant", "content": sampled.text})
            if sampled.is_cut:
                return Ending.LENGTH
            calls = dialogue.calls(sampled.text)
            if isinstance(calls, Malformed):
                if config.malformed_call == "end" or turn == config.max_turns:
                    return Ending.MALFORMED_CALL
                await self._go_on(session, sampled, messages, [await dialogue.complaint(calls)], seconds=0.0)
                continue
            if not calls:
                return Ending.ANSWERED
            if turn == config.max_turns:
                return Ending.MAX_TURNS
            num_calls += len(calls)
            if config.max_calls is not None and num_calls > config.max_calls:
                return Ending.TOOL_LIMIT
            if await self._answer(environment, session, sampled, messages, calls):
                return Ending.ANSWERED
            if session.num_left == 0:
                return Ending.LENGTH
        raise AssertionError("the last turn ends the episode")

    async def _answer(
        self,
        environment: Environment,
        session: Session,
        sampled: SampledTurn,
        messages: list[ChatMessage],
        calls: Sequence[Call],
    ) -> bool:
        """Answer the calls of a turn, one after the other; return whether the environment ended the episode."""
        observed, has_ended, began = list[ChatMessage](), False, time.monotonic()
        for call in calls:
            observation = await environment.call(call)
            observed.append(await self._dialogue.observation(call, observation))
            session.reward(observation.reward or 0.0)
            has_ended |= observation.ended
        if has_ended:
            messages += observed
        else:
            await self._go_on(session, sampled, messages, observed, seconds=time.monotonic() - began)
        return has_ended

    async def _go_on(
        self,
        session: Session,
        sampled: SampledTurn,
        messages: list[ChatMessage],
        observed: list[ChatMessage],
        *,
        seconds: float,
    ) -> None:
        """Add observations to the history, or begin a new row where the template rewrites it."""
        messages += observed
        with _rendering():
            suffix = await self._dialogue.suffix(sampled.token_ids, observed)
            if suffix is None:
                session.begin_row(await self._dialogue.whole(messages))
            else:
                session.append(suffix, seconds=seconds)


@contextmanager
def _rendering() -> Iterator[None]:
    """Lose the episode where the chat template refuses texts of its environment."""
    try:
        yield
    except DataError as error:
        raise EnvironmentLostError(f"its text cannot be rendered: {error}") from error


class Agency:
    """Surroundings that decide the turns themselves."""

    def __init__(self, agents: Agents, *, max_turns: int) -> None:
        self._agents = agents
        self._max_turns = max_turns

    async def play(self, prompt: Prompt, session: Session) -> Played:
        score = await self._agents.run(row_of(prompt), session)
        if session.num_left == 0:
            return Played(ending=Ending.LENGTH, score=score)
        is_over = session.num_sampled >= self._max_turns
        return Played(ending=Ending.MAX_TURNS if is_over else Ending.ANSWERED, score=score)

    async def close(self) -> None:
        await self._agents.close()


class EpisodeScorer:
    """A `stages.Scorer` that keeps the scores that environments gave, and leaves the other episodes to the reward."""

    def __init__(self, reward: Scorer) -> None:
        self._reward = reward

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        unscored = tuple(rollout for rollout in group.rollouts if rollout.score is None)
        scored = (await self._reward.score(replace(group, rollouts=unscored))).scores if unscored else ()
        remaining = iter(scored)
        scores = (next(remaining) if rollout.score is None else rollout.score for rollout in group.rollouts)
        return ScoredGroup(group=group, scores=tuple(scores))


def _described(lost: list[_LostError]) -> str:
    return "; ".join(f"{each.ending}: {each.reason}" for each in lost)
