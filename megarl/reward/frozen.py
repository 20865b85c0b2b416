"""Rewards of models on engines: a sequence classifier, or a judge that finds one answer likeliest or writes one.

Knows neither engines nor tokens: a `FrozenModel` has both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megarl.config.reward import EngineJudgeRewardConfig, QuestionConfig, RewardModelRewardConfig
from megarl.errors import ScoreError
from megarl.reward.protocol import Answer, Request

Chat = Sequence[Mapping[str, object]]
RETRY_TEMPERATURE = 0.7
"""A judge that is asked again would give the same reply at temperature 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenReply:
    text: str
    num_tokens: int
    """The cost: tokens of the question and of the reply."""
    is_cut: bool
    """The limit of tokens ended it."""


class FrozenModel(Protocol):
    """A model that is never trained, with its own tokenizer and chat template.

    Each call raises a ScoreError where a chat does not fit the model, and a MachineFaultError where no engine answers.
    """

    async def classify(self, chat: Chat) -> float:
        """Return the output of a sequence classifier after the last message, the answer."""
        ...

    async def probabilities(self, question: str, answers: Sequence[str]) -> Sequence[float]:
        """Return how likely the model begins with each answer, relative to the other answers."""
        ...

    async def write(self, question: str, *, schema: str, max_tokens: int, attempt: int) -> WrittenReply:
        """Return a reply that keeps to a JSON schema unless it is cut: the likeliest first, then sampled ones."""
        ...


class RewardModelBackend:
    """A `ScoringBackend`: the score of a classifier for the chat and its response."""

    def __init__(self, config: RewardModelRewardConfig, model: FrozenModel) -> None:
        self._config = config
        self._model = model

    async def answers(self, requests: Sequence[Request]) -> list[Answer]:
        return [await self._answer(request) for request in requests]

    async def _answer(self, request: Request) -> Answer:
        messages = request.get("messages", ())
        if not messages:
            raise ScoreError("the prompt has no messages; a reward model scores chats")
        score = await self._model.classify([*messages, {"role": "assistant", "content": request["solution_str"]}])
        return {"score": self._config.scaled(score), "components": {"raw": score}}

    def close(self) -> None:
        """Nothing to close: the engines belong to the run."""


class EngineJudgeBackend:
    """A `ScoringBackend`: the score of the answer that a judge gives to the recipe's question."""

    def __init__(self, config: EngineJudgeRewardConfig, model: FrozenModel) -> None:
        self._config = config
        self._model = model

    async def answers(self, requests: Sequence[Request]) -> list[Answer]:
        return [await self._answer(request) for request in requests]

    async def _answer(self, request: Request) -> Answer:
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

    def close(self) -> None:
        """Nothing to close: the engines belong to the run."""


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
