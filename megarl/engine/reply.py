"""Decodes an engine's reply into arrays and checks it before the trainer learns from it. Pure: no HTTP.

A broken engine may still reply: with something that is no JSON, counts that differ, ids outside the vocabulary,
impossible log-probabilities, tokens of another version. Each is a BadReplyError here, and the rollout is tried again.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from megarl.config.roles import InFlight
from megarl.errors import EngineError
from megarl.routes import RouteRequest
from megarl.tokens import RouteArray, SampledTokens, join_tokens
from megarl.types import FinishReason, FloatArray, PolicyVersion, TokenArray

_MAX_LOGPROB = 1e-3
"""A probability is at most 1, up to the rounding of a kernel."""
_MAX_VERSION = 2**31 - 1


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
    """The engine was paused or retired, or the request cut: the tokens it had by then are a valid reply."""
    base_version: PolicyVersion | None = None
    """The version that the reply names where it is that of the base under an adapter, whose version is `version`."""
    in_flight: InFlight | None = None
    """The treatment of requests when the engine is paused for a publish; None if it is never paused during one."""
    echo: tuple[int, ...] | None = None
    """The tokens that were sent, where the reply has to have those that the engine saw."""
    routes: RouteRequest | None = None
    images: tuple[str, ...] = ()
    """The digests of the images that were named in the request."""
    num_prompt: int | None = None
    """Tokens of the prompt that the engine has to have counted; None: not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response(SampledTokens):
    """The tokens of a checked reply, end token included. With finish reason abort the response is not complete."""

    finish_reason: FinishReason
    num_cached: int = 0
    """Tokens of the request that the engine had in its cache."""
    num_passes: int = 0
    """Passes that checked drafted tokens of the response."""

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
        if not len(self.token_ids) and self.routes is None:
            return rest
        routes = [part for part in (self.routes, rest.routes) if part is not None]
        return Response(
            finish_reason=rest.finish_reason,
            is_cut=rest.is_cut,
            routes=np.concatenate(routes) if routes else None,
            **join_tokens([self, rest]),
        )


_Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


# Without gc: a reply has as many entries as tokens, and none of them can be part of a cycle.
class _TokenLogprob(msgspec.Struct, array_like=True, gc=False):
    logprob: float
    token_id: _Int32


class _FlatLogprobs(msgspec.Struct):
    """Arrays of little-endian numbers, as `server` sends them; base64 in JSON."""

    logprobs: bytes
    token_ids: bytes


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None
    matched: _Int32 | str | list[_Int32] | None = None


class _Span(msgspec.Struct):
    version: str | _Int32
    start: _Int32
    end: _Int32


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    weight_version: str | _Int32 | None = None
    weight_versions: list[_Span] | None = None
    output_token_logprobs: _FlatLogprobs | list[_TokenLogprob] | None = None
    routed_experts: bytes | None = None
    cached_tokens: _Int32 | None = None
    prompt_tokens: _Int32 | None = None
    spec_verify_ct: _Int32 = 0
    megarl_read_images: list[str] = []


class _Reply(msgspec.Struct):
    """The fields of a reply of `/generate` that are read; others are skipped without being built."""

    output_ids: msgspec.Raw
    meta_info: _Meta
    prompt_token_ids: list[int] | None = None


_DECODER = msgspec.json.Decoder(_Reply)
_IDS_DECODER = msgspec.json.Decoder(list[int])


def read_response(content: bytes, expected: Expectation) -> Response:
    """Return the response in a reply of `/generate`; a BadReplyError names the fault."""
    reply = _decode(content)
    meta = reply.meta_info
    if expected.echo is not None:
        _check_echo(reply.prompt_token_ids, expected.echo)
    finish_reason = _finish_reason(meta.finish_reason, expected)
    _check_images(meta, expected)
    is_cut = finish_reason is FinishReason.ABORT
    is_drafted = meta.spec_verify_ct > 0
    token_ids = _token_ids(reply, expected, fewest=0 if is_cut else 1, may_be_too_many=is_drafted)
    # A request that was aborted before its first token has no log-probabilities.
    logprobs = _logprobs(meta.output_token_logprobs if len(token_ids) else [], token_ids)
    num_kept = len(token_ids)
    if is_drafted:
        num_kept, finish_reason = _drafted_end(finish_reason, token_ids, expected)
    _check_end(finish_reason, meta.finish_reason, token_ids[:num_kept], expected)
    if is_cut and not is_drafted:
        # An abort hides whether the last token was an end token. It is drawn again, with the same random numbers.
        num_kept = max(num_kept - 1, 0)
    return Response(
        token_ids=token_ids[:num_kept],
        logprobs=logprobs[:num_kept],
        versions=_versions(meta, len(token_ids), expected)[:num_kept],
        finish_reason=finish_reason,
        is_cut=finish_reason is FinishReason.LENGTH,
        num_cached=meta.cached_tokens or 0,
        num_passes=meta.spec_verify_ct,
        routes=None if expected.routes is None else _routes(meta, expected.routes, len(token_ids), num_kept),
    )


