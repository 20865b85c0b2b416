"""Teachers on engines: numbers of a real engine against transformers, bad replies, and which rows are asked about."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config.roles import Teaching
from megarl.engine.client import EngineClient
from megarl.engine.process import EngineProcess
from megarl.errors import DataError, EngineError, QuarantineError, ScoreError
from megarl.families import FAMILIES
from megarl.rollout.frozen import FrozenEngines, TaughtGenerator
from megarl.rollout.teacher import token_scores
from megarl.tokens import Content
from megarl.types import Episode, FinishReason, FloatArray, Prompt, Rollout, RolloutGroup, TokenArray
from tests.engine.engines import ServedModel, engine_spec, prompt_of, scripted_client
from tests.tiny_models import write_tiny_model

TOKENS = np.array([5, 6, 7, 8, 40, 12, 2], np.int32)
FIRST = 3


def all_logprobs(model: Path, token_ids: TokenArray, *, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probabilities of the whole vocabulary for every token but the first. [N - 1, V]"""
    slow = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = (slow(torch.tensor([token_ids.tolist()])).logits[0, :-1] / temperature).log_softmax(-1)
    return found


@pytest.mark.parametrize(("num_top", "vocab"), [(0, 99), (5, 99), (5, 30)])
async def test_a_teacher_answers_as_transformers_does(num_top: int, vocab: int, qwen2_tp1: ServedModel) -> None:
    """With a policy of 30 tokens, the likeliest are those below 30, of whatever rank."""

    async with qwen2_tp1.fleet() as fleet:
        spare = qwen2_tp1.shape.vocab - vocab
        client = fleet.engines[0].client
        numbers = await token_scores(client, TOKENS, first=FIRST, num_top=num_top, num_spare=spare, vocab=vocab)
    check_scores(numbers, all_logprobs(qwen2_tp1.folder, TOKENS)[FIRST - 1 :], num_top=num_top, vocab=vocab)


