"""The tokens between turns: equal to the template's own for whole conversations, or none."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest

from megarl.data.tokenizer import Tokenizer
from megarl.episodes.dialogue import Dialogue
from megarl.episodes.protocol import Call, ChatMessage, Malformed, Observation
from megarl.errors import DataError
from tests.episodes.templates import ADD, family_tokenizer

EXACT = ("llama", "qwen2.5", "qwen3")
_WORDS = ("the", "sum", "12", "größer", "数", "{", "}", "\n", "  ", '"', "three", "\\", "<b>", "\U0001f600")
_TURNS_PER_EPISODE = 10


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("families")
    return {family: family_tokenizer(folder / family, family) for family in (*EXACT, "forgetful")}


@pytest.fixture
def dialogues(tokenizers: dict[str, Tokenizer]) -> dict[str, Dialogue]:
    return {family: Dialogue(tokenizer, max_result_tokens=64) for family, tokenizer in tokenizers.items()}


def _text(chance: random.Random) -> str:
    # Templates trim contents, so a text that is to be compared with theirs begins and ends with a word.
    return " ".join(["so", *chance.choices(_WORDS, k=chance.randint(0, 8)), "ok"])


def _sampled(tokenizer: Tokenizer, text: str, chance: random.Random) -> np.ndarray:
    """Tokens as a model may choose them: the text in other pieces than the tokenizer's own, then an end token."""
    cut = chance.randint(0, len(text))
    pieces = [piece for piece in tokenizer.encode([text[:cut], text[cut:]]) if len(piece)]
    return np.concatenate([*pieces, np.array([tokenizer.eos_ids[0]], np.int32)])


async def _episode(tokenizer: Tokenizer, dialogue: Dialogue, chance: random.Random) -> int:
    """Play one episode; return the number of its turns if the tokens are not those of the template, else 0."""
    chat: list[ChatMessage] = [{"role": "user", "content": _text(chance)}]
    row = await dialogue.prompt_ids(chat)
    for _ in range(_TURNS_PER_EPISODE):
        answer = _text(chance)
        sampled = _sampled(tokenizer, answer, chance)
        call = Call(name="add", arguments={}, id="call_0")
        observed = [
            await dialogue.observation(call, Observation(text=_text(chance)))
            for _ in range(chance.choice((1, 1, 1, 2)))
        ]
        suffix = await dialogue.suffix(sampled, observed)
        assert suffix is not None
        chat += [{"role": "assistant", "content": answer}, *observed]
        row = np.concatenate([row, sampled, suffix])
    assert suffix is not None
    is_text_equal = tokenizer.decode(row) == tokenizer.render_chat(chat)
    # The suffix is in the tokenizer's own pieces, not only the same text.
    is_ending_equal = np.array_equal((await dialogue.whole(chat))[-len(suffix) :], suffix)
    return 0 if is_text_equal and is_ending_equal else _TURNS_PER_EPISODE


