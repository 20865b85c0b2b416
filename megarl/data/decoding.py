"""From token ids to text, as the tokenizer of the model does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megarl.types import TokenArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NUM_COMPARED = 2000
"""Random tokens whose text is compared before a tokenizer's own decoder is replaced."""


class Decoder:
    def __init__(self, inner: PreTrainedTokenizerBase, eos_ids: tuple[int, ...]) -> None:
        self._inner = inner
        self._fast_decoder = _byte_decoder(inner)
        self.eos_ids = eos_ids
        """Each ends a response; a demonstration ends with the first."""

    def decode(self, token_ids: TokenArray) -> str:
        """Return the text, special tokens included."""
        if self._fast_decoder is not None:
            return self._fast_decoder.decode(token_ids)
        return decode_slowly(self._inner, token_ids)

    def decode_response(self, token_ids: TokenArray) -> str:
        """Return the text of a response without its end token.

        Other special tokens stay: rewards and tool parsers may need them, and a response that abuses them must not look
        clean.
        """
        has_end = len(token_ids) > 0 and int(token_ids[-1]) in self.eos_ids
        return self.decode(token_ids[:-1] if has_end else token_ids)


def decode_slowly(inner: PreTrainedTokenizerBase, token_ids: TokenArray) -> str:
    text: str = inner.decode(token_ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


class _ByteDecoder:
    """Joins the bytes of tokens, as a byte-level tokenizer does, at a fraction of its cost."""

    def __init__(self, inner: PreTrainedTokenizerBase, byte_of: Mapping[str, int]) -> None:
        """`byte_of` is the byte that each character of a token stands for."""
        self._inner = inner
        self._byte_of = byte_of
        self._known: npt.NDArray[np.object_] = np.empty(0, dtype=object)
        """The bytes of each token; None until it is met."""

    def decode(self, token_ids: TokenArray) -> str:
        try:
            joined = b"".join(self._known[token_ids].tolist())
        except (IndexError, TypeError):
            self._learn(np.unique(token_ids).tolist())
            joined = b"".join(self._known[token_ids].tolist())
        return joined.decode("utf-8", errors="replace")

    def _learn(self, token_ids: list[int]) -> None:
        num_missing = max(token_ids) + 1 - len(self._known)
        self._known = np.append(self._known, np.full(max(num_missing, 0), None, dtype=object))
        for token_id in token_ids:
            if self._known[token_id] is None:
                self._known[token_id] = self._bytes_of(self._inner.convert_ids_to_tokens(token_id))

    def _bytes_of(self, token: str | None) -> bytes:
        if token is None:
            return b""  # an id between the vocabulary and the rows of the embedding
        try:
            return bytes(self._byte_of[char] for char in token)
        except KeyError:
            return token.encode()  # an added token is its own text


def _byte_decoder(inner: PreTrainedTokenizerBase) -> _ByteDecoder | None:
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
    sample = np.random.default_rng(0).integers(0, max(inner.get_vocab().values()) + 1, _NUM_COMPARED, np.int32)
    return decoder if decoder.decode(sample) == decode_slowly(inner, sample) else None
