"""The recipe's `reward` section: how a response is scored, with what limits, and what an error does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.section import Section, UserCode

SampleField: TypeAlias = Literal[
    "data_source",
    "solution_str",
    "ground_truth",
    "extra_info",
    "response",
    "prompt",
    "messages",
    "token_ids",
    "finish_reason",
    "group",
]


class _Reward(Section):
    has_components: ClassVar[bool] = True
    """Its scores may have named components, which a filter or `gdpo` compares."""


class _Tolerance(_Reward):
    on_error: Literal["fail", "mask", "value"] = "fail"
    """The effect of a rollout without a score: it stops the run, leaves the group's statistics and the loss, or gets
    `error_value`."""
    error_value: FiniteFloat | None = None
    """The score of a rollout without one, with `on_error: value`."""


class _InWorkers(_Tolerance):
    workers: PositiveInt = 2
    """Processes that score, on the driver's node or on each node with rollout workers."""
    deadline_s: PositiveFloat = 30
    """Per rollout; a worker that is later is killed and replaced."""
    samples_per_worker: PositiveInt = 10_000
    """After this many a fresh process, with its imports, replaces the worker, so that leaked memory is freed."""
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


class ExactRewardConfig(_Reward):
    has_components: ClassVar[bool] = False
    kind: Literal["exact"]
    """1 when the response, stripped, equals the ground truth, else 0."""


class RegexRewardConfig(_BuiltIn):
    has_components: ClassVar[bool] = False
    kind: Literal["regex"]
    """1 when the last match of `pattern` equals the ground truth, else 0."""
    pattern: Annotated[str, Field(min_length=1)]
    """Python's syntax; the group named `answer` is compared, else the first group, else the whole match."""
    ignores_case: bool = False
    """Upper and lower case count as equal."""
    is_format: bool = False
    """1 when the whole response matches, whatever the ground truth, else 0."""


class MultipleChoiceRewardConfig(_BuiltIn):
    has_components: ClassVar[bool] = False
    kind: Literal["multiple_choice"]
    """1 when the letter the response settles on is the ground truth, else 0."""
    letters: Annotated[str, Field(pattern=r"^[A-Z]{2,26}$")] = "ABCD"
    """The letters that are choices."""


class Gsm8kRewardConfig(_BuiltIn):
    has_components: ClassVar[bool] = False
    kind: Literal["gsm8k"]
    """1 when the number after the last `####` equals that of the ground truth, else 0."""
    is_flexible: bool = False
    """Without `####`, the last number of the response counts."""


class MathRewardConfig(_BuiltIn):
    has_components: ClassVar[bool] = False
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
    """The score is the share of tests that pass, not all or nothing."""
    workers: PositiveInt = 2
    """Programs that run at the same time, on the driver's node or on each node with rollout workers."""
    samples_per_worker: PositiveInt = 1000
    """After this many a fresh process replaces the worker."""
    deadline_s: PositiveFloat = 10
    """For all tests of one rollout; a test that has not passed by then has failed."""
    memory_gib: PositiveFloat = 1
    """Memory of all processes of the program together; each process's address space has the same limit."""
    disk_mib: PositiveInt = 64
    """Size of the sandbox's /tmp and of its /dev/shm; both are in memory."""
    max_processes: PositiveInt = 32
    """Processes and threads of the program."""
    max_output_bytes: PositiveInt = 1_000_000
    """A test that writes more has failed."""
    python: Path | None = None
    """The interpreter, with its packages; null is megarl's, without packages."""


class ScaledScore(Section):
    """The score becomes clip((score - mean) / std)."""

    mean: FiniteFloat = 0.0
    """Subtracted from the score, such as the mean of a reward model over the data."""
    std: PositiveFloat = 1.0
    """Divides the score less `mean`."""
    clip: tuple[FiniteFloat, FiniteFloat] | None = None
    """Lowest and highest value after that."""

    def scaled(self, score: float) -> float:
        value = (score - self.mean) / self.std
        return value if self.clip is None else min(max(value, self.clip[0]), self.clip[1])


