"""Episodes on a real engine: what it saw is what is trained after, whatever is published between turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config.environment import ClassEnvironmentConfig
from megarl.engine import admin
from megarl.engine.fleet import Fleet
from megarl.episodes.admission import Admission
from megarl.episodes.play import Player, Tools
from megarl.episodes.protocol import Call, ChatMessage, Malformed, Observation, Row, ToolSchema, Transcript
from megarl.episodes.session import Session
from megarl.rollout.generator import FleetGenerator
from megarl.rollout.task import Sampling, Vocabulary
from megarl.tokens import SampledTokens
from megarl.types import Ending, PolicyVersion, Rollout, Score, TokenArray, TurnKind
from tests.engine.engines import CONTEXT, ServedModel, prompt_of, spell

ENDS = tuple(range(2, 22))
"""Many tokens end a response, so that the turns of a random model are short."""
PROMPT = (50, 57, 63, 90, 88)


@dataclass
class Between:
    """Environments whose calls do something to the engine; every response is a call."""

    act: Callable[[int], Awaitable[None]]
    num_calls: int = 0
    tools: Sequence[ToolSchema] = ()
    opening: str | None = None

    async def open(self, row: Row) -> Between:
        return self

    async def call(self, call: Call) -> Observation:
        self.num_calls += 1
        await self.act(self.num_calls)
        return Observation(text="")

    async def score(self, transcript: Transcript) -> Score | None:
        return Score(value=1.0, components={})

    async def close(self) -> None:
        """Nothing to close."""


@dataclass
class NumberDialogue:
    """Stands for a chat template: three tokens follow each response; with `forgets`, the history is rewritten."""

    forgets: bool = False
    num_turns: int = 0
    spoken: list[str] = field(default_factory=list)

    def calls(self, text: str) -> list[Call] | Malformed:
        return [Call(name="go", arguments={}, id="call_0")]

    async def observation(self, call: Call, observation: Observation) -> ChatMessage:
        return {"role": "tool", "content": observation.text}

    async def suffix(self, sampled_ids: TokenArray, observations: Sequence[ChatMessage]) -> TokenArray | None:
        self.num_turns += 1
        return None if self.forgets else np.array([30, 31, 32 + self.num_turns], np.int32)

    async def whole(self, messages: Sequence[ChatMessage]) -> TokenArray:
        return np.array([*PROMPT[:3], 40 + self.num_turns, 41], np.int32)


def play(served: ServedModel, act: Callable[[Fleet, int], Awaitable[None]], *, forgets: bool = False) -> list[Rollout]:
    config = ClassEnvironmentConfig(kind="class", path=Path("unused.py"), max_turns=4)

    async def scenario() -> list[Rollout]:
        async with served.fleet() as fleet:
            environments = Between(lambda number: act(fleet, number))
            tools = Tools(environments, NumberDialogue(forgets=forgets), config)  # type: ignore[arg-type]
            player = Player(
                tools, config, admission=Admission(max_running=8, max_open=8), decode=spell, retried=lambda cause: None
            )
            generator = FleetGenerator(
                fleet,
                sampling=Sampling(
                    num_rollouts=1, temperature=0.8, top_p=1.0, top_k=None, max_response_tokens=CONTEXT - 16
                ),
                vocabulary=Vocabulary(size=99, eos_ids=ENDS, max_context_tokens=CONTEXT, decode=spell),
                seed=7,
                max_attempts=3,
                player=player,
            )
            return list((await generator.generate(prompt_of(*PROMPT))).rollouts)

    return asyncio.run(scenario())


def expected_logprobs(folder: Path, rollout: Rollout) -> np.ndarray:
    """Return log-probabilities of each token after the history of its row, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    token_ids, rows = rollout.token_ids, (*rollout.episode.rows, rollout.num_tokens)
    found = np.zeros(rollout.num_tokens)
    for start, end in zip((0, *rows[:-1]), rows, strict=True):
        before = [] if start in rollout.episode.rows else list(PROMPT)
        ids = torch.tensor([[*before, *token_ids[start:end].tolist()]])
        with torch.no_grad():
            logprobs = (model(ids).logits[0, :-1] / 0.8).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        found[end - min(end - start, len(logprobs)) : end] = logprobs[-(end - start) :]
    return found


async def nothing(fleet: Fleet, number: int) -> None:
    """Leave the engine alone."""


@pytest.mark.parametrize("forgets", [False, True])
def test_log_probabilities_of_every_turn_are_those_after_the_history_of_its_row(
    qwen2_tp1: ServedModel, forgets: bool
) -> None:
    (rollout,) = play(qwen2_tp1, nothing, forgets=forgets)
    assert rollout.episode.ending is Ending.MAX_TURNS
    assert len(rollout.episode.rows) == (3 if forgets else 0)
    sampled = [turn for turn in rollout.episode.turns if turn.kind is TurnKind.SAMPLED]
    assert len(sampled) == 4
    expected = expected_logprobs(qwen2_tp1.folder, rollout)
    mask = rollout.loss_mask
    np.testing.assert_allclose(rollout.logprobs[mask], expected[mask], atol=1e-4)


@pytest.mark.fault("weights are published in the middle of an episode", "each token has the version that chose it")
def test_a_publish_between_two_turns_changes_the_version_of_the_later_ones(qwen2_tp1: ServedModel) -> None:
    async def publish(fleet: Fleet, number: int) -> None:
        if number == 2:
            (engine,) = fleet.engines
            await admin.load_weights_from_disk(
                engine.client, qwen2_tp1.other_folder, version=PolicyVersion(1), timeout_s=600
            )
            await engine.client.flush_cache()
            await fleet.committed(PolicyVersion(1), [engine])

    (rollout,) = play(qwen2_tp1, publish)
    sampled = [turn for turn in rollout.episode.turns if turn.kind is TurnKind.SAMPLED]
    assert [turn.versions for turn in sampled] == [(0, 0), (0, 0), (1, 1), (1, 1)]
    for folder, version in ((qwen2_tp1.folder, 0), (qwen2_tp1.other_folder, 1)):
        chosen = rollout.versions == version
        expected = expected_logprobs(folder, rollout)
        np.testing.assert_allclose(rollout.logprobs[chosen], expected[chosen], atol=1e-4)


async def test_a_turn_costs_little_time_of_the_processor() -> None:
    class Instant:
        async def sample(
            self, history: TokenArray, *, max_tokens: int, row: int, num_routed: int, heard: object = None
        ) -> SampledTokens:
            ids = np.full(200, 7, np.int32)
            return SampledTokens(
                token_ids=ids, logprobs=np.zeros(200, np.float32), versions=np.zeros(200, np.int32), is_cut=False
            )

    # The bound holds on a machine five times slower.
    session = Session(Instant(), np.ones(1000, np.int32), max_tokens=1 << 20, max_turns=1000, decode=spell)
    began = time.process_time()
    for _ in range(200):
        await session.sample()
        session.append(np.full(100, 9, np.int32))
    session.finish(Ending.ANSWERED, None)
    assert (time.process_time() - began) / 200 < 2e-3
