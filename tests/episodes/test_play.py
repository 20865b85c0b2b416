"""Episodes with scripted responses and environments in this process: turns, endings, what is lost and played again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from megarl.config.environment import ClassEnvironmentConfig, EnvironmentConfig
from megarl.config.roles import RolloutRoleConfig
from megarl.data.tokenizer import Tokenizer
from megarl.episodes.admission import Admission
from megarl.episodes.dialogue import Dialogue
from megarl.episodes.play import MAX_LOST_IN_A_ROW, EpisodeSetup, Player, Tools, open_player, tools_of
from megarl.episodes.protocol import Call, Observation, Row, ToolSchema, Transcript
from megarl.errors import DataError, EnvironmentLostError, NeighbourError, QuarantineError, RewardError, ScoreLostError
from megarl.tokens import SampledTokens
from megarl.types import DEMONSTRATION, Ending, FinishReason, Prompt, Rollout, Score, TokenArray, TurnKind
from tests.episodes.conftest import CALCULATOR
from tests.episodes.templates import ADD, FAMILIES, family_tokenizer, sum_prompt


def call_of(a: int, b: int) -> str:
    return "<tool_call>\n" + json.dumps({"name": "add", "arguments": {"a": a, "b": b}}) + "\n</tool_call>"


class ScriptedSampler:
    """Answers with texts in turn, each token of the version that is served then; remembers what it was asked."""

    def __init__(self, tokenizer: Tokenizer, *texts: str, versions: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._texts = list(texts)
        self._versions = list(versions)
        self.histories: list[TokenArray] = []
        self.rows: list[int] = []

    async def sample(
        self, history: TokenArray, *, max_tokens: int, row: int, num_routed: int, heard: object = None
    ) -> SampledTokens:
        number = len(self.histories)
        self.histories.append(history)
        self.rows.append(row)
        (ids,) = self._tokenizer.encode([self._texts[number % len(self._texts)]])
        whole = np.concatenate([ids, np.array(self._tokenizer.eos_ids[:1], np.int32)])[:max_tokens]
        version = self._versions[number] if self._versions else 0
        return SampledTokens(
            token_ids=whole,
            logprobs=np.full(len(whole), -0.5, np.float32),
            versions=np.full(len(whole), version, np.int32),
            is_cut=len(whole) < len(ids) + 1,
        )


@dataclass
class Sums:
    """Environments that add, in this process; `faults` are raised by the calls in turn, None is no fault."""

    faults: list[Exception | None] = field(default_factory=list)
    score_faults: list[Exception | None] = field(default_factory=list)
    answer: Callable[[Call], Observation] = lambda call: Observation(
        text=str(int(str(call.arguments["a"])) + int(str(call.arguments["b"])))
    )
    turns: tuple[float, ...] | None = None
    opening: str | None = None
    slow_s: float = 0.0
    num_opened: int = 0
    num_closed: int = 0
    transcripts: list[Transcript] = field(default_factory=list)
    tools: Sequence[ToolSchema] = (ADD,)

    async def open(self, row: Row) -> Sums:
        self.num_opened += 1
        return self

    async def call(self, call: Call) -> Observation:
        await asyncio.sleep(self.slow_s)
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault
        return self.answer(call)

    async def score(self, transcript: Transcript) -> Score | None:
        fault = self.score_faults.pop(0) if self.score_faults else None
        if fault is not None:
            raise fault
        self.transcripts.append(transcript)
        return Score(value=float(transcript.last_text == "7"), components={}, turns=self.turns)

    async def close(self) -> None:
        self.num_closed += 1


CONFIG = ClassEnvironmentConfig(kind="class", max_turns=4, max_result_tokens=16)


@dataclass
class Table:
    """All that one test plays with."""

    tokenizer: Tokenizer
    sums: Sums
    sampler: ScriptedSampler
    retried: list[str] = field(default_factory=list)

    def player(self, config: ClassEnvironmentConfig) -> Player:
        dialogue = Dialogue(self.tokenizer, max_result_tokens=config.max_result_tokens)
        return Player(
            Tools(self.sums, dialogue, config),
            config,
            admission=Admission(max_running=2, max_open=2),
            decode=self.tokenizer.decode_response,
            retried=self.retried.append,
        )

    def play(self, config: ClassEnvironmentConfig = CONFIG, *, max_tokens: int = 400) -> Rollout:
        return asyncio.run(self.player(config).rollout(self.prompt, self.sampler, max_tokens=max_tokens))

    @property
    def prompt(self) -> Prompt:
        return sum_prompt(self.tokenizer)


def table(folder: Path, *texts: str, family: str = "qwen2.5", versions: Sequence[int] = (), **sums: object) -> Table:
    tokenizer = family_tokenizer(folder, family)
    return Table(tokenizer, Sums(**sums), ScriptedSampler(tokenizer, *texts, versions=versions))  # type: ignore[arg-type]


def test_sampled_tokens_are_kept_as_they_came_and_results_are_not_trained_on(tmp_path: Path) -> None:
    here = table(tmp_path, call_of(3, 4), "7", versions=[2, 5])
    rollout = here.play()
    assert rollout.episode.ending is Ending.ANSWERED
    assert [turn.kind for turn in rollout.episode.turns] == [TurnKind.SAMPLED, TurnKind.GIVEN, TurnKind.SAMPLED]
    first, given, last = rollout.episode.turns
    whole = np.concatenate([here.prompt.token_ids, rollout.token_ids])
    # The engine saw, at each turn, exactly what the row has before it.
    num_prompt = len(here.prompt.token_ids)
    assert here.sampler.histories[0].tolist() == whole[:num_prompt].tolist()
    assert here.sampler.histories[1].tolist() == whole[: num_prompt + given.end].tolist()
    assert rollout.loss_mask.tolist() == [True] * first.end + [False] * (given.end - first.end) + [True] * (
        last.end - last.start
    )
    assert (rollout.versions[first.start : first.end] == 2).all()
    assert (rollout.versions[given.start : given.end] == DEMONSTRATION).all()
    assert (first.versions, given.versions, last.versions) == ((2, 2), None, (5, 5))
    assert not rollout.logprobs[~rollout.loss_mask].any()
    assert (rollout.text, rollout.finish_reason, rollout.score and rollout.score.value) == ("7", FinishReason.STOP, 1.0)
    assert "<tool_response>\n7\n</tool_response>" in here.tokenizer.decode(rollout.token_ids)
    assert here.sums.num_closed == here.sums.num_opened == 1


def test_a_template_that_drops_thoughts_begins_a_row_that_repeats_nothing_in_the_loss(tmp_path: Path) -> None:
    here = table(tmp_path, f"<think>\nhm\n</think>\n\n{call_of(3, 4)}", "7", family="forgetful")
    rollout = here.play()
    (row,) = rollout.episode.rows
    kinds = [turn.kind for turn in rollout.episode.turns]
    assert kinds == [TurnKind.SAMPLED, TurnKind.CONTEXT, TurnKind.SAMPLED]
    context = rollout.episode.turns[1]
    assert context.start == row
    assert here.sampler.histories[1].tolist() == rollout.token_ids[context.start : context.end].tolist()
    assert "hm" not in here.tokenizer.decode(here.sampler.histories[1])
    assert not rollout.loss_mask[context.start : context.end].any()
    assert here.sampler.rows == [0, 1]


@pytest.mark.parametrize(
    ("texts", "changes", "max_tokens", "ending"),
    [
        (["7"], {}, 400, Ending.ANSWERED),
        ([call_of(1, 2)], {}, 2000, Ending.MAX_TURNS),
        ([call_of(1, 2)], {}, 20, Ending.LENGTH),
        ([call_of(1, 2)], {"max_calls": 2}, 2000, Ending.TOOL_LIMIT),
        (["<tool_call>\nadd three\n</tool_call>"], {"malformed_call": "end"}, 400, Ending.MALFORMED_CALL),
    ],
)
def test_endings_of_the_policy(
    tmp_path: Path, texts: list[str], changes: dict[str, object], max_tokens: int, ending: Ending
) -> None:
    here = table(tmp_path, *texts)
    rollout = here.play(CONFIG.model_copy(update=changes), max_tokens=max_tokens)
    assert rollout.episode.ending is ending
    assert here.sums.transcripts[0].ending == ending.value
    assert rollout.loss_mask[-1]
    assert rollout.num_tokens <= max_tokens
    assert (rollout.finish_reason is FinishReason.LENGTH) == (ending is Ending.LENGTH)


def test_a_malformed_call_is_an_observation_and_the_model_may_try_again(tmp_path: Path) -> None:
    here = table(tmp_path, "<tool_call>\nadd three\n</tool_call>", call_of(3, 4), "7")
    rollout = here.play()
    assert rollout.episode.ending is Ending.ANSWERED
    assert "error: the call" in here.tokenizer.decode(rollout.token_ids)


def test_an_environment_may_end_the_episode_with_its_observation(tmp_path: Path) -> None:
    here = table(tmp_path, call_of(3, 4), answer=lambda call: Observation(text="over", ended=True, reward=2.5))
    rollout = here.play()
    assert rollout.episode.ending is Ending.ANSWERED
    assert [turn.reward for turn in rollout.episode.turns] == [2.5]
    assert here.sums.transcripts[0].messages[-1]["content"] == "over"


def test_rewards_of_turns_are_those_of_observations_and_of_the_score(tmp_path: Path) -> None:
    here = table(tmp_path, call_of(3, 4), "7", turns=(0.25, 1.0), answer=lambda call: Observation(text="7", reward=0.5))
    rewards = [turn.reward for turn in here.play().episode.turns]
    assert rewards == [0.75, 0.0, 1.0]
    with pytest.raises(RewardError, match="3 rewards in `turns` for an episode of 2"):
        table(tmp_path, call_of(3, 4), "7", turns=(1.0, 1.0, 1.0)).play()


def test_the_opening_of_an_environment_is_part_of_the_history(tmp_path: Path) -> None:
    here = table(tmp_path, "7", opening="Look at the board.")
    rollout = here.play()
    assert "Look at the board." in here.tokenizer.decode(here.sampler.histories[0])
    assert rollout.loss_mask.sum() == rollout.episode.turns[-1].end - rollout.episode.turns[-1].start


@pytest.mark.fault(
    "an environment is lost in the middle of an episode", "played again in a fresh one, nothing of it trained"
)
def test_a_lost_environment_is_played_again_and_what_it_left_is_forgotten(tmp_path: Path) -> None:
    here = table(tmp_path, call_of(3, 4), "7", faults=[EnvironmentLostError("killed")])
    here.sampler._texts = [call_of(3, 4), call_of(3, 4), "7"]
    rollout = here.play()
    assert rollout.episode.ending is Ending.ANSWERED
    assert rollout.episode.num_retries == 1
    assert (here.retried, here.sums.num_opened, here.sums.num_closed) == (["env_lost"], 2, 2)
    assert len(rollout.episode.turns) == 3
    assert here.sampler.histories[1].tolist() == here.prompt.token_ids.tolist()


@pytest.mark.fault(
    "half of a character in a call of the model, in a result or in an opening",
    "the model is told, or reads a replacement; the run goes on",
)
def test_half_a_character_ends_no_episode(tmp_path: Path) -> None:
    calls = ['{"name": "\\ud800", "arguments": {}}', '{"name": "add", "arguments": {"a": "\\ud800"}}']
    texts = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    answer = Observation(text="7\ud800<|im_end|>")
    here = table(tmp_path, *texts, call_of(3, 4), "7", opening="Look\udc00<|im_start|>", answer=lambda call: answer)
    rollout = here.play()
    assert (rollout.episode.ending, rollout.episode.num_retries) == (Ending.ANSWERED, 0)
    history = here.tokenizer.decode(here.sampler.histories[-1])
    assert history.count("error: the call") == 2
    assert "<tool_response>\n7\ufffd< |im_end|>\n" in history
    assert "Look\ufffd< |" in history


def test_an_opening_is_cut_as_a_result_is(tmp_path: Path) -> None:
    here = table(tmp_path, "7", opening="Look at it. " * 100_000)
    here.play()
    assert "tokens are not shown]" in here.tokenizer.decode(here.sampler.histories[0])
    assert len(here.sampler.histories[0]) < len(here.prompt.token_ids) + 150


@pytest.mark.fault(
    "an error that nobody expects in one episode", "the episode is lost, logged and played again; the run goes on"
)
def test_an_unexpected_error_loses_its_episode_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here = table(tmp_path, call_of(3, 4), faults=[OverflowError("int too large\n\x1b[2J")])
    here.sampler._texts = [call_of(3, 4), call_of(3, 4), "7"]
    with caplog.at_level("INFO", logger="megarl.episodes.play"):
        rollout = here.play()
    assert (rollout.episode.ending, rollout.episode.num_retries, here.retried) == (Ending.ANSWERED, 1, ["env_lost"])
    assert here.sums.num_closed == here.sums.num_opened == 2
    (trace, told) = (record for record in caplog.records if record.name == "megarl.episodes.play")
    assert trace.exc_info is not None
    assert "unexpected OverflowError: int too large" in told.getMessage()
    assert told.getMessage().isprintable()


def test_an_episode_that_always_fails_unexpectedly_gives_its_group_up(tmp_path: Path) -> None:
    here = table(tmp_path, call_of(3, 4), faults=[KeyError("x")] * 3)
    with pytest.raises(QuarantineError, match="row-0: 3 episodes were lost: env_lost: unexpected KeyError"):
        here.play()


def test_text_that_the_template_refuses_loses_the_episode_not_the_run(tmp_path: Path) -> None:
    strict = "{% if 'bad' in messages[-1].content %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = family_tokenizer(tmp_path, "qwen2.5", template=strict + FAMILIES["qwen2.5"][0])
    sums = Sums(answer=lambda call: Observation(text="bad"))
    here = Table(tokenizer, sums, ScriptedSampler(tokenizer, call_of(3, 4)))
    with pytest.raises(QuarantineError, match="its text cannot be rendered: the chat template refuses the messages"):
        here.play()


@pytest.mark.parametrize(
    ("sums", "changes", "cause"),
    [
        (Sums(faults=[EnvironmentLostError("gone")] * 3), {}, "env_lost"),
        (Sums(score_faults=[ScoreLostError("gone")] * 3), {}, "score_lost"),
        (Sums(slow_s=5.0), {"wall_s": 0.05}, "wall"),
    ],
)
def test_after_too_many_losses_the_group_is_given_up(
    tmp_path: Path, sums: Sums, changes: dict[str, object], cause: str
) -> None:
    here = table(tmp_path, call_of(3, 4))
    here.sums = sums
    with pytest.raises(QuarantineError, match=f"row-0: 3 episodes were lost: {cause}"):
        here.play(CONFIG.model_copy(update=changes))
    assert here.retried == [cause] * 2
    assert here.sums.num_closed == here.sums.num_opened == 3


@pytest.mark.fault("a score that always fails", "the run ends with the reason instead of replacing groups for ever")
@pytest.mark.parametrize(
    ("sums", "error"),
    [
        (Sums(score_faults=[ScoreLostError("KeyError: 'answer'")] * 1000), RewardError),
        (Sums(faults=[EnvironmentLostError("KeyError: 'answer'")] * 1000), EnvironmentLostError),
    ],
)
@pytest.mark.parametrize("on_error", ["mask", "retry"])
def test_an_environment_in_which_every_episode_is_lost_ends_the_run(
    tmp_path: Path, sums: Sums, error: type[Exception], on_error: str
) -> None:
    here = table(tmp_path, call_of(3, 4))
    here.sums = Sums(faults=list(sums.faults), score_faults=list(sums.score_faults))
    config = CONFIG.model_copy(update={"on_error": on_error, "max_turns": 2, "max_attempts": 4})
    player = here.player(config)

    async def play() -> None:
        for _ in range(MAX_LOST_IN_A_ROW + 1):
            with suppress(QuarantineError):
                await player.rollout(here.prompt, here.sampler, max_tokens=400)

    with pytest.raises(error, match=rf"^environment: {MAX_LOST_IN_A_ROW + 1} episodes in a row .*KeyError: 'answer'$"):
        asyncio.run(play())
    assert here.sums.num_closed == here.sums.num_opened == MAX_LOST_IN_A_ROW + 1


async def test_an_episode_that_is_played_forgets_the_losses_before_it(tmp_path: Path) -> None:
    here = table(tmp_path, "7", score_faults=([ScoreLostError("gone")] * MAX_LOST_IN_A_ROW + [None]) * 2)
    player = here.player(CONFIG.model_copy(update={"on_error": "mask"}))

    rollouts = [await player.rollout(here.prompt, here.sampler, max_tokens=400) for _ in range(514)]
    assert sum(rollout.score is not None and rollout.score.is_masked for rollout in rollouts) == 2 * MAX_LOST_IN_A_ROW


@pytest.mark.patient
def test_turns_are_admitted_by_what_the_caches_of_engines_hold_and_episodes_by_their_processes(tmp_path: Path) -> None:
    path = tmp_path / "environment.py"
    path.write_text(CALCULATOR)
    config = ClassEnvironmentConfig(kind="class", path=path, workers=40)
    tokenizer = family_tokenizer(tmp_path / "model", "qwen2.5", tools=tools_of(config))
    rollout = RolloutRoleConfig(pool="rollout", max_running_requests=64)
    setup = EpisodeSetup.of(config, tokenizer, rollout, max_context_tokens=1000)

    async def admitted(*sizes: int | None) -> tuple[int, int]:
        async def cache_sizes() -> list[int | None]:
            return list(sizes)

        opener = setup.opener(tokenizer, cache_sizes=cache_sizes, retried=lambda _: None, log_path=tmp_path / "log")
        player = await opener()
        await player.close()
        return player.admission.max_running, player.admission.max_open

    async def all_admitted() -> list[tuple[int, int]]:
        held = [(None,), (100_000,), (4_000,), (100,), (4_000, None), (4_000, 100_000)]
        return [await admitted(*sizes) for sizes in held]

    assert asyncio.run(all_admitted()) == [(running, 40) for running in (64, 64, 8, 1, 16, 72)]


@pytest.mark.parametrize("on_error", ["retry", "mask", "fail"])
def test_an_episode_that_another_one_took_down_is_played_again_and_costs_no_attempt(
    on_error: str, tmp_path: Path
) -> None:
    faults = [*[NeighbourError("gone")] * (MAX_LOST_IN_A_ROW + 1), None]
    here = table(tmp_path, *[call_of(3, 4)] * len(faults), "7", faults=faults)
    rollout = here.play(CONFIG.model_copy(update={"on_error": on_error, "max_attempts": 1}))
    assert rollout.score is not None
    assert (rollout.score.value, rollout.score.is_masked, rollout.episode.num_retries) == (1.0, False, 0)
    assert here.retried == ["neighbour_lost"] * (MAX_LOST_IN_A_ROW + 1)


def test_on_error_masks_an_episode_or_ends_the_run(tmp_path: Path) -> None:
    here = table(tmp_path, call_of(3, 4), faults=[EnvironmentLostError("gone")])
    rollout = here.play(CONFIG.model_copy(update={"on_error": "mask"}))
    assert rollout.score is not None
    assert rollout.score.is_masked
    assert rollout.episode.ending is Ending.ENV_LOST
    here = table(tmp_path, call_of(3, 4), faults=[EnvironmentLostError("gone")])
    with pytest.raises(EnvironmentLostError, match=r"environment\.on_error"):
        here.play(CONFIG.model_copy(update={"on_error": "fail"}))


_AGENTS = """
import httpx

