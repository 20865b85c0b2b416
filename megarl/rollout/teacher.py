"""Teachers on engines: the log-probability of each token of a rollout, and those of the likeliest tokens at its place.

An engine computes them in one prefill, at the temperature it was started with, and samples nothing. A reply is checked
against the tokens that were sent; one that is not the answer to its request is never learnt from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt

from megarl.engine.client import EngineClient
from megarl.errors import EngineError
from megarl.types import FloatArray, JsonValue, TokenArray

_MOST = 1e-3
"""A log-probability, or that of several tokens together, is at most 0, up to the rounding of a kernel."""
_Listed = tuple[float | None, int, str | None]


async def token_scores(
    client: EngineClient, token_ids: TokenArray, *, first: int, num_top: int, num_spare: int, vocab: int
) -> FloatArray:
    """Return the numbers of every token from `first` on; an EngineError if the reply is not this answer.

    `num_spare` further tokens are asked for at each place, in case some of the likeliest are not below `vocab`.
    """
    rid = uuid4().hex
    body: Mapping[str, JsonValue] = {
        "rid": rid,
        "input_ids": token_ids.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": first - 1,
        "top_logprobs_num": num_top + num_spare if num_top else 0,
        # SGLang's own for the likeliest tokens; `server` extends it to the tokens themselves.
        "return_flat_raw_top_logprobs": True,
        "return_flat_raw_top_logprobs_b64": True,
    }
    try:
        meta = msgspec.json.decode(await client.post("teacher", "/generate", body), type=_Scored).meta_info
        if meta.id != rid or meta.prompt_tokens != len(token_ids):
            raise ValueError("it is to another request")
        logprobs = _logprobs(meta, token_ids[first:])
        return np.hstack([logprobs[:, None], *_likeliest(meta, len(logprobs), num_top, vocab)]).astype(np.float32)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, IndexError) as error:
        raise EngineError(f"{client.endpoint}: teacher: not a reply to the request: {error}") from error


class _FlatScores(msgspec.Struct):
    """Arrays of little-endian numbers, as `server` sends them; base64 in JSON."""

    logprobs: bytes
    token_ids: bytes


class _Meta(msgspec.Struct):
    """The first entry of a list is that of a token which nothing precedes: it has no number."""

    id: str
    prompt_tokens: int
    input_token_logprobs: _FlatScores | list[_Listed]
    input_top_logprobs: list[list[_Listed] | None] = []
    input_top_logprobs_val_flat_b64: bytes | None = None
    input_top_logprobs_idx_flat_b64: bytes | None = None


class _Scored(msgspec.Struct):
    meta_info: _Meta


def _logprobs(meta: _Meta, token_ids: TokenArray) -> FloatArray:
    entries = meta.input_token_logprobs
    if isinstance(entries, _FlatScores):
        found, ids = np.frombuffer(entries.logprobs, "<f4"), np.frombuffer(entries.token_ids, "<i4")
    else:
        found, ids = (np.array(column) for column in _columns(entries))
    if not len(found) == len(ids) == len(token_ids) + 1 or (ids[1:] != token_ids).any():
        raise ValueError(f"{len(found)} log-probabilities of other tokens than the {len(token_ids)} asked for")
    with np.errstate(over="ignore"):
        logprobs: FloatArray = found[1:].astype(np.float32)
    for place in np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= _MOST)))[:1]:
        raise ValueError(f"log-probability {logprobs[place]} of token {token_ids[place]}")
    return logprobs


def _columns(entries: Sequence[_Listed]) -> tuple[list[float], list[int]]:
    return [np.nan if entry[0] is None else entry[0] for entry in entries], [entry[1] for entry in entries]


def _likeliest(meta: _Meta, num_tokens: int, num_top: int, vocab: int) -> tuple[npt.NDArray[Any], ...]:
    """Return the log-probabilities of the likeliest tokens below `vocab` and their ids, [T, K] each; () for K = 0."""
    if not num_top:
        return ()
    if meta.input_top_logprobs_val_flat_b64 is not None and meta.input_top_logprobs_idx_flat_b64 is not None:
        values = np.frombuffer(meta.input_top_logprobs_val_flat_b64, "<f4").reshape(num_tokens, -1)
        ids = np.frombuffer(meta.input_top_logprobs_idx_flat_b64, "<i4").reshape(num_tokens, -1)
    else:
        rows = [_columns(row) for row in meta.input_top_logprobs[1:] if row is not None]
        values, ids = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    if values.shape != ids.shape or len(values) != num_tokens or (ids < 0).any():
        raise ValueError(f"{ids.shape} likeliest tokens with {values.shape} log-probabilities for {num_tokens} tokens")
    order = np.argsort(ids >= vocab, axis=1, kind="stable")[:, :num_top]
    values, ids = np.take_along_axis(values, order, axis=1), np.take_along_axis(ids, order, axis=1)
    if ids.shape[1] != num_top or (ids >= vocab).any():
        raise ValueError(f"it has no {num_top} likeliest tokens below {vocab} at some place")
    # Checked as the trainer reads them: what is finite in 64 bits may not be in 32.
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    if not np.isfinite(values).all() or (np.exp(values).sum(axis=1) > 1 + _MOST).any():
        raise ValueError("the likeliest tokens have impossible log-probabilities")
    return values, ids