def _decode(content: bytes) -> _Reply:
    try:
        return _DECODER.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadReplyError(f"{len(content)} bytes that are no reply: {error}") from None


def _check_echo(seen: list[int] | None, sent: Sequence[int]) -> None:
    """Refuse a response to other tokens than those that it will be trained after."""
    if seen is None:
        raise BadReplyError("prompt_token_ids is missing (SGLang before 0.5.21)")
    if seen != list(sent):
        place = next((i for i, (one, other) in enumerate(zip(seen, sent, strict=False)) if one != other), len(sent))
        raise BadReplyError(
            f"the engine saw {len(seen)} prompt tokens, {len(sent)} were sent; they differ from {place}"
        )


def _check_images(meta: _Meta, expected: Expectation) -> None:
    """Refuse a response to other images, or to a prompt of another length, than those that it will be trained with."""
    read = tuple(meta.megarl_read_images)
    if read != expected.images and meta.finish_reason.type != FinishReason.ABORT:
        raise BadReplyError(f"the engine read the images {list(read)}, sent were {list(expected.images)}")
    if expected.num_prompt is not None and meta.prompt_tokens not in (None, expected.num_prompt):
        raise BadReplyError(f"the engine counts {meta.prompt_tokens} prompt tokens, sent were {expected.num_prompt}")


def _finish_reason(finish: _Finish, expected: Expectation) -> FinishReason:
    if finish.type == FinishReason.ABORT and not expected.is_interrupted:
        raise BadReplyError(f"aborted: {finish.message or 'no reason given'}")
    if finish.type not in tuple(FinishReason):
        raise BadReplyError(f"finish reason is {finish.type!r}")
    return FinishReason(finish.type)


def _token_ids(reply: _Reply, expected: Expectation, *, fewest: int, may_be_too_many: bool) -> TokenArray:
    token_ids = _output_ids(reply)
    most = len(token_ids) if may_be_too_many else expected.max_response_tokens
    if not fewest <= len(token_ids) <= most:
        raise BadReplyError(f"{len(token_ids)} tokens, asked for {fewest} to {expected.max_response_tokens}")
    outside = token_ids[(token_ids < 0) | (token_ids >= expected.vocab)]
    if outside.size:
        raise BadReplyError(f"token id {outside[0]} is not in the vocabulary of {expected.vocab}")
    return token_ids


def _output_ids(reply: _Reply) -> TokenArray:
    """Return the ids of the reply. Writing an array as JSON is much quicker than reading a list: equal is as good."""
    listed, entries = bytes(reply.output_ids), reply.meta_info.output_token_logprobs
    if isinstance(entries, _FlatLogprobs):
        token_ids = _from_bytes(entries.token_ids, "<i4")
        if listed == orjson.dumps(token_ids, option=orjson.OPT_SERIALIZE_NUMPY):
            return token_ids
    try:
        values = _IDS_DECODER.decode(listed)
        return np.fromiter(values, dtype=np.int32, count=len(values))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadReplyError(f"output_ids: {error}") from None
    except OverflowError as error:
        raise BadReplyError(f"a token id is too large: {error}") from None


def _logprobs(entries: _FlatLogprobs | list[_TokenLogprob] | None, token_ids: TokenArray) -> FloatArray:
    match entries:
        case None:
            raise BadReplyError("output_token_logprobs is missing")
        case _FlatLogprobs():
            logprobs, ids = _from_bytes(entries.logprobs, "<f4"), _from_bytes(entries.token_ids, "<i4")
        case _:
            ids = np.fromiter([entry.token_id for entry in entries], dtype=np.int32, count=len(entries))
            values = np.fromiter([entry.logprob for entry in entries], dtype=np.float64, count=len(entries))
            with np.errstate(over="ignore"):
                logprobs = values.astype(np.float32)
    if not len(logprobs) == len(ids) == len(token_ids):
        raise BadReplyError(f"{len(logprobs)} log-probabilities of {len(ids)} for {len(token_ids)} tokens")
    if (is_other := ids != token_ids).any():
        place = int(is_other.argmax())
        raise BadReplyError(f"log-probability of token {ids[place]} is not of token {token_ids[place]}")
    # Checked as the trainer reads them: what is finite in 64 bits may not be in 32. Nothing compares with a NaN.
    if not (is_right := (logprobs <= _MAX_LOGPROB) & (logprobs > -np.inf)).all():
        place = int(is_right.argmin())
        raise BadReplyError(f"log-probability {logprobs[place]} of token {token_ids[place]}")
    return logprobs


