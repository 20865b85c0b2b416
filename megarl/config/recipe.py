"""The schema of a recipe: one typed tree, one default per key, unknown keys refused, sections in the order of a recipe.

A function takes the sections it needs rather than the whole recipe. Nothing here opens a file: see `checks`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, cast

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.document import Tree, merged
from megarl.config.environment import EnvironmentConfig
from megarl.config.lora import LoraConfig
from megarl.config.reward import ExactRewardConfig, RewardConfig
from megarl.config.roles import InFlight, OptimizerConfig, PoolConfig, RolesConfig
from megarl.config.section import IMAGES_FOLDER, Device, DtypeName, GpuName, Section, UserCode, dtype_on
from megarl.families.shape import ModelShape

LEAST_GRACE_S = 120.0
LEAST_DEADLINE_S = 1800.0


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
    """Names the run's folder, `<folder>/<name>`."""
    folder: Path = Path("runs")
    """Holds the folders of all runs."""
    seed: NonNegativeInt = 1
    """With the recipe it determines a synchronous CPU run: tokens, rewards and weights."""
    steps: PositiveInt | None = None
    """How often to generate and train; the run ends after the last. With `epochs`, whichever ends first counts."""
    epochs: PositiveInt | None = None
    """Passes over the prompts of `data.train`, each in another order: as many steps as show every prompt so often."""
    device: Device = "cuda"
    """`cpu` runs the same engines on a laptop, one process per GPU of the pools."""
    ray_address: str | None = None
    """A running Ray cluster; null starts one on this machine and stops it at the end."""

    @property
    def dtype(self) -> DtypeName:
        return dtype_on(self.device)

    @property
    def max_steps(self) -> int:
        """Upper bound of the steps that is known without the data; a run of epochs alone has none."""
        return sys.maxsize if self.steps is None else self.steps

    @property
    def total_steps(self) -> int:
        """Number of steps of a run whose data were counted."""
        assert self.steps is not None, "`with_steps` turns run.epochs into run.steps"
        return self.steps


class ModelConfig(Section):
    path: Path
    """A folder in Hugging Face format: config.json, safetensors, tokenizer."""
    lora: LoraConfig | None = None
    """Trains an adapter beside the frozen model; null trains the model itself."""
    has_float32_head: bool = False
    """Logits keep the precision in which they are summed, in trainers and engines alike. Else both round them to
    bfloat16, each its own way, which is a large part of the difference between their probabilities."""

    @property
    def served_lora(self) -> LoraConfig | None:
        """The adapter that engines serve beside their base; None where they get whole weights."""
        return None if self.lora is None or self.lora.is_merged else self.lora


class JinjaTemplateConfig(Section):
    """A chat template instead of the model's own."""

    jinja: Annotated[str, Field(min_length=1)]
    """The template, or the path of a file with it that ends in `.jinja`. Reads `messages`, `add_generation_prompt` and
    the special tokens, such as `bos_token`."""

    @property
    def text(self) -> str:
        return Path(self.jinja).read_text() if self.jinja.endswith(".jinja") else self.jinja


class DataConfig(Section):
    train: Annotated[tuple[Path, ...], Field(min_length=1)]
    """Parquet files."""
    eval: tuple[Path, ...] = ()
    """Parquet files of held-out prompts, for `evaluation`."""
    eval_demonstrations: tuple[Path, ...] = ()
    """Parquet files of held-out demonstrations: `evaluation` of an sft run computes their loss and perplexity."""
    eval_pairs: tuple[Path, ...] = ()
    """Parquet files of held-out pairs: `evaluation` of `dpo` and `reward_model` computes how many are in order."""
    template: Literal["chat", "raw"] | JinjaTemplateConfig = "chat"
    """Turns a prompt into text: the model's chat template, or another one. `raw` takes strings as they are, for prompts
    that are rendered already and for base models; the tokenizer's first token is added where it is missing."""
    prompt_key: str = "prompt"
    """Column with a list of messages, or a string (sent as one user message). Here and below, `a.b` is field b of
    column a."""
    response_key: str = "response"
    """Column that `sft` imitates; where it is missing, assistant messages of the prompt."""
    imitates: Literal["every_answer", "last_answer"] = "every_answer"
    """The assistant messages that `sft` imitates where there is no response column. A message with `weight: 0` is never
    imitated."""
    chosen_key: Annotated[str, Field(min_length=1)] = "chosen"
    """Column with the better answer of a pair, a string; `dpo` and `reward_model` read it."""
    rejected_key: Annotated[str, Field(min_length=1)] = "rejected"
    """Column with the worse answer."""
    ground_truth_key: Annotated[str, Field(min_length=1)] | None = "reward_model.ground_truth"
    """Column that rewards compare with; numbers and lists become JSON. null: there is none."""
    source_key: Annotated[str, Field(min_length=1)] = "data_source"
    """Column that names the kind of task; where it is missing, the file's name is used."""
    images_key: Annotated[str, Field(min_length=1)] | None = "images"
    """Column with the images of a row, in the order of their places (`<image>`, or content parts of type image): bytes,
    paths (relative to the file), or structs with one of these. null: images are ignored."""
    max_image_pixels: PositiveInt | None = None
    """Larger images are made smaller. null: only those that the model's own processor finds too large."""
    max_prompt_tokens: PositiveInt = 1024
    """Length of the longest prompt, after the chat template, with the tokens of its images."""
    overlong_prompts: Literal["refuse", "drop"] = "refuse"
    """The treatment of a prompt above max_prompt_tokens: the run is refused, or goes on without it."""
    is_shuffled: bool = True
    """Prompts come in an order that `run.seed` determines, another one in each epoch."""


