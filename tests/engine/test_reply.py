from __future__ import annotations

import copy
import json
from base64 import b64encode
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.roles import InFlight
from megarl.engine.reply import BadReplyError, Expectation, Response, WrongVersionError, read_response
from megarl.routes import RouteRequest, RouteShape
from megarl.types import FinishReason, PolicyVersion
from tests import hostile

EXPECTED = Expectation(
    vocab=50,
    max_response_tokens=3,
    eos_ids=frozenset({2}),
    version=PolicyVersion(4),
    newest_version=PolicyVersion(4),
)

GOOD: dict[str, Any] = {
    "output_ids": [5, 6, 2],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 2},
        "weight_version": "4",
        "weight_versions": [{"version": "4", "start": 0, "end": 3}],
        "output_token_logprobs": [[-0.5, 5, None], [-1.5, 6, None], [0.0, 2, None]],
    },
}


def read(reply: object, expected: Expectation) -> Response:
    return read_response(json.dumps(reply).encode(), expected)


def test_a_good_reply_is_read_token_by_token() -> None:
    response = read(GOOD, EXPECTED)
    assert response.token_ids.tolist() == [5, 6, 2]
    assert response.logprobs.tolist() == [-0.5, -1.5, 0.0]
    assert response.versions.tolist() == [4, 4, 4]
    assert response.finish_reason is FinishReason.STOP
    assert response.token_ids.dtype == np.int32
    assert response.num_cached == 0
    assert read(with_meta(cached_tokens=7), EXPECTED).num_cached == 7


def with_tokens(*token_ids: int, **fields: object) -> dict[str, Any]:
    reply = with_meta(**fields)
    reply["output_ids"] = list(token_ids)
    reply["meta_info"]["output_token_logprobs"] = [[-1.0, token_id, None] for token_id in token_ids]
    reply["meta_info"]["weight_versions"] = [{"version": "4", "start": 0, "end": len(token_ids)}]
    return reply


def with_meta(**fields: object) -> dict[str, Any]:
    reply = copy.deepcopy(GOOD)
    reply["meta_info"].update(fields)
    return reply


def with_logprobs(*entries: list[object]) -> dict[str, Any]:
    return with_meta(output_token_logprobs=list(entries))


def test_an_end_token_that_only_the_model_config_names_is_a_stop() -> None:
    reply = with_tokens(5, 6, 9, finish_reason={"type": "stop", "matched": 9})
    assert read(reply, EXPECTED).finish_reason is FinishReason.STOP


@pytest.mark.fault("garbage replies", "refused with the reason")
@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (with_meta(finish_reason={"type": "abort", "message": "by hand"}), "aborted: by hand"),
        (with_meta(finish_reason={"type": "tired"}), "finish reason is 'tired'"),
        (with_meta(finish_reason=None), r"got `null` - at `\$.meta_info.finish_reason`"),
        ({"output_ids": [5]}, "missing required field `meta_info`"),
        (with_tokens(), "0 tokens, asked for 1 to 3"),
        (with_tokens(5, 5, 5, 5), "4 tokens, asked for 1 to 3"),
        (with_tokens(5, 50, 2), "token id 50 is not in the vocabulary of 50"),
        (with_tokens(5, -1, 2), "token id -1 is not in the vocabulary"),
        (GOOD | {"output_ids": [5, "6", 2]}, r"output_ids: Expected `int`, got `str` - at `\$\[1\]"),
        (with_logprobs([-0.5, 5], [-0.5, 6]), "2 log-probabilities of 2 for 3 tokens"),
        (with_logprobs([-0.5, 5], [-0.5, 7], [-0.5, 2]), "is not of token 6"),
        (with_logprobs([-0.5, 5], [float("nan"), 6], [-0.5, 2]), "JSON is malformed"),
        (with_logprobs([-0.5, 5], [float("-inf"), 6], [-0.5, 2]), "no reply"),
        (with_logprobs([-0.5, 5], [None, 6], [-0.5, 2]), "Expected `float`, got `null`"),
        (with_logprobs([-0.5, 5], [-1e308, 6], [-0.5, 2]), "log-probability -inf of token 6"),
        (with_logprobs([-0.5, 5], [-0.5, 2**40], [-0.5, 2]), "Expected `int` <= 2147483647"),
        (with_meta(weight_version=str(2**40)), "weight version is 1099511627776, which no run reaches"),
        (with_meta(weight_version=2**40), "no reply"),
        (with_meta(weight_version="-1"), "weight version is -1, which no run reaches"),
        (with_meta(weight_version="7" * 5000), "weight version is '7777"),
        (with_meta(weight_versions=[{"version": str(2**40), "start": 0, "end": 3}]), "which no run reaches"),
        (with_meta(weight_versions=[{"version": "4", "start": -(10**400), "end": 3}]), "no reply"),
        (GOOD | {"output_ids": [5, 10**400, 2]}, "a token id is too large"),
        (GOOD | {"output_ids": [5, 2**31, 2]}, "a token id is too large"),
        (GOOD | {"output_ids": [5, True, 2]}, "Expected `int`, got `bool`"),
        (with_logprobs([-0.5, 5], [0.5, 6], [-0.5, 2]), "log-probability 0.5 of token 6"),
        (with_meta(output_token_logprobs=None), "output_token_logprobs is missing"),
        (with_tokens(5, 6, 7), "stopped at token 7, which is no end token"),
        (with_tokens(5, 2, 2), "tokens after an end token"),
        (with_meta(weight_version="default"), "weight version is 'default'"),
        (with_meta(weight_versions=[{"version": "4", "start": 1, "end": 3}]), "tokens 1 to 3, after 0 of 3"),
        (with_meta(weight_versions=[{"version": "4", "start": 0, "end": 2}]), "of 2 tokens, there are 3"),
        (with_tokens(5, 6, finish_reason={"type": "length", "length": 2}), "cut at 2 tokens, asked for 3"),
        (with_meta(output_token_logprobs={"logprobs": "*", "token_ids": ""}), "no reply: Invalid base64"),
        (None, "Expected `object`"),
        ([], "Expected `object`"),
        ("text", "Expected `object`"),
        (7, "Expected `object`"),
    ],
)
def test_a_bad_reply_is_refused_with_its_reason(reply: object, message: str) -> None:
    with pytest.raises(BadReplyError, match=message):
        read(reply, EXPECTED)


