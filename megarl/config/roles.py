"""The recipe's `pools` and `roles`: which GPUs there are, and how trainers and engines are placed and split on them.

At the end the scores that teachers on engines compute for each rollout, and the choice of a prompt's teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.draft import DraftConfig
from megarl.config.section import PAD_MULTIPLE, Device, DtypeName, Section, dtype_on
from megarl.errors import DataError


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
    """The peak, after the warm-up."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Where `decay` ends."""
    warmup_steps: NonNegativeInt = 0
    """Linear, from zero."""
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the run's steps to warm up for, instead of `warmup_steps`."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, until the last step."""
    weight_decay: NonNegativeFloat = 0.01
    """Not applied to norms and biases."""
    beta1: Decay = 0.9
    """Decay of Adam's mean of gradients."""
    beta2: Decay = 0.95
    """Decay of Adam's mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """Added to Adam's denominator."""
    clip_grad_norm: PositiveFloat = 1.0
    """Bound on the norm of all gradients together."""


Scaling: TypeAlias = Literal["tensorwise", "blockwise", "delayed"]
FP8_TOKENS: Mapping[Scaling, int] = {"tensorwise": 16, "blockwise": 128, "delayed": 16}
"""The number of tokens on a rank is a multiple of this: FP8 products sum over tokens, in blocks of this size."""


class ModelParallelConfig(Section):
    """How a Megatron model is split over the ranks of its pool; the rest is data parallel."""

    tensor: PositiveInt = 1
    """Ranks that share every matrix (tensor parallelism); must divide the attention heads."""
    pipeline: PositiveInt = 1
    """Stages of consecutive layers (pipeline parallelism), each on ranks of its own."""
    virtual_pipeline: PositiveInt = 1
    """Model chunks per pipeline stage (interleaved schedule when > 1)."""
    is_sequence_parallel: bool = False
    """Shard activations along the sequence between the tensor-parallel ranks."""
    context: PositiveInt = 1
    """Ranks that share the tokens of each sequence, for sequences whose activations exceed one GPU."""
    context_exchange: Literal["gather", "ring", "all_to_all"] = "gather"
    """How these ranks attend to one another's tokens. `gather`: each gets all keys and values. `ring` and `all_to_all`
    are Transformer Engine's: keys and values go around while others are attended to, or each rank gets whole sequences
    of some heads."""
    expert: PositiveInt = 1
    """Ranks that share out the experts of a mixture; each rank of a pipeline stage belongs to one such set."""
    expert_tensor: PositiveInt | None = None
    """Ranks that share one expert, with `expert` > 1; null is `tensor`. Small experts are faster with 1."""
    first_stage_layers: PositiveInt | None = None
    """Layers of the first pipeline stage; null: as many as the other stages."""
    last_stage_layers: PositiveInt | None = None
    """Layers of the last pipeline stage; null: as many as the other stages."""
    dispatcher: Literal["alltoall", "deepep"] = "alltoall"
    """Sends tokens to their experts on other ranks: collectives of NCCL, or the kernels of DeepEP where it is
    installed."""
    kernels: Literal["auto", "local", "torch", "te"] = "auto"
    """The linear layers: Megatron's own, or those of Transformer Engine, which compute in FP8 and run the experts of a
    rank together. `auto` takes Transformer Engine for `precision: fp8`, and for experts where it is installed. `torch`
    is local without the fused kernels of Triton: slower, for comparisons and for GPUs that Triton does not know."""
    precision: Literal["bf16", "fp8", "fp32"] = "bf16"
    """The products of linear layers: bfloat16 (float32 on CPUs), or FP8. With fp8 weights, gradients, checkpoints and
    what is published stay as they are with bf16; head, embedding, attention, first and last layer compute in bf16. A
    critic can have fp32: weights, activations and products in float32, attention in bfloat16; many times slower."""
    fp8_scaling: Scaling = "tensorwise"
    """One scale for a tensor, from its present values; one for each block of 128, as FP8 engines have it; or `delayed`:
    one for a tensor, from its past values. Delayed includes the first and last layer; the first update after a
    start or a resume has no past values, so that a resumed run is not equal bit for bit."""
    megatron: dict[str, object] = Field(default={})
    """Further fields of megatron-core's TransformerConfig, such as `recompute_granularity: full`."""

    def dtype_on(self, device: Device) -> DtypeName:
        """Return the dtype of weights and activations."""
        return "float32" if self.precision == "fp32" else dtype_on(device)

    @property
    def is_fused(self) -> bool:
        """Whether megarl's kernels of Triton are used, where there is a GPU."""
        return self.kernels != "torch"

    @property
    def model_parallel(self) -> int:
        return self.tensor * self.context * self.pipeline

    @property
    def sequence_multiple(self) -> int:
        """The number of tokens that each sequence in a pack is padded to a multiple of."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def pack_multiple(self) -> int:
        """The number of tokens that packs are padded to a multiple of: even shares of all ranks."""
        per_rank = FP8_TOKENS[self.fp8_scaling] if self.precision == "fp8" else PAD_MULTIPLE
        return per_rank * self.tensor * self.context

    @property
    def ranks_per_expert(self) -> int:
        return self.tensor if self.expert_tensor is None else self.expert_tensor


PIECE_ELEMENTS = 1 << 24
NUM_PIECES = 2
"""Pieces of an optimizer in host memory that are on the GPU at once: one is updated while the other is copied."""


class TrainedModelConfig(ModelParallelConfig):
    offload: Literal["nothing", "optimizer", "everything"] = "nothing"
    """State in host memory: the optimizer's, of which each update has a piece at a time on the GPU, or also the weights
    while engines generate in this pool. With either, gradients have GPU memory only from a pass to the publish."""
    megatron_optimizer: dict[str, object] = Field(default={})
    """Further fields of megatron-core's OptimizerConfig, such as `decoupled_weight_decay: false`."""
    megatron_ddp: dict[str, object] = Field(default={})
    """Further fields of megatron-core's DistributedDataParallelConfig, such as `overlap_grad_reduce: true`."""


