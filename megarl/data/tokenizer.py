"""The tokenizer of the model folder: from chats to token ids; `decoding` has the way back to text.

The only modules that use transformers' tokenizers; they use no model class.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np
from jinja2 import TemplateError

from megarl.config.checks.files import NO_TEMPLATE
from megarl.config.recipe import JinjaTemplateConfig
from megarl.data.decoding import Decoder, decode_slowly
from megarl.data.rows import is_imitated
from megarl.env import TRANSFORMERS_ADVICE
from megarl.errors import ConfigError, DataError, Problem
from megarl.system.foreign import map_texts, whole_text, without_marks
from megarl.system.imports import uncollected
from megarl.system.proc import bounded
from megarl.types import BoolArray, JsonValue, TokenArray

Message: TypeAlias = Mapping[str, JsonValue]
"""`role`, `content` and other keys that the chat template reads."""

Chat: TypeAlias = Sequence[Message]


ToolFunction: TypeAlias = Mapping[str, JsonValue]
"""A tool as chat templates take it: `type: function`, and `function` with name, description, parameters."""

Template: TypeAlias = Literal["chat", "raw"] | JinjaTemplateConfig
"""The recipe's `data.template`."""

TEMPLATE_TIMEOUT_S = 10.0
TEMPLATE_BYTES = 1 << 30
_REWRITES = (
    "writes an earlier answer differently from how it was given, so that there is no one text to imitate; "
    "set data.imitates to last_answer, or give each answer a row of its own"
)
_PLAIN_KEYS = {"role", "content", "weight"}
_NUM_ENCODED = 256
"""Random texts whose ids are compared before a tokenizer's own encoder is replaced."""
_SHORT_CHARACTERS = 2000
"""Texts up to this length are encoded at once, in about 2 ms; a thread costs a tenth of that."""


if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(
    folder: Path, *, vocab: int, template: Template = "chat", tools: Sequence[ToolFunction] = ()
) -> Tokenizer:
    """Return the tokenizer of the model in `folder`, whose embedding has `vocab` rows; a ConfigError if it is unfit.

    Every chat is rendered with `tools`.
    """
    with uncollected():
        from transformers import AutoTokenizer  # noqa: PLC0415 - imports torch: checking a recipe need not wait for it

    if not folder.is_dir():
        raise _error(f"{folder} is not a folder")
    try:
        inner: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise _error(f"{folder} has no tokenizer that can be loaded: {reason}") from error
    if template == "chat" and inner.chat_template is None:
        raise _error(f"the tokenizer in {folder} {NO_TEMPLATE}")
    num_known = max(inner.get_vocab().values()) + 1
    if num_known > vocab:
        raise _error(
            f"the tokenizer in {folder} knows {num_known} ids, but the model's vocab_size is {vocab}; "
            "the two do not belong together"
        )
    eos_ids = _eos_ids(folder, inner.eos_token_id)
    if not eos_ids:
        raise _error(f"{folder} names no end token; set eos_token in tokenizer_config.json")
    return Tokenizer(inner, folder=folder, eos_ids=eos_ids, vocab=vocab, template=template, tools=tools)