def check_scores(numbers: FloatArray, expected: torch.Tensor, *, num_top: int, vocab: int) -> None:
    chosen = expected.gather(1, torch.tensor(TOKENS[FIRST:], dtype=torch.int64)[:, None])
    assert numbers.shape == (len(TOKENS) - FIRST, 1 + 2 * num_top)
    np.testing.assert_allclose(numbers[:, :1], chosen.numpy(), atol=1e-5)
    if num_top:
        likeliest = expected[:, :vocab].topk(num_top)
        np.testing.assert_allclose(numbers[:, 1 : 1 + num_top], likeliest.values.numpy(), atol=1e-5)
        np.testing.assert_array_equal(numbers[:, 1 + num_top :], likeliest.indices.numpy())


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("llama", 2),
        pytest.param("qwen2", 1, marks=pytest.mark.slow),
        pytest.param("qwen3", 1, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", 1, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("real_engines")
def test_a_teacher_at_another_temperature_answers_as_transformers_does(
    family: str, tensor: int, tmp_path: Path
) -> None:
    """SGLang itself scores given tokens at temperature 1, whatever a request says."""
    temperature, num_top = 0.7, 5
    shape = write_tiny_model(tmp_path / "model", family, tied=False, layers=2, seed=1)
    spec = replace(engine_spec(tmp_path / "model", tmp_path / "run", tensor=tensor), has_float32_head=True)
    process = EngineProcess(replace(spec, temperature=temperature, role="teacher.warm"))

    async def ask() -> FloatArray:
        await process.wait_ready()
        client = EngineClient(process.endpoint, request_timeout_s=600)
        try:
            return await token_scores(client, TOKENS, first=FIRST, num_top=num_top, num_spare=0, vocab=shape.vocab)
        finally:
            await client.close()

    process.start()
    try:
        numbers = asyncio.run(ask())
    finally:
        process.stop()
    expected = all_logprobs(tmp_path / "model", TOKENS, temperature=temperature)[FIRST - 1 :]
    assert not np.allclose(expected.numpy(), all_logprobs(tmp_path / "model", TOKENS)[FIRST - 1 :].numpy(), atol=1e-2)
    check_scores(numbers, expected, num_top=num_top, vocab=shape.vocab)


def test_every_family_can_be_a_teacher_at_another_temperature() -> None:
    """Our classes, which know the temperature, are made of those that a family names: they must be where it says."""
    spec = find_spec("sglang")
    assert spec is not None, "sglang is not installed"
    models = Path(str(spec.origin)).parent / "srt/models"
    for family in FAMILIES:
        served = {family.engine.module: family.architecture, family.engine.classifier: family.critic}
        for module, name in served.items():
            assert module is None or f"class {name}(" in (models / f"{module}.py").read_text(), name


def reply_of(body: dict[str, Any], logprobs: list[float | None], ids: list[int], *, num_top: int = 0) -> dict[str, Any]:
    """Return a reply of SGLang as a server without our hook writes it: lists of three."""
    tops = [None, *([[-0.5 - place, 10 + place, None] for place in range(num_top)] for _ in ids[1:])]
    meta = {
        "id": body["rid"],
        "prompt_tokens": len(body["input_ids"]),
        "input_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)],
    }
    return {"meta_info": {**meta, **({"input_top_logprobs": tops} if num_top else {})}}


GOOD: list[float | None] = [None, -1.0, -2.0, -0.25, -4.0]


def asked(change: Callable[[dict[str, Any]], object], *, num_top: int = 2) -> FloatArray:
    """Return the numbers of a reply that `change` was applied to."""

    def answer(request: httpx.Request) -> httpx.Response:
        reply = reply_of(json.loads(request.content), GOOD, TOKENS[FIRST - 1 :].tolist(), num_top=num_top)
        change(reply["meta_info"])
        return httpx.Response(200, content=json.dumps(reply))

    client = scripted_client(answer)
    return asyncio.run(token_scores(client, TOKENS, first=FIRST, num_top=num_top, num_spare=0, vocab=99))


def test_lists_of_a_server_without_the_hook_are_read_as_well() -> None:
    numbers = asked(lambda _: None)
    np.testing.assert_array_equal(numbers[:, 0], GOOD[1:])
    np.testing.assert_array_equal(numbers[:, 1:3], [[-0.5, -1.5]] * 4)
    np.testing.assert_array_equal(numbers[:, 3:], [[10, 11]] * 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "another"},
        {"prompt_tokens": 6},
        {"input_token_logprobs": []},
        {"input_token_logprobs": [[None, 7, None], [-1, 8, None], [-1, 41, None], [-1, 12, None], [-1, 2, None]]},
        {"input_token_logprobs": [[None, 7, None], [-1, 8, None], [None, 40, None], [-1, 12, None], [-1, 2, None]]},
        {"input_token_logprobs": [[None, 7, None], [-1, 8, None], [0.5, 40, None], [-1, 12, None], [-1, 2, None]]},
        {"input_token_logprobs": {"logprobs": "AAA=", "token_ids": ""}},
        {"input_top_logprobs": [None, [[-1, 3, None]]]},
        {"input_top_logprobs": [None, *[[[-1, 3, None], [-1, 99, None]]] * 4]},
        {"input_top_logprobs": [None, *[[[-0.1, 3, None], [-0.1, 4, None]]] * 4]},
        {"input_top_logprobs": [None, *[[[-0.1, 3, None], [-1, 4, None]]] * 3, [[-0.1, 3, None]]]},
    ],
)
def test_a_reply_that_is_not_the_answer_is_never_learnt_from(wrong: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="not a reply to the request"):
        asked(lambda meta: meta.update(wrong))


def rollout_of(token_ids: list[int], mask: list[bool], *, rows: tuple[int, ...] = ()) -> Rollout:
    tokens = np.array(token_ids, np.int32)
    return Rollout(
        versions=np.zeros(len(tokens), np.int32),
        loss_mask=np.array(mask),
        finish_reason=FinishReason.STOP,
        content=Content(token_ids=tokens, logprobs=np.zeros(len(tokens), np.float32), text=""),
        episode=Episode(rows=rows),
    )


