"""From the recordings of trainer and engine on the same tokens to a verdict: what differs first, and why. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

import torch
from torch import Tensor

from megarl.types import FloatArray, TokenArray
from megarl.weights.recordings import LM_HEAD, LOGPROBS, HookPoint, Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The largest errors that rounding explains: well above those of a healthy model, well below those of a mistake."""

    relative: float
    """For hidden states: |trainer's - engine's| / |engine's|, over the columns of a token."""
    logprob: float
    """For log-probabilities: the absolute difference."""


TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(relative=1e-4, logprob=1e-4),
    "bfloat16": Tolerance(relative=5e-2, logprob=0.25),
}


class Verdict(StrEnum):
    NOTHING = "nothing differs"
    WEIGHTS = "weights differ"
    COMPUTATION = "computation differs"
    DEFINITION = "definition of log-probabilities differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class HookPointError:
    """The error at one hook point, at the token where it is largest."""

    point: HookPoint
    error: float
    token: int
    """Position in the sequence."""
    tolerance: float

    @property
    def is_beyond(self) -> bool:
        # Not `>`: a NaN is beyond every tolerance.
        return not self.error <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The tokens that both sides saw, and the log-probabilities that each gives the response."""

    prompt_ids: TokenArray  # [P]
    response_ids: TokenArray  # [T]
    engine_logprobs: FloatArray  # [T]
    trainer_logprobs: FloatArray  # [T]
    temperature: float

    @property
    def num_positions(self) -> int:
        """One less than the tokens: the last one predicts nothing."""
        return len(self.prompt_ids) + len(self.response_ids) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    verdict: Verdict
    sentence: str
    errors: tuple[HookPointError, ...]
    """In the order of the forward pass."""
    first: HookPointError | None
    """The first one beyond its tolerance; its inputs agree. None where all agree."""
    differing_tensors: tuple[str, ...]
    conversation: Conversation


def diagnose(
    points: Sequence[HookPoint],
    trainer: Recording,
    engine: Recording,
    conversation: Conversation,
    *,
    differing_tensors: tuple[str, ...],
    tolerance: Tolerance,
) -> Diagnosis:
    from_logits = {
        temperature: _from_logits(engine, conversation, temperature) for temperature in (conversation.temperature, 1.0)
    }
    errors = [
        _point_error(point, trainer, engine, conversation, from_logits[conversation.temperature], tolerance)
        for point in points
    ]
    reported = torch.from_numpy(conversation.engine_logprobs)
    is_before_temperature = bool(((reported - from_logits[1.0]).abs() <= tolerance.logprob).all())
    return reach_verdict(errors, differing_tensors, conversation, is_before_temperature=is_before_temperature)


def reach_verdict(
    errors: Sequence[HookPointError],
    differing_tensors: tuple[str, ...],
    conversation: Conversation,
    *,
    is_before_temperature: bool,
) -> Diagnosis:
    """Return the verdict; `is_before_temperature`: the engine reports log-probabilities at temperature 1."""
    beyond = [index for index, error in enumerate(errors) if error.is_beyond]
    first = errors[beyond[0]] if beyond else None
    # A differing weight shows at its own point, or, where its error is within the tolerance there, further on.
    upstream = errors if first is None else errors[: beyond[0] + 1]
    blamed = tuple(name for error in upstream for name in error.point.weights if name in differing_tensors)
    verdict = _verdict(first, blamed)
    return Diagnosis(
        verdict=verdict,
        sentence=_sentence(
            verdict,
            first,
            blamed,
            before=max((error.error for error in upstream if error is not first), default=0.0),
            num_prompt=len(conversation.prompt_ids),
            num_others=len(set(differing_tensors) - set(blamed)),
            is_before_temperature=is_before_temperature,
        ),
        errors=tuple(errors),
        first=first,
        differing_tensors=differing_tensors,
        conversation=conversation,
    )


def _verdict(first: HookPointError | None, blamed: Sequence[str]) -> Verdict:
    if blamed:
        return Verdict.WEIGHTS
    if first is None:
        return Verdict.NOTHING
    return Verdict.DEFINITION if first.point.name == LOGPROBS else Verdict.COMPUTATION


def _sentence(
    verdict: Verdict,
    first: HookPointError | None,
    blamed: Sequence[str],
    *,
    before: float,
    num_prompt: int,
    num_others: int,
    is_before_temperature: bool,
) -> str:
    others = f"; {num_others} tensor(s) further on differ too" if num_others else ""
    if first is None:
        if verdict is Verdict.NOTHING:
            return f"nothing differs: every module agrees to {before:.1e}, and all weights are the same"
        return f"weights differ, too little to show: {_names(blamed)}; every module agrees to {before:.1e}"
    kind = "sampled token" if first.token >= num_prompt else "prompt token"
    place = f"{first.point.name} is the first module that differs, by {first.error:.1e} at {kind} {first.token}"
    match verdict:
        case Verdict.WEIGHTS:
            return f"weights differ: {_names(blamed)}; {place} (before it at most {before:.1e}){others}"
        case Verdict.COMPUTATION:
            return f"computation differs: {place} (before it at most {before:.1e}), with the same weights{others}"
        case Verdict.DEFINITION:
            hint = "; the engine's are of logits before the temperature" if is_before_temperature else ""
            return (
                f"only the log-probabilities differ, by {first.error:.1e} at {kind} {first.token}: "
                f"those of the engine's own logits agree to {before:.1e}{hint}{others}"
            )
        case Verdict.NOTHING:
            raise AssertionError("something differs")
        case _:
            assert_never(verdict)


def _names(tensors: Sequence[str]) -> str:
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return ", ".join(tensors[:3]) + more


def _point_error(
    point: HookPoint,
    trainer: Recording,
    engine: Recording,
    conversation: Conversation,
    from_logits: Tensor,
    tolerance: Tolerance,
) -> HookPointError:
    limit = tolerance.logprob
    if point.name == LOGPROBS:
        errors = _gaps(torch.from_numpy(conversation.engine_logprobs), conversation)
    elif point.name == LM_HEAD:
        errors = _gaps(from_logits, conversation)
    else:
        errors, limit = _relative_errors(trainer.whole(point.name), engine.whole(point.name)), tolerance.relative
    worst = int(errors.nan_to_num(nan=torch.inf).argmax())
    return HookPointError(point=point, error=float(errors[worst]), token=worst, tolerance=limit)


def _relative_errors(trainer: Tensor, engine: Tensor) -> Tensor:
    """Return the error per token [tokens]."""
    assert trainer.shape == engine.shape, f"{list(trainer.shape)} and {list(engine.shape)}"
    floor = torch.finfo(torch.float32).tiny
    errors: Tensor = (trainer - engine).norm(dim=1) / engine.norm(dim=1).clamp(min=floor)
    return errors


def _gaps(engine_logprobs: Tensor, conversation: Conversation) -> Tensor:
    """Return the absolute differences [tokens], 0 where the predicted token is in the prompt."""
    gaps = torch.zeros(conversation.num_positions)
    gaps[len(conversation.prompt_ids) - 1 :] = (torch.from_numpy(conversation.trainer_logprobs) - engine_logprobs).abs()
    return gaps


def _from_logits(engine: Recording, conversation: Conversation, temperature: float) -> Tensor:
    """Return the response's log-probabilities [T] computed from the engine's recorded logits."""
    rows = {patch.place.token: patch.values[0] for patch in engine.patches(LM_HEAD)}
    first = len(conversation.prompt_ids) - 1
    logits = torch.stack([rows[first + step] for step in range(len(conversation.response_ids))])
    chosen = torch.from_numpy(conversation.response_ids).to(torch.int64)
    return (logits / temperature).log_softmax(dim=1).gather(1, chosen[:, None])[:, 0]
