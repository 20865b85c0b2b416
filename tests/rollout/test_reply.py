from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megarl.rollout.reply import BadReplyError, Expectation, WrongVersionError, read_response
from megarl.types import FinishReason, PolicyVersion

EXPECTED = Expectation(vocab=50, max_response_tokens=3, eos_ids=frozenset({2}), version=PolicyVersion(4))

GOOD: dict[str, Any] = {
    "output_ids": [5, 6, 2],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 2},
        "weight_version": "4",
        "weight_versions": [{"version": "4", "start": 0, "end": 3}],
        "output_token_logprobs": [[-0.5, 5, None], [-1.5, 6, None], [0.0, 2, None]],
    },
}


def test_a_good_reply_is_read_token_by_token() -> None:
    response = read_response(GOOD, EXPECTED)
    assert response.token_ids.tolist() == [5, 6, 2]
    assert response.logprobs.tolist() == [-0.5, -1.5, 0.0]
    assert response.versions.tolist() == [4, 4, 4]
    assert response.finish_reason is FinishReason.STOP
    assert response.token_ids.dtype == np.int32


def test_an_older_engine_names_one_version_for_all_tokens() -> None:
    reply = copy.deepcopy(GOOD)
    del reply["meta_info"]["weight_versions"]
    assert read_response(reply, EXPECTED).versions.tolist() == [4, 4, 4]


def test_an_end_token_that_only_the_model_config_names_is_a_stop() -> None:
    reply = copy.deepcopy(GOOD)
    _set_tokens(reply, [5, 6, 9])
    reply["meta_info"]["finish_reason"] = {"type": "stop", "matched": 9}
    assert read_response(reply, EXPECTED).finish_reason is FinishReason.STOP


def _set_tokens(reply: dict[str, Any], token_ids: list[int]) -> None:
    reply["output_ids"] = token_ids
    reply["meta_info"]["output_token_logprobs"] = [[-1.0, token_id, None] for token_id in token_ids]
    reply["meta_info"]["weight_versions"] = [{"version": "4", "start": 0, "end": len(token_ids)}]


def _cut_short(reply: dict[str, Any]) -> None:
    _set_tokens(reply, [5, 6])
    reply["meta_info"]["finish_reason"] = {"type": "length", "length": 2}


BAD: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "aborted": ("aborted: by hand", lambda r: r["meta_info"].update(finish_reason={"type": "abort", "message": "by hand"})),
    "no finish reason": ("finish_reason is missing", lambda r: r["meta_info"].update(finish_reason=None)),
    "unknown finish reason": ("finish reason is 'tired'", lambda r: r["meta_info"].update(finish_reason={"type": "tired"})),
    "no meta": ("meta_info is missing", lambda r: r.pop("meta_info")),
    "no tokens": ("0 tokens", lambda r: _set_tokens(r, [])),
    "too many tokens": ("4 tokens, asked for 1 to 3", lambda r: _set_tokens(r, [5, 5, 5, 5])),
    "id too large": ("token id 50 is not in the vocabulary", lambda r: _set_tokens(r, [5, 50, 2])),
    "id negative": ("token id -1 is not", lambda r: _set_tokens(r, [5, -1, 2])),
    "id not a number": ("not an integer", lambda r: r.update(output_ids=[5, "6", 2])),
    "fewer log-probabilities": ("2 log-probabilities for 3 tokens", lambda r: r["meta_info"]["output_token_logprobs"].pop()),
    "other log-probabilities": ("is not of token 6", lambda r: r["meta_info"]["output_token_logprobs"][1].__setitem__(1, 7)),
    "log-probability nan": ("nan of token 6", lambda r: r["meta_info"]["output_token_logprobs"][1].__setitem__(0, float("nan"))),
    "log-probability null": ("None of token 6", lambda r: r["meta_info"]["output_token_logprobs"][1].__setitem__(0, None)),
    "log-probability positive": ("0.5 of token 6", lambda r: r["meta_info"]["output_token_logprobs"][1].__setitem__(0, 0.5)),
    "no log-probabilities": ("output_token_logprobs is missing", lambda r: r["meta_info"].pop("output_token_logprobs")),
    "stopped at no end token": ("no end token", lambda r: _set_tokens(r, [5, 6, 7])),
    "goes on after the end": ("after an end token", lambda r: _set_tokens(r, [5, 2, 2])),
    "cut too early": ("cut at 2 tokens, asked for 3", _cut_short),
    "version not a number": ("weight version is 'default'", lambda r: r["meta_info"].update(weight_version="default")),
    "versions with a gap": ("after 0 of 3", lambda r: r["meta_info"]["weight_versions"][0].update(start=1)),
    "versions too short": ("of 2 tokens, there are 3", lambda r: r["meta_info"]["weight_versions"][0].update(end=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reply_is_refused_with_its_reason(name: str) -> None:
    message, spoil = BAD[name]
    reply = copy.deepcopy(GOOD)
    spoil(reply)
    with pytest.raises(BadReplyError, match=message):
        read_response(reply, EXPECTED)


def test_tokens_of_another_version_are_refused() -> None:
    reply = copy.deepcopy(GOOD)
    reply["meta_info"]["weight_versions"] = [
        {"version": "3", "start": 0, "end": 1},
        {"version": "4", "start": 1, "end": 3},
    ]
    with pytest.raises(WrongVersionError, match="1 tokens of version 3, expected version 4"):
        read_response(reply, EXPECTED)


@pytest.mark.parametrize("reply", [None, [], "text", 7])
def test_something_else_than_an_object_is_refused(reply: object) -> None:
    with pytest.raises(BadReplyError, match="the reply is missing or not an object"):
        read_response(reply, EXPECTED)  # type: ignore[arg-type]
