"""Answers to held-out prompts, scored as the rollouts are, graded, and kept for people to read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from megarl.algo.grade import grade, is_right
from megarl.config.recipe import EvaluationConfig
from megarl.data.generations import Generation, generations_file, write_generations
from megarl.results import EvalResult
from megarl.runtime.tasks import task_group
from megarl.stages import Generator, Scorer
from megarl.types import PolicyVersion, Prompt, ScoredGroup, TokenArray


class Evaluator(Protocol):
    def is_due(self, step: int, *, is_last: bool) -> bool:
        """After `step`; 0 is before the first."""
        ...

    async def evaluate(self, step: int, version: PolicyVersion) -> EvalResult:
        """Of what the engines serve meanwhile: `version`, or later ones where they are published to beside it."""
        ...


class NoEvaluator:
    """For runs without held-out prompts or without engines."""

    def is_due(self, step: int, *, is_last: bool) -> bool:
        return False

    async def evaluate(self, step: int, version: PolicyVersion) -> EvalResult:
        raise AssertionError(f"step {step}: an evaluation that is never due")


class HeldOutEvaluator:
    """Greedy, sampled, or both. The same seeds each time: two evaluations differ by what was learned between them."""

    def __init__(
        self,
        config: EvaluationConfig,
        *,
        prompts: Sequence[Prompt],
        greedy: Generator | None,
        sampled: Generator | None,
        scorer: Scorer,
        decode: Callable[[TokenArray], str],
        run_folder: Path,
    ) -> None:
        """A generator that the configuration does not ask for is None."""
        assert prompts, "an evaluation needs prompts"
        self._config = config
        self._prompts = prompts
        self._greedy = greedy
        self._sampled = sampled
        self._scorer = scorer
        self._decode = decode
        self._run_folder = run_folder

    def is_due(self, step: int, *, is_last: bool) -> bool:
        if step == 0:
            return self._config.runs_before_training
        every_steps = self._config.every_steps
        return is_last or (every_steps is not None and step % every_steps == 0)

    async def evaluate(self, step: int, version: PolicyVersion) -> EvalResult:
        # One after the other: next to a greedy request SGLang draws the sampled ones of a batch by rank, not by token,
        # and the same seeds give other tokens.
        greedy = await self._answers(self._greedy)
        sampled = await self._answers(self._sampled)
        await asyncio.to_thread(self._keep, step, greedy, sampled)
        versions = sorted(_versions([*greedy, *sampled]))
        right_from, sampling = self._config.right_from, self._config.sampled
        pass_at = sampling.pass_at_or_default if sampling is not None else ()
        return EvalResult(
            version=versions[0],
            newest_version=versions[-1] if len(versions) > 1 else None,
            greedy=grade(greedy, right_from=right_from) if greedy else None,
            sampled=grade(sampled, right_from=right_from, pass_at=pass_at) if sampled else None,
        )

    async def _answers(self, generator: Generator | None) -> list[ScoredGroup]:
        """A group per prompt, in their order; the first failure ends them all."""
        if generator is None:
            return []
        async with task_group() as tasks:
            answers = [tasks.create_task(self._answer(generator, prompt)) for prompt in self._prompts]
        return [answer.result() for answer in answers]

    async def _answer(self, generator: Generator, prompt: Prompt) -> ScoredGroup:
        return await self._scorer.score(await generator.generate(prompt))

    def _keep(self, step: int, greedy: Sequence[ScoredGroup], sampled: Sequence[ScoredGroup]) -> None:
        write_generations(
            generations_file(self._run_folder, step),
            (
                generation
                for groups, is_greedy in ((greedy, True), (sampled, False))
                for scored in groups
                for generation in self._generations(scored, is_greedy=is_greedy)
            ),
        )

    def _generations(self, scored: ScoredGroup, *, is_greedy: bool) -> Iterator[Generation]:
        prompt = scored.group.prompt
        text = self._decode(prompt.token_ids)
        for index, (rollout, score) in enumerate(zip(scored.group.rollouts, scored.scores, strict=True)):
            yield Generation(
                prompt_uid=prompt.uid,
                data_source=prompt.data_source,
                is_greedy=is_greedy,
                index=index,
                is_right=is_right(score, right_from=self._config.right_from),
                score=score.value,
                components=score.components,
                prediction=score.prediction,
                ground_truth=prompt.ground_truth,
                finish_reason=rollout.finish_reason,
                num_tokens=len(rollout.token_ids),
                prompt=text,
                response=rollout.text,
            )


def _versions(groups: Sequence[ScoredGroup]) -> set[PolicyVersion]:
    """All that chose a token."""
    return {
        PolicyVersion(version)
        for scored in groups
        for rollout in scored.group.rollouts
        for version in np.unique(rollout.versions).tolist()
    }
