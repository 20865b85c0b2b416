"""Rewards of models on engines: a sequence classifier, or a judge that finds one of several answers likeliest.

Knows neither engines nor tokens: a `FrozenModel` has both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from megarl.config.reward import EngineJudgeRewardConfig, RewardModelRewardConfig
from megarl.errors import ScoreError
from megarl.reward.protocol import Answer, Request

Chat = Sequence[Mapping[str, object]]


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


def filled(template: str, request: Request) -> str:
    """Return the template with the facts of the sample in place of their names, in one pass: a fact is no template."""

    def fact(match: re.Match[str]) -> str:
        value = request.get(match.group(1), match.group(0))
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return re.sub(r"\{(\w+)\}", fact, template)
