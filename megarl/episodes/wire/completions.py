"""`/v1/completions`: a text or tokens that the model continues as they are, without a template."""

from __future__ import annotations

import time

from megarl.episodes.wire.chat import DONE, usage_of
from megarl.episodes.wire.values import (
    AnswerStream,
    Body,
    Dialect,
    ModelAnswer,
    ModelRequest,
    RefusedError,
    event,
    read_flag,
    read_limit,
    read_model,
)
from megarl.types import JsonValue


class CompletionsDialect(Dialect):
    path = "/v1/completions"
    known = frozenset(("model", "prompt", "max_tokens", "stream", "stream_options", "n", "best_of", "user"))

    def read(self, body: Body) -> ModelRequest:
        if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1):
            raise RefusedError("one choice is served per request; leave out n and best_of")
        options = body.get("stream_options")
        return ModelRequest(
            prompt=_prompt(body.get("prompt")),
            max_tokens=read_limit(body, "max_tokens"),
            is_streamed=read_flag(body, "stream"),
            has_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            model=read_model(body),
        )

    def whole(self, request: ModelRequest, answer: ModelAnswer) -> dict[str, JsonValue]:
        choice = _choice(answer.text, "length" if answer.is_cut else "stop")
        return {**_head(request, answer.id), "choices": [choice], "usage": usage_of(answer)}

    def stream(self, request: ModelRequest, *, answer_id: str, num_prompt_tokens: int) -> AnswerStream:
        return _CompletionStream(request, answer_id)


class _CompletionStream(AnswerStream):
    def __init__(self, request: ModelRequest, answer_id: str) -> None:
        self._request = request
        self._head = _head(request, answer_id)

    def text(self, piece: str) -> bytes:
        return event({**self._head, "choices": [_choice(piece, None)]})

    def end(self, answer: ModelAnswer) -> bytes:
        events = event({**self._head, "choices": [_choice("", "length" if answer.is_cut else "stop")]})
        if self._request.has_usage:
            events += event({**self._head, "choices": [], "usage": usage_of(answer)})
        return events + DONE

    def error(self, message: str) -> bytes:
        return event(CompletionsDialect().error(503, message)) + DONE


def _head(request: ModelRequest, answer_id: str) -> dict[str, JsonValue]:
    return {
        "id": f"cmpl-{answer_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
    }


def _choice(text: str, reason: str | None) -> JsonValue:
    return {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}


def _prompt(prompt: JsonValue) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        token_ids = tuple(each for each in prompt if isinstance(each, int) and not isinstance(each, bool))
        if len(token_ids) == len(prompt):
            return token_ids
    raise RefusedError("prompt must be one text, or one list of token ids")
