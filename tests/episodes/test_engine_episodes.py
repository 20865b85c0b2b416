"""Episodes on the shared real engine: a function's turns, and publishes between and during turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config.environment import FunctionEnvironmentConfig
from megarl.config.roles import InFlight, RolloutRoleConfig
from megarl.config.section import CPU_CACHED_TOKENS
from megarl.data.tokenizer import Tokenizer
from megarl.engine.fleet import Fleet
from megarl.episodes.play import EpisodeSetup
from megarl.observe.observer import Observer
from megarl.reward.scorer import ExactScorer
from megarl.rollout.following import RequestCounts
from megarl.rollout.task import RolloutTask, Sampling, Vocabulary
from megarl.rollout.worker import RolloutWorker, cache_sizes
from megarl.types import Ending, PolicyVersion, Prompt, Rollout, RolloutGroup, TurnKind
from tests.engine.engines import CONTEXT, EOS, ServedModel, prompt_of
from tests.episodes.templates import family_tokenizer
from tests.serving.pauses import DiskPublisher, pausing

NUM_EPISODES = 16
NUM_TURNS = 6
PROMPT = (5, 17, 33, 90, 8)
_TURNS = """
import asyncio
import numpy as np

async def play(row, session, tokenizer):
    for turn in range(6):
        await session.sample(max_tokens=24)
        session.append(np.array([40 + turn, 41, 42], np.int32))
        await asyncio.sleep(0.05 * (turn % 3))
    return {"score": 1.0, "turns": [0.5] + [0.0] * 5}
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return family_tokenizer(tmp_path_factory.mktemp("tokenizer"), "qwen2.5", tools=())


@asynccontextmanager
async def opened(fleet: Fleet, tokenizer: Tokenizer, folder: Path) -> AsyncIterator[RolloutWorker]:
    """Yield a worker as the driver builds it."""
    (folder / "turns.py").write_text(_TURNS)
    config = FunctionEnvironmentConfig.model_validate({"kind": "function", "code": f"{folder / 'turns.py'}:play"})
    setup = EpisodeSetup.of(config, tokenizer, RolloutRoleConfig(pool="rollout"), max_context_tokens=CONTEXT)

    async def sizes() -> list[int | None]:
        found = await cache_sizes(fleet.engines)
        assert found == [CPU_CACHED_TOKENS]
        return found

    open_player = setup.opener(tokenizer, cache_sizes=sizes, retried=lambda _: None, log_path=folder / "log")
    vocabulary = Vocabulary(size=99, eos_ids=(EOS,), max_context_tokens=CONTEXT, decode=tokenizer.decode_response)
    scorer = ExactScorer(Observer(()))
    worker = RolloutWorker(fleet, vocabulary=vocabulary, scorer=scorer, max_attempts=3, open_player=open_player)
    try:
        yield worker
    finally:
        await worker.close()


def task_of(mode: InFlight | None) -> RolloutTask:
    sampling = Sampling(
        num_rollouts=NUM_EPISODES, temperature=1.0, top_p=1.0, top_k=None, max_response_tokens=NUM_TURNS * 27 + 1
    )
    return RolloutTask(sampling=sampling, seed=3, in_flight=mode)


async def play(
    served: ServedModel, tokenizer: Tokenizer, folder: Path, mode: InFlight | None, *, pause_s: float
) -> tuple[RolloutGroup, RequestCounts]:
    """Return a group of episodes through which, with a mode, two versions were published."""
    async with served.fleet() as fleet, opened(fleet, tokenizer, folder) as worker:
        fleet.requests = counts = RequestCounts()
        playing = asyncio.create_task(worker.answer(prompt_of(*PROMPT), task_of(mode)))
        if mode is not None:
            publisher = pausing(DiskPublisher(served, fleet, mode), fleet, mode)
            for version in (1, 2):
                await asyncio.sleep(pause_s)
                await publisher.publish(PolicyVersion(version))
        answered = await playing
        assert [score.value for score in answered.scored.scores] == [1.0] * NUM_EPISODES
        return answered.scored.group, counts