class ActorConfig(TrainedModelConfig):
    pool: str
    """The GPUs of its ranks, a name of `pools`; that of `rollout` as well where they take turns."""


class CriticConfig(TrainedModelConfig):
    """Learns which reward to expect at every token; its ranks are processes of their own in any pool."""

    pool: str
    """The GPUs of its ranks, a name of `pools`."""
    path: Path | None = None
    """A folder like `model.path`, of a language model or an earlier critic; null starts from `model.path`."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    prompts_per_update: PositiveInt | None = None
    """Mini-batch of one update of the critic; null is that of `train`."""
    epochs: PositiveInt = 1
    """How often the critic sees the rollouts of a step."""
    warmup_steps: NonNegativeInt = 0
    """First steps in which only the critic learns."""
    clip: PositiveFloat = 0.5
    """How far an update may move a value before its loss stops falling."""


class DrafterConfig(TrainedModelConfig):
    """Teaches `rollout.draft`, of kind model, what the policy answers; its ranks are processes of their own."""

    pool: str
    """The GPUs of its ranks, a name of `pools`."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4)
    every_steps: PositiveInt = 1
    """Steps from one update to the next. Each learns the responses of its step, and the next publish sends the draft
    to the engines as well."""
    epochs: PositiveInt = 1
    """How often it sees these responses."""


class ReferenceConfig(ModelParallelConfig):
    """The policy that `algorithm.kl` measures the distance to; never trained."""

    pool: str | None = None
    """null keeps it in host memory of the actor's ranks, which take its weights for a forward pass in every step."""
    path: Path | None = None
    """A folder like `model.path`, of a model of the same shape; null is `model.path`."""


_UNPLANNED_REQUESTS = 128
"""Requests of an engine outside of a run, such as one that a tool asks."""
_QUEUE_DIVISOR = 8
"""An engine has up to 1 / 8 of its running requests waiting: those that end while the next are on their way."""
InFlight: TypeAlias = Literal["abort", "retract", "in_place"]


class EndpointConfig(Section):
    """An SGLang server that runs already; megarl neither starts nor stops it."""

    url: Annotated[str, Field(pattern=r"^https?://[^/@:\s]+:[0-9]+$")]
    """With its port, such as http://10.0.0.7:30000."""
    api_key_file: Path | None = None
    """File with the key of `--api-key`; null for a server that was started without one."""
    admin_key_file: Path | None = None
    """File with the key of `--admin-api-key`; null is `api_key_file`."""