def test_tokens_of_another_version_are_refused() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    with pytest.raises(WrongVersionError, match="1 tokens of version 3, expected version 4"):
        read(with_meta(weight_versions=spans), EXPECTED)


WHOLE = json.dumps(GOOD).encode()


@pytest.mark.fault("garbage replies", "refused with the reason")
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>bad gateway</html>",
        WHOLE[:-1],
        WHOLE[: len(WHOLE) // 2],
        WHOLE.replace(b"stop", b"st\xffop"),
        b"[" * 100_000 + b"]" * 100_000,
        b'{"more":' + b"[" * 100_000 + b"]" * 100_000 + b"," + WHOLE[1:],
        WHOLE.replace(b'"matched": 2', b'"matched": ' + b"[" * 100_000 + b"]" * 100_000),
    ],
    ids=["empty", "html", "no end", "half", "no text", "deep", "deep in an unknown field", "deep in a known field"],
)
def test_a_reply_that_is_no_json_is_refused(content: bytes) -> None:
    with pytest.raises(BadReplyError, match=f"{len(content)} bytes that are no reply"):
        read_response(content, EXPECTED)


def test_a_long_reply_becomes_arrays_that_are_equal_to_its_numbers() -> None:
    random = np.random.default_rng(0)
    token_ids = random.integers(3, 50, 5000).tolist()
    logprobs = (-random.exponential(1.0, 5000)).astype(np.float32)
    reply = with_tokens(*token_ids, finish_reason={"type": "length", "length": 5000})
    entries = zip(logprobs.astype(float).tolist(), token_ids, strict=True)
    reply["meta_info"]["output_token_logprobs"] = [[logprob, token_id, None] for logprob, token_id in entries]
    response = read(reply, replace(EXPECTED, max_response_tokens=5000))
    assert response.token_ids.tolist() == token_ids
    assert (response.logprobs == logprobs).all()
    assert [array.dtype.name for array in (response.token_ids, response.logprobs, response.versions)] == [
        "int32",
        "float32",
        "int32",
    ]


def flat(logprobs: bytes, token_ids: bytes) -> dict[str, Any]:
    encoded = {"logprobs": b64encode(logprobs).decode(), "token_ids": b64encode(token_ids).decode()}
    return with_meta(output_token_logprobs=encoded)


LOGPROBS = np.array([-0.5, -1.5, 0.0], "<f4").tobytes()
IDS = np.array([5, 6, 2], "<i4").tobytes()


def test_flat_log_probabilities_are_those_of_the_list() -> None:
    flat_response, response = read(flat(LOGPROBS, IDS), EXPECTED), read(GOOD, EXPECTED)
    assert flat_response.logprobs.tolist() == response.logprobs.tolist()
    assert flat_response.logprobs.dtype == response.logprobs.dtype


