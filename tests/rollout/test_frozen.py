"""Frozen models on real engines: numbers against transformers, and bad replies on scripted ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from megarl.config.model import read_model_shape
from megarl.config.reward import EngineJudgeRewardConfig, RewardModelRewardConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.engine.client import EngineClient
from megarl.engine.fleet import Fleet
from megarl.engine.lifecycle import Ended, EngineState, RestartPolicy, Started, Ticked
from megarl.engine.process import EngineProcess
from megarl.errors import EngineError, ScoreError
from megarl.families.shape import ModelShape
from megarl.reward.build import build_scorer
from megarl.reward.judge import WrittenReply
from megarl.reward.pool import MachineFaultError
from megarl.rollout.frozen import FrozenEngines, classify, label_logprobs
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from tests.engine.engines import ServedModel, engine_spec, scripted_client, scripted_fleet
from tests.rollout.judged import CHAT, group_of, written_question
from tests.tiny_models import as_classifier, classifier_scores, next_logprobs


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_model(folder, TinyShape(), seed=3)
    return folder


def model_of(fleet: Fleet, folder: Path, *, shape: ModelShape | None = None) -> FrozenEngines:
    shape = shape or read_model_shape(folder)
    tokenizer = load_tokenizer(folder, vocab=shape.vocab)
    return FrozenEngines(fleet, tokenizer, shape, role="reward_model.tiny", max_attempts=2)


@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3"))]
)
@pytest.mark.usefixtures("real_engines")
def test_a_reward_model_scores_like_transformers(family: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    """SGLang's own Qwen classifiers have a head with a random bias; ours have none."""
    folder = as_classifier(tokenizer_folder, tmp_path / "classifier", family)
    tokenizer = load_tokenizer(folder, vocab=read_model_shape(folder).vocab)
    texts = ["42", "41", "I do not know" * 5]
    chats = [tokenizer.render_answered([*CHAT, {"role": "assistant", "content": text}]) for text in texts]
    expected = classifier_scores(folder, [ids.tolist() for ids in tokenizer.encode(chats)])
    process = EngineProcess(
        replace(engine_spec(folder, tmp_path / "run"), is_classifier=True, role="reward_model.tiny")
    )
    process.start()
    try:

        async def score() -> list[float]:
            await process.wait_ready()
            client = EngineClient(process.endpoint, request_timeout_s=600)
            fleet = Fleet([client], max_outstanding=8, publish_timeout_s=600)
            config = RewardModelRewardConfig(kind="reward_model", mean=0.5, std=2.0)
            scorer = build_scorer(config, frozen={"reward_model.tiny": model_of(fleet, folder)})
            scored = await scorer.score(group_of(*texts))
            await fleet.close()
            assert [score.value for score in scored.scores] == pytest.approx(
                [(score.components["raw"] - 0.5) / 2 for score in scored.scores]
            )
            return [score.components["raw"] for score in scored.scores]

        scores = asyncio.run(score())
    finally:
        process.stop()
    assert np.ptp(expected) > 1e-3, "a test of equal scores shows nothing"
    assert np.abs(np.array(scores) - expected).max() < 1e-5
    assert (tmp_path / "run" / "engines" / "reward_model.tiny_0.log").exists()


def test_a_judge_answers_with_the_probabilities_of_transformers(qwen2_tp1: ServedModel) -> None:
    token_ids, labels = [5, 6, 7, 8], [11, 12, 40]

    async def ask() -> list[float]:
        async with qwen2_tp1.fleet() as fleet:
            return await label_logprobs(fleet.engines[0].client, token_ids, labels)

    expected = next_logprobs(qwen2_tp1.folder, token_ids)[labels]
    assert np.abs(np.array(asyncio.run(ask())) - expected.numpy()).max() < 1e-5


class _Writer:
    """Gives one reply after the other."""

    def __init__(self, *replies: str) -> None:
        self._replies = replies
        self.attempts: list[int] = []

    async def classify(self, chat: Sequence[object]) -> float:
        raise AssertionError(chat)

    async def probabilities(self, question: str, answers: Sequence[str]) -> Sequence[float]:
        raise AssertionError(question, answers)

    async def write(self, question: str, *, schema: str, max_tokens: int, attempt: int) -> WrittenReply:
        assert '"reasoning": {"type": "string", "maxLength": 90}' in schema, schema
        assert '{"reasoning": ..., "answer": ...}' in question
        self.attempts.append(attempt)
        return WrittenReply(text=self._replies[attempt], num_tokens=10, is_cut=attempt == 0)


def test_a_written_reply_outside_the_schema_is_asked_again_and_never_a_score() -> None:
    config = written_question(max_tokens=64, max_reasoning_chars=90)
    model = _Writer('{"reasoning": "it', '{"reasoning": "", "answer": "yes"}')
    (score,) = asyncio.run(build_scorer(config, frozen={"judge.a": model}).score(group_of("4"))).scores
    assert (score.value, score.components, model.attempts) == (1.0, {"judge_tokens": 20.0}, [0, 1])
    for bad in ('{"answer": "maybe"}', '"yes"', "[" * 50_000, ""):
        with pytest.raises(ScoreError, match=r"not one of yes, no \(reward.answers\), 3 times"):
            asyncio.run(build_scorer(config, frozen={"judge.a": _Writer(*[bad] * 3)}).score(group_of("4")))


