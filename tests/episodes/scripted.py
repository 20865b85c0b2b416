"""Sessions whose model says what a test wrote."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np

from megarl.data.tokenizer import Tokenizer
from megarl.episodes.protocol import Heard
from megarl.episodes.session import Session
from megarl.errors import MegarlError
from megarl.tokens import SampledTokens
from megarl.types import TokenArray


class ScriptedSampler:
    """Says the texts one after the other, a token at a time."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], *, error: MegarlError | None = None) -> None:
        self._tokenizer = tokenizer
        self.decode = tokenizer.decode
        self._texts = texts
        self._error = error
        self.limits: list[int] = []
        self.histories: list[TokenArray] = []
        self.num_cancelled = 0
        self.going_on = asyncio.Event()
        """Without it, a response stops before its last token."""
        self.going_on.set()

    async def sample(
        self, history: TokenArray, *, max_tokens: int, row: int, num_routed: int, heard: Heard | None = None
    ) -> SampledTokens:
        if self._error is not None:
            raise self._error
        self.limits.append(max_tokens)
        self.histories.append(history)
        text = self._texts.pop(0)
        token_ids = self._tokenizer.encode([text + "<|im_end|>"])[0][:max_tokens]
        try:
            for num_said in range(1, len(token_ids)):
                if heard is not None:
                    heard(partial(token_ids.__getitem__, slice(num_said)))
                    await asyncio.sleep(0)
            await self.going_on.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return SampledTokens(
            token_ids=token_ids,
            logprobs=np.full(len(token_ids), -1.0, np.float32),
            versions=np.zeros(len(token_ids), np.int32),
            is_cut=int(token_ids[-1]) not in self._tokenizer.eos_ids,
        )


class ScriptedSession(Session):
    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: list[str],
        *,
        error: MegarlError | None = None,
        max_tokens: int = 1 << 14,
        max_turns: int = 64,
    ) -> None:
        self.script = ScriptedSampler(tokenizer, texts, error=error)
        super().__init__(
            self.script,
            np.array([0], np.int32),
            max_tokens=max_tokens,
            max_turns=max_turns,
            decode=tokenizer.decode_response,
        )

    @property
    def num_rows(self) -> int:
        return sum(1 for row in self._rows if row.learnt())
