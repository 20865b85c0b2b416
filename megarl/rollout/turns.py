"""The turns of an episode: each follows its whole history, on the engine of the turn before where that is live."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from megarl.episodes.protocol import Heard
from megarl.tokens import SampledTokens
from megarl.types import Prompt, TokenArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Tokens that the model continues: a prompt, or the history of an episode."""

    prompt: Prompt
    index: int
    token_ids: TokenArray
    """[P]"""
    max_tokens: int
    seed: int
    prefixes: tuple[str, ...]
    """Names of what an engine may have cached, the longest first."""
    is_echoed: bool = False
    """The engine has to return the tokens that it saw."""
    num_routed: int = 0
    """Tokens whose experts are known already."""
    heard: Heard | None = None
    """Is told the tokens as they come."""


@dataclass(frozen=True, slots=True)
class TurnSampler:
    """The engines, for one episode (a `Sampler`)."""

    prompt: Prompt
    index: int
    _: KW_ONLY
    seed_of: Callable[[str], int]
    """Returns the seed of a row by its name."""
    continued: Callable[[Context], Awaitable[SampledTokens]]

    async def sample(
        self, history: TokenArray, *, max_tokens: int, row: int, num_routed: int = 0, heard: Heard | None = None
    ) -> SampledTokens:
        prompt = self.prompt
        context = Context(
            prompt=prompt,
            index=self.index,
            token_ids=history,
            max_tokens=max_tokens,
            # Positions repeat where a row begins anew: another row has other random numbers.
            seed=self.seed_of(prompt.uid if row == 0 else f"{prompt.uid}/{row}"),
            prefixes=(f"{prompt.uid}#{prompt.epoch}.{self.index}", prompt.uid),
            is_echoed=True,
            num_routed=num_routed,
            heard=heard,
        )
        return await self.continued(context)


def hear(heard: Heard, before: TokenArray, token_ids: Sequence[int], *, num_untold: int) -> None:
    """Tell the tokens of a response so far; the last one is untold where a publish may interrupt it and redraw that."""

    def so_far() -> TokenArray:
        told = np.array(token_ids[: len(token_ids) - num_untold], np.int32)
        return np.concatenate([before, told]) if len(before) else told

    heard(so_far)