class RewardModelRewardConfig(_Tolerance, ScaledScore):
    kind: Literal["reward_model"]
    """The output of a sequence classifier on engines of `roles.reward_model`, for the chat with its response."""
    role: str | None = None
    """Its name in `roles.reward_model`; null where there is only one."""


class _OverHttp(_Tolerance):
    url: Annotated[str, Field(pattern=r"^https?://\S+$")]
    """Where requests are posted. Holds no user or password: see `api_key_file`."""
    api_key_file: Path | None = None
    """Its content is sent only as `Authorization: Bearer ...`."""
    concurrency: PositiveInt = 32
    """Requests at the same time."""
    requests_per_second: PositiveFloat | None = None
    """Rate of requests; null sets no limit."""
    timeout_s: PositiveFloat = 60
    """Deadline of one attempt."""
    max_attempts: PositiveInt = 4
    """A time-out, a lost connection, 429 and 5xx are retried, after a pause that doubles each time."""
    max_reply_bytes: PositiveInt = 1_000_000
    """A longer reply is an error."""


class HttpRewardConfig(_OverHttp):
    kind: Literal["http"]
    """A server that gets `fields` as a JSON object and replies as a `function` may return."""
    fields: tuple[SampleField, ...] = ("data_source", "solution_str", "ground_truth", "extra_info", "prompt")
    """Which facts of a sample are sent."""
    weights: Annotated[dict[str, FiniteFloat], Field(min_length=1)] | None = None
    """The same key as in `function`."""


class QuestionConfig(Section):
    """The question to a judge, and the score of each of its answers."""

    template: Annotated[str, Field(min_length=1)]
    """The question, such as a rubric; `{prompt}`, `{response}`, `{ground_truth}` and other facts of a sample are
    filled in."""
    answers: Annotated[dict[str, FiniteFloat], Field(min_length=2)]
    """The score of each answer that the judge may give."""
    max_reasoning_chars: NonNegativeInt = 0
    """Characters in which a judge that writes may reason before its answer; the JSON schema of its reply says so."""


class JudgeRewardConfig(_OverHttp, QuestionConfig):
    kind: Literal["judge"]
    """A language model behind an OpenAI-style chat server (`url` ends with /v1/chat/completions) chooses an answer."""
    model: Annotated[str, Field(min_length=1)]
    """The name by which the server knows the model."""
    max_tokens: PositiveInt = 64
    """Limit of the judge's reply, its reasoning included."""


class EngineJudgeRewardConfig(_Tolerance, QuestionConfig):
    kind: Literal["engine_judge"]
    """A language model on engines of `roles.judge` chooses an answer, by its first token or in a written reply."""
    role: str | None = None
    """Its name in `roles.judge`; null where there is only one."""
    max_tokens: PositiveInt | None = None
    """Limit of a reply that the judge writes, as JSON, its reasoning included; null: it writes nothing, and the answer
    whose first token it finds likeliest counts. No two answers may begin with the same token then."""
    max_attempts: PositiveInt = 3
    """How often a judge is asked whose written reply is cut off or none of `answers`."""
    is_expected: bool = False
    """The score is the mean of all answers' scores, weighted by their probabilities, not that of the likeliest."""


FrozenRewardConfig: TypeAlias = RewardModelRewardConfig | EngineJudgeRewardConfig
"""The rewards of models on engines."""


class FunctionRewardConfig(_InWorkers):
    kind: Literal["function"]
    path: Path
    """Your Python file; a change of it during the run is an error."""
    name: str = "compute_score"
    """`name(data_source, solution_str, ground_truth, extra_info=None)` returns a float, or a dict with `score`. It may
    name other facts of a sample as well: prompt, messages, response, token_ids, finish_reason, group."""
    scores_groups: bool = False
    """The function takes a list, all samples of a group as dicts, and returns a list of as many results. Limits are per
    group then."""
    weights: Annotated[dict[str, FiniteFloat], Field(min_length=1)] | None = None
    """The score is the weighted sum of these numbers of the dict, which must have them all; null uses its `score`."""


