from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config.recipe import DataConfig
from megarl.data import prompts as prompts_module
from megarl.data.prompts import (
    Demonstrations,
    DemonstrationScorer,
    PromptReader,
    PromptSet,
)
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.errors import DataError
from megarl.tools.quickstart.tiny_model import TinyShape
from megarl.types import DEMONSTRATION, FinishReason, Prompt
from tests.data.parquet_rows import WriteParquet, make_row
from tests.values import make_prompt


def load(path: Path, tokenizer: Tokenizer, **keys: object) -> PromptSet:
    config = DataConfig.model_validate({"train": [path], **keys})
    return PromptReader(config=config, kind="prompts").read(config.train, tokenizer)


def load_answered(path: Path, tokenizer: Tokenizer, *, max_response_tokens: int = 16, **keys: object) -> PromptSet:
    config = DataConfig.model_validate({"train": [path], **keys})
    reader = PromptReader(config=config, kind="demonstrations", max_response_tokens=max_response_tokens)
    return reader.read(config.train, tokenizer)


def test_a_prompt_goes_through_the_chat_template_up_to_the_answer(
    write_parquet: WriteParquet, tokenizer: Tokenizer
) -> None:
    loaded = load(write_parquet(make_row("1+1="), make_row("12+3=")), tokenizer)
    first, second = loaded.prompts
    assert tokenizer.decode_response(first.token_ids) == "<|user|>1+1=<|assistant|>"
    assert tokenizer.decode_response(second.token_ids) == "<|user|>12+3=<|assistant|>"
    assert (second.uid, second.position, second.epoch) == ("train.parquet:1", 1, 0)
    assert (second.data_source, second.ground_truth) == ("sums", "2")
    assert second.demonstration is None
    assert second.messages == ({"role": "user", "content": "12+3="},)
    assert loaded.num_dropped == 0


def test_more_rows_than_one_encoding_keep_their_places(write_parquet: WriteParquet, tokenizer: Tokenizer) -> None:
    rows = (make_row(f"{number}+0=", response=str(number)) for number in range(1500))
    prompts = load_answered(write_parquet(*rows), tokenizer).prompts
    for number in (0, 1023, 1024, 1499):
        assert prompts[number].position == number
        assert tokenizer.decode_response(prompts[number].token_ids) == f"<|user|>{number}+0=<|assistant|>"
        demonstration = prompts[number].demonstration
        assert demonstration is not None
        assert tokenizer.decode_response(demonstration) == str(number)


