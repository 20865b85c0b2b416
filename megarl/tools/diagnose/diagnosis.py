"""From what trainer and engine made of the same tokens to a verdict: what differs first, and why. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

import torch
from torch import Tensor

from megarl.compare.hook_points import LM_HEAD, LOGPROBS, Site
from megarl.compare.recordings import Recording
from megarl.types import FloatArray, TokenArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """What rounding alone may do: well above what a healthy model shows, well below what a mistake does."""

    relative: float
    """Of hidden states: |trainer's - engine's| / |engine's|, over the columns of a token."""
    logprob: float
    """Of log-probabilities: the difference itself."""


TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(relative=1e-4, logprob=1e-4),
    "bfloat16": Tolerance(relative=5e-2, logprob=0.25),
}


class ModuleVerdict(StrEnum):
    NOTHING = "nothing differs"
    WEIGHTS = "weights differ"
    COMPUTATION = "computation differs"
    DEFINITION = "definition of log-probabilities differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteError:
    """At the token where it is largest."""

    site: Site
    error: float
    token: int
    """Position in the sequence."""
    tolerance: float

    @property
    def is_beyond(self) -> bool:
        # Not `>`: what is not a number does not agree.
        return not self.error <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The tokens both sides saw, and how likely each finds the response."""

    prompt_ids: TokenArray  # [P]
    response_ids: TokenArray  # [T]
    engine_logprobs: FloatArray  # [T]
    trainer_logprobs: FloatArray  # [T]
    temperature: float

    @property
    def num_positions(self) -> int:
        """The last token predicts nothing."""
        return len(self.prompt_ids) + len(self.response_ids) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    verdict: ModuleVerdict
    sentence: str
    errors: tuple[SiteError, ...]
    """In the order of the forward pass."""
    first: SiteError | None
    """The first beyond its tolerance: what enters it agrees."""
    differing_tensors: tuple[str, ...]
    conversation: Conversation


def diagnose(
    sites: Sequence[Site],
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
        _site_error(site, trainer, engine, conversation, from_logits[conversation.temperature], tolerance)
        for site in sites
    ]
    reported = torch.from_numpy(conversation.engine_logprobs)
    is_before_temperature = bool(((reported - from_logits[1.0]).abs() <= tolerance.logprob).all())
    return judge(errors, differing_tensors, conversation, is_before_temperature=is_before_temperature)


def judge(
    errors: Sequence[SiteError],
    differing_tensors: tuple[str, ...],
    conversation: Conversation,
    *,
    is_before_temperature: bool,
) -> Diagnosis:
    """`is_before_temperature`: the engine's log-probabilities are those of its logits as they are."""
    beyond = [index for index, error in enumerate(errors) if error.is_beyond]
    first = errors[beyond[0]] if beyond else None
    # A weight that differs shows at its own site, or, where it is a little below the tolerance there, further on.
    upstream = errors if first is None else errors[: beyond[0] + 1]
    guilty = tuple(name for error in upstream for name in error.site.weights if name in differing_tensors)
    verdict = _verdict(first, guilty)
    return Diagnosis(
        verdict=verdict,
        sentence=_sentence(
            verdict,
            first,
            guilty,
            before=max((error.error for error in upstream if error is not first), default=0.0),
            num_prompt=len(conversation.prompt_ids),
            num_others=len(set(differing_tensors) - set(guilty)),
            is_before_temperature=is_before_temperature,
        ),
        errors=tuple(errors),
        first=first,
        differing_tensors=differing_tensors,
        conversation=conversation,
    )


def _verdict(first: SiteError | None, guilty: Sequence[str]) -> ModuleVerdict:
    if guilty:
        return ModuleVerdict.WEIGHTS
    if first is None:
        return ModuleVerdict.NOTHING
    return ModuleVerdict.DEFINITION if first.site.name == LOGPROBS else ModuleVerdict.COMPUTATION


def _sentence(
    verdict: ModuleVerdict,
    first: SiteError | None,
    guilty: Sequence[str],
    *,
    before: float,
    num_prompt: int,
    num_others: int,
    is_before_temperature: bool,
) -> str:
    others = f"; {num_others} tensor(s) further on differ too" if num_others else ""
    if first is None:
        if verdict is ModuleVerdict.NOTHING:
            return f"nothing differs: every module agrees to {before:.1e}, and all weights are the same"
        return f"weights differ, too little to show: {_names(guilty)}; every module agrees to {before:.1e}"
    kind = "sampled token" if first.token >= num_prompt else "prompt token"
    apart = f"{first.site.name} is the first module that differs, by {first.error:.1e} at {kind} {first.token}"
    match verdict:
        case ModuleVerdict.WEIGHTS:
            return f"weights differ: {_names(guilty)}; {apart} (before it at most {before:.1e}){others}"
        case ModuleVerdict.COMPUTATION:
            return f"computation differs: {apart} (before it at most {before:.1e}), with the same weights{others}"
        case ModuleVerdict.DEFINITION:
            hint = "; the engine's are of logits before the temperature" if is_before_temperature else ""
            return (
                f"only the log-probabilities differ, by {first.error:.1e} at {kind} {first.token}: "
                f"those of the engine's own logits agree to {before:.1e}{hint}{others}"
            )
        case ModuleVerdict.NOTHING:
            raise AssertionError("something differs")
        case _:
            assert_never(verdict)


def _names(tensors: Sequence[str]) -> str:
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return ", ".join(tensors[:3]) + more


def _site_error(
    site: Site,
    trainer: Recording,
    engine: Recording,
    conversation: Conversation,
    from_logits: Tensor,
    tolerance: Tolerance,
) -> SiteError:
    limit = tolerance.logprob
    if site.name == LOGPROBS:
        errors = _gaps(torch.from_numpy(conversation.engine_logprobs), conversation)
    elif site.name == LM_HEAD:
        errors = _gaps(from_logits, conversation)
    else:
        errors, limit = _relative_errors(trainer.whole(site.name), engine.whole(site.name)), tolerance.relative
    worst = int(errors.nan_to_num(nan=torch.inf).argmax())
    return SiteError(site=site, error=float(errors[worst]), token=worst, tolerance=limit)


def _relative_errors(mine: Tensor, theirs: Tensor) -> Tensor:
    """[tokens]"""
    assert mine.shape == theirs.shape, f"{list(mine.shape)} and {list(theirs.shape)}"
    floor = torch.finfo(torch.float32).tiny
    errors: Tensor = (mine - theirs).norm(dim=1) / theirs.norm(dim=1).clamp(min=floor)
    return errors


def _gaps(engine_logprobs: Tensor, conversation: Conversation) -> Tensor:
    """[tokens], 0 where nothing of the response is predicted."""
    gaps = torch.zeros(conversation.num_positions)
    gaps[len(conversation.prompt_ids) - 1 :] = (torch.from_numpy(conversation.trainer_logprobs) - engine_logprobs).abs()
    return gaps


def _from_logits(engine: Recording, conversation: Conversation, temperature: float) -> Tensor:
    """[T], what follows for the response from the logits the engine really had."""
    rows = {patch.place.token: patch.values[0] for patch in engine.patches(LM_HEAD)}
    first = len(conversation.prompt_ids) - 1
    logits = torch.stack([rows[first + step] for step in range(len(conversation.response_ids))])
    chosen = torch.from_numpy(conversation.response_ids).to(torch.int64)
    return (logits / temperature).log_softmax(dim=1).gather(1, chosen[:, None])[:, 0]
