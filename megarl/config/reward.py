"""The recipe's `reward` section: who judges a response, with what limits, and what an error means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, FiniteFloat, PositiveFloat, PositiveInt

from megarl.config.section import Section


class _Tolerance(Section):
    on_error: Literal["fail", "mask", "value"] = "fail"
    """A rollout without a score stops the run, leaves the group's statistics and the loss, or gets `error_value`."""
    error_value: FiniteFloat | None = None
    """The score of such a rollout, for `on_error: value`."""


class _InWorkers(_Tolerance):
    workers: PositiveInt = 2
    """Processes that score."""
    deadline_s: PositiveFloat = 30
    """Per rollout; a worker that is later is killed and replaced."""
    samples_per_worker: PositiveInt = 1000
    """A worker that has scored so many makes room for a fresh process, with whatever it has leaked."""
    memory_gib: PositiveFloat | None = 16
    """Address space of one worker; null sets no limit, which a function that uses CUDA needs."""
    cpu_s: PositiveInt | None = 120
    """CPU time of one worker per rollout, all threads together; null sets no limit."""


class _BuiltIn(_InWorkers):
    """A scorer in `reward/scorers/<kind>.py`; the keys that a subclass adds are keyword arguments of its function."""

    late_score: ClassVar[float | None] = None
    """Score of a rollout that is not scored by the deadline; None makes it an error."""

    @property
    def options(self) -> dict[str, object]:
        return self.model_dump(exclude={"kind", *_InWorkers.model_fields})


class ExactRewardConfig(Section):
    kind: Literal["exact"]
    """1 when the response, stripped, equals the ground truth, else 0."""


class RegexRewardConfig(_BuiltIn):
    kind: Literal["regex"]
    """1 when the last match of `pattern` equals the ground truth, else 0."""
    pattern: Annotated[str, Field(min_length=1)]
    """Python's syntax; the group named `answer` is compared, else the first group, else the whole match."""
    ignores_case: bool = False


class MultipleChoiceRewardConfig(_BuiltIn):
    kind: Literal["multiple_choice"]
    """1 when the letter the response settles on is the ground truth, else 0."""
    letters: Annotated[str, Field(pattern=r"^[A-Z]{2,26}$")] = "ABCD"
    """Those that are choices."""


class Gsm8kRewardConfig(_BuiltIn):
    kind: Literal["gsm8k"]
    """1 when the number after the last `####` equals that of the ground truth, else 0."""
    is_flexible: bool = False
    """Without `####`, the last number of the response counts."""


class MathRewardConfig(_BuiltIn):
    # A policy can write what no algebra system simplifies in time: a wrong answer, not a broken reward.
    late_score: ClassVar[float | None] = 0.0
    kind: Literal["math"]
    """1 when the last `\\boxed{...}`, else the last `Answer:` line, is the ground truth for math-verify, else 0."""


class DapoMathRewardConfig(_BuiltIn):
    kind: Literal["dapo_math"]
    """1 when the last `Answer:` line of the last 300 characters equals the ground truth as text, else -1."""


class CodeTestsRewardConfig(_Tolerance):
    kind: Literal["code_tests"]
    """1 when the last Python block of the response passes all tests of the ground truth, else 0."""
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """`none` runs the model's code as you, with your files and your network: only where the machine is the sandbox."""
    gives_partial_credit: bool = False
    """The share of tests that pass, not all or nothing."""
    workers: PositiveInt = 2
    """Programs that run at the same time."""
    samples_per_worker: PositiveInt = 1000
    """A worker that has scored so many makes room for a fresh process."""
    deadline_s: PositiveFloat = 10
    """For all tests of one rollout; a test that has not passed by then has failed."""
    memory_gib: PositiveFloat = 1
    """Of all processes of the program together; each process's address space has the same limit."""
    disk_mib: PositiveInt = 64
    """Of the sandbox's /tmp and /dev/shm, each; both are memory."""
    max_processes: PositiveInt = 32
    """Processes and threads of the program."""
    max_output_bytes: PositiveInt = 1_000_000
    """A test that writes more has failed."""
    python: Path | None = None
    """The interpreter, with its packages; null takes that of megarl, without packages."""


class HttpRewardConfig(_Tolerance):
    kind: Literal["http"]
    """A judge: gets data_source, solution_str, ground_truth, extra_info as JSON; answers as a function may."""
    url: Annotated[str, Field(pattern=r"^https?://\S+$")]
    """Where it is posted to. No user or password in it: see `api_key_file`."""
    api_key_file: Path | None = None
    """Its content is sent as `Authorization: Bearer ...`, and nowhere else."""
    concurrency: PositiveInt = 32
    """Requests at the same time."""
    requests_per_second: PositiveFloat | None = None
    """null sets no limit."""
    timeout_s: PositiveFloat = 60
    """Of one attempt."""
    max_attempts: PositiveInt = 4
    """A time-out, a lost connection, 429 and 5xx are tried again, after a pause that doubles each time."""
    max_reply_bytes: PositiveInt = 1_000_000
    """A longer reply is an error."""
    weights: Annotated[dict[str, FiniteFloat], Field(min_length=1)] | None = None
    """As of `function`."""


class FunctionRewardConfig(_InWorkers):
    kind: Literal["function"]
    path: Path
    """A Python file of yours; that it changes during the run is an error."""
    name: str = "compute_score"
    """`name(data_source, solution_str, ground_truth, extra_info=None)` returns a float, or a dict with `score`."""
    weights: Annotated[dict[str, FiniteFloat], Field(min_length=1)] | None = None
    """The score is the weighted sum of these numbers of the dict, all of which it must have; null takes its `score`."""


_BuiltInRewardConfig: TypeAlias = (
    RegexRewardConfig
    | MultipleChoiceRewardConfig
    | Gsm8kRewardConfig
    | MathRewardConfig
    | DapoMathRewardConfig
    | CodeTestsRewardConfig
)

WorkerRewardConfig: TypeAlias = FunctionRewardConfig | _BuiltInRewardConfig
"""Those that score in worker processes."""

_AnySingle: TypeAlias = ExactRewardConfig | _BuiltInRewardConfig | HttpRewardConfig | FunctionRewardConfig

SingleRewardConfig = Annotated[_AnySingle, Field(discriminator="kind")]


class BySourceRewardConfig(Section):
    kind: Literal["by_source"]
    """Another scorer for each data_source."""
    sources: Annotated[dict[str, SingleRewardConfig], Field(min_length=1)]
    """By data_source; one that is not here is an error."""


RewardConfig = Annotated[_AnySingle | BySourceRewardConfig, Field(discriminator="kind")]