@pytest.mark.patient
@pytest.mark.parametrize("num_turns", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_histories_of_many_turns_are_those_of_the_template(
    num_turns: int, tokenizers: dict[str, Tokenizer], dialogues: dict[str, Dialogue]
) -> None:
    chance = random.Random(7)
    num_episodes = num_turns // (_TURNS_PER_EPISODE * len(EXACT)) + 1
    wrong = {
        family: sum([await _episode(tokenizers[family], dialogues[family], chance) for _ in range(num_episodes)])
        for family in EXACT
    }
    assert wrong == dict.fromkeys(EXACT, 0)


async def test_a_turn_costs_little(tokenizers: dict[str, Tokenizer], dialogues: dict[str, Dialogue]) -> None:
    chance = random.Random(1)
    tokenizer, dialogue = tokenizers["qwen3"], dialogues["qwen3"]
    call = Call(name="add", arguments={}, id="call_0")
    sampled = _sampled(tokenizer, _text(chance), chance)
    await dialogue.suffix(sampled, [await dialogue.observation(call, Observation(text="5"))])
    began = time.process_time()
    for _ in range(200):
        await dialogue.suffix(sampled, [await dialogue.observation(call, Observation(text=_text(chance)))])
    assert (time.process_time() - began) / 200 < 0.01  # 1 ms on a quiet machine


async def test_thoughts_before_tool_results_stay_where_the_template_keeps_them(
    tokenizers: dict[str, Tokenizer], dialogues: dict[str, Dialogue]
) -> None:
    thought = "<think>\nhm\n</think>\n\nI call."
    observed: list[ChatMessage] = [{"role": "tool", "name": "add", "tool_call_id": "call_0", "content": "5"}]
    for family in EXACT:
        sampled = _sampled(tokenizers[family], thought, random.Random(3))
        assert await dialogues[family].suffix(sampled, observed) is not None, family


async def test_there_is_no_suffix_where_the_template_drops_thoughts(
    tokenizers: dict[str, Tokenizer], dialogues: dict[str, Dialogue]
) -> None:
    chance = random.Random(3)
    tool: list[ChatMessage] = [{"role": "tool", "name": "add", "tool_call_id": "call_0", "content": "5"}]
    user: list[ChatMessage] = [{"role": "user", "content": "5"}]
    thought = "<think>\nhm\n</think>\n\nI call."
    forgetful = tokenizers["forgetful"]
    assert await dialogues["forgetful"].suffix(_sampled(forgetful, thought, chance), tool) is None
    assert await dialogues["forgetful"].suffix(_sampled(forgetful, "I call.", chance), tool) is not None
    # A message of the user ends the stretch in which this template keeps thoughts.
    assert await dialogues["qwen3"].suffix(_sampled(tokenizers["qwen3"], thought, chance), user) is None
    # The row that begins then has the history without the thought.
    chat: list[ChatMessage] = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": thought}, *tool]
    assert "hm" not in forgetful.decode(await dialogues["forgetful"].whole(chat))


async def test_a_template_whose_prompt_begins_a_thought_has_no_suffix(
    tmp_path: Path, tokenizers: dict[str, Tokenizer]
) -> None:
    from tests.episodes.templates import FORGETFUL

    template = FORGETFUL.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")
    assert template != FORGETFUL
    tokenizer = family_tokenizer(tmp_path, "forgetful", template=template)
    dialogue = Dialogue(tokenizer, max_result_tokens=64)
    assert (
        await dialogue.suffix(_sampled(tokenizer, "I call.", random.Random(0)), [{"role": "tool", "content": "5"}])
        is None
    )
    assert "rewrites its history" in dialogue.rehearsal()


@pytest.mark.parametrize(
    ("family", "response", "beginning"),
    [
        ("qwen2.5", "I call.", "<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n"),
        # Another end token of the model is kept.
        ("llama", "I call.<|eom_id|>", '<|start_header_id|>ipython<|end_header_id|>\n\n"5"<|eot_id|>'),
    ],
)
async def test_a_response_without_an_end_token_gets_the_templates(
    family: str, response: str, beginning: str, tokenizers: dict[str, Tokenizer], dialogues: dict[str, Dialogue]
) -> None:
    (sampled,) = tokenizers[family].encode([response])
    suffix = await dialogues[family].suffix(sampled, [{"role": "tool", "content": "5"}])
    assert suffix is not None
    assert tokenizers[family].decode(suffix).startswith(beginning)


async def test_a_long_result_is_cut_in_tokens_with_a_mark(dialogues: dict[str, Dialogue]) -> None:
    dialogue = dialogues["qwen2.5"]
    short = await dialogue.cut("seven")
    assert short == "seven"
    cut = await dialogue.cut("7 " * 500)
    assert cut.startswith("7 7 7")
    assert "tokens are not shown]" in cut
    assert len(cut) < 250
    began = time.process_time()
    flood = await dialogue.cut("x" * 50_000_000)
    assert "of 50000000 tokens" in flood or "tokens are not shown]" in flood
    assert time.process_time() - began < 2


async def test_a_short_result_is_within_its_limit_though_nobody_counts_its_tokens(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(3)
    texts = ["".join(map(chr, chance.choices(range(128), k=63))) for _ in range(200)]
    for family in EXACT:
        tokenizer = tokenizers[family]
        assert max(map(len, tokenizer.encode(texts))) <= 64
        with monkeypatch.context() as patched:
            patched.setattr(tokenizer, "encode", None)
            assert await Dialogue(tokenizer, max_result_tokens=64).cut("x" * 63) == "x" * 63
        longer = await Dialogue(tokenizer, max_result_tokens=64).cut((tokenizer.control_texts[0] * 63)[:63])
        assert len(tokenizer.encode([longer.split("\n[cut here")[0]])[0]) <= 64


@pytest.mark.parametrize(("family", "call_format"), [("llama", "llama"), ("qwen2.5", "hermes"), ("qwen3", "hermes")])
def test_the_template_tells_how_calls_are_written(
    family: str, call_format: str, dialogues: dict[str, Dialogue]
) -> None:
    assert dialogues[family].call_format == call_format
    assert dialogues[family].refusals() == []
    assert "append-only, with thoughts and without" in dialogues[family].rehearsal()


def test_a_template_that_drops_thoughts_is_told(dialogues: dict[str, Dialogue]) -> None:
    assert "drops old thoughts" in dialogues["forgetful"].rehearsal()


def test_a_template_without_tools_is_refused(tmp_path: Path) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    dialogue = Dialogue(family_tokenizer(tmp_path, "qwen2.5", template=plain), max_result_tokens=64)
    (refusal,) = dialogue.refusals()
    assert "does not render tools: add" in refusal
    with pytest.raises(DataError, match=r"environment\.call_format"):
        dialogue.calls("hello")


def test_a_template_that_refuses_results_is_refused(tmp_path: Path) -> None:
    strict = (
        "{{ tools | tojson }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tool role') }}"
        "{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    tokenizer = family_tokenizer(tmp_path, "qwen2.5", template=strict)
    (refusal,) = Dialogue(tokenizer, max_result_tokens=64, call_format="hermes").refusals()
    assert "no tool role" in refusal


async def test_with_a_text_field_every_response_is_an_action(tokenizers: dict[str, Tokenizer]) -> None:
    dialogue = Dialogue(tokenizers["qwen2.5"], max_result_tokens=64, text_field="message")
    calls = dialogue.calls("left")
    assert not isinstance(calls, Malformed)
    assert [(call.name, call.arguments) for call in calls] == [("step", {"message": "left"})]
    assert (await dialogue.observation(calls[0], Observation(text="a wall")))["role"] == "user"


def test_tools_are_part_of_the_prompt(tokenizers: dict[str, Tokenizer]) -> None:
    for family in EXACT:
        assert ADD.description in tokenizers[family].render_chat([{"role": "user", "content": "2+3?"}])