class StragglerConfig(Section):
    """When a rank or an engine counts as slow: beside the median of its kind, window after window."""

    ratio: Annotated[float, Field(gt=1)] = 2
    """Its time over the median's: of a token in an engine, of a fixed product of matrices on a rank."""
    window_s: PositiveFloat = 60
    """How long times are collected before they are compared."""
    windows: PositiveInt = 5
    """Slow windows in a row after which it is named in a warning."""
    drains_engines: bool = True
    """Whether a slow engine is then drained and restarted: its requests keep their tokens and go on elsewhere."""


class ClusterConfig(Section):
    """The machines under the pools."""

    gpu: GpuName | None = None
    """The kind of all GPUs, for which `megarl plan` computes and `megarl train` checks that the run fits; null takes
    what Ray reports, and h100 where there is no Ray to ask."""
    gpu_hour_price: PositiveFloat | None = None
    """The price of one GPU for an hour, in any currency: `plan`, `top`, the page and the metrics then show the cost of
    a step, of the run so far, and of the whole run."""
    allows_no_token: bool = False
    """Join a Ray cluster without a token if none is given: everyone who reaches such a cluster can run code in it."""
    file_system_gb_per_s: PositiveFloat = 5
    """Rate at which all nodes together write to the file system of the run's folder and read models from theirs;
    `megarl plan` takes the time of starts and saves from it."""
    node_timeout_s: PositiveFloat = 600
    """How long a run that lost a node waits for another one before it ends."""
    lease_s: NonNegativeFloat = 90
    """How long the processes of a run outlive its driver if that is killed: the next `megarl train` of the run adopts
    them, once it has a checkpoint. 0 ends them with the driver."""
    max_node_faults: PositiveInt = 4
    """Accidents of the engines or ranks of one node within an hour after which they move to a spare node, if there is
    one; engines are taken out in any case if other nodes have some."""
    stragglers: StragglerConfig = StragglerConfig()


class SamplingConfig(Section):
    rollouts_per_prompt: PositiveInt = 8
    """The size of a group."""
    temperature: PositiveFloat = 1.0
    """Used for generation and, so that both see the same policy, for the trained log-probabilities."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1 samples from the whole distribution."""
    top_k: PositiveInt | None = None
    """null samples from the whole distribution."""
    max_response_tokens: PositiveInt = 1024
    """A response that reaches it is cut there."""
    generator: UserCode | None = None
    """Your own `stages.Generator` around the engines': `name(inner)` returns an object with
    `async def generate(self, prompt)`."""


