"""Which function the workers of a recipe's reward run, with which options and limits. Pure."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import assert_never

from megarl.config.reward import (
    CodeTestsRewardConfig,
    DapoMathRewardConfig,
    FunctionRewardConfig,
    Gsm8kRewardConfig,
    MathRewardConfig,
    MultipleChoiceRewardConfig,
    RegexRewardConfig,
    WorkerRewardConfig,
)
from megarl.reward.pool import ScoringTask
from megarl.reward.protocol import Task
from megarl.reward.sandbox import Limits

_SCORERS = Path(__file__).parent / "scorers"
_FUNCTION = "compute_score"
_GIB = 1 << 30
_MIB = 1 << 20
_SANDBOX_GRACE_S = 20.0
"""The sandbox keeps the deadline itself; what is later than this is no longer the program's fault."""


def workload_of(config: WorkerRewardConfig) -> ScoringTask:
    match config:
        case FunctionRewardConfig():
            return _workload(config, path=config.path.resolve(), name=config.name, weights=config.weights)
        case RegexRewardConfig():
            return _workload(config, options={"pattern": config.pattern, "ignores_case": config.ignores_case})
        case MultipleChoiceRewardConfig():
            return _workload(config, options={"letters": config.letters})
        case Gsm8kRewardConfig():
            return _workload(config, options={"is_flexible": config.is_flexible})
        case MathRewardConfig():
            # A policy can write what no algebra system simplifies in time: that is a wrong answer, not a broken reward.
            return replace(_workload(config), late_score=0.0)
        case DapoMathRewardConfig():
            return _workload(config)
        case CodeTestsRewardConfig():
            return _code_tests(config)
        case _:
            assert_never(config)


def _workload(
    config: FunctionRewardConfig
    | RegexRewardConfig
    | MultipleChoiceRewardConfig
    | Gsm8kRewardConfig
    | MathRewardConfig
    | DapoMathRewardConfig,
    *,
    path: Path | None = None,
    name: str = _FUNCTION,
    options: dict[str, object] | None = None,
    weights: dict[str, float] | None = None,
) -> ScoringTask:
    task = Task(
        path=str(path or _SCORERS / f"{config.kind}.py"),
        name=name,
        options=options or {},
        weights=weights,
        memory_bytes=None if config.memory_gib is None else int(config.memory_gib * _GIB),
        cpu_s=config.cpu_s,
    )
    return ScoringTask(
        task=task,
        workers=config.workers,
        deadline_s=config.deadline_s,
        samples_per_worker=config.samples_per_worker,
    )


def _code_tests(config: CodeTestsRewardConfig) -> ScoringTask:
    """The limits are the sandbox's: the worker itself runs no code of the model."""
    options = {
        "sandbox": config.sandbox,
        "python": python_of(config),
        "gives_partial_credit": config.gives_partial_credit,
        "deadline_s": config.deadline_s,
        **asdict(limits_of(config)),
    }
    return ScoringTask(
        task=Task(
            path=str(_SCORERS / "code_tests.py"),
            name=_FUNCTION,
            options=options,
            weights=None,
            memory_bytes=None,
            cpu_s=None,
        ),
        workers=config.workers,
        deadline_s=config.deadline_s + _SANDBOX_GRACE_S,
        samples_per_worker=config.samples_per_worker,
    )


def limits_of(config: CodeTestsRewardConfig) -> Limits:
    return Limits(
        memory_bytes=int(config.memory_gib * _GIB),
        disk_bytes=config.disk_mib * _MIB,
        max_processes=config.max_processes,
        max_output_bytes=config.max_output_bytes,
    )


def python_of(config: CodeTestsRewardConfig) -> str | None:
    return None if config.python is None else str(config.python.absolute())