def run(task, base_url, api_key):
    headers = {"Authorization": f"Bearer {api_key}"}
    messages = [{"role": "user", "content": task["prompt"]}]
    for said in ("Are you sure?", None):
        body = {"messages": messages}
        reply = httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=60).json()
        messages += [reply["choices"][0]["message"], {"role": "user", "content": said}]
    return float(messages[-2]["content"] == task["ground_truth"])

async def turns(row, session, tokenizer):
    first = await session.sample()
    session.append(tokenizer.encode(["Are you sure?"])[0])
    second = await session.sample()
    return float(second.text == row["ground_truth"])
"""


@pytest.mark.patient
@pytest.mark.parametrize("kind", ["chat", "function"])
async def test_agents_play_through_the_same_player(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "agents.py"
    path.write_text(_AGENTS)
    keys = {"path": str(path)} if kind == "chat" else {"code": f"{path}:turns"}
    config: EnvironmentConfig = TypeAdapter(EnvironmentConfig).validate_python({"kind": kind, "max_turns": 4, **keys})
    tokenizer = family_tokenizer(tmp_path / "model", "qwen2.5", tools=())
    prompt = sum_prompt(tokenizer)
    sampler = ScriptedSampler(tokenizer, "8", "7")

    player = await open_player(
        config, tokenizer, admission=Admission(max_running=2, max_open=2), retried=lambda _: None
    )
    try:
        rollout = await player.rollout(prompt, sampler, max_tokens=400)
    finally:
        await player.close()
    assert rollout.score is not None
    assert rollout.score.value == 1
    kinds = [turn.kind for turn in rollout.episode.turns]
    assert kinds == [TurnKind.SAMPLED, TurnKind.GIVEN, TurnKind.SAMPLED]
    assert np.array_equal(sampler.histories[0], prompt.token_ids)
    assert rollout.loss_mask.sum() == len(tokenizer.encode(["8"])[0]) + len(tokenizer.encode(["7"])[0]) + 2


def test_tools_that_prompts_do_not_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "environment.py"
    path.write_text(CALCULATOR)
    tokenizer = family_tokenizer(tmp_path / "model", "qwen2.5")
    config = ClassEnvironmentConfig(kind="class", path=path)
    with pytest.raises(DataError, match="not those that the prompts name"):
        asyncio.run(
            open_player(config, tokenizer, admission=Admission(max_running=2, max_open=2), retried=lambda _: None)
        )