class TrainConfig(Section):
    prompts_per_step: PositiveInt
    """Groups that are generated, then trained on."""
    prompts_per_update: PositiveInt | None = None
    """Mini-batch of one optimizer update; null makes the whole step one update."""
    epochs: PositiveInt = 1
    """How often the rollouts of a step are trained on."""
    tokens_per_micro_batch: PositiveInt | None = None
    """Sequences are packed up to this many tokens; must hold the longest prompt + response. null: so many that a GPU
    computes several times as long as its host needs to start the work, if the plan finds memory for them."""
    share_prefixes: bool = True
    """Compute tokens once that rows of a micro-batch begin with: the prompt of a group, the history of an episode. The
    gradients are the same. Rows stay apart in models with delta nets and with a `context_exchange` other than `gather`;
    where an engine's experts are replayed, as far as they differ."""
    tokens_per_tree: PositiveInt | None = None
    """Up to this many tokens are packed where that keeps rows with a common beginning together, instead of
    `tokens_per_micro_batch`. null: as many as the plan finds memory for, up to eight times that; on a CPU no more."""
    max_staleness: NonNegativeInt = 0
    """Steps a trained token's policy may be behind the one that is trained; 0 generates and trains in turn, 1 generates
    the next step while this one is trained, more lets engines run further ahead."""
    routing: Literal["replay", "live"] | None = None
    """The experts of a mixture that the actor sends a token to: those that the engine chose (`replay`), or its own
    choice (`live`), which differs by rounding. null is `replay` where megarl starts the engines of a mixture."""
    optimizer: OptimizerConfig = OptimizerConfig()
    operation_timeout_s: PositiveFloat | None = None
    """Deadline of every call to a trainer rank: past it the ranks count as hanging, and their stacks are written to
    `<run>/hang_*.txt`. null is three times what the longest call takes by the plan if responses are 90 % of the longest
    in the mean, and at least 1800 s. Less than three times is refused."""
    max_restarts: NonNegativeInt = 3
    """How often all ranks are restarted from the newest checkpoint after one died or hung; every checkpoint resets the
    count. 0 ends the run at once."""
    restart_pause_s: NonNegativeFloat = 1.0
    """Pause before the first restart; it doubles with each further one, up to a minute."""

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch, in a recipe that its plan has completed."""
        assert self.tokens_per_micro_batch is not None, "the plan has not completed the recipe"
        return self.tokens_per_micro_batch

    @property
    def most_tokens(self) -> int:
        """Tokens of a micro-batch at most, in a recipe that its plan has completed."""
        return max(self.micro_batch_tokens, self.tokens_per_tree or 0)

    @property
    def deadline_s(self) -> float:
        """The deadline of a recipe whose plan is known, or needs none: on a CPU."""
        return LEAST_DEADLINE_S if self.operation_timeout_s is None else self.operation_timeout_s

    @property
    def updates_per_step(self) -> int:
        return self.epochs * (self.prompts_per_step // (self.prompts_per_update or self.prompts_per_step))


class SampledEvaluationConfig(Section):
    """Several sampled rollouts per prompt: mean@n, pass@k, majority@n."""

    rollouts_per_prompt: PositiveInt = 8
    """n: larger values make the numbers depend less on luck."""
    temperature: PositiveFloat = 1.0
    """Independent of `sampling`, as are the other keys here."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1 samples from the whole distribution."""
    top_k: PositiveInt | None = None
    """null samples from the whole distribution."""
    pass_at: tuple[PositiveInt, ...] | None = None
    """The k of pass@k, none above n; null takes 1, 2, 4 ... and n."""

    @property
    def pass_at_or_default(self) -> tuple[int, ...]:
        if self.pass_at is not None:
            return self.pass_at
        powers = [1 << power for power in range(self.rollouts_per_prompt.bit_length())]
        return tuple(sorted({*powers, self.rollouts_per_prompt}))


class EvaluationConfig(Section):
    """Answers to the prompts of `data.eval`, scored like rollouts and kept in `<run>/evaluations`; the loss of
    `data.eval_demonstrations`; and the order of `data.eval_pairs`."""

    every_steps: PositiveInt | None = None
    """Steps between two evaluations; null evaluates only before the first and after the last step."""
    runs_before_training: bool = True
    """false skips the evaluation before the first step."""
    max_prompts: PositiveInt | None = None
    """How many prompts of `data.eval`, demonstrations and pairs to use from the beginning; null uses all."""
    max_response_tokens: PositiveInt | None = None
    """null takes `sampling.max_response_tokens`."""
    is_greedy: bool = True
    """One rollout per prompt that takes the likeliest token each time; its metric is `accuracy`."""
    sampled: SampledEvaluationConfig | None = None
    """Sampled rollouts in addition to the greedy one or, with `is_greedy: false`, instead of it."""
    right_from: float = 1.0
    """A score of at least this is a right answer; the built-in scorers give 1 for right, and less for part of it."""

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether to evaluate after `step`; 0 is before the first."""
        if step == 0:
            return self.runs_before_training
        return is_last or (self.every_steps is not None and step % self.every_steps == 0)


class KeepBestConfig(Section):
    metric: str = "accuracy"
    """The evaluation's metric to compare."""
    mode: Literal["max", "min"] = "max"
    """Whether larger or smaller is better."""


