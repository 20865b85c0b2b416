"""Checks an engine's reply before the trainer learns from it. Pure: no HTTP.

A broken engine may still reply: with counts that differ, ids outside the vocabulary, impossible log-probabilities,
tokens of another version. Each is a BadReplyError here, and the rollout is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from megarl.config.roles import InFlight
from megarl.errors import EngineError
from megarl.types import FinishReason, FloatArray, JsonValue, PolicyVersion, TokenArray

_MAX_LOGPROB = 1e-3
"""A probability is at most 1, up to the rounding of a kernel."""


class BadReplyError(EngineError):
    """The engine's reply is not a rollout that can be trained on."""


class WrongVersionError(BadReplyError):
    """The engine serves other weights than the fleet has recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The valid replies to one request."""

    vocab: int
    max_response_tokens: int
    eos_ids: Set[int]
    version: PolicyVersion
    """The version served when the request was sent."""
    newest_version: PolicyVersion
    """The newest version that may have been served since."""
    is_interrupted: bool = False
    """The engine was paused meanwhile: the tokens it had by then are a valid reply."""
    in_flight: InFlight | None = None
    """How the engine is paused for a publish; None if it is never paused during a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The tokens of a checked reply, end token included. With finish reason abort the response is not complete."""

    token_ids: TokenArray  # [T]
    logprobs: FloatArray  # [T]
    versions: npt.NDArray[np.int32]  # [T]
    finish_reason: FinishReason

    @classmethod
    def nothing(cls) -> Response:
        """Return a response without tokens, to be continued."""
        return cls(
            token_ids=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            versions=np.empty(0, np.int32),
            finish_reason=FinishReason.ABORT,
        )

    def then(self, rest: Response) -> Response:
        """Return this interrupted response with its continuation."""
        return Response(
            token_ids=np.concatenate([self.token_ids, rest.token_ids]),
            logprobs=np.concatenate([self.logprobs, rest.logprobs]),
            versions=np.concatenate([self.versions, rest.versions]),
            finish_reason=rest.finish_reason,
        )


def read_response(reply: JsonValue, expected: Expectation) -> Response:
    """Return the response in a reply of `/generate`; a BadReplyError names the fault."""
    fields = _mapping(reply, "the reply")
    meta = _mapping(fields.get("meta_info"), "meta_info")
    finish = _mapping(meta.get("finish_reason"), "finish_reason")
    finish_reason = _finish_reason(finish, expected)
    is_cut = finish_reason is FinishReason.ABORT
    token_ids = _token_ids(fields.get("output_ids"), expected, fewest=0 if is_cut else 1)
    # A request that was aborted before its first token has no log-probabilities.
    logprobs = _logprobs(meta.get("output_token_logprobs") if token_ids else [], token_ids)
    _check_end(finish_reason, finish, token_ids, expected)
    # An abort hides whether the last token was an end token. It is drawn again, with the same random numbers.
    num_kept = max(len(token_ids) - 1, 0) if is_cut else len(token_ids)
    return Response(
        token_ids=np.array(token_ids[:num_kept], dtype=np.int32),
        logprobs=logprobs[:num_kept].astype(np.float32),
        versions=_versions(meta, len(token_ids), expected)[:num_kept],
        finish_reason=finish_reason,
    )


def _finish_reason(finish: Mapping[str, JsonValue], expected: Expectation) -> FinishReason:
    kind = finish.get("type")
    if kind == FinishReason.ABORT and not expected.is_interrupted:
        raise BadReplyError(f"aborted: {finish.get('message') or 'no reason given'}")
    if kind not in tuple(FinishReason):
        raise BadReplyError(f"finish reason is {kind!r}")
    return FinishReason(str(kind))


def _token_ids(value: JsonValue, expected: Expectation, *, fewest: int) -> list[int]:
    items = _sequence(value, "output_ids")
    if set(map(type, items)) - {int}:
        items = [_integer(item, "a token id") for item in items]
    token_ids = cast("list[int]", items)
    if not fewest <= len(token_ids) <= expected.max_response_tokens:
        raise BadReplyError(f"{len(token_ids)} tokens, asked for {fewest} to {expected.max_response_tokens}")
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id < expected.vocab:
            raise BadReplyError(f"token id {token_id} is not in the vocabulary of {expected.vocab}")
    return token_ids


def _logprobs(value: JsonValue, token_ids: Sequence[int]) -> npt.NDArray[np.float64]:
    entries = _sequence(value, "output_token_logprobs")
    if len(entries) != len(token_ids):
        raise BadReplyError(f"{len(entries)} log-probabilities for {len(token_ids)} tokens")
    pairs = [entry[:2] for entry in entries if isinstance(entry, list)]
    values = [pair[0] for pair in pairs if pair]
    if [pair[-1] for pair in pairs if pair] == token_ids and not set(map(type, values)) - {float, int}:
        logprobs = np.array(values, dtype=np.float64)
        if np.isfinite(logprobs).all() and logprobs.max(initial=-np.inf) <= _MAX_LOGPROB:
            return logprobs
    raise _wrong_logprob(entries, token_ids)