def _from_bytes(content: bytes, dtype: str) -> npt.NDArray[Any]:
    try:
        return np.frombuffer(content, dtype=dtype).copy()
    except ValueError as error:
        raise BadReplyError(f"{len(content)} bytes of an array: {error}") from None


def _routes(meta: _Meta, asked: RouteRequest, num_tokens: int, num_kept: int) -> RouteArray:
    if meta.routed_experts is None and meta.finish_reason.type != FinishReason.ABORT:
        raise BadReplyError("routed_experts is missing (start the engine with --enable-return-routed-experts)")
    try:
        return asked.read(meta.routed_experts, num_tokens=num_tokens, num_kept=num_kept)
    except ValueError as error:
        raise BadReplyError(f"routed_experts: {error}") from None


def _drafted_end(finish_reason: FinishReason, token_ids: TokenArray, expected: Expectation) -> tuple[int, FinishReason]:
    """Return how many tokens of a response with drafts count, and how it ends.

    SGLang looks for an abort, then for the longest response, and for an end token only where it found neither: the last
    pass may have gone past one. No token is drawn again after an abort: where it falls depends on the last token, which
    would have other odds.
    """
    ends = np.flatnonzero(np.isin(token_ids, list(expected.eos_ids)))
    most = expected.max_response_tokens
    if len(ends) and ends[0] < most:
        return int(ends[0]) + 1, FinishReason.STOP
    if len(token_ids) >= most and finish_reason is not FinishReason.STOP:
        return most, FinishReason.LENGTH
    return len(token_ids), finish_reason


def _check_end(finish_reason: FinishReason, finish: _Finish, token_ids: TokenArray, expected: Expectation) -> None:
    if any((token_ids[:-1] == eos_id).any() for eos_id in expected.eos_ids):
        raise BadReplyError("tokens after an end token")
    if finish_reason is FinishReason.ABORT:
        return
    last = int(token_ids[-1])
    # The model's config may name end tokens that the tokenizer does not.
    if finish_reason is FinishReason.STOP and last not in expected.eos_ids and finish.matched != last:
        raise BadReplyError(f"stopped at token {last}, which is no end token")
    if finish_reason is FinishReason.LENGTH and len(token_ids) != expected.max_response_tokens:
        raise BadReplyError(f"cut at {len(token_ids)} tokens, asked for {expected.max_response_tokens}")


def _versions(meta: _Meta, num_tokens: int, expected: Expectation) -> npt.NDArray[np.int32]:
    """Return the version of each token: per token if the reply has spans (SGLang from 0.5.19), else one for all."""
    versions = np.full(num_tokens, _version(meta.weight_version), dtype=np.int32)
    spans = meta.weight_versions
    if spans is not None:
        versions = _of_spans(spans, num_tokens)
    oldest, newest = expected.version, expected.newest_version
    if expected.base_version is not None:
        oldest = newest = expected.base_version
    wrong = versions[(versions < oldest) | (versions > newest)]
    if wrong.size:
        served = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
        raise WrongVersionError(f"{wrong.size} tokens of version {wrong[0]}, expected {served}")
    if spans is not None and np.any(np.diff(versions) < 0):
        raise BadReplyError(f"tokens of version {versions.max()} before those of {versions[-1]}")
    if spans is None and oldest != newest and expected.in_flight != "abort":
        raise BadReplyError(
            "the reply has no version per token (SGLang before 0.5.19); set roles.rollout.in_flight to abort"
        )
    if expected.base_version is not None:
        return np.full(num_tokens, expected.version, dtype=np.int32)
    return _lower_bounds(versions, oldest) if expected.in_flight == "in_place" else versions


def _of_spans(spans: Sequence[_Span], num_tokens: int) -> npt.NDArray[np.int32]:
    versions = np.zeros(num_tokens, dtype=np.int32)
    covered = 0
    for span in spans:
        if span.start != covered or not span.start <= span.end <= num_tokens:
            raise BadReplyError(f"weight version of tokens {span.start} to {span.end}, after {covered} of {num_tokens}")
        versions[span.start : span.end] = _version(span.version)
        covered = span.end
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


def _version(value: str | int | None) -> int:
    try:
        version = int(str(value))
    except ValueError:
        raise BadReplyError(f"weight version is {str(value)[:40]!r}") from None
    if not 0 <= version <= _MAX_VERSION:
        raise BadReplyError(f"weight version is {str(value)[:40]}, which no run reaches")
    return version