class MirrorConfig(Section):
    """A copy of the checkpoints in an object store or on another disk, made in the background after each save. A run
    whose disk is lost resumes from it."""

    url: Annotated[str, Field(min_length=1)]
    """`s3://bucket/folder`, `gs://bucket/folder` or `file:///folder`; checkpoints are below it, in a folder with the
    run's name. Needs the extra `megarl[s3]` or `megarl[gs]`; keys and endpoint come from the store's own settings,
    such as AWS_ENDPOINT_URL."""
    api_key_file: Path | None = None
    """The store's keys: for `s3` a file like `~/.aws/credentials`, for `gs` the JSON key of a service account; null are
    those of the environment."""
    stall_s: PositiveFloat = 300
    """A transfer in which nothing moves for so long is ended, and tried again later."""
    finish_s: NonNegativeFloat = 600
    """How long a run that is done waits for its last checkpoint to be copied, by a store that takes it."""


class CheckpointConfig(Section):
    """Checkpoints are in `<run>/checkpoints/step_N`; `model` in one is a Hugging Face folder. A stopped run resumes
    from the newest."""

    save_every_steps: PositiveInt | Literal["hourly"] | None = "hourly"
    """Steps between two saves, which run in the background; `hourly` are as many as take an hour, at least one. null
    saves only at the end, at a new best, and when the run is asked to stop (SIGTERM). More than an hour by the plan is
    refused."""
    save_at_end: bool = True
    """Save the last step; a run whose last step cannot be saved ends with exit code 4."""
    keep_last: PositiveInt = 2
    """How many checkpoints to keep; older ones are removed once a new one is complete."""
    keep_best: KeepBestConfig | None = None
    """Save every step whose evaluation beats all before it, and keep that one in addition to the last ones."""
    contents: Literal["everything", "weights"] = "everything"
    """A run can resume only from `everything`: weights, optimizer and the state of the run."""
    grace_s: PositiveFloat | None = None
    """Time to save after SIGTERM or SIGUSR1; past it, or after a second SIGTERM, the run ends at once. null is twice
    the time of a save by the plan, and at least 120 s. An update that takes more than half of it is given up at the
    signal, and the step before it is saved."""
    mirror: MirrorConfig | None = None
    """A second place for the checkpoints; null has none."""

    @property
    def time_to_save_s(self) -> float:
        """The grace of a recipe whose plan is known, or needs none: on a CPU."""
        return LEAST_GRACE_S if self.grace_s is None else self.grace_s


class RolloutSamplesConfig(Section):
    groups_per_step: NonNegativeInt = 4
    """Groups of a step that are kept, chosen by the run's seed; 0 keeps none.

    The trainer computes its log-probabilities of their tokens, unless the algorithm needs them anyway."""
    every: PositiveInt = 1
    """Steps from one whose rollouts are kept to the next."""
    max_megabytes: PositiveInt = 1024
    """Size of all files together; the oldest are removed first."""


class TensorboardConfig(Section):
    folder: Path | None = None
    """Holds the event files; null is `<run>/tensorboard`."""


class WandbConfig(Section):
    project: Annotated[str, Field(min_length=1)]
    """The project of W&B; the run has the name of `run.name`."""
    entity: str | None = None
    """A team; null is that of the API key, which W&B finds in its own places."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to `<run>/wandb`, for `wandb sync`."""
    proxy: str | None = None
    """`http://host:port`, used for W&B alone."""
    tags: tuple[str, ...] = ()
    """Labels of the run."""


class MlflowConfig(Section):
    tracking_uri: Annotated[str, Field(min_length=1)]
    """Such as `http://host:5000`."""
    experiment: Annotated[str, Field(min_length=1)] = "megarl"
    """The experiment of MLflow; it is made if it does not exist."""


class ProfileConfig(Section):
    """Steps whose traces by torch are written to `<run>/profiles`, with snapshots of memory on GPUs."""

    steps: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """One of the first is slower than the others: kernels are compiled then."""
    ranks: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (0,)
    """Ranks of the actor."""


class ObserveConfig(Section):
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = 0
    """Prometheus endpoint on loopback; 0 picks a free port, null turns it off."""
    tensorboard: TensorboardConfig | None = None
    """Event files as well; needs the extra `megarl[tensorboard]`."""
    wandb: WandbConfig | None = None
    """A run of Weights & Biases as well; needs the extra `megarl[wandb]`."""
    mlflow: MlflowConfig | None = None
    """A run of MLflow as well; needs the extra `megarl[mlflow]`."""
    rollouts: RolloutSamplesConfig = RolloutSamplesConfig()
    """Rollouts that are kept in `<run>/rollouts` for `megarl view`."""
    profile: ProfileConfig | None = None
    """`megarl train --profile STEP` sets it."""


