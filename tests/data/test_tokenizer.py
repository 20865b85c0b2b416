from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer

from megarl.config.recipe import JinjaTemplateConfig
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.errors import ConfigError, DataError
from megarl.tools.quickstart.tiny_model import TinyShape
from megarl.types import JsonValue

VOCAB = TinyShape().vocab


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may break."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_chat_ends_where_the_assistant_begins(tokenizer: Tokenizer) -> None:
    chat = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2="},
    ]
    assert tokenizer.render_chat(chat) == "<|user|>1+1=<|assistant|>2<|end|><|user|>2+2=<|assistant|>"


@pytest.mark.parametrize("text", ["12+34=", "a b\n", "größer 数", "it's  <|user|> x", ""])
def test_text_survives_the_way_there_and_back(text: str, tokenizer: Tokenizer, model_folder: Path) -> None:
    (token_ids,) = tokenizer.encode([text])
    assert token_ids.dtype == np.int32
    assert tokenizer.decode_response(token_ids) == text
    # The class that transformers puts around the file gives the same ids as the file itself.
    assert token_ids.tolist() == RawTokenizer.from_file(str(model_folder / "tokenizer.json")).encode(text).ids


def test_only_the_end_token_at_the_end_is_left_out_of_the_text(tokenizer: Tokenizer) -> None:
    (token_ids,) = tokenizer.encode(["1<|end|>2<|user|><|end|>"])
    assert tokenizer.decode_response(token_ids) == "1<|end|>2<|user|>"
    (response,) = tokenizer.encode(["12<|end|>"])
    assert tokenizer.decode_response(response) == "12"
    assert tokenizer.decode_response(response[:-1]) == "12"
    assert tokenizer.decode_response(response[:0]) == ""


def test_end_tokens_come_from_the_tokenizer_and_the_generation_config(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[0, 1])
    assert load_tokenizer(folder, vocab=VOCAB).eos_ids == (1, 0)
    edit(folder / "generation_config.json", eos_token_id=0)
    assert load_tokenizer(folder, vocab=VOCAB).eos_ids == (1, 0)
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(folder, vocab=VOCAB).eos_ids == (1,)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"knows {VOCAB} ids, but the model's vocab_size is {VOCAB - 1}"):
        load_tokenizer(folder, vocab=VOCAB - 1)
    assert load_tokenizer(folder, vocab=VOCAB + 60).vocab == VOCAB + 60


def test_a_folder_without_a_usable_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        load_tokenizer(folder / "nowhere", vocab=VOCAB)
    edit(folder / "tokenizer_config.json", chat_template=None)
    with pytest.raises(ConfigError, match="has no chat template"):
        load_tokenizer(folder, vocab=VOCAB)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="no tokenizer that can be loaded"):
        load_tokenizer(folder, vocab=VOCAB)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError):
        load_tokenizer(folder, vocab=VOCAB)