@pytest.fixture
def in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenise in two processes, however few rows and cores there are."""
    monkeypatch.setattr(prompts_module, "_ROWS_PER_WORKER", 10)
    monkeypatch.setattr("megarl.data.rows._ROWS_PER_READ", 7)
    monkeypatch.setattr(prompts_module, "_num_cores", lambda: 2)


@pytest.mark.patient
def test_worker_processes_give_the_same_prompts(
    write_parquet: WriteParquet,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    rows = [make_row(f"{number}+0=", response=None if number % 3 else str(number)) for number in range(0, 90, 3)]
    path = write_parquet(*rows)
    expected = load_answered(path, tokenizer)
    request.getfixturevalue("in_workers")
    monkeypatch.setattr(tokenizer, "render_chats", lambda _: pytest.fail("tokenised here"))
    found = load_answered(path, tokenizer)
    assert found.digest == expected.digest
    assert [prompt.position for prompt in found.prompts] == list(range(len(rows)))


def test_rows_that_are_not_kept_are_checked_and_counted(write_parquet: WriteParquet, tokenizer: Tokenizer) -> None:
    rows = [{**make_row(f"{number}+{number}="), "data_source": f"s{number % 2}"} for number in range(40)]
    path = write_parquet(*rows)
    config = DataConfig(train=(path,), max_prompt_tokens=6, overlong_prompts="drop")
    counted = PromptReader(config=config, kind="prompts", keeps_all=False).read((path,), tokenizer)
    kept = PromptReader(config=config, kind="prompts").read((path,), tokenizer)
    assert 0 < kept.num_dropped < 40
    assert (counted.num_prompts, counted.num_dropped) == (len(kept.prompts), kept.num_dropped)
    assert [prompt.uid for prompt in counted.prompts] == [prompt.uid for prompt in kept.prompts[:2]]


@pytest.mark.usefixtures("in_workers")
def test_the_first_row_that_is_refused_is_named_whoever_tokenises_it(
    write_parquet: WriteParquet, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def threads(reader: PromptReader, tokenizer: Tokenizer, num_workers: int) -> Iterator[ThreadPoolExecutor]:
        monkeypatch.setattr(prompts_module, "_of_worker", (reader, tokenizer))
        with ThreadPoolExecutor(num_workers) as pool:
            yield pool

    monkeypatch.setattr(prompts_module, "_workers", threads)
    strict = tmp_path / "strict"
    shutil.copytree(model_folder, strict)
    template = "{% if messages[0].role == 'nobody' %}{{ raise_exception('who?') }}{% endif %}{{ messages[0].content }}"
    (strict / "chat_template.jinja").write_text(template)
    bad = [{"role": "nobody", "content": "?"}]
    rows = [make_row([{"role": "user", "content": "1"}]) for _ in range(40)]
    rows[11] = rows[30] = make_row(bad)
    with pytest.raises(DataError, match=r"train\.parquet:11: the chat template refuses"):
        load(write_parquet(*rows), load_tokenizer(strict, vocab=TinyShape().vocab))


def test_a_demonstration_ends_with_the_end_token(write_parquet: WriteParquet, tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    for row in (make_row(response="2"), make_row(chat)):
        (prompt,) = load_answered(write_parquet(row), tokenizer).prompts
        assert tokenizer.decode_response(prompt.token_ids) == "<|user|>1+1=<|assistant|>"
        assert prompt.demonstration is not None
        assert prompt.demonstration.tolist() == [*tokenizer.encode(["2"])[0].tolist(), tokenizer.eos_ids[0]]


def test_overlong_prompts_are_refused_with_count_limit_longest_and_remedy(
    write_parquet: WriteParquet, tokenizer: Tokenizer
) -> None:
    path = write_parquet(make_row("1+1="), make_row("1+100="), make_row("100+100="))
    assert len(load(path, tokenizer, max_prompt_tokens=10).prompts) == 3
    with pytest.raises(DataError) as caught:
        load(path, tokenizer, max_prompt_tokens=7)
    assert str(caught.value) == (
        "2 of 3 rows are longer than data.max_prompt_tokens 7 (longest: train.parquet:2 with 10 tokens); "
        "raise it; or set data.overlong_prompts to drop"
    )


def test_overlong_prompts_are_dropped_with_a_count(write_parquet: WriteParquet, tokenizer: Tokenizer) -> None:
    path = write_parquet(make_row("100+100="), make_row("1+1="), make_row("1+100="), make_row("2+2="))
    loaded = load(path, tokenizer, max_prompt_tokens=7, overlong_prompts="drop")
    assert loaded.num_dropped == 2
    # The name is the row's, whatever was dropped before it; the position is the place among those kept.
    assert [(prompt.uid, prompt.position) for prompt in loaded.prompts] == [
        ("train.parquet:1", 0),
        ("train.parquet:3", 1),
    ]


def test_a_data_set_that_loses_every_row_is_an_error(write_parquet: WriteParquet, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="no prompt is left: 1 of 1 rows"):
        load(write_parquet(make_row("100+100=")), tokenizer, max_prompt_tokens=3, overlong_prompts="drop")


def test_a_demonstration_may_not_be_longer_than_a_response(write_parquet: WriteParquet, tokenizer: Tokenizer) -> None:
    path = write_parquet(make_row(response="12"), make_row(response="123"))
    with pytest.raises(DataError, match=r"1 of 2 rows are longer than sampling.max_response_tokens 3 .* 4 tokens"):
        load_answered(path, tokenizer, max_response_tokens=3)
    assert load_answered(path, tokenizer, max_response_tokens=3, overlong_prompts="drop").num_dropped == 1


def prompt_with(tokenizer: Tokenizer, response: str) -> Prompt:
    prompt = make_prompt(4, token_ids=tokenizer.encode(["1+1="])[0], file="sft.parquet", ground_truth="2")
    answer = np.append(tokenizer.encode([response])[0], np.int32(tokenizer.eos_ids[0]))
    return replace(prompt, demonstration=answer)


def test_the_group_is_the_data_sets_own_answer(tokenizer: Tokenizer) -> None:
    prompt = prompt_with(tokenizer, "12")
    group = asyncio.run(Demonstrations(tokenizer).generate(prompt))
    (rollout,) = group.rollouts
    assert group.prompt is prompt
    assert rollout.token_ids is prompt.demonstration
    assert rollout.text == "12"
    assert rollout.finish_reason is FinishReason.STOP
    assert rollout.versions.tolist() == [DEMONSTRATION] * 3
    assert rollout.logprobs.tolist() == [0.0] * 3
    assert rollout.logprobs.dtype == np.float32
    # The end token is part of what is imitated.
    assert rollout.loss_mask.tolist() == [True] * 3


def test_every_demonstration_scores_one(tokenizer: Tokenizer) -> None:
    group = asyncio.run(Demonstrations(tokenizer).generate(prompt_with(tokenizer, "wrong")))
    scored = asyncio.run(DemonstrationScorer().score(group))
    assert scored.group is group
    assert [score.value for score in scored.scores] == [1.0]


def test_a_prompt_without_a_demonstration_is_a_bug(tokenizer: Tokenizer) -> None:
    prompt = replace(prompt_with(tokenizer, "2"), demonstration=None)
    with pytest.raises(AssertionError, match=r"sft.parquet:4 has no demonstration"):
        asyncio.run(Demonstrations(tokenizer).generate(prompt))


def load_chosen(path: Path, tokenizer: Tokenizer, **keys: object) -> PromptSet:
    config = DataConfig.model_validate({"train": [path], **keys})
    return PromptReader(config=config, kind="pairs", max_response_tokens=8).read(config.train, tokenizer)


def test_a_pair_is_a_group_of_the_better_and_the_worse_answer(
    write_parquet: WriteParquet, tokenizer: Tokenizer
) -> None:
    path = write_parquet(make_row("1+1=", chosen="2", rejected="11"), make_row("2+2=", chosen="4", rejected="22"))
    pairs = load_chosen(path, tokenizer)
    group = asyncio.run(Demonstrations(tokenizer).generate(pairs.prompts[1]))
    assert [rollout.text for rollout in group.rollouts] == ["4", "22"]
    assert all(rollout.token_ids[-1] == tokenizer.eos_ids[0] for rollout in group.rollouts)
    scored = asyncio.run(DemonstrationScorer((1.0, 0.0)).score(group))
    assert [score.value for score in scored.scores] == [1.0, 0.0]
    swapped = load_chosen(path, tokenizer, chosen_key="rejected", rejected_key="chosen")
    assert swapped.digest != pairs.digest


@pytest.mark.parametrize(
    ("columns", "keys", "message"),
    [
        ({"chosen": "2"}, {}, r"has no column rejected, the rejected answer, a string; data.rejected_key names it"),
        ({"chosen": "2", "rejected": None}, {}, r"has no column rejected|column rejected has type null|is null"),
        ({"chosen": "2", "rejected": "1" * 9}, {}, r"1 of 1 rows are longer than sampling.max_response_tokens 8"),
    ],
)
def test_a_pair_without_two_answers_is_one_line(
    columns: dict[str, object],
    keys: dict[str, object],
    message: str,
    write_parquet: WriteParquet,
    tokenizer: Tokenizer,
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load_chosen(write_parquet(make_row("1+1=", **columns)), tokenizer, **keys)
    assert "\n" not in str(caught.value)
