"""Models that judge: over HTTP, one POST per response, paced and retried, or on engines of the run. Knows no rollouts.

A language model chooses one of the recipe's answers, which it writes or finds likeliest; a reward model or a server
scores by itself. Knows neither engines nor tokens: a `FrozenModel` has both. An API key is read from a file and sent in
a header; no message contains it: errors name the URL and the reply.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Protocol

import httpx
from pydantic import BaseModel, Field, ValidationError

from megarl.config.reward import (
    EngineJudgeRewardConfig,
    HttpRewardConfig,
    JudgeRewardConfig,
    QuestionConfig,
    RewardModelRewardConfig,
)
from megarl.errors import RewardError, ScoreError
from megarl.observe.observer import Observer
from megarl.reward.protocol import Answer, Request, check_result
from megarl.system.foreign import finite32, one_line, without_markup
from megarl.system.secret import Secret

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_RETRIED = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
Chat = Sequence[Mapping[str, object]]
_MAX_TOKENS = 2**31
"""Tokens that a reply may claim to have cost."""
RETRY_TEMPERATURE = 0.7
"""A judge that is asked again would give the same reply at temperature 0."""


class _Judge(ABC):
    """A `ScoringBackend` that is asked about one response after the other."""

    async def answers(self, requests: Sequence[Request]) -> list[Answer]:
        return [await self._ask(request) for request in requests]

    def close(self) -> None:  # noqa: B027 - the same in every subclass
        """Nothing to close: connections are closed with their requests, and engines belong to the run."""

    @abstractmethod
    async def _ask(self, request: Request) -> Answer: ...


class _HttpBackend(_Judge):
    """A subclass says what is sent and what a reply means."""

    def __init__(self, config: HttpRewardConfig | JudgeRewardConfig) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(config.concurrency)
        self._next_start = 0.0
        # Created once: reading the certificates takes longer than most requests.
        self._tls = ssl.create_default_context()
        self._key = None if config.api_key_file is None else read_key(config.api_key_file)

    async def _ask(self, request: Request) -> Answer:
        pause_s = _FIRST_PAUSE_S
        for attempt in range(1, self._config.max_attempts + 1):
            try:
                async with self._slots:
                    await self._pace()
                    reply = await self._post(request, attempt)
                return self._read(reply)
            except _RetryError as error:
                complaint, pause_s = str(error), max(pause_s, min(error.pause_s, _LONGEST_PAUSE_S))
            if attempt < self._config.max_attempts:
                logger.warning("the judge %s, attempt %d of %d", complaint, attempt, self._config.max_attempts)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise ScoreError(f"{complaint}, {self._config.max_attempts} times (reward.max_attempts)")

    def _read(self, reply: bytes) -> Answer:
        try:
            return self._answer(json.loads(reply))
        except (ValueError, RecursionError):
            raise ScoreError(f"did not reply with JSON: {reply[:80]!r}") from None

    async def _pace(self) -> None:
        """Start requests at even intervals, so that no second has more than `requests_per_second`."""
        if self._config.requests_per_second is None:
            return
        now = asyncio.get_running_loop().time()
        start = max(self._next_start, now)
        self._next_start = start + 1 / self._config.requests_per_second
        await asyncio.sleep(start - now)

    async def _post(self, request: Request, attempt: int) -> bytes:
        config = self._config
        content = json.dumps(self._content(request, attempt)).encode()
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key.reveal()}"
        try:
            # Redirects are not followed: the key is for this address only.
            async with (
                asyncio.timeout(config.timeout_s),
                httpx.AsyncClient(timeout=None, trust_env=False, verify=self._tls) as client,  # noqa: S113 - see above
                client.stream("POST", config.url, content=content, headers=headers) as response,
            ):
                _check_status(response)
                encoding = response.headers.get("Content-Encoding", "identity")
                if encoding != "identity":
                    # Nobody asked for it, and its size after decompression is unknown.
                    raise ScoreError(f"replied with compressed content ({encoding[:40]})")
                return await _read(response, config.max_reply_bytes)
        except TimeoutError:
            raise _RetryError(f"gave no reply within {config.timeout_s:g} s (reward.timeout_s)") from None
        except httpx.RequestError as error:
            raise _RetryError(f"cannot be reached: {type(error).__name__}: {error}") from None

    @abstractmethod
    def _content(self, request: Request, attempt: int) -> Mapping[str, object]:
        """Return what is sent; attempts are counted from 1."""

    @abstractmethod
    def _answer(self, reply: object) -> Answer: ...


class HttpJudge(_HttpBackend):
    """A server that scores by itself."""

    def __init__(self, config: HttpRewardConfig) -> None:
        super().__init__(config)
        self._fields, self._weights = config.fields, config.weights

    def _content(self, request: Request, attempt: int) -> Mapping[str, object]:
        return {name: item for name, item in request.items() if name in self._fields}

    def _answer(self, reply: object) -> Answer:
        return check_result(reply, self._weights)


class ChatJudge(_HttpBackend):
    """A language model that chooses one of the recipe's answers; each answer has its score."""

    def __init__(self, config: JudgeRewardConfig, observer: Observer) -> None:
        super().__init__(config)
        self._question = config
        self._observer = observer

    def _content(self, request: Request, attempt: int) -> Mapping[str, object]:
        config = self._question
        schema = {"name": "answer", "schema": reply_schema(config)}
        response = request["solution_str"]
        if attempt == 1 and without_markup(response) != response:
            self._observer.judge_addressed()
        return {
            "model": config.model,
            # Its server may make control tokens of their texts, and which ones these are is not known here.
            "messages": [{"role": "user", "content": without_markup(asked_in_json(config, request))}],
            "temperature": 0 if attempt == 1 else RETRY_TEMPERATURE,
            "seed": attempt,
            "max_tokens": config.max_tokens,
            "response_format": {"type": "json_schema", "json_schema": schema},
        }

    def _answer(self, reply: object) -> Answer:
        """Return the score and the tokens it cost; a reply outside the schema is requested again."""
        try:
            completion = _Completion.model_validate(reply)
        except ValidationError:
            return {"error": f"did not reply with a chat completion: {json.dumps(reply)[:80]}"}
        model, version = one_line(completion.model), one_line(completion.system_fingerprint or "")
        self._observer.judge_answered(f"{self._question.model} at {self._question.url}", model, version)
        self._observer.check_judges()
        content = completion.choices[0].message.content or ""
        chosen = read_choice(self._question, content)
        if chosen is None:
            raise _RetryError(unknown_answer(self._question, content))
        return judged(self._question, chosen, completion.usage.total_tokens)