def test_a_template_that_refuses_a_chat_is_a_data_error(folder: Path) -> None:
    template = "{{ raise_exception('system messages are not supported') }}"
    edit(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(DataError, match="refuses the messages: system messages are not supported"):
        load_tokenizer(folder, vocab=VOCAB).render_chat([{"role": "system", "content": ""}])


def with_template(folder: Path, template: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder, vocab=VOCAB)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['os'].environ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ (messages|map(attribute='__class__')|list)[0].__base__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_chat_template_reaches_nothing_but_the_messages(folder: Path, template: str) -> None:
    tokenizer = with_template(folder, template)
    chat = [{"role": "user", "content": "1+1="}]
    with pytest.raises(DataError, match="chat template refuses the messages"):
        tokenizer.render_chat(chat)
    assert chat == [{"role": "user", "content": "1+1="}]


@pytest.mark.parametrize(
    "template",
    [
        "{% set s = messages[0]['content'] %}" + "{% for a in s %}" * 4 + "{% endfor %}" * 4,
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 11 }}",
        "{% set n = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{{ 'a'.center(10 ** 11) }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_a_chat_template_has_a_deadline_and_a_limit_of_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr("megarl.data.tokenizer.TEMPLATE_TIMEOUT_S", 0.5)
    tokenizer = with_template(folder, template)
    began = time.monotonic()
    with pytest.raises(DataError, match=r"chat template (needs more than|refuses)"):
        tokenizer.render_chat([{"role": "user", "content": "1" * 1000}])
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("seed", range(20))
def test_the_text_of_any_tokens_is_that_of_transformers(tokenizer: Tokenizer, model_folder: Path, seed: int) -> None:
    """Bytes in any order, added tokens, and ids that are in the embedding but not in the vocabulary."""
    inner = AutoTokenizer.from_pretrained(str(model_folder), local_files_only=True)
    token_ids = np.random.default_rng(seed).integers(0, VOCAB, 300).astype(np.int32)
    expected = inner.decode(token_ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(token_ids) == expected
    assert tokenizer._fast_decoder is not None, "the decoder of transformers takes many times as long"


CONVERSATION: list[dict[str, JsonValue]] = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
]


def imitated(tokenizer: Tokenizer, chat: Sequence[Mapping[str, JsonValue]]) -> tuple[str, str]:
    """Return the text after the first message, and the part of it that is imitated."""
    ((token_ids, mask),) = tokenizer.encode_spans([tokenizer.spans(chat[:1], chat[1:])])
    assert len(token_ids) == len(mask)
    return tokenizer.decode(token_ids), tokenizer.decode(token_ids[mask])


def test_every_answer_of_a_conversation_is_imitated_with_its_end_token(tokenizer: Tokenizer) -> None:
    text, counted = imitated(tokenizer, CONVERSATION)
    assert text == "2<|end|><|user|>2+2=<|assistant|>4<|end|>"
    assert counted == "2<|end|>4<|end|>"
    # The tokens are those of the whole conversation, whatever its parts.
    whole = tokenizer.render_chat(CONVERSATION)
    assert tokenizer.render_chat(CONVERSATION[:1]) + text + "<|assistant|>" == whole


def test_an_answer_of_weight_zero_is_read_and_not_imitated(tokenizer: Tokenizer) -> None:
    chat: list[dict[str, JsonValue]] = [
        *CONVERSATION,
        {"role": "user", "content": "3+3="},
        {"role": "assistant", "content": "6"},
    ]
    chat[3] = {**chat[3], "weight": 0}
    text, counted = imitated(tokenizer, chat)
    assert text == "2<|end|><|user|>2+2=<|assistant|>4<|end|><|user|>3+3=<|assistant|>6<|end|>"
    assert counted == "2<|end|>6<|end|>"


def test_what_a_template_writes_into_an_answer_is_imitated(folder: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|assistant|>{{ m.content }}"
        "{% if m.tool_calls %}[{{ m.tool_calls }}]{% endif %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = load_tokenizer(folder, vocab=VOCAB, template=JinjaTemplateConfig(jinja=template))
    called = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "", "tool_calls": "add"}]
    assert imitated(tokenizer, called) == ("[add]<|end|>", "[add]<|end|>")


def test_a_template_that_changes_earlier_answers_leaves_nothing_to_imitate(folder: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content if m.role == 'user' or loop.last else '...' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = load_tokenizer(folder, vocab=VOCAB, template=JinjaTemplateConfig(jinja=template))
    with pytest.raises(DataError, match=r"set data\.imitates to last_answer"):
        imitated(tokenizer, CONVERSATION)
    assert imitated(tokenizer, CONVERSATION[2:]) == ("4<|end|>", "4<|end|>")


def test_a_model_without_a_template_takes_raw_text_or_a_template_of_the_recipe(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    with pytest.raises(ConfigError, match=r"set data\.template to raw"):
        load_tokenizer(folder, vocab=VOCAB)
    question = [{"role": "user", "content": "1+1="}]
    assert load_tokenizer(folder, vocab=VOCAB, template="raw").render_chat(question) == "1+1="
    (folder / "own.jinja").write_text("Q: {{ messages[0].content }} A:")
    own = JinjaTemplateConfig(jinja=str(folder / "own.jinja"))
    assert load_tokenizer(folder, vocab=VOCAB, template=own).render_chat(question) == "Q: 1+1= A:"


def test_raw_text_gets_the_tokenizers_first_token_once(folder: Path) -> None:
    backend = json.loads((folder / "tokenizer.json").read_text())
    first = next(token for token in backend["added_tokens"] if token["content"] == "<|user|>")
    backend["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|user|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|user|>": {"id": "<|user|>", "ids": [first["id"]], "tokens": ["<|user|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    edit(folder / "tokenizer_config.json", bos_token="<|user|>")
    tokenizer = load_tokenizer(folder, vocab=VOCAB, template="raw")
    for text in ("1+1=", "<|user|>1+1="):
        assert tokenizer.render_chat([{"role": "user", "content": text}]) == "<|user|>1+1="
