"""The schema of a recipe: one typed tree, one default per key, unknown keys refused.

A function takes the section it needs, never the whole recipe. Nothing here opens a file: see `check`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.reward import ExactRewardConfig, RewardConfig
from megarl.config.section import Section

Device: TypeAlias = Literal["cpu", "cuda"]


def dtype_on(device: Device) -> Literal["float32", "bfloat16"]:
    """Return the dtype of weights and activations, in trainers and engines alike."""
    return "float32" if device == "cpu" else "bfloat16"


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Names the run's folder, `<folder>/<name>`."""
    folder: Path = Path("runs")
    """Holds the folders of all runs."""
    seed: NonNegativeInt = 1
    """With the recipe it determines a synchronous CPU run: tokens, rewards and weights."""
    steps: PositiveInt
    """How often to generate and train; the run ends after the last."""
    device: Device = "cuda"
    """`cpu` runs the same engines on a laptop, one process per GPU of the pools."""
    ray_address: str | None = None
    """A running Ray cluster; without it megarl starts one on this machine and stops it at the end."""

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        return dtype_on(self.device)


class ModelConfig(Section):
    path: Path
    """A folder in Hugging Face format: config.json, safetensors, tokenizer."""


class DataConfig(Section):
    train: Annotated[tuple[Path, ...], Field(min_length=1)]
    """Parquet files."""
    eval: tuple[Path, ...] = ()
    """Parquet files of held-out prompts, for `evaluation`."""
    prompt_key: str = "prompt"
    """Column with a list of messages, or a string (sent as one user message)."""
    response_key: str = "response"
    """Column that `sft` imitates; where it is missing, the last assistant message of the prompt."""
    max_prompt_tokens: PositiveInt = 1024
    """After the chat template."""
    overlong_prompts: Literal["refuse", "drop"] = "refuse"
    """What happens to a prompt above max_prompt_tokens: the run is refused, or goes on without it."""
    is_shuffled: bool = True
    """In an order that `run.seed` determines, another one in each epoch."""


class PoolConfig(Section):
    nodes: PositiveInt = 1
    """Machines; on one, all GPUs of the pool are taken from the same machine."""
    gpus_per_node: PositiveInt
    """On a CPU run, processes."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    learning_rate: PositiveFloat = 1e-6
    min_learning_rate: NonNegativeFloat = 0.0
    """Where `decay` ends."""
    warmup_steps: NonNegativeInt = 0
    """Linear, from zero."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, until `run.steps`."""
    weight_decay: NonNegativeFloat = 0.01
    """Not applied to norms and biases."""
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: PositiveFloat = 1e-8
    clip_grad_norm: PositiveFloat = 1.0
    """Of all gradients together."""


class ModelParallelConfig(Section):
    """How a Megatron model is split over the ranks of its pool; the rest is data parallel."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    virtual_pipeline: PositiveInt = 1
    """Model chunks per pipeline stage (interleaved schedule when > 1)."""
    is_sequence_parallel: bool = False
    """Shard activations along the sequence between the tensor-parallel ranks."""
    expert: PositiveInt = 1
    """Ranks that share out the experts of a mixture; each rank of a pipeline stage belongs to one such set."""
    expert_tensor: PositiveInt | None = None
    """Ranks that share one expert, of those with `expert` > 1; null is `tensor`. Small experts are faster with 1."""
    first_stage_layers: PositiveInt | None = None
    """Of the first pipeline stage, where they are not as many as in the others."""
    last_stage_layers: PositiveInt | None = None
    """Of the last pipeline stage, where they are not as many as in the others."""
    megatron: dict[str, object] = Field(default={})
    """Further fields of megatron-core's TransformerConfig, such as `recompute_granularity: full`."""

    @property
    def model_parallel(self) -> int:
        return self.tensor * self.pipeline

    @property
    def ranks_per_expert(self) -> int:
        return self.tensor if self.expert_tensor is None else self.expert_tensor


