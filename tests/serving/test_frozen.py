"""Frozen models on engines that run already: a real judge and a real reward model, by their URLs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config.model import read_model_shape
from megarl.config.recipe import NetworkConfig, RunConfig
from megarl.config.reward import JudgeRewardConfig, RewardConfig, RewardModelRewardConfig
from megarl.config.roles import EndpointConfig, FrozenRoleConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.engine.process import EngineProcess
from megarl.errors import EngineError, ScoreError
from megarl.observe.events import Noted
from megarl.observe.observer import Observer
from megarl.reward.build import build_scorer
from megarl.serving.frozen import model_version, models_of, start_frozen
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from megarl.types import Score
from tests.engine.engines import engine_spec
from tests.observe.samples import ListSink
from tests.rollout.test_frozen import CHAT, group_of, written_question
from tests.tiny_models import as_classifier, classifier_scores, next_logprobs

TEXTS = ("4", "12", "the rest")


@pytest.fixture(scope="module")
def folder(real_engines: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    write_tiny_model(folder / "model", TinyShape(), seed=3)
    return folder


@pytest.fixture(scope="module")
def judge(folder: Path) -> Iterator[FrozenRoleConfig]:
    """A judge that somebody started."""
    yield from served(folder / "model", folder, role="judge.tiny")


def served(model: Path, folder: Path, *, role: str) -> Iterator[FrozenRoleConfig]:
    is_classifier = role.startswith("reward_model.")
    spec = replace(engine_spec(model, folder / "run"), role=role, is_classifier=is_classifier)
    process = EngineProcess(replace(spec, has_grammars=not is_classifier))
    process.start()
    try:
        asyncio.run(process.wait_ready())
        (folder / "key").write_text(process.endpoint.keys.api)
        endpoint = EndpointConfig(url=process.endpoint.url, api_key_file=folder / "key")
        yield FrozenRoleConfig(endpoints=(endpoint,), model=model)
    finally:
        process.stop()


def scored(
    role: str, config: FrozenRoleConfig, reward: RewardConfig, *texts: str, notes: ListSink | None = None
) -> list[Score]:
    async def score() -> list[Score]:
        observer = Observer([notes] if notes else [])
        run, network = RunConfig(name="test", device="cpu"), NetworkConfig()
        async with AsyncExitStack() as stack:
            started = await start_frozen(
                {role: config}, {}, stack, run=run, network=network, observer=observer, longest_reply=None
            )
            scorer = build_scorer(reward, observer=observer, frozen=models_of(started))
            return list((await scorer.score(group_of(*texts))).scores)

    return asyncio.run(score())


def likeliest(model: Path, text: str) -> tuple[str, int]:
    """Return the answer that transformers finds likeliest after the start of the reply, and the tokens until then."""
    tokenizer = load_tokenizer(model, vocab=read_model_shape(model).vocab)
    question = f'Is {text} right?\n\nReply with JSON: {{"answer": ...}}, the answer one of ["yes", "no"].'
    start = tokenizer.render_chat([{"role": "user", "content": question}]) + '{"answer": "'
    begun, yes, no = (each.tolist() for each in tokenizer.encode([start, "yes", "no"]))
    expected = next_logprobs(model, begun)
    return "yes" if expected[yes[0]] > expected[no[0]] else "no", len(begun)


def test_a_judge_writes_the_answer_that_transformers_finds_likeliest(judge: FrozenRoleConfig) -> None:
    notes = ListSink()
    scores = scored("judge.tiny", judge, written_question(max_tokens=40), *TEXTS, notes=notes)
    for text, score in zip(TEXTS, scores, strict=True):
        answer, num_begun = likeliest(judge.model, text)
        assert (score.prediction, score.value) == (answer, float(answer == "yes"))
        # With its answer, the closing mark, the brace and the end token.
        assert score.components == {"judge_tokens": float(num_begun + len(answer) + 3)}
    text = f"roles.judge.tiny is {judge.model}, version {model_version(judge.model)}"
    assert notes.events == [Noted(text=text)]


def test_a_judge_reasons_before_its_answer_and_one_that_is_cut_has_no_score(judge: FrozenRoleConfig) -> None:
    reasoned = written_question(max_tokens=80, max_reasoning_chars=8, max_attempts=1)
    (score,) = scored("judge.tiny", judge, reasoned, "4")
    assert score.prediction in ("yes", "no")
    with pytest.raises(ScoreError, match=r"answered '\{\"answer\"', .* cut off at 9 tokens .*, 3 times"):
        scored("judge.tiny", judge, written_question(max_tokens=9), "4")


def test_the_chat_route_of_a_server_gives_the_same_answers(judge: FrozenRoleConfig) -> None:
    (endpoint,) = judge.endpoints
    config = JudgeRewardConfig(
        kind="judge",
        url=f"{endpoint.url}/v1/chat/completions",
        api_key_file=endpoint.api_key_file,
        model="tiny",
        template="Is {response} right?",
        answers={"yes": 1.0, "no": 0.0},
    )

    async def score() -> list[Score]:
        return list((await build_scorer(config).score(group_of(*TEXTS))).scores)

    for text, score_ in zip(TEXTS, asyncio.run(score()), strict=True):
        answer, num_begun = likeliest(judge.model, text)
        assert score_.prediction == answer
        assert score_.components == {"judge_tokens": float(num_begun + len(answer) + 3)}


def test_an_engine_that_serves_a_model_of_another_kind_is_refused(
    judge: FrozenRoleConfig, folder: Path, tmp_path: Path
) -> None:
    classifier = as_classifier(folder / "model", tmp_path / "classifier", "qwen2")
    role, config = "reward_model.tiny", judge.model_copy(update={"model": classifier})
    with pytest.raises(EngineError, match=r"serves .*, which is not a sequence classifier \(roles.reward_model.tiny\)"):
        scored(role, config, RewardModelRewardConfig(kind="reward_model"), "4")


def test_nothing_at_a_url_is_one_line(folder: Path) -> None:
    config = FrozenRoleConfig(endpoints=(EndpointConfig(url="http://127.0.0.1:9"),), model=folder / "model")
    with pytest.raises(EngineError, match=r"the engines of roles.judge.tiny.endpoints must be running") as caught:
        scored("judge.tiny", config, written_question(), "4")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_reward_model_by_its_url_scores_like_transformers(folder: Path, tmp_path: Path) -> None:
    classifier = as_classifier(folder / "model", tmp_path / "classifier", "qwen2")
    tokenizer = load_tokenizer(classifier, vocab=read_model_shape(classifier).vocab)
    chats = [tokenizer.render_answered([*CHAT, {"role": "assistant", "content": text}]) for text in TEXTS]
    expected = classifier_scores(classifier, [ids.tolist() for ids in tokenizer.encode(chats)])
    for config in served(classifier, tmp_path, role="reward_model.tiny"):
        scores = scored("reward_model.tiny", config, RewardModelRewardConfig(kind="reward_model"), *TEXTS)
    assert np.abs(np.array([score.value for score in scores]) - expected).max() < 1e-5


def test_the_version_of_a_model_changes_with_its_weights(folder: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "same", TinyShape(), seed=3)
    write_tiny_model(tmp_path / "other", TinyShape(), seed=4)
    assert model_version(tmp_path / "same") == model_version(folder / "model")
    assert model_version(tmp_path / "other") != model_version(folder / "model")