class Given:
    """A generator of one rollout."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout

    async def generate(self, prompt: Prompt) -> RolloutGroup:
        return RolloutGroup(prompt=prompt, rollouts=(self._rollout,))


class Squares:
    """A teacher that gives each token its square, and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    async def token_scores(
        self, token_ids: TokenArray, *, first: int, num_top: int, vocab: int, prefix: str
    ) -> FloatArray:
        assert (num_top, vocab, prefix) == (1, 50, "row-0")
        self.seen.append(token_ids.tolist())
        return np.repeat(token_ids[first:, None].astype(np.float32) ** 2, 3, axis=1)


def taught(rollout: Rollout, models: dict[str, Any], *sources: tuple[str, tuple[str, ...]]) -> Content:
    teaching = Teaching(num_top=1, vocab=50, sources=sources)
    group = asyncio.run(TaughtGenerator(Given(rollout), teaching, models).generate(prompt_of(20, 21)))
    return group.rollouts[0].content.load()


def test_a_response_is_asked_about_after_its_prompt_by_the_teacher_of_its_source() -> None:
    own, other = Squares(), Squares()
    content = taught(
        rollout_of([3, 4], [True, True]),
        {"teacher.other": other, "teacher.own": own},
        ("teacher.other", ()),
        ("teacher.own", ("test",)),
    )
    assert own.seen == [[20, 21, 3, 4]]
    assert other.seen == []
    assert content.teacher is not None
    assert content.teacher.tolist() == [[9.0] * 3, [16.0] * 3]


def test_each_row_of_an_episode_is_asked_about_by_itself_where_the_policy_chose_some_of_it() -> None:
    model = Squares()
    mask = [True, True, False, False, True, False, False]
    content = taught(rollout_of([1, 2, 3, 4, 5, 6, 7], mask, rows=(2, 5)), {"teacher.one": model}, ("teacher.one", ()))
    assert model.seen == [[20, 21, 1, 2], [3, 4, 5]]
    assert content.teacher is not None
    assert content.teacher[:, 0].tolist() == [1, 4, 0, 16, 25, 0, 0]


def test_a_source_without_a_teacher_is_an_error_in_a_sentence() -> None:
    with pytest.raises(DataError, match="no teacher for prompts of source test: name it in the sources"):
        taught(rollout_of([3], [True]), {"teacher.code": Squares()}, ("teacher.code", ("code",)))


def test_a_group_whose_teacher_does_not_answer_is_given_up_and_not_trained_on() -> None:
    class Silent:
        async def token_scores(self, *_: object, **__: object) -> FloatArray:
            raise ScoreError("roles.teacher.one gave no answer")

    with pytest.raises(QuarantineError, match=r"prompt row-0: roles\.teacher\.one gave no answer"):
        taught(rollout_of([3], [True]), {"teacher.one": Silent()}, ("teacher.one", ()))


def test_tokens_that_would_end_the_engine_are_not_sent(qwen2_tp1: ServedModel) -> None:
    async def ask(token_ids: TokenArray) -> FloatArray:
        async with qwen2_tp1.fleet() as fleet:
            shape = replace(qwen2_tp1.shape, max_context_tokens=4)
            model = FrozenEngines(fleet, None, shape, role="teacher.one", max_attempts=1)  # type: ignore[arg-type]
            return await model.token_scores(token_ids, first=1, num_top=0, vocab=200, prefix="row-0")

    assert asyncio.run(ask(np.array([5, 6], np.int32))).shape == (1, 1)
    for token_ids in ([5, 6, 7, 8], [5, 150]):
        with pytest.raises(ScoreError, match=r"do not fit roles\.teacher\.one: 4 tokens of context, 99 of vocabulary"):
            asyncio.run(ask(np.array(token_ids, np.int32)))