class ScorerRewardConfig(_Reward):
    kind: Literal["scorer"]
    """Your own `stages.Scorer`, in the driver: it sees all rollouts of a prompt at once."""
    code: UserCode
    """A class without arguments, or a function that returns an object; with `async def score(self, group)`."""


_BuiltInRewardConfig: TypeAlias = (
    RegexRewardConfig
    | MultipleChoiceRewardConfig
    | Gsm8kRewardConfig
    | MathRewardConfig
    | DapoMathRewardConfig
    | CodeTestsRewardConfig
)

WorkerRewardConfig: TypeAlias = FunctionRewardConfig | _BuiltInRewardConfig
"""The rewards that are scored in worker processes."""

_AnySingle: TypeAlias = (
    ExactRewardConfig
    | _BuiltInRewardConfig
    | HttpRewardConfig
    | JudgeRewardConfig
    | FrozenRewardConfig
    | FunctionRewardConfig
    | ScorerRewardConfig
)

SingleRewardConfig = Annotated[_AnySingle, Field(discriminator="kind")]


class RewardPartConfig(ScaledScore):
    """One part of a composed reward: weight * clip((score - mean) / std)."""

    reward: SingleRewardConfig
    """How the part is scored, with the keys of that kind."""
    weight: FiniteFloat = 1.0
    """The part's score is multiplied by this."""
    gate_from: FiniteFloat | None = None
    """The whole score is `closed_score` unless the part's own score is at least this."""


class ComposedRewardConfig(_Reward):
    kind: Literal["composed"]
    """The sum of several rewards; the score of each part is a component."""
    parts: Annotated[dict[str, RewardPartConfig], Field(min_length=1)]
    """By name."""
    closed_score: FiniteFloat = 0.0
    """The score of a response that a part with `gate_from` stops."""


class BySourceRewardConfig(_Reward):
    kind: Literal["by_source"]
    """Another scorer for each data_source."""
    sources: Annotated[
        dict[str, Annotated[_AnySingle | ComposedRewardConfig, Field(discriminator="kind")]], Field(min_length=1)
    ]
    """By data_source; a prompt with another data_source is an error."""


RewardConfig = Annotated[_AnySingle | ComposedRewardConfig | BySourceRewardConfig, Field(discriminator="kind")]


def single_rewards(config: RewardConfig, key: str = "reward") -> Iterator[tuple[str, SingleRewardConfig]]:
    """Yield every reward that scores by itself, with its key in the recipe."""
    match config:
        case BySourceRewardConfig():
            for name, source in config.sources.items():
                yield from single_rewards(source, f"{key}.sources.{name}")
        case ComposedRewardConfig():
            for name, part in config.parts.items():
                yield f"{key}.parts.{name}.reward", part.reward
        case _:
            yield key, config


def longest_reply(config: RewardConfig) -> int | None:
    """Return the most tokens that a judge on engines of the run writes; None if no judge writes."""
    judges = (single for _, single in single_rewards(config) if isinstance(single, EngineJudgeRewardConfig))
    return max((judge.max_tokens for judge in judges if judge.max_tokens is not None), default=None)


def frozen_role(config: FrozenRewardConfig, names: Iterable[str]) -> str | None:
    """Return the key below `roles` of the model that scores; None if `names`, those roles of its kind, lack it."""
    kind, roles = ("reward_model" if isinstance(config, RewardModelRewardConfig) else "judge"), list(names)
    name = roles[0] if config.role is None and len(roles) == 1 else config.role
    return f"{kind}.{name}" if name in roles else None
