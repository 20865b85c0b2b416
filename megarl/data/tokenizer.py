"""The tokenizer of the model folder: from chats to token ids, and back to text.

The only module that uses transformers' tokenizers; it uses no model class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from jinja2 import TemplateError

from megarl.errors import ConfigError, DataError, Problem
from megarl.system.proc import bounded
from megarl.types import JsonValue, TokenArray

Message: TypeAlias = Mapping[str, JsonValue]
"""`role`, `content` and other keys that the chat template reads."""

Chat: TypeAlias = Sequence[Message]


TEMPLATE_TIMEOUT_S = 10.0
TEMPLATE_BYTES = 1 << 30
_NUM_COMPARED = 2000
"""Random tokens whose text is compared before a tokenizer's own decoder is replaced."""


class _HuggingFaceTokenizer(Protocol):
    """The part of transformers' tokenizer that is used."""

    @property
    def chat_template(self) -> str | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    def apply_chat_template(self, chat: Chat, *, add_generation_prompt: bool, tokenize: bool) -> str: ...
    def __call__(
        self, texts: list[str], *, add_special_tokens: bool, verbose: bool
    ) -> Mapping[str, list[list[int]]]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...
    def convert_ids_to_tokens(self, token_ids: int) -> str | None: ...
    def get_vocab(self) -> dict[str, int]: ...


def load_tokenizer(folder: Path, *, vocab: int) -> Tokenizer:
    """Return the tokenizer of the model in `folder`, whose embedding has `vocab` rows; a ConfigError if it is unfit."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - imports torch: seconds that checking a recipe need not pay

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
    return Tokenizer(inner, folder=folder, eos_ids=eos_ids, vocab=vocab, decoder=_byte_decoder(inner))


class _ByteDecoder:
    """Joins the bytes of tokens, as a byte-level tokenizer does, at a fraction of its cost."""

    def __init__(self, inner: _HuggingFaceTokenizer, byte_of: Mapping[str, int]) -> None:
        """`byte_of` is the byte that each character of a token stands for."""
        self._inner = inner
        self._byte_of = byte_of
        self._known: dict[int, bytes] = {}

    def decode(self, token_ids: list[int]) -> str:
        try:
            joined = b"".join(map(self._known.__getitem__, token_ids))
        except KeyError:
            for token_id in set(token_ids) - self._known.keys():
                self._known[token_id] = self._bytes_of(self._inner.convert_ids_to_tokens(token_id))
            joined = b"".join(map(self._known.__getitem__, token_ids))
        return joined.decode("utf-8", errors="replace")

    def _bytes_of(self, token: str | None) -> bytes:
        if token is None:
            return b""  # an id between the vocabulary and the rows of the embedding
        try:
            return bytes(self._byte_of[char] for char in token)
        except KeyError:
            return token.encode()  # an added token is its own text


def _byte_decoder(inner: _HuggingFaceTokenizer) -> _ByteDecoder | None:
    """Return a decoder if the tokenizer is byte-level and this decoder gives the same text; else None."""
    from tokenizers.decoders import ByteLevel  # noqa: PLC0415 - with transformers above
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    if not isinstance(inner, PreTrainedTokenizerFast) or not isinstance(inner.backend_tokenizer.decoder, ByteLevel):
        return None
    # GPT-2's alphabet: printable bytes are themselves, the others the characters from 256 on.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
    decoder = _ByteDecoder(inner, byte_of)
    sample = np.random.default_rng(0).integers(0, max(inner.get_vocab().values()) + 1, _NUM_COMPARED).tolist()
    return decoder if decoder.decode(sample) == _decode(inner, sample) else None


def _decode(inner: _HuggingFaceTokenizer, token_ids: list[int]) -> str:
    return inner.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Tokenizer:
    def __init__(
        self,
        inner: _HuggingFaceTokenizer,
        *,
        folder: Path,
        eos_ids: tuple[int, ...],
        vocab: int,
        decoder: _ByteDecoder | None = None,
    ) -> None:
        """`decoder` gives the same text as `inner`, faster."""
        self._inner = inner
        self._decoder = decoder
        self.folder = folder
        self.eos_ids = eos_ids
        """Each ends a response; a demonstration ends with the first."""
        self.vocab = vocab
        """Rows of the model's embedding: every valid token id is below it."""

    def render_chat(self, chat: Chat) -> str:
        """Apply the chat template, up to where the assistant begins to answer.

        The template is a program that came with the model. transformers runs it in Jinja's immutable sandbox, where it
        can read only the messages; here its time and memory are limited too.
        """
        try:
            with bounded(seconds=TEMPLATE_TIMEOUT_S, num_bytes=TEMPLATE_BYTES):
                return self._inner.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError) as error:  # TypeError: it loads another file
            raise DataError(f"the model's chat template refuses the messages: {error}") from error
        except (TimeoutError, MemoryError, OverflowError) as error:
            limit = f"{TEMPLATE_TIMEOUT_S:g} s and {TEMPLATE_BYTES >> 20} MiB for one chat"
            raise DataError(f"the model's chat template needs more than {limit}: {type(error).__name__}") from None

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        """Encode rendered chats or plain texts. Special tokens are those in the text; none is added."""
        # The chat template has already written the first token.
        encoded = self._inner(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        return [np.array(token_ids, dtype=np.int32) for token_ids in encoded]

    def encode_responses(self, texts: Sequence[str]) -> list[TokenArray]:
        """Encode each text as a response, with the end token."""
        end = np.array(self.eos_ids[:1], dtype=np.int32)
        return [np.concatenate([token_ids, end]) for token_ids in self.encode(texts)]

    def decode(self, token_ids: TokenArray) -> str:
        """Return the text, special tokens included."""
        if self._decoder is not None:
            return self._decoder.decode(token_ids.tolist())
        return _decode(self._inner, token_ids.tolist())

    def decode_response(self, token_ids: TokenArray) -> str:
        """Return the text of a response without its end token.

        Other special tokens stay: rewards and tool parsers may need them, and a response that abuses them must not look
        clean.
        """
        has_end = len(token_ids) > 0 and int(token_ids[-1]) in self.eos_ids
        return self.decode(token_ids[:-1] if has_end else token_ids)


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