class NetworkConfig(Section):
    """Where engines, the stores through which processes connect, and the metrics listen. Ray requires a token, engines
    require keys."""

    bind: str | None = None
    """A network in CIDR form, such as 10.1.0.0/16, or one address: each machine listens on its own address in it.
    `private` is its only address that is not public, or of several the one towards Ray's head, or of its default route.
    null is loopback on one machine, and in a Ray cluster the address by which Ray knows the machine; metrics stay on
    loopback then."""


PolicyName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=100)]
POLICIES_FOLDER = "policies"
"""In the folder of a run of several policies: the folders of their runs."""


class Recipe(Section):
    run: RunConfig
    model: ModelConfig
    data: DataConfig
    cluster: ClusterConfig = ClusterConfig()
    pools: Annotated[dict[str, PoolConfig], Field(min_length=1)]
    roles: RolesConfig
    algorithm: AlgorithmConfig
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = ExactRewardConfig(kind="exact")
    environment: EnvironmentConfig | None = None
    """Makes an episode of turns with tools of each rollout; null asks for one response. `sft` renders its tools into
    the prompts."""
    train: TrainConfig
    evaluation: EvaluationConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    network: NetworkConfig = NetworkConfig()
    policies: dict[PolicyName, dict[str, object]] = Field(default={})
    """Several adapters of one base, trained side by side and served by the same engines. Each policy has the keys of
    this recipe, and its own `data`, `reward`, `algorithm`, `sampling`, `evaluation`, `observe`, `train.optimizer`,
    `run.steps` and others over them; its run is in `<run>/policies/<name>`."""

    def by_policy(self) -> dict[str, Recipe]:
        """Return the recipe of each policy, by name; none where one is trained alone."""
        return {name: Recipe.model_validate(self.policy_tree(name)) for name in self.policies}

    def policy_tree(self, name: str) -> dict[str, Tree]:
        common: dict[str, Tree] = self.model_dump(mode="json", exclude_unset=True, exclude={"policies"})
        run: dict[str, Tree] = {"name": name, "folder": str(self.run_folder / POLICIES_FOLDER)}
        return merged(merged(common, cast("dict[str, Tree]", self.policies[name])), {"run": run})

    def with_steps(self, num_prompts: int) -> Recipe:
        """Return the recipe with the number of its steps, which follows from `run.epochs` and the data."""
        if self.run.epochs is None:
            return self
        steps = -(-self.run.epochs * num_prompts // self.train.prompts_per_step)
        return self.model_copy(update={"run": self.run.model_copy(update={"steps": min(steps, self.run.max_steps)})})

    @property
    def run_folder(self) -> Path:
        return self.run.folder / self.run.name

    @property
    def images_folder(self) -> Path:
        """The images of the run's prompts, which ranks and engines read."""
        return self.run_folder.absolute() / IMAGES_FOLDER

    @property
    def data_parallel(self) -> int:
        """Data-parallel size of the actor."""
        return self.pools[self.roles.actor.pool].gpus // self.roles.actor.model_parallel

    @property
    def samples_per_prompt(self) -> int:
        """Answers to each prompt that are trained on: those of the data, or a group of rollouts."""
        return self.algorithm.needs.samples_per_prompt(self.sampling.rollouts_per_prompt)

    @property
    def num_engines(self) -> int:
        """Number of engines: as many as fit into the pool, or those that run already."""
        rollout = self.roles.rollout
        if rollout is None or rollout.pool is None:
            return 0 if rollout is None else len(rollout.endpoints)
        return self.pools[rollout.pool].gpus // rollout.tensor

    def replays_routing(self, shape: ModelShape) -> bool:
        """Whether the actor follows the experts that engines chose."""
        rollout, routing = self.roles.rollout, self.train.routing
        if rollout is None or shape.experts is None or not self.algorithm.needs.has_engines:
            return False
        return routing == "replay" or (routing is None and rollout.pool is not None)

    @property
    def in_flight(self) -> InFlight | None:
        """The treatment of running requests during a publish; None where none runs then, or where none is disturbed."""
        rollout = self.roles.rollout
        is_paused = rollout is not None and self.train.max_staleness and self.model.served_lora is None
        return (rollout.in_flight or "abort") if rollout is not None and is_paused else None

    @property
    def evaluation_response_tokens(self) -> int:
        """Length of the longest answer in an evaluation; 0 without an evaluation."""
        if self.evaluation is None:
            return 0
        return self.evaluation.max_response_tokens or self.sampling.max_response_tokens

    @property
    def longest_response_tokens(self) -> int:
        """Length of the longest response, in training or in an evaluation."""
        return max(self.sampling.max_response_tokens, self.evaluation_response_tokens)

    @property
    def max_context_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.sampling.max_response_tokens
