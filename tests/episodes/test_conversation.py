"""Agents that rewrite their histories at random: a sampled token is trained once, after what it was sampled after."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.tokenizer import Tokenizer
from megarl.episodes.conversation import AgentConversation
from megarl.episodes.dialogue import Dialogue
from megarl.episodes.protocol import ChatMessage, Heard
from megarl.episodes.session import Session
from megarl.episodes.wire.values import ModelAnswer, ModelRequest
from megarl.tokens import SampledTokens
from megarl.types import Ending, Rollout, Score, TokenArray, TurnKind
from tests.episodes.scripted import ScriptedSession
from tests.episodes.templates import family_tokenizer


class _Serial:
    """A `Sampler` each of whose tokens has another log-probability, and that is now and then given up."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = np.random.default_rng(seed)
        self._num_tokens = 0
        self.seen: dict[float, tuple[int, ...]] = {}
        """By the log-probability of each token: the tokens before it, and itself."""

    async def sample(
        self, history: TokenArray, *, max_tokens: int, row: int, num_routed: int, heard: Heard | None = None
    ) -> SampledTokens:
        text = "".join(self._random.choice(["a", "<think>", "</think>", "\u00e9", " b", "\n"], size=5))
        token_ids = self._tokenizer.encode([text + self._random.choice(["<|im_end|>", ""])])[0][:max_tokens]
        await asyncio.sleep(0)
        if self._random.random() < 0.2:
            raise asyncio.CancelledError
        logprobs = -1.0 - np.arange(self._num_tokens, self._num_tokens + len(token_ids), dtype=np.float32)
        self._num_tokens += len(token_ids)
        for place, logprob in enumerate(logprobs.tolist()):
            self.seen[logprob] = (*history.tolist(), *token_ids[: place + 1].tolist())
        return SampledTokens(token_ids=token_ids, logprobs=logprobs, versions=np.zeros(len(token_ids), np.int32))