class _Message(BaseModel):
    content: str | None = None


class _Alternative(BaseModel):
    message: _Message


class _Usage(BaseModel):
    total_tokens: Annotated[int, Field(ge=0, le=_MAX_TOKENS)] = 0


class _Completion(BaseModel):
    """The part of a chat completion that a judge needs."""

    model: str
    system_fingerprint: str | None = None
    choices: Annotated[list[_Alternative], Field(min_length=1)]
    usage: _Usage = _Usage()


class _RetryError(Exception):
    """Another attempt may succeed, after the pause that the server asks for."""

    def __init__(self, message: str, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.pause_s = pause_s


def read_key(path: Path) -> Secret:
    """Return the key; a RewardError names the file and the fault, never the content."""
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise RewardError(f"{path} cannot be read: {reason}") from None
    if not key or not key.isascii() or any(character.isspace() for character in key):
        raise RewardError(f"{path} must contain one key and nothing else")
    return Secret(key)


def _check_status(response: httpx.Response) -> None:
    status = response.status_code
    if status in _RETRIED or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        seconds = response.headers.get("Retry-After", "")
        raise _RetryError(f"replied with status {status}", float(seconds) if seconds.isdecimal() else 0.0)
    if status != HTTPStatus.OK:
        raise ScoreError(f"replied with status {status}")


async def _read(response: httpx.Response, max_bytes: int) -> bytes:
    reply = b""
    async for chunk in response.aiter_raw():
        reply += chunk
        if len(reply) > max_bytes:
            raise ScoreError(f"replied with more than {max_bytes} bytes (reward.max_reply_bytes)")
    return reply


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenReply:
    text: str
    num_tokens: int
    """The cost: tokens of the question and of the reply."""
    is_cut: bool
    """The limit of tokens ended it."""


class FrozenModel(Protocol):
    """A model that is never trained, with its own tokenizer and chat template.

    It reads all texts of a chat or a question as plain text, whatever tokens they name. Each call raises a ScoreError
    where a chat does not fit the model, and a MachineFaultError where no engine answers.
    """

    def has_control(self, text: str) -> bool:
        """Whether the text names special tokens of this model."""
        ...

    async def classify(self, chat: Chat) -> float:
        """Return the output of a sequence classifier after the last message, the answer."""
        ...

    async def probabilities(self, question: str, answers: Sequence[str]) -> Sequence[float]:
        """Return how likely the model begins with each answer, relative to the other answers."""
        ...

    async def write(self, question: str, *, schema: str, max_tokens: int, attempt: int) -> WrittenReply:
        """Return a reply that keeps to a JSON schema unless it is cut: the likeliest first, then sampled ones."""
        ...


class RewardModelBackend(_Judge):
    """The score of a classifier for the chat and its response."""

    def __init__(self, config: RewardModelRewardConfig, model: FrozenModel, observer: Observer) -> None:
        self._config = config
        self._model = model
        self._observer = observer

    async def _ask(self, request: Request) -> Answer:
        messages = request.get("messages", ())
        if not messages:
            raise ScoreError("the prompt has no messages; a reward model scores chats")
        _note_control(self._model, request, self._observer)
        raw = await self._model.classify([*messages, {"role": "assistant", "content": request["solution_str"]}])
        score = finite32(self._config.scaled(raw))
        if score is None:
            raise ScoreError(f"gave {raw:g}, which is not finite in 32 bits with reward.mean and reward.std")
        return {"score": score, "components": {"raw": raw}}


class EngineJudgeBackend(_Judge):
    """The score of the answer that a judge on engines gives to the recipe's question."""

    def __init__(self, config: EngineJudgeRewardConfig, model: FrozenModel, observer: Observer) -> None:
        self._config = config
        self._model = model
        self._observer = observer

    async def _ask(self, request: Request) -> Answer:
        _note_control(self._model, request, self._observer)
        max_tokens = self._config.max_tokens
        return await (self._likeliest(request) if max_tokens is None else self._written(request, max_tokens))

    async def _written(self, request: Request, max_tokens: int) -> Answer:
        config, num_tokens = self._config, 0
        question, schema = asked_in_json(config, request), json.dumps(reply_schema(config))
        for attempt in range(config.max_attempts):
            reply = await self._model.write(question, schema=schema, max_tokens=max_tokens, attempt=attempt)
            num_tokens += reply.num_tokens
            chosen = read_choice(config, reply.text)
            if chosen is not None:
                return judged(config, chosen, num_tokens)
        end = f" and was cut off at {max_tokens} tokens (reward.max_tokens)" if reply.is_cut else ""
        raise ScoreError(
            f"{unknown_answer(config, reply.text)}{end}, {config.max_attempts} times (reward.max_attempts)"
        )

    async def _likeliest(self, request: Request) -> Answer:
        config, names = self._config, list(self._config.answers)
        question = f"{filled(config.template, request)}\n\nReply with one of: {', '.join(names)}."
        found = await self._model.probabilities(question, names)
        likeliest = max(zip(found, names, strict=True))[1]
        expected = sum(share * config.answers[name] for share, name in zip(found, names, strict=True))
        return {
            "score": expected if config.is_expected else config.answers[likeliest],
            "components": {"judge_probability": max(found)},
            "prediction": likeliest,
        }


def _note_control(model: FrozenModel, request: Request, observer: Observer) -> None:
    """Count a response that names control tokens of its judge: a policy may learn to."""
    if model.has_control(request["solution_str"]):
        observer.judge_addressed()


def asked_in_json(config: QuestionConfig, request: Request) -> str:
    """Return the question to a judge that writes its answer."""
    form = '{"reasoning": ..., "answer": ...}' if config.max_reasoning_chars else '{"answer": ...}'
    answers = json.dumps(list(config.answers), ensure_ascii=False)
    return f"{filled(config.template, request)}\n\nReply with JSON: {form}, the answer one of {answers}."


def reply_schema(config: QuestionConfig) -> dict[str, object]:
    """Return the JSON schema of a written reply; the reasoning comes first, so that the answer follows from it."""
    reasoning = {"reasoning": {"type": "string", "maxLength": config.max_reasoning_chars}}
    answer = {"answer": {"enum": list(config.answers)}}
    properties = {**reasoning, **answer} if config.max_reasoning_chars else answer
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def read_choice(config: QuestionConfig, text: str) -> str | None:
    """Return the answer of a written reply; None if it is none of the recipe's."""
    try:
        reply = json.loads(text, strict=False)  # grammars allow control characters in strings
    except (ValueError, RecursionError):
        return None
    chosen = reply.get("answer") if isinstance(reply, dict) else None
    return chosen if isinstance(chosen, str) and chosen in config.answers else None


def judged(config: QuestionConfig, chosen: str, num_tokens: int) -> Answer:
    """Return the score of an answer, with the tokens that all replies to the question cost."""
    return {
        "score": config.answers[chosen],
        "components": {"judge_tokens": float(num_tokens)},
        "prediction": chosen,
    }


def unknown_answer(config: QuestionConfig, text: str) -> str:
    return f"answered {text[:80]!r}, not one of {', '.join(config.answers)} (reward.answers)"


def filled(template: str, request: Request) -> str:
    """Return the template with the facts of the sample in place of their names, in one pass: a fact is no template."""

    def fact(match: re.Match[str]) -> str:
        value = request.get(match.group(1), match.group(0))
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return re.sub(r"\{(\w+)\}", fact, template)