@pytest.mark.parametrize(
    ("logprobs", "token_ids", "message"),
    [
        (LOGPROBS[:-1], IDS, "11 bytes of an array"),
        (LOGPROBS[:-4], IDS, "2 log-probabilities of 3 for 3 tokens"),
        (LOGPROBS, IDS[:-4], "3 log-probabilities of 2 for 3 tokens"),
        (LOGPROBS, np.array([5, 7, 2], "<i4").tobytes(), "of token 7 is not of token 6"),
        (np.array([-0.5, np.nan, 0.0], "<f4").tobytes(), IDS, "log-probability nan of token 6"),
        (np.array([-0.5, -np.inf, 0.0], "<f4").tobytes(), IDS, "log-probability -inf of token 6"),
        (np.array([-0.5, 0.5, 0.0], "<f4").tobytes(), IDS, "log-probability 0.5 of token 6"),
    ],
)
def test_bad_flat_log_probabilities_are_refused(logprobs: bytes, token_ids: bytes, message: str) -> None:
    with pytest.raises(BadReplyError, match=message):
        read(flat(logprobs, token_ids), EXPECTED)


def interrupted(mode: InFlight = "abort", *, newest: int = 5) -> Expectation:
    """What is expected of a request that was sent at version 4 and lived through a publish."""
    return replace(EXPECTED, newest_version=PolicyVersion(newest), is_interrupted=True, in_flight=mode)


def aborted(reply: dict[str, Any]) -> dict[str, Any]:
    reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "paused"}
    return reply


def test_a_response_that_a_pause_cut_is_kept_but_for_its_last_token() -> None:
    response = read(aborted(with_tokens(5, 6)), interrupted())
    assert response.finish_reason is FinishReason.ABORT
    assert response.token_ids.tolist() == [5]
    assert (len(response.logprobs), response.versions.tolist()) == (1, [4])


def test_a_request_that_a_pause_ended_before_it_began_has_no_tokens() -> None:
    reply: dict[str, Any] = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "4"}}
    response = read(reply, interrupted())
    assert (response.finish_reason, response.token_ids.tolist()) == (FinishReason.ABORT, [])


@pytest.mark.parametrize(
    ("reason", "tokens", "kept", "expected"),
    [
        ("abort", [5, 6], [5, 6], FinishReason.ABORT),  # drawn again, the last one would have other odds
        ("abort", [5, 2, 6], [5, 2], FinishReason.STOP),
        ("abort", [5, 6, 7, 8], [5, 6, 7], FinishReason.LENGTH),
        ("length", [5, 2, 6], [5, 2], FinishReason.STOP),
        ("length", [5, 6, 7], [5, 6, 7], FinishReason.LENGTH),
        ("stop", [5, 2], [5, 2], FinishReason.STOP),
    ],
)
def test_a_response_with_drafts_ends_where_it_would_without(
    reason: str, tokens: list[int], kept: list[int], expected: FinishReason
) -> None:
    reply = with_tokens(*tokens, finish_reason={"type": reason}, spec_verify_ct=2)
    response = read(reply, interrupted())
    assert (response.token_ids.tolist(), response.finish_reason) == (kept, expected)
    assert (len(response.logprobs), len(response.versions)) == (len(kept), len(kept))
    assert (response.num_passes, response.is_cut) == (2, expected is FinishReason.LENGTH)


def test_an_end_token_within_a_response_that_was_cut_is_refused() -> None:
    with pytest.raises(BadReplyError, match="tokens after an end token"):
        read(aborted(with_tokens(5, 2, 6)), interrupted())


def test_tokens_are_of_the_versions_that_were_served_since_the_request_was_sent() -> None:
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3}]
    reply = with_meta(weight_versions=spans, weight_version="5")
    assert read(reply, interrupted("retract")).versions.tolist() == [4, 4, 5]
    # Paused in place, the engine may have counted one token to the wrong side.
    assert read(reply, interrupted("in_place")).versions.tolist() == [4, 4, 4]
    with pytest.raises(WrongVersionError, match="1 tokens of version 5, expected version 4"):
        read(reply, EXPECTED)


def test_in_place_the_first_token_is_of_the_version_that_was_served_when_it_was_asked_for() -> None:
    spans = [{"version": "5", "start": 0, "end": 3}]
    reply = with_meta(weight_versions=spans, weight_version="5")
    assert read(reply, interrupted("retract")).versions.tolist() == [5, 5, 5]
    assert read(reply, interrupted("in_place")).versions.tolist() == [4, 5, 5]


@pytest.mark.parametrize("version", ["3", "6"])
def test_versions_that_were_not_served_meanwhile_are_refused(version: str) -> None:
    reply = with_meta(weight_versions=None, weight_version=version)
    with pytest.raises(WrongVersionError, match=f"3 tokens of version {version}, expected versions 4 to 5"):
        read(reply, interrupted())


