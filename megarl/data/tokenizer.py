"""The model folder's tokenizer, as much of it as a run needs: chats in, token ids out, and back to text.

The only place that knows transformers' tokenizers. It never touches a model class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from jinja2 import TemplateError

from megarl.data.bounds import bounded
from megarl.errors import ConfigError, DataError, Problem
from megarl.types import JsonValue, TokenArray

Message: TypeAlias = Mapping[str, JsonValue]
"""`role` and `content`, and whatever else the chat template reads."""

Chat: TypeAlias = Sequence[Message]


TEMPLATE_TIMEOUT_S = 10.0
TEMPLATE_BYTES = 1 << 30


class _HuggingFaceTokenizer(Protocol):
    """What is used of transformers' tokenizer."""

    @property
    def chat_template(self) -> str | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    def apply_chat_template(self, chat: Chat, *, add_generation_prompt: bool, tokenize: bool) -> str: ...
    def __call__(
        self, texts: list[str], *, add_special_tokens: bool, verbose: bool
    ) -> Mapping[str, list[list[int]]]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...
    def get_vocab(self) -> dict[str, int]: ...


def load_tokenizer(folder: Path, *, vocab: int) -> Tokenizer:
    """The tokenizer of the model in `folder`, whose embedding has `vocab` rows; a ConfigError says what it lacks."""
    # Not at the top: transformers brings torch along, seconds that checking a recipe or a data file must not cost.
    from transformers import AutoTokenizer  # noqa: PLC0415

    if not folder.is_dir():
        raise _error(f"{folder} is not a folder")
    try:
        inner: _HuggingFaceTokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise _error(f"{folder} has no tokenizer that can be loaded: {reason}") from error
    if inner.chat_template is None:
        raise _error(f"the tokenizer in {folder} has no chat template; add chat_template.jinja to the folder")
    num_known = max(inner.get_vocab().values()) + 1
    if num_known > vocab:
        raise _error(
            f"the tokenizer in {folder} knows {num_known} ids, but the model's vocab_size is {vocab}; "
            "the two do not belong together"
        )
    eos_ids = _eos_ids(folder, inner.eos_token_id)
    if not eos_ids:
        raise _error(f"{folder} names no end token; set eos_token in tokenizer_config.json")
    return Tokenizer(inner, eos_ids=eos_ids, vocab=vocab)


class Tokenizer:
    def __init__(self, inner: _HuggingFaceTokenizer, *, eos_ids: tuple[int, ...], vocab: int) -> None:
        self._inner = inner
        self.eos_ids = eos_ids
        """Each of these ends a response; the first is the one a demonstration is closed with."""
        self.vocab = vocab
        """Rows of the model's embedding: every valid token id is below it."""

    def render_chat(self, chat: Chat) -> str:
        """The chat through the chat template, up to where the assistant begins to answer.

        The template is a program that came with the model: transformers renders it in Jinja's immutable sandbox, where
        it reaches nothing but the messages, and here it has a deadline and a limit of memory.
        """
        try:
            with bounded(seconds=TEMPLATE_TIMEOUT_S, num_bytes=TEMPLATE_BYTES):
                return self._inner.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError) as error:  # TypeError: it wants another file
            raise DataError(f"the model's chat template refuses the messages: {error}") from error
        except (TimeoutError, MemoryError, OverflowError) as error:
            limit = f"{TEMPLATE_TIMEOUT_S:g} s and {TEMPLATE_BYTES >> 20} MiB for one chat"
            raise DataError(f"the model's chat template needs more than {limit}: {type(error).__name__}") from None

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        """Rendered chats or plain texts; special tokens are those written in the text, none is added."""
        # The chat template has written the first token already: one that is added would be its double.
        encoded = self._inner(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        return [np.array(token_ids, dtype=np.int32) for token_ids in encoded]

    def encode_responses(self, texts: Sequence[str]) -> list[TokenArray]:
        """Each text as the model would have to produce it, end token included."""
        end = np.array(self.eos_ids[:1], dtype=np.int32)
        return [np.concatenate([token_ids, end]) for token_ids in self.encode(texts)]

    def decode(self, token_ids: TokenArray) -> str:
        """The text, special tokens included."""
        return self._inner.decode(token_ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_response(self, token_ids: TokenArray) -> str:
        """The text of a response without its end token.

        Other special tokens stay visible: rewards and tool parsers may need them, and a response that abuses them
        must not pass for a clean one.
        """
        has_end = len(token_ids) > 0 and int(token_ids[-1]) in self.eos_ids
        return self.decode(token_ids[:-1] if has_end else token_ids)


def _eos_ids(folder: Path, tokenizer_eos_id: int | None) -> tuple[int, ...]:
    """The tokenizer's own end token first, then those the model's generation_config.json adds."""
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