def _wrong_logprob(entries: Sequence[JsonValue], token_ids: Sequence[int]) -> BadReplyError:
    """Return the error for the first wrong log-probability."""
    for entry, token_id in zip(entries, token_ids, strict=True):
        pair = _sequence(entry, "a log-probability")
        if len(pair) < 2 or pair[1] != token_id:
            return BadReplyError(f"log-probability {pair[:2]} is not of token {token_id}")
        value = pair[0]
        if not isinstance(value, float | int) or not math.isfinite(value) or value > _MAX_LOGPROB:
            return BadReplyError(f"log-probability {value!r} of token {token_id}")
    raise AssertionError(f"nothing is wrong with {len(entries)} log-probabilities")


def _check_end(
    finish_reason: FinishReason, finish: Mapping[str, JsonValue], token_ids: Sequence[int], expected: Expectation
) -> None:
    if not expected.eos_ids.isdisjoint(token_ids[:-1]):
        raise BadReplyError("tokens after an end token")
    if finish_reason is FinishReason.ABORT:
        return
    last = token_ids[-1]
    # The model's config may name end tokens that the tokenizer does not.
    if finish_reason is FinishReason.STOP and last not in expected.eos_ids and finish.get("matched") != last:
        raise BadReplyError(f"stopped at token {last}, which is no end token")
    if finish_reason is FinishReason.LENGTH and len(token_ids) != expected.max_response_tokens:
        raise BadReplyError(f"cut at {len(token_ids)} tokens, asked for {expected.max_response_tokens}")


def _versions(meta: Mapping[str, JsonValue], num_tokens: int, expected: Expectation) -> npt.NDArray[np.int32]:
    """Return the version of each token: per token if the reply has spans (SGLang from 0.5.19), else one for all."""
    versions = np.full(num_tokens, _version(meta.get("weight_version")), dtype=np.int32)
    spans = meta.get("weight_versions")
    if spans is not None:
        versions = _of_spans(_sequence(spans, "weight_versions"), num_tokens)
    oldest, newest = expected.version, expected.newest_version
    wrong = versions[(versions < oldest) | (versions > newest)]
    if wrong.size:
        served = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
        raise WrongVersionError(f"{wrong.size} tokens of version {wrong[0]}, expected {served}")
    if np.any(np.diff(versions) < 0):
        raise BadReplyError(f"tokens of version {versions.max()} before those of {versions[-1]}")
    if spans is None and oldest != newest and expected.in_flight != "abort":
        raise BadReplyError(
            "the reply has no version per token (SGLang before 0.5.19); set roles.rollout.in_flight to abort"
        )
    return _lower_bounds(versions, oldest) if expected.in_flight == "in_place" else versions


def _of_spans(spans: Sequence[JsonValue], num_tokens: int) -> npt.NDArray[np.int32]:
    versions = np.zeros(num_tokens, dtype=np.int32)
    covered = 0
    for item in spans:
        span = _mapping(item, "a weight version")
        start, end = _integer(span.get("start"), "start"), _integer(span.get("end"), "end")
        if start != covered or not start <= end <= num_tokens:
            raise BadReplyError(f"weight version of tokens {start} to {end}, after {covered} of {num_tokens}")
        versions[start:end] = _version(span.get("version"))
        covered = end
    if covered != num_tokens:
        raise BadReplyError(f"weight versions of {covered} tokens, there are {num_tokens}")
    return versions


def _lower_bounds(versions: npt.NDArray[np.int32], oldest: PolicyVersion) -> npt.NDArray[np.int32]:
    """Give each token the version of the token before it, and the first token the oldest version that was served.

    SGLang overlaps scheduling with computing: paused in place, it may hold a token that is computed but not counted
    yet, and count it to the next version. A token may be recorded as older than it is, never as newer.
    """
    bounds = np.empty_like(versions)
    bounds[:1] = oldest
    bounds[1:] = versions[:-1]
    return bounds


def _version(value: JsonValue) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise BadReplyError(f"weight version is {value!r}") from None


def _mapping(value: JsonValue, what: str) -> Mapping[str, JsonValue]:
    if not isinstance(value, dict):
        raise BadReplyError(f"{what} is missing or not an object")
    return value


def _sequence(value: JsonValue, what: str) -> Sequence[JsonValue]:
    if not isinstance(value, list):
        raise BadReplyError(f"{what} is missing or not a list")
    return value


def _integer(value: JsonValue, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadReplyError(f"{what} is {value!r}, not an integer")
    return value