class EngineRoleConfig(Section):
    """The keys of every role that SGLang engines serve."""

    pool: str | None = None
    """Where engines are started; null where `endpoints` names engines that run already."""
    endpoints: tuple[EndpointConfig, ...] = ()
    """Engines that megarl does not start. Those of `rollout` are published to by files in `publish_folder`."""
    tensor: PositiveInt = 1
    """GPUs per engine; the pool holds as many engines as fit."""
    expert: PositiveInt = 1
    """Expert-parallel size: the experts of a mixture are divided into so many sets of `tensor` / `expert` GPUs."""
    max_running_requests: PositiveInt | None = None
    """Requests that an engine computes at the same time; further ones wait. null: as many as a step sends to it
    and its KV cache holds halfway through their responses (`megarl plan` prints the number)."""
    max_cached_tokens: PositiveInt | None = None
    """Size of the KV cache in tokens; null takes what `megarl plan` grants in a pool that is shared with trainers (all
    requests at their longest, as far as there is memory), else the memory that is left (on CPU: 32,768)."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Share of GPU memory for weights and KV cache."""
    is_deterministic: bool | None = None
    """Same tokens whatever the order and size of the batch, at some cost in speed; null: on CPU only."""
    start_timeout_s: PositiveFloat | None = None
    """Until an engine has answered its first request; null: 600 s, and 1 s for each GB of its weights."""
    request_timeout_s: PositiveFloat | None = None
    """For one request with all its tokens; null: 600 s, and for each token of the longest response 0.05 s and 4 ms for
    each GB of weights on one GPU."""
    max_attempts: PositiveInt = 3
    """How often one request is tried, each time on another engine where there is one."""
    max_restarts: NonNegativeInt = 3
    """Restarts of an engine that dies or hangs; an hour of service restores them all."""
    restart_back_off_s: PositiveFloat = 1
    """Pause before the first restart; it doubles with each further one, up to a minute."""
    silence_timeout_s: PositiveFloat = 30
    """An engine that does not answer for this long counts as dead; after a third of it, it gets no more requests."""
    sglang: dict[str, object] = Field(default={})
    """Further options of the SGLang server, such as `attention_backend: fa3` for `--attention-backend fa3`."""

    @property
    def running_requests(self) -> int:
        """`max_running_requests`, written or derived: `planner.deployment.deploy` derives it for every run."""
        return self.max_running_requests or _UNPLANNED_REQUESTS

    @property
    def outstanding_requests(self) -> int:
        """Requests that an engine has at a time: a few wait in it, so that it computes several prompts together."""
        return self.running_requests + max(1, self.running_requests // _QUEUE_DIVISOR)

    def is_deterministic_on(self, device: Device) -> bool:
        """Whether the tokens of a request are independent of its batch, by the recipe or else by the device."""
        return device == "cpu" if self.is_deterministic is None else self.is_deterministic

    @property
    def fp8_keep(self) -> tuple[str, ...] | None:
        """The patterns of modules in bfloat16 beside FP8 weights; None: no weights are in FP8."""
        return None

    @property
    def served_draft(self) -> DraftConfig | None:
        """The draft that guesses tokens in the engines; None where nothing does."""
        return None

    @property
    def gives_up_memory(self) -> bool:
        """Whether engines that share a pool give up memory there while others compute."""
        return True

    @property
    def has_fp8_cache(self) -> bool:
        """Whether keys and values are cached in FP8, with scale 1."""
        return str(self.sglang.get("kv_cache_dtype", "")).startswith("fp8")


class FrozenRoleConfig(EngineRoleConfig):
    """A model that is never trained and never published to, on engines in a pool of its own or of other roles."""

    model: Path
    """A folder like `model.path`, with its own tokenizer and chat template; also for `endpoints`, which serve it."""


class TeacherRanksConfig(ModelParallelConfig):
    """A teacher as Megatron ranks, computed as the policy is: the same weights have the same log-probabilities."""

    kind: Literal["ranks"]
    pool: str
    """Its own, or that of another role: models of one pool compute one after the other."""
    model: Path
    """A folder like `model.path`, of a model of any shape with the same tokenizer."""
    sources: tuple[str, ...] = ()
    """Values of `data.source_key` whose prompts it teaches; empty: all that no other teacher names."""


class TeacherEnginesConfig(FrozenRoleConfig):
    """A teacher on SGLang engines, asked when a rollout is complete. `endpoints` need `sampling.temperature` 1."""

    kind: Literal["engines"]
    sources: tuple[str, ...] = ()
    """The same as those of a teacher on ranks."""


TeacherConfig: TypeAlias = Annotated[TeacherRanksConfig | TeacherEnginesConfig, Field(discriminator="kind")]


class RolloutRoleConfig(EngineRoleConfig):
    precision: Literal["bf16", "fp8"] = "bf16"
    """The weights and products of linear layers in engines: bfloat16 (float32 on CPUs), or FP8 with a scale for each
    block of 128 x 128, quantised by the trainer ranks at each publish: half the weights, half the traffic. Head,
    embedding, norms, router and attention stay in bfloat16. Needs Hopper GPUs and `algorithm.correction`."""
    keep_bf16: tuple[str, ...] = ()
    """Patterns of further modules in bfloat16 with fp8, such as `model.layers.0.*`, `*.o_proj` or `*.mlp.experts`."""
    publish_folder: Path | None = None
    """Holds the newest version for `endpoints`, which see it under the same path; null is `<run>/published`."""
    release: Literal["nothing", "kv_cache", "everything"] | None = None
    """Memory that engines give up while trainers work in their pool. With `everything` their weights go as well, and
    each step ends with a publish that brings them back. null: nothing if the plan has room for engines and trainers at
    once, else `kv_cache`."""
    publish_timeout_s: PositiveFloat = 600
    """Deadline of each exchange of weights with the trainer ranks."""
    relays_weights: bool = False
    """Weights leave the trainers once and pass from one rollout node to the next: for many nodes and few trainers."""
    in_flight: InFlight | None = None
    """The treatment of running requests during a publish, with `train.max_staleness` above 0. `abort` (if null): they
    end, and go on from where they were as new requests; `retract`: they wait in the engine and go on with a KV cache
    that is computed again; `in_place`: they go on with the one they have, of the weights before."""
    draft: DraftConfig | None = None
    """Speculative decoding: several tokens for one pass of the policy, with the policy's probabilities. On a CPU, one
    token that a model guesses."""
    canary_every: PositiveInt | None = 10
    """Publishes from one comparison of an engine's log-probabilities with the trainer's to the next; null: none."""
    workers: NonNegativeInt | None = None
    """Rollout workers on each node with engines: processes that ask engines, check and score the answers, and keep them
    until ranks train on them. 0: the driver does it. null: 0 if all engines are on one node, else 1."""

    @property
    def served_draft(self) -> DraftConfig | None:
        draft, requests = self.draft, self.max_running_requests
        # Until the plan has derived the requests, memory is left for a draft.
        return draft if draft is not None and (requests is None or draft.is_started(requests)) else None

    @property
    def gives_up_memory(self) -> bool:
        return self.release != "nothing"

    @property
    def fp8_keep(self) -> tuple[str, ...] | None:
        return self.keep_bf16 if self.precision == "fp8" else None


class RolesConfig(Section):
    actor: ActorConfig
    critic: CriticConfig | None = None
    """Needed by `gae`, and by `prime` as its reward model; only they use it."""
    drafter: DrafterConfig | None = None
    """null: `rollout.draft` stays as it is while the policy learns."""
    reference: ReferenceConfig | None = None
    """Needed by `algorithm.kl`; only `algorithm.kl` uses it."""
    rollout: RolloutRoleConfig | None = None
    """Not needed by `sft` without an evaluation."""
    reward_model: dict[str, FrozenRoleConfig] = Field(default={})
    """Sequence classifiers by name, for `reward: {kind: reward_model}`."""
    judge: dict[str, FrozenRoleConfig] = Field(default={})
    """Language models by name, for `reward: {kind: engine_judge}`."""
    teacher: dict[str, TeacherConfig] = Field(default={})
    """Models by name that `algorithm.distillation` draws the policy to; all on ranks or all on engines."""

    @property
    def frozen(self) -> dict[str, FrozenRoleConfig]:
        """The models on engines that are never trained, by their key below `roles`."""
        kinds = {"reward_model": self.reward_model, "judge": self.judge}
        scoring = {f"{kind}.{name}": role for kind, named in kinds.items() for name, role in named.items()}
        return {**scoring, **{key: role for key, role in self.teachers.items() if role.kind == "engines"}}

    @property
    def teachers(self) -> dict[str, TeacherRanksConfig | TeacherEnginesConfig]:
        """The teachers by their key below `roles`."""
        return {f"teacher.{name}": role for name, role in self.teacher.items()}

    @property
    def teacher_ranks(self) -> dict[str, TeacherRanksConfig]:
        """The teachers on Megatron ranks by their key below `roles`."""
        return {key: role for key, role in self.teachers.items() if role.kind == "ranks"}

    @property
    def on_engines(self) -> dict[str, EngineRoleConfig]:
        """All roles that SGLang engines serve, by their key below `roles`."""
        return {**({"rollout": self.rollout} if self.rollout else {}), **self.frozen}

    def with_running_requests(self, requests: Mapping[str, int]) -> RolesConfig:
        """Return these roles with `max_running_requests` of all that engines serve, by their key below `roles`."""
        counted = {
            key: role.model_copy(update={"max_running_requests": requests[key]})
            for key, role in self.on_engines.items()
        }
        kinds: Mapping[str, Mapping[str, object]] = {
            "reward_model": self.reward_model,
            "judge": self.judge,
            "teacher": self.teacher,
        }
        named = {
            kind: {name: counted.get(f"{kind}.{name}", role) for name, role in roles.items()}
            for kind, roles in kinds.items()
        }
        return self.model_copy(update={"rollout": counted.get("rollout"), **named})

    @property
    def used_pools(self) -> dict[str, str]:
        """The pool of each role that has one."""
        pools = {name: role.pool for name, role in (*self.megatron_roles.items(), *self.on_engines.items())}
        return {name: pool for name, pool in pools.items() if pool is not None}

    @property
    def beside_engines(self) -> tuple[str, ...]:
        """The roles that share the pool of the engines megarl starts."""
        pools = self.used_pools
        return tuple(role for role, pool in pools.items() if role != "rollout" and pool == pools.get("rollout"))

    @property
    def frozen_in_turns(self) -> dict[str, str]:
        """The pool of each frozen role that shares one: it is on its devices only while it scores."""
        users, frozen = self.used_pools, self.frozen
        return {role: pool for role, pool in users.items() if role in frozen and list(users.values()).count(pool) > 1}

    @property
    def trained(self) -> dict[str, ActorConfig | CriticConfig | DrafterConfig]:
        """The roles whose models learn."""
        named = {"actor": self.actor, "critic": self.critic, "drafter": self.drafter}
        return {name: role for name, role in named.items() if role is not None}

    @property
    def draft_learns_every(self) -> int | None:
        """Steps from one update of the draft to the next; None where it stays as it is."""
        return None if self.drafter is None else self.drafter.every_steps

    @property
    def in_turns_with_engines(self) -> list[str]:
        """The keys by which others have the memory of the engines' pool in turns with them, however much there is."""
        pool = self.used_pools.get("rollout")
        offloaded = [
            f"roles.{role}.offload"
            for role, each in self.trained.items()
            if each.pool == pool and each.offload != "nothing"
        ]
        return [*offloaded, *(f"roles.{role}" for role, used in self.frozen_in_turns.items() if used == pool)]

    @property
    def scores_after_generation(self) -> bool:
        """Whether a frozen model has the pool of the rollout engines: a step is scored when it is generated."""
        return self.rollout is not None and self.rollout.pool in self.frozen_in_turns.values()

    @property
    def megatron_roles(
        self,
    ) -> dict[str, ActorConfig | CriticConfig | DrafterConfig | ReferenceConfig | TeacherRanksConfig]:
        """The roles with Megatron ranks of their own; a reference in the actor's ranks is not one."""
        named = {**self.trained, "reference": self.reference, **self.teacher_ranks}
        return {name: role for name, role in named.items() if role is not None and role.pool is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """The scores that teachers compute for every rollout."""

    num_top: int
    """K, the likeliest tokens at each place."""
    vocab: int
    """The size of the policy's vocabulary: the likeliest tokens are below it."""
    sources: tuple[tuple[str, tuple[str, ...]], ...]
    """The sources of each teacher, which is given by its key below `roles`."""

    @property
    def width(self) -> int:
        """Columns per token: its log-probability, those of the K likeliest tokens, and their ids."""
        return 1 + 2 * self.num_top


def teaching_of(algorithm: AlgorithmConfig, roles: RolesConfig, vocab: int) -> Teaching | None:
    """Return the scores that a recipe needs; None without a teacher on engines. `vocab` is that of the policy."""
    distillation = algorithm.distillation
    sources = tuple((role, each.sources) for role, each in roles.teachers.items() if each.kind == "engines")
    if distillation is None or not sources:
        return None
    return Teaching(num_top=distillation.top_k, vocab=vocab, sources=sources)


def teacher_of(source: str, sources: Mapping[str, Sequence[str]]) -> str:
    """Return the teacher of a prompt's source: the one that names it, else the one that names none."""
    for name, named in sources.items():
        if source in named:
            return name
    for name, named in sources.items():
        if not named:
            return name
    raise DataError(
        f"no teacher for prompts of source {source}: name it in the sources of one of roles.teacher, "
        "or leave the sources of one out"
    )