class TrainedModelConfig(ModelParallelConfig):
    offload: Literal["nothing", "optimizer", "everything"] = "nothing"
    """What goes to host memory while engines generate in the same pool: the optimizer's states, or the weights as well;
    with either, gradients are given up meanwhile."""
    megatron_optimizer: dict[str, object] = Field(default={})
    """Further fields of megatron-core's OptimizerConfig, such as `decoupled_weight_decay: false`."""
    megatron_ddp: dict[str, object] = Field(default={})
    """Further fields of megatron-core's DistributedDataParallelConfig, such as `overlap_grad_reduce: true`."""


class ActorConfig(TrainedModelConfig):
    pool: str


class CriticConfig(TrainedModelConfig):
    """Learns which reward to expect at every token; its ranks are processes of their own in any pool."""

    pool: str
    path: Path | None = None
    """A folder like `model.path`, of a language model or an earlier critic; null starts from `model.path`."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    prompts_per_update: PositiveInt | None = None
    """As in `train`, and what it is there unless set."""
    epochs: PositiveInt = 1
    """How often the critic sees the rollouts of a step."""
    warmup_steps: NonNegativeInt = 0
    """First steps in which only the critic learns."""
    clip: PositiveFloat = 0.5
    """How far an update may move a value before its loss stops falling."""


class ReferenceConfig(ModelParallelConfig):
    """The policy that `algorithm.kl` measures the distance to; never trained."""

    pool: str | None = None
    """null keeps it in host memory of the actor's ranks, which take its weights for a forward pass in every step."""
    path: Path | None = None
    """A folder like `model.path`, of a model of the same shape; null is `model.path`."""


InFlight: TypeAlias = Literal["abort", "retract", "in_place"]


class EndpointConfig(Section):
    """An SGLang server that runs already; megarl neither starts nor stops it."""

    url: Annotated[str, Field(pattern=r"^https?://[^/@:\s]+:[0-9]+$")]
    """With its port, such as http://10.0.0.7:30000."""
    api_key_file: Path | None = None
    """Has the key of `--api-key`; null where it was started without one."""
    admin_key_file: Path | None = None
    """Has the key of `--admin-api-key`; null is the one of `api_key_file`."""


class RolloutRoleConfig(Section):
    pool: str | None = None
    """Where engines are started; null where `endpoints` names engines that run already."""
    endpoints: tuple[EndpointConfig, ...] = ()
    """Engines that megarl does not start. They are published to by files, which they read from `publish_folder`."""
    publish_folder: Path | None = None
    """Has the newest version for `endpoints`, which see it under the same path; null is `<run>/published`."""
    tensor: PositiveInt = 1
    """GPUs per engine; the pool holds as many engines as fit."""
    expert: PositiveInt = 1
    """Sets that the experts of a mixture are divided into, of `tensor` / `expert` GPUs each."""
    max_running_requests: PositiveInt = 128
    """Per engine, at the same time; what comes above that waits."""
    max_cached_tokens: PositiveInt | None = None
    """Size of the KV cache in tokens; without it the engine takes what memory is left (on CPU: 32,768)."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Share of GPU memory for weights and KV cache."""
    is_deterministic: bool = True
    """Same tokens whatever the order and size of the batch, at some cost in speed."""
    start_timeout_s: PositiveFloat = 300
    """Until an engine has generated its first tokens."""
    request_timeout_s: PositiveFloat = 600
    """Of one request, all its tokens included."""
    publish_timeout_s: PositiveFloat = 600
    """Deadline of each exchange of weights with the trainer ranks."""
    relays_weights: bool = False
    """Weights leave the trainers once and pass from one rollout node to the next: for many nodes and few trainers."""
    in_flight: InFlight | None = None
    """What a publish does to the requests that are running, with `train.max_staleness` above 0. `abort` (if null): they
    end, and go on from where they were as new requests; `retract`: they wait in the engine and go on with a KV cache
    that is computed again; `in_place`: they go on with the one they have, of the weights before."""
    canary_every: PositiveInt | None = 10
    """Publishes from one comparison of an engine's log-probabilities with the trainer's to the next; null: none."""
    max_attempts: PositiveInt = 3
    """How often one request is tried, each time on another engine where there is one."""
    max_restarts: NonNegativeInt = 3
    """Of an engine that dies or hangs; one that has served for an hour since has them all again."""
    restart_back_off_s: PositiveFloat = 1
    """Before the first restart; twice as long before each further one, up to a minute."""
    silence_timeout_s: PositiveFloat = 30
    """An engine that answers nothing for so long is taken for dead; after a third of it, it gets no more requests."""
    sglang: dict[str, object] = Field(default={})
    """Further options of the SGLang server, such as `attention_backend: fa3` for `--attention-backend fa3`."""