def test_an_engine_without_grammars_is_a_fault_of_the_machine(tokenizer_folder: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        end = {"type": "abort", "message": "Grammar-based generation is not supported"}
        meta = {"id": body["rid"], "prompt_tokens": len(body["input_ids"]), "finish_reason": end}
        return httpx.Response(200, json={"output_ids": [], "meta_info": meta})

    async def score() -> None:
        model = model_of(scripted_fleet(*[answer] * 2), tokenizer_folder)
        await model.write("Right?", schema="{}", max_tokens=9, attempt=0)

    with pytest.raises(MachineFaultError, match="Grammar-based generation is not supported"):
        asyncio.run(score())


class _Judge:
    def __init__(self, *shares: float) -> None:
        self._shares = shares

    async def write(self, question: str, *, schema: str, max_tokens: int, attempt: int) -> WrittenReply:
        raise AssertionError(question)

    async def classify(self, chat: Sequence[object]) -> float:
        raise AssertionError(chat)

    async def probabilities(self, question: str, answers: Sequence[str]) -> Sequence[float]:
        assert question == "Is 7 right for 12+30=?\n\nReply with one of: yes, no, maybe.", question
        return self._shares


@pytest.mark.parametrize(("is_expected", "score"), [(False, 1.0), (True, 0.6 * 1 + 0.1 * 0.5)])
def test_a_judge_gives_the_likeliest_answers_score_or_the_mean(is_expected: bool, score: float) -> None:
    config = EngineJudgeRewardConfig(
        kind="engine_judge",
        template="Is {response} right for {prompt}?",
        answers={"yes": 1.0, "no": 0.0, "maybe": 0.5},
        is_expected=is_expected,
    )
    scorer = build_scorer(config, frozen={"judge.strict": _Judge(0.6, 0.3, 0.1)})
    (found,) = asyncio.run(scorer.score(group_of("7"))).scores
    assert found.value == pytest.approx(score)
    assert found.prediction == "yes"
    assert found.components == {"judge_probability": 0.6}


def test_answers_that_begin_alike_are_refused(tokenizer_folder: Path) -> None:
    model = model_of(scripted_fleet(lambda _: httpx.Response(500)), tokenizer_folder)
    with pytest.raises(ScoreError, match="begin with the same token"):
        model.labels(["good", "great"])


@pytest.mark.parametrize(
    "reply",
    [
        {"embedding": [1.0], "meta_info": {"id": "another", "prompt_tokens": 3}},
        {"embedding": [1.0, 2.0], "meta_info": {"id": "RID", "prompt_tokens": 3}},
        {"embedding": [None], "meta_info": {"id": "RID", "prompt_tokens": 3}},
        {"embedding": [1.0], "meta_info": {"id": "RID", "prompt_tokens": 2}},
        [],
    ],
)
def test_a_reply_that_is_not_the_answer_is_no_score(reply: object) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        rid = json.loads(request.content)["rid"]
        return httpx.Response(200, content=json.dumps(reply).replace("RID", rid))

    with pytest.raises(EngineError):
        asyncio.run(classify(scripted_client(answer), [1, 2, 3]))


def test_engines_that_fail_are_a_fault_of_the_machine_not_a_score(tokenizer_folder: Path) -> None:
    async def score() -> None:
        model = model_of(scripted_fleet(*[lambda _: httpx.Response(500)] * 2), tokenizer_folder)
        await model.classify([*CHAT, {"role": "assistant", "content": "42"}])

    with pytest.raises(MachineFaultError, match=r"roles\.reward_model\.tiny gave no answer"):
        asyncio.run(score())


async def test_a_request_that_a_killed_engine_loses_is_asked_again_when_it_is_back(tokenizer_folder: Path) -> None:
    asked: list[object] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        asked.append(body["input_ids"])
        if len(asked) == 1:
            await asyncio.sleep(3600)
        meta = {"id": body["rid"], "prompt_tokens": len(body["input_ids"])}
        return httpx.Response(200, json={"embedding": [0.25], "meta_info": meta})

    policy = RestartPolicy(max_restarts=1, back_off_s=0.0)
    fleet = Fleet([scripted_client(answer)], max_outstanding=8, publish_timeout_s=60, policy=policy)
    (engine,) = fleet.engines
    model = model_of(fleet, tokenizer_folder)
    scoring = asyncio.create_task(model.classify([*CHAT, {"role": "assistant", "content": "42"}]))
    while not asked:
        await asyncio.sleep(0)
    fleet.report(engine, Ended(reason="exited with SIGKILL"))
    fleet.report(engine, Ticked(unheard_s=0.0, may_start=True))
    assert engine.state is EngineState.RESTARTING
    await asyncio.sleep(0.05)
    assert not scoring.done()
    fleet.report(engine, Started())
    await fleet.joined(engine)
    assert (await scoring) == 0.25
    assert len(asked) == 2
    assert asked[0] == asked[1]


def test_a_chat_that_is_too_long_has_no_score(tokenizer_folder: Path) -> None:
    model = model_of(scripted_fleet(lambda _: httpx.Response(500)), tokenizer_folder)
    with pytest.raises(ScoreError, match=r"do not fit into the context of roles\.reward_model\.tiny, 256"):
        asyncio.run(model.classify([*CHAT, {"role": "assistant", "content": "4" * 300}]))