def check_whole(rollout: Rollout) -> None:
    """All turns are there, and only sampled tokens are trained on, each with the version that chose it."""
    episode = rollout.episode
    assert (episode.ending, episode.num_retries, episode.rows) == (Ending.ANSWERED, 0, ())
    kinds = [turn.kind for turn in episode.turns]
    assert kinds == [TurnKind.SAMPLED, TurnKind.GIVEN] * (NUM_TURNS - 1) + [TurnKind.SAMPLED]
    assert [turn.reward for turn in episode.turns if turn.kind is TurnKind.SAMPLED] == [0.5] + [0.0] * 5
    newest = 0
    for turn in episode.turns:
        part = slice(turn.start, turn.end)
        assert (rollout.loss_mask[part] == (turn.kind is TurnKind.SAMPLED)).all()
        if turn.kind is TurnKind.GIVEN:
            assert rollout.token_ids[part].tolist()[1:] == [41, 42]
            continue
        versions = rollout.versions[part]
        assert turn.versions == (versions.min(), versions.max())
        assert (np.diff(versions) >= 0).all()
        assert versions[0] >= newest or newest - versions[0] <= 1  # a lower bound where engines are paused in place
        newest = max(newest, int(versions[-1]))


def logprobs_of(folder: Path, prompt: Prompt, rollout: Rollout) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[*prompt.token_ids.tolist(), *rollout.token_ids.tolist()]])
    num_prompt = len(prompt.token_ids)
    with torch.no_grad():
        table = model(ids).logits[0, num_prompt - 1 : -1].log_softmax(-1)
    found: np.ndarray[tuple[int], np.dtype[np.float32]] = table.gather(1, ids[0, num_prompt:, None])[:, 0].numpy()
    return found


def test_turns_of_a_function_are_those_that_the_engine_computed(
    qwen2_tp1: ServedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    group, counts = asyncio.run(play(qwen2_tp1, tokenizer, tmp_path, None, pause_s=0))
    assert not counts.causes  # every engine saw the tokens that it was sent
    # A deterministic engine on a CPU has no cache of prefixes.
    brought = sum(len(PROMPT) + turn.start for each in group.rollouts for turn in each.episode.turns if turn.versions)
    assert (counts.num_prompt_tokens, counts.num_cached_tokens) == (brought, 0)
    for rollout in group.rollouts:
        check_whole(rollout)
        expected = logprobs_of(qwen2_tp1.folder, group.prompt, rollout)
        mask = rollout.loss_mask
        np.testing.assert_allclose(rollout.logprobs[mask], expected[mask], atol=1e-4)
    assert len({tuple(rollout.token_ids.tolist()) for rollout in group.rollouts}) == NUM_EPISODES


@pytest.mark.fault(
    "weights are published between and during the turns of episodes, in each mode of in_flight",
    "no episode is lost; each token has the log-probability of its version",
)
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_episodes_live_through_publishes(
    qwen2_tp1: ServedModel, tokenizer: Tokenizer, tmp_path: Path, mode: InFlight
) -> None:
    for pause_s in (0.4, 0.15, 1.0):
        group, _ = asyncio.run(play(qwen2_tp1, tokenizer, tmp_path, mode, pause_s=pause_s))
        mixed = [rollout for rollout in group.rollouts if len({*rollout.versions[rollout.loss_mask].tolist()}) > 1]
        if len(mixed) >= NUM_EPISODES // 2:
            break
    assert len(mixed) >= NUM_EPISODES // 2, "the publishes came too late or too early to test anything"
    num_tokens = num_wrong = 0
    for rollout in group.rollouts:
        check_whole(rollout)
        if mode == "in_place":
            continue  # turns go on with the cache of earlier versions: no model alone computes these
        expected = [logprobs_of(folder, group.prompt, rollout) for folder in (qwen2_tp1.folder, qwen2_tp1.other_folder)]
        of_version = np.where(rollout.versions % 2 == 0, expected[0], expected[1])
        mask = rollout.loss_mask
        num_tokens += int(mask.sum())
        num_wrong += int((np.abs(rollout.logprobs - of_version)[mask] > 1e-4).sum())
    assert num_wrong == 0, f"{num_wrong} of {num_tokens} tokens are not of their version"