class RolesConfig(Section):
    actor: ActorConfig
    critic: CriticConfig | None = None
    """Needed by `gae`, and of use to nothing else."""
    reference: ReferenceConfig | None = None
    """Needed by `algorithm.kl`, and of use to nothing else."""
    rollout: RolloutRoleConfig | None = None
    """Not needed by `sft` without an evaluation."""


class SamplingConfig(Section):
    rollouts_per_prompt: PositiveInt = 8
    """The size of a group."""
    temperature: PositiveFloat = 1.0
    """Of generation and, so that both see the same policy, of the trained log-probabilities."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1 samples from the whole distribution."""
    top_k: PositiveInt | None = None
    """null samples from the whole distribution."""
    max_response_tokens: PositiveInt = 1024
    """A response that reaches it is cut there."""


class TrainConfig(Section):
    prompts_per_step: PositiveInt
    """Groups that are generated, then trained on."""
    prompts_per_update: PositiveInt | None = None
    """Mini-batch of one optimizer update; without it the whole step is one update."""
    epochs: PositiveInt = 1
    """How often the rollouts of a step are trained on."""
    tokens_per_micro_batch: PositiveInt = 8192
    """Sequences are packed up to this many tokens; must hold the longest prompt + response."""
    max_staleness: NonNegativeInt = 0
    """Steps a trained token's policy may be behind the one that is trained; 0 generates and trains in turn, 1 generates
    the next step while this one is trained, more lets engines run further ahead."""
    optimizer: OptimizerConfig = OptimizerConfig()
    operation_timeout_s: PositiveFloat = 1800
    """Deadline of every call to a trainer rank: past it the ranks hang, and their stacks are in `<run>/hang_*.txt`."""
    max_restarts: NonNegativeInt = 3
    """How often all ranks are started again, from the newest checkpoint, because one died or hung; counted anew with
    every checkpoint. 0 ends the run at once."""
    restart_pause_s: NonNegativeFloat = 1.0
    """Before the first of them; twice as long before each further one, and a minute at most."""

    @property
    def updates_per_step(self) -> int:
        return self.epochs * (self.prompts_per_step // (self.prompts_per_update or self.prompts_per_step))


class SampledEvaluationConfig(Section):
    """Several sampled rollouts per prompt: mean@n, pass@k, majority@n."""

    rollouts_per_prompt: PositiveInt = 8
    """n: the more, the less the numbers depend on luck."""
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
    """Answers to the prompts of `data.eval`, scored as the rollouts are; kept in `<run>/evaluations`."""

    every_steps: PositiveInt | None = None
    """Besides before the first and after the last step."""
    runs_before_training: bool = True
    """false skips the one before the first step."""
    max_prompts: PositiveInt | None = None
    """The first ones of `data.eval`; null takes all."""
    max_response_tokens: PositiveInt | None = None
    """null takes `sampling.max_response_tokens`."""
    is_greedy: bool = True
    """One rollout per prompt that takes the likeliest token each time: `accuracy`."""
    sampled: SampledEvaluationConfig | None = None
    """Sampled rollouts, besides the greedy one or, with `is_greedy: false`, instead of it."""
    right_from: float = 1.0
    """A score of at least this is a right answer: the built-in scorers give 1 for right, and part of it for less."""


class KeepBestConfig(Section):
    metric: str = "accuracy"
    """A number of the evaluation."""
    mode: Literal["max", "min"] = "max"
    """Whether more or less of it is better."""


class CheckpointConfig(Section):
    """In `<run>/checkpoints/step_N`; its `model` is a Hugging Face folder. A run that is stopped goes on from there."""

    save_every_steps: PositiveInt | None = 50
    """In the background; null saves only at the end, a new best, and when the run is asked to leave (SIGTERM)."""
    save_at_end: bool = True
    """After the last step; a run whose last step cannot be saved ends with exit code 4."""
    keep_last: PositiveInt = 2
    """Older ones are removed once a new one is complete."""
    keep_best: KeepBestConfig | None = None
    """Save every step whose evaluation beats all before it, and keep that one besides the last ones."""
    contents: Literal["everything", "weights"] = "everything"
    """A run can go on only from `everything`: weights, optimizer and where it stood."""
    grace_s: PositiveFloat = 120
    """After SIGTERM or SIGUSR1, to save what is trained; past it, or after a second SIGTERM, the run leaves at once."""


class RolloutSamplesConfig(Section):
    groups_per_step: NonNegativeInt = 4
    """Groups of a step that are kept, chosen by the run's seed; 0 keeps none.

    The trainer is asked for its log-probabilities of their tokens, where nobody else has asked."""
    every: PositiveInt = 1
    """Steps from one that is kept to the next."""
    max_megabytes: PositiveInt = 1024
    """Of all files together; the oldest go first."""


class TensorboardConfig(Section):
    folder: Path | None = None
    """Of the event files; without it `<run>/tensorboard`."""


class WandbConfig(Section):
    project: Annotated[str, Field(min_length=1)]
    entity: str | None = None
    """A team; without it that of the API key, which W&B finds in its own places."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to `<run>/wandb`, for `wandb sync`."""
    proxy: str | None = None
    """`http://host:port`, for W&B alone: nothing else of the run uses it."""
    tags: tuple[str, ...] = ()


class MlflowConfig(Section):
    tracking_uri: Annotated[str, Field(min_length=1)]
    """Such as `http://host:5000`."""
    experiment: Annotated[str, Field(min_length=1)] = "megarl"


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
    """What is kept in `<run>/rollouts` for `megarl view` and for people to read."""


class NetworkConfig(Section):
    """What listens: engines, the stores at which processes meet, the metrics. Ray has a token, engines have keys."""

    bind: str | None = None
    """A network in CIDR form, such as 10.1.0.0/16, or one address: each machine listens on its own address in it.
    null is loopback on one machine, and in a Ray cluster the address by which Ray knows the machine; metrics stay on
    loopback then."""


class Recipe(Section):
    run: RunConfig
    model: ModelConfig
    data: DataConfig
    pools: Annotated[dict[str, PoolConfig], Field(min_length=1)]
    roles: RolesConfig
    algorithm: AlgorithmConfig
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = ExactRewardConfig(kind="exact")
    train: TrainConfig
    evaluation: EvaluationConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    network: NetworkConfig = NetworkConfig()

    @property
    def run_folder(self) -> Path:
        return self.run.folder / self.run.name

    @property
    def data_parallel(self) -> int:
        """Of the actor."""
        return self.pools[self.roles.actor.pool].gpus // self.roles.actor.model_parallel

    @property
    def num_engines(self) -> int:
        """As many as fit into the pool, or as run already."""
        rollout = self.roles.rollout
        if rollout is None or rollout.pool is None:
            return 0 if rollout is None else len(rollout.endpoints)
        return self.pools[rollout.pool].gpus // rollout.tensor

    @property
    def used_pools(self) -> dict[str, str]:
        """By role: where its processes are."""
        roles = self.roles
        named = {"actor": roles.actor, "critic": roles.critic, "reference": roles.reference, "rollout": roles.rollout}
        return {name: role.pool for name, role in named.items() if role is not None and role.pool is not None}

    @property
    def megatron_roles(self) -> dict[str, ModelParallelConfig]:
        """Those whose ranks Megatron splits a model over, with how; a reference in the actor's ranks has none."""
        roles = self.roles
        named = {"actor": roles.actor, "critic": roles.critic, "reference": roles.reference}
        return {name: role for name, role in named.items() if role is not None and role.pool is not None}

    @property
    def in_flight(self) -> InFlight | None:
        """What a publish does to running requests; None where there are none."""
        rollout = self.roles.rollout
        return (rollout.in_flight or "abort") if rollout is not None and self.train.max_staleness else None

    @property
    def evaluation_response_tokens(self) -> int:
        """Of the longest answer in an evaluation; 0 where there is none."""
        if self.evaluation is None:
            return 0
        return self.evaluation.max_response_tokens or self.sampling.max_response_tokens

    @property
    def max_context_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.sampling.max_response_tokens