def test_versions_that_go_back_are_refused() -> None:
    spans = [{"version": "5", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    with pytest.raises(BadReplyError, match="tokens of version 5 before those of 4"):
        read(with_meta(weight_versions=spans), interrupted("retract"))


def test_an_older_engine_that_does_not_say_which_token_is_of_which_version_must_abort() -> None:
    reply = with_meta(weight_versions=None, weight_version="5")
    assert read(reply, interrupted("abort")).versions.tolist() == [5, 5, 5]
    for mode in ("retract", "in_place"):
        with pytest.raises(BadReplyError, match=r"set roles\.rollout\.in_flight to abort"):
            read(reply, interrupted(mode))  # type: ignore[arg-type]


def test_a_response_is_joined_from_its_parts() -> None:
    first = read(aborted(with_tokens(5, 6, 7)), interrupted())
    whole = Response.nothing().then(first).then(read(GOOD, EXPECTED))
    assert whole.token_ids.tolist() == [5, 6, 5, 6, 2]
    assert len(whole.logprobs) == len(whole.versions) == 5
    assert whole.finish_reason is FinishReason.STOP


def test_a_response_to_other_tokens_than_those_sent_is_refused() -> None:
    expected = replace(EXPECTED, echo=(7, 8, 9))
    assert read({**GOOD, "prompt_token_ids": [7, 8, 9]}, expected).token_ids.tolist() == [5, 6, 2]
    with pytest.raises(BadReplyError, match="saw 3 prompt tokens, 3 were sent; they differ from 1"):
        read({**GOOD, "prompt_token_ids": [7, 1, 9]}, expected)
    with pytest.raises(BadReplyError, match="saw 2 prompt tokens, 3 were sent"):
        read({**GOOD, "prompt_token_ids": [7, 8]}, expected)
    with pytest.raises(BadReplyError, match="prompt_token_ids is missing"):
        read(GOOD, expected)


ROUTES = np.arange(2 * 5 * 2 * 2, dtype="<i4").reshape(2 * 5, 2, 2)[:6] % 7
"""The experts of five tokens that were sent and two of three that were sampled, from the second on."""
ROUTED = replace(
    EXPECTED,
    routes=RouteRequest(shape=RouteShape(num_layers=2, per_token=2, num_experts=8), first=1, num_sent=5),
)


def with_routes(routes: np.ndarray) -> dict[str, Any]:
    return with_meta(routed_experts=b64encode(routes.tobytes()).decode())


def test_the_experts_of_all_tokens_but_the_last_are_read() -> None:
    routes = read(with_routes(ROUTES), ROUTED).routes
    assert routes is not None
    assert routes.tolist() == ROUTES.tolist()
    assert routes.dtype == np.uint8
    assert read(GOOD, EXPECTED).routes is None


def test_a_response_without_the_experts_that_were_asked_for_is_refused() -> None:
    with pytest.raises(BadReplyError, match=r"routed_experts is missing \(start the engine with"):
        read(GOOD, ROUTED)
    with pytest.raises(BadReplyError, match="routed_experts: 80 bytes of routes, not 4 for each"):
        read(with_routes(ROUTES[1:]), ROUTED)


def test_an_interrupted_response_has_the_experts_before_the_last_token_that_is_kept() -> None:
    """The last one is computed again, perhaps by other weights, when the response is continued."""
    interrupted = replace(ROUTED, is_interrupted=True)
    reply = aborted(with_routes(ROUTES))
    first = read(reply, interrupted)
    assert first.token_ids.tolist() == [5, 6]
    assert first.routes is not None
    assert first.routes.tolist() == ROUTES[:5].tolist()
    del reply["meta_info"]["routed_experts"]
    unknown = read(reply, interrupted).routes
    assert unknown is not None
    assert (unknown == 255).all()
    assert unknown.shape == (5, 2, 2)
    rest = read(with_routes(ROUTES), ROUTED)
    joined = Response.nothing().then(first).then(rest).routes
    assert joined is not None
    assert joined.tolist() == [*ROUTES[:5].tolist(), *ROUTES.tolist()]


_PLACES = [("output_ids",), ("prompt_token_ids",), ("meta_info",), *(("meta_info", key) for key in GOOD["meta_info"])]


@pytest.mark.patient
@settings(max_examples=300)
@given(place=st.sampled_from(_PLACES), value=hostile.values(), num_cut=st.none() | st.integers(0, 300))
def test_no_reply_raises_anything_but_its_refusal(place: tuple[str, ...], value: object, num_cut: int | None) -> None:
    reply = copy.deepcopy(GOOD)
    inner = reply if len(place) == 1 else reply["meta_info"]
    inner[place[-1]] = value
    for expected in (EXPECTED, replace(EXPECTED, is_interrupted=True, echo=(1, 2), in_flight="in_place")):
        try:
            response = read_response(json.dumps(reply).encode()[:num_cut], expected)
        except BadReplyError:
            continue
        assert np.isfinite(response.logprobs).all()
        assert ((response.token_ids >= 0) & (response.token_ids < EXPECTED.vocab)).all()