@contextmanager
def without_torch() -> Iterator[None]:
    """Let tokenizers load without torch, at a third of the time and a quarter of the memory.

    transformers imports torch, with its compiler, where it finds it. In a process that entered this block transformers
    has no models any more. Does nothing where one of the two is imported already.
    """
    if {"torch", "transformers"} & sys.modules.keys():
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    TRANSFORMERS_ADVICE.set(TRANSFORMERS_ADVICE.default)
    try:
        yield
    finally:
        del sys.modules["torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpan:
    """A part of a conversation after the prompt."""

    text: str
    is_imitated: bool
    end_id: int | None
    """The end token that follows the text."""


def _encode(inner: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    return inner(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []


class Tokenizer(Decoder):
    def __init__(
        self,
        inner: PreTrainedTokenizerBase,
        *,
        folder: Path,
        eos_ids: tuple[int, ...],
        vocab: int,
        template: Template = "chat",
        tools: Sequence[ToolFunction] = (),
    ) -> None:
        super().__init__(inner, eos_ids)
        self._jinja = None if isinstance(template, str) else template.text
        self._first_text = _first_text(inner) if template == "raw" else None
        self.template: Template = template
        self.tools = tuple(tools)
        self.folder = folder
        self.vocab = vocab
        """Rows of the model's embedding: every valid token id is below it."""

    def with_tools(self, tools: Sequence[ToolFunction]) -> Tokenizer:
        """Return a tokenizer that renders chats with these tools."""
        self._fast  # noqa: B018 - found once: that changes the tokenizer, which other threads may use later
        other = copy.copy(self)
        other.tools = tuple(tools)
        other.__dict__.pop("_shown_tools", None)
        return other

    def render_chat(self, chat: Chat) -> str:
        """Return the text up to where the assistant begins to answer; `raw` takes the content of the only message."""
        if self._first_text is None:
            return self._applied(chat, is_answered=False)
        (message,) = chat
        text = str(message["content"])
        return text if text.startswith(self._first_text) else self._first_text + text

    def render_chats(self, chats: Sequence[Chat]) -> list[str]:
        """Return `render_chat` of each; an error does not say of which. Many at once take a third of the time."""
        if self._first_text is not None or not chats:
            return [self.render_chat(chat) for chat in chats]
        return self._applied_to([list(chat) for chat in chats], is_answered=False)

    def render_answered(self, chat: Chat) -> str:
        """Return the text of a chat whose last message is the answer, with the end that the template writes."""
        return self._applied(chat, is_answered=True)

    def spans(self, chat: Chat, continuation: Chat) -> list[TextSpan]:
        """Return the texts that continue `render_chat(chat)`: answers, and what the template writes between them.

        An answer is its content and an end token, as the policy would write it. A message with further keys, such as
        `tool_calls`, is written by the template.
        """
        spans: list[TextSpan] = []
        conversation, rendered = [*chat], self.render_chat(chat)
        for place, message in enumerate(continuation):
            conversation.append(message)
            if message["role"] != "assistant":
                continue
            text, is_counted = self._answer(conversation, rendered), is_imitated(message)
            answers = (later for later in range(place + 1, len(continuation)) if _is_answer(continuation[later]))
            following = next(answers, None)
            if following is None:
                return [*spans, TextSpan(text=text, is_imitated=is_counted, end_id=self.eos_ids[0])]
            whole = self.render_chat([*chat, *continuation[:following]])
            between, end_id = self._between(whole, rendered + text)
            spans.append(TextSpan(text=text, is_imitated=is_counted, end_id=end_id))
            spans.append(TextSpan(text=between, is_imitated=False, end_id=None))
            rendered = whole
        raise AssertionError("a continuation ends with an answer")

    def _answer(self, conversation: Chat, rendered: str) -> str:
        """Return the text of the last message, without the end token."""
        message = conversation[-1]
        if set(message) <= _PLAIN_KEYS:
            return str(message["content"])
        whole = self._applied(conversation, is_answered=True)
        if not whole.startswith(rendered):
            raise DataError(f"the chat template {_REWRITES}")
        text = whole.removeprefix(rendered)
        ends = [place for eos in self.eos_texts if (place := text.rfind(eos)) >= 0]
        return text[: max(ends)] if ends else text

    def _between(self, whole: str, before: str) -> tuple[str, int | None]:
        """Return the text that follows an answer, and the end token that the answer has in it, if it has one."""
        if not whole.startswith(before):
            raise DataError(f"the chat template {_REWRITES}")
        between = whole.removeprefix(before)
        for text, token_id in self.eos_texts.items():
            if between.startswith(text):
                return between.removeprefix(text), token_id
        return between, None

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """The texts that become special tokens or end tokens wherever they stand, the longest first."""
        special = [token.content for token in self._inner.added_tokens_decoder.values() if token.special]
        return _longest_first([*special, *self.eos_texts])

    @cached_property
    def _marks(self) -> tuple[str, ...]:
        """The texts of all added tokens but those that are words or white space, as some vocabularies have them."""
        added = [token.content for token in self._inner.added_tokens_decoder.values()]
        marks = [text for text in added if not all(each.isalnum() or each.isspace() for each in text)]
        return _longest_first([*self.control_texts, *marks])

    def plain(self, text: str) -> str:
        """Return foreign text so that it stays text: without lone surrogates, and without any of the added tokens."""
        clean = without_marks(whole_text(text), self._marks)
        if self._normalize is not None:
            # Some tokenizers look for added tokens in the normalized text, which may have what the text has not.
            marks, normalized = {*self._marks, *map(self._normalize, self._marks)}, self._normalize(clean)
            if any(mark in normalized for mark in marks if mark):
                return " ".join(clean)
        return clean

    def without_control(self, text: str) -> str:
        """Return the text without special tokens; the other added tokens, as of thoughts and calls, stay."""
        return without_marks(whole_text(text), self.control_texts)

    @cached_property
    def _normalize(self) -> Callable[[str], str] | None:
        """Returns the text in which added tokens are found; None where that is the text itself."""
        normalizer = getattr(getattr(self._inner, "backend_tokenizer", None), "normalizer", None)
        if normalizer is None or not any(token.normalized for token in self._inner.added_tokens_decoder.values()):
            return None
        return normalizer.normalize_str  # type: ignore[no-any-return]

    def has_control(self, text: str) -> bool:
        """Whether the text would have special tokens if it were encoded as it is."""
        return any(mark in text for mark in self.control_texts)

    @cached_property
    def eos_texts(self) -> dict[str, int]:
        """The end tokens by their texts."""
        return {self.decode(np.array([token_id], np.int32)): token_id for token_id in self.eos_ids}

    @cached_property
    def _shown_tools(self) -> list[JsonValue]:
        """The tools with plain texts: servers write their descriptions."""
        return cast("list[JsonValue]", map_texts(self.tools, self.plain))

    def _applied(self, chat: Chat, *, is_answered: bool) -> str:
        return self._applied_to([list(chat)], is_answered=is_answered)[0]

    def _applied_to(self, chats: list[list[Message]], *, is_answered: bool) -> list[str]:
        """Apply the chat template.

        The template is a program that came with the model. transformers runs it in Jinja's immutable sandbox, where it
        can read only the messages; here its time and memory are limited too.
        """
        try:
            with bounded(seconds=TEMPLATE_TIMEOUT_S, num_bytes=TEMPLATE_BYTES):
                rendered: list[str] = self._inner.apply_chat_template(
                    chats,
                    tools=self._shown_tools or None,
                    chat_template=self._jinja,
                    add_generation_prompt=not is_answered,
                    tokenize=False,
                )
                return rendered
        except (TimeoutError, MemoryError, OverflowError, RecursionError) as error:
            limit = f"{TEMPLATE_TIMEOUT_S:g} s and {TEMPLATE_BYTES >> 20} MiB for one chat"
            raise DataError(f"the chat template needs more than {limit}: {type(error).__name__}") from None
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # TypeError: it loads another file; the others come from messages that it does not expect.
            raise DataError(f"the chat template refuses the messages: {error}") from error

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        """Encode rendered chats or plain texts. Special tokens are those in the text; none is added."""
        # The chat template has already written the first token.
        whole = [whole_text(text) for text in texts]
        if self._fast is not None:
            encodings = self._fast.encode_batch_fast(whole, add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
        return [np.array(token_ids, dtype=np.int32) for token_ids in _encode(self._inner, whole)]

    async def encode_aside(self, text: str) -> TokenArray:
        """Encode one text; a long one in a thread, so that the event loop goes on meanwhile."""
        # Only the tokenizer without transformers around it can be used by several threads at once.
        if len(text) <= _SHORT_CHARACTERS or self._fast is None:
            return self.encode([text])[0]
        return (await asyncio.to_thread(self.encode, [text]))[0]

    @cached_property
    def _fast(self) -> Backend | None:
        """The tokenizer that transformers calls, at half the cost; None where there is none or its ids differ."""
        backend: Backend | None = getattr(self._inner, "backend_tokenizer", None)
        if backend is None:
            return None
        backend.no_truncation()
        backend.no_padding()
        sample = np.random.default_rng(0).integers(0, self.vocab, (_NUM_ENCODED, 8), np.int32)
        texts = [decode_slowly(self._inner, token_ids) for token_ids in sample]
        ids = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
        return backend if ids == _encode(self._inner, texts) else None

    def encode_spans(self, conversations: Sequence[Sequence[TextSpan]]) -> list[tuple[TokenArray, BoolArray]]:
        """Return the tokens of each conversation, and which of them are imitated."""
        encoded = iter(self.encode([span.text for spans in conversations for span in spans]))
        encoded_conversations = []
        for spans in conversations:
            parts = []
            for span in spans:
                ends = [] if span.end_id is None else [span.end_id]
                parts.append(np.concatenate([next(encoded), np.array(ends, np.int32)]))
            masks = [np.full(len(part), span.is_imitated) for part, span in zip(parts, spans, strict=True)]
            encoded_conversations.append((np.concatenate(parts), np.concatenate(masks)))
        return encoded_conversations


def _longest_first(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({text for text in texts if text.strip("\ufffd")}, key=len, reverse=True))


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant"


def _first_text(inner: PreTrainedTokenizerBase) -> str:
    """Return the token that the tokenizer puts before a text by itself, if it does so."""
    (first,) = inner([""], add_special_tokens=True, verbose=False)["input_ids"]
    return inner.bos_token or "" if first[:1] == [inner.bos_token_id] else ""


def _eos_ids(folder: Path, tokenizer_eos_id: int | None) -> tuple[int, ...]:
    """Return the tokenizer's own end token, then those of the model's generation_config.json."""
    path = folder / "generation_config.json"
    try:
        raw = json.loads(path.read_text()) if path.exists() else {}
    except json.JSONDecodeError as error:
        raise _error(f"{path} is not JSON: {error}") from None
    declared = raw.get("eos_token_id")
    ids = [] if tokenizer_eos_id is None else [tokenizer_eos_id]
    ids += declared if isinstance(declared, list) else [] if declared is None else [declared]
    return tuple(dict.fromkeys(ids))


def _error(message: str) -> ConfigError:
    return ConfigError("model.path", (Problem(key="model.path", message=message),))