@pytest.fixture(scope="module", params=["qwen2.5", "qwen3"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One template that only appends, and one that drops old thoughts."""
    return family_tokenizer(tmp_path_factory.mktemp(request.param), request.param, tools=())


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["go on", "branch", "edit", "compact", "new", "forge", "retry"]),
        st.integers(0, 9),
        st.integers(0, 9),
        st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


@given(steps=_STEPS, seed=st.integers(0, 1000))
def test_every_sampled_token_is_trained_once_after_the_tokens_it_was_sampled_after(
    tokenizer: Tokenizer, steps: Sequence[tuple[str, int, int, bool]], seed: int
) -> None:
    sampler = _Serial(tokenizer, seed)
    prompt_ids = tokenizer.encode([tokenizer.render_chat([{"role": "user", "content": "hi"}])])[0]
    session = Session(sampler, prompt_ids, max_tokens=4000, max_turns=40, decode=tokenizer.decode_response)
    asyncio.run(_Agent(tokenizer, AgentConversation(session)).play(steps))
    if not sampler.seen:
        return
    rollout = session.finish(Ending.ANSWERED, None)
    trained = Counter(rollout.logprobs[rollout.loss_mask].tolist())
    assert trained == Counter(dict.fromkeys(sampler.seen, 1))
    assert _contexts(rollout, prompt_ids) == sampler.seen


def _contexts(rollout: Rollout, prompt_ids: TokenArray) -> dict[float, tuple[int, ...]]:
    """Return the tokens of its row up to each trained token, as the trainer sees them."""
    rows = rollout.episode.rows
    edges = [*([] if rows and rows[0] == 0 else [0]), *rows, rollout.num_tokens]
    found = {}
    for start, end in pairwise(edges):
        before = [] if start in rows else prompt_ids.tolist()
        for place in range(start, end):
            if rollout.loss_mask[place]:
                context = (*before, *rollout.token_ids[start : place + 1].tolist())
                found[float(rollout.logprobs[place])] = context
    return found


class _Agent:
    """Rewrites what it said and got in every way that agents do."""

    def __init__(self, tokenizer: Tokenizer, conversation: AgentConversation) -> None:
        self._tokenizer = tokenizer
        self._dialogue = Dialogue(tokenizer, max_result_tokens=1000, call_format="hermes")
        self._conversation = conversation
        self._chats: list[list[ChatMessage]] = [[]]

    async def play(self, steps: Sequence[tuple[str, int, int, bool]]) -> None:
        running: list[asyncio.Task[None]] = []
        for number, (kind, one, other, is_beside) in enumerate(steps):
            chat = self._chats[one % len(self._chats)]
            said: ChatMessage = {"role": "user", "content": f"step {number}"}
            match kind:
                case "go on":
                    asked = [*chat, said]
                case "branch":
                    asked = [*chat[: 2 * (other % (len(chat) // 2 + 1))], said]
                case "edit":
                    asked = [*({**each, "content": f"{each['content']}!"} for each in chat[:1]), *chat[1:], said]
                case "compact":
                    asked = [{"role": "user", "content": f"{len(chat)} messages before"}, *chat[-1:], said]
                case "forge":
                    asked = [*chat, said, {"role": "assistant", "content": "I never said <|im_end|>"}, said]
                case "retry":
                    asked = list(chat[:-1]) if chat else [said]
                case _:
                    asked = [said]
            running.append(asyncio.create_task(self._ask(asked)))
            if not is_beside:
                await asyncio.wait(running)
        await asyncio.wait(running)

    async def _ask(self, messages: list[ChatMessage]) -> None:
        conversation = self._conversation
        asked = conversation.asked(ModelRequest(messages=tuple(messages)))
        async with conversation.place(asked, self._dialogue, self._tokenizer) as place:
            num_prompt_tokens = place.num_prompt_tokens
            sampled = await place.row.sample(given=place.given, max_tokens=30)
            answer = ModelAnswer(
                text=sampled.text,
                is_cut=sampled.is_cut,
                num_prompt_tokens=num_prompt_tokens,
                num_sampled=len(sampled.token_ids),
            )
            if answer.num_sampled:
                conversation.note(asked, place, answer, sampled.text)
                self._chats.append([*messages, answer.message])


async def test_rewards_of_turns_and_of_tokens_are_in_the_order_of_sampling_where_rows_interleave(
    tokenizer: Tokenizer,
) -> None:
    session = ScriptedSession(tokenizer, ["a", "bb", "ccc"])
    first, second = (session.open_row(np.array([number], np.int32)) for number in (5, 6))
    lengths = [len((await row.sample()).token_ids) for row in (first, second, first)]
    tokens = tuple(float(number) for number, length in enumerate(lengths, 1) for _ in range(length))
    rollout = session.finish(Ending.ANSWERED, Score(value=0.0, components={}, turns=(1.0, 2.0, 3.0), tokens=tokens))
    sampled = [turn for turn in rollout.episode.turns if turn.kind is TurnKind.SAMPLED]
    assert [turn.reward for turn in sampled] == [1.0, 3.0, 2.0]
    assert rollout.score is not None
    by_token = np.zeros(rollout.num_tokens)
    by_token[rollout.loss_mask] = rollout.score.tokens
    assert all((by_token[turn.start : turn.end] == turn.reward).all() for turn in sampled)


async def test_the_first_messages_of_a_group_are_rendered_once_and_every_field_tells_them_apart(
    tokenizer: Tokenizer,
) -> None:
    dialogue = Dialogue(tokenizer, max_result_tokens=64)
    rendered: list[str] = []
    plain = dialogue.prompt_ids

    async def counted(messages: Sequence[ChatMessage]) -> TokenArray:
        rendered.append(str(messages[-1]["content"]))
        return await plain(messages)

    dialogue.prompt_ids = counted  # type: ignore[method-assign]
    for content, name in (("one", "a"), ("one", "a"), ("two", "a"), ("one", "b"), ("one", "a")):
        session = ScriptedSession(tokenizer, ["x"])
        conversation = AgentConversation(session)
        message: ChatMessage = {"role": "user", "content": content, "name": name}
        asked = conversation.asked(ModelRequest(messages=(message,)))
        async with conversation.place(asked, dialogue, tokenizer) as place:
            assert place.row.token_ids.tolist() == (await plain([{"role": "user", "content": content}])).tolist()
    assert rendered == ["one", "two", "one"]
