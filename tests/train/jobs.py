"""Jobs of the rank processes. Each function runs in every rank of a `Cluster`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
import torch

from megarl.checkpoint.manifest import FileDigest
from megarl.checkpoint.resume import TrainerState
from megarl.config import roles
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.lora import LoraConfig
from megarl.config.roles import ActorConfig, CriticConfig, OptimizerConfig
from megarl.errors import CheckpointError, ConfigError, DamagedError, MachineError, NumericsError
from megarl.families.shape import ModelShape
from megarl.ranks.publishing import PublishingActor
from megarl.results import CriticResult, CriticStats, UpdateResult, UpdateStats
from megarl.tokens import SampleColumn
from megarl.train import cpu, offload
from megarl.train.actor import ActorRank
from megarl.train.critic import CriticRank, ImplicitRewardRank
from megarl.train.frozen import ReferenceRank, TeacherRank
from megarl.train.logprob import token_scores, vocab_shard
from megarl.train.lora import MergedTensors
from megarl.train.rank_spec import ImageFiles, RankSpec, TrainerRecord
from megarl.train.topology import Topology, initialize, shut_down
from megarl.types import FloatArray, PolicyVersion, TrainBatch

P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    actor: ActorConfig | CriticConfig
    folder: Path
    shape: ModelShape
    optimizer: OptimizerConfig
    algorithm: AlgorithmConfig
    epochs: int = 1
    timeout_s: float = 300
    lora: LoraConfig | None = None
    images: ImageFiles | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreInputs:
    hidden: FloatArray  # [N, hidden]
    weight: FloatArray  # [rows, hidden]; rows beyond `vocab` are padding
    targets: npt.NDArray[np.int64]  # [N]
    importance: FloatArray  # [2, N]: how much each log-probability and entropy counts in the loss
    vocab: int
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOutcome:
    logprobs: FloatArray
    entropy: FloatArray
    grad_hidden: FloatArray
    grad_weight: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of one rank."""

    logprobs: list[SampleColumn | None]
    result: UpdateResult
    tensors: dict[str, FloatArray]

    @property
    def stats(self) -> UpdateStats:
        assert self.result.stats is not None, "no update was applied"
        return self.result.stats


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOutcome:
    """The results of one rank of a critic, or of an implicit reward model."""

    values: SampleColumn | None
    result: CriticResult
    after: SampleColumn | None
    """The values after the update."""
    tensors: dict[str, FloatArray]
    state: TrainerState

    @property
    def stats(self) -> CriticStats:
        assert self.result.stats is not None, "no update was applied"
        return self.result.stats


def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, FloatArray]:
    return {name: tensor.float().numpy().copy() for name, tensor in tensors.items()}


def spec_of(rank: int, world: int, port: int, setup: Setup) -> RankSpec:
    return RankSpec(
        rank=rank,
        world=world,
        master_address="127.0.0.1",
        master_port=port,
        device="cpu",
        split=setup.actor,
        shape=setup.shape,
        seed=1,
        timeout_s=setup.timeout_s,
        lora=setup.lora,
        images=setup.images,
    )


def build_empty(rank: int, world: int, port: int, setup: Setup) -> ActorRank:
    return ActorRank(
        spec_of(rank, world, port, setup),
        algorithm=setup.algorithm,
        optimizer=setup.optimizer,
        total_steps=4,
        epochs=setup.epochs,
    )


def build(rank: int, world: int, port: int, setup: Setup) -> ActorRank:
    trainer = build_empty(rank, world, port, setup)
    trainer.load(setup.folder)
    return trainer


def on_actor(
    job: Callable[Concatenate[ActorRank, Setup, P], Result],
) -> Callable[Concatenate[int, int, int, Setup, P], Result]:
    """Make a job of what is done with an actor that has its weights."""

    @wraps(job)
    def run(rank: int, world: int, port: int, setup: Setup, /, *arguments: P.args, **options: P.kwargs) -> Result:
        trainer = build(rank, world, port, setup)
        result = job(trainer, setup, *arguments, **options)
        trainer.close()
        return result

    return run


@on_actor
def train(trainer: ActorRank, _: Setup, scored: Sequence[TrainBatch], trained: TrainBatch) -> Outcome:
    """Score some batches, then update with one."""
    logprobs = [trainer.logprobs(batch) for batch in scored]
    result = trainer.update(trained)
    return Outcome(logprobs=logprobs, result=result, tensors=copied(trainer.trained_tensors()))


@on_actor
def merge(trainer: ActorRank, _: Setup) -> Outcome:
    """Return this rank's weights with its adapter in them, twice derived."""
    merged = MergedTensors(trainer._models, trainer.tensors())
    merged.fill()
    merged.free()
    merged.fill()
    result = UpdateResult(version=PolicyVersion(0), stats=None)
    return Outcome(logprobs=[], result=result, tensors=copied(merged.tensors))


@on_actor
def score(trainer: ActorRank, _: Setup, batch: TrainBatch) -> SampleColumn | None:
    return trainer.logprobs(batch)


def teach(rank: int, world: int, port: int, setup: Setup, num_top: int, question: TrainBatch) -> SampleColumn | None:
    """Return the answer of a teacher with the setup's model and split."""
    teacher = TeacherRank(spec_of(rank, world, port, setup), num_top=num_top, vocab=setup.shape.vocab)
    teacher.load(setup.folder)
    scores = teacher.logprobs(question)
    teacher.close()
    return scores


def fail_to_start(rank: int, world: int, port: int, setup: Setup) -> str:
    try:
        build(rank, world, port, setup)
    except CheckpointError as error:
        return str(error)
    except ConfigError as error:
        return str(error.problems[0])
    finally:
        shut_down()
    return "no error"


@on_actor
def update_until_error(
    trainer: ActorRank, _: Setup, batches: Sequence[TrainBatch]
) -> tuple[list[UpdateResult], str, bool]:
    """Return every result, the error that ended them, and whether the weights are unchanged."""
    before = copied(trainer.tensors())
    results: list[UpdateResult] = []
    message = "no error"
    try:
        results.extend(trainer.update(batch) for batch in batches)
    except NumericsError as error:
        message = str(error)
    after = copied(trainer.tensors())
    return results, message, all(np.array_equal(after[name], before[name]) for name in before)


def score_vocab_shards(rank: int, world: int, port: int, inputs: ScoreInputs) -> ScoreOutcome:
    """Return scores over a vocabulary that is split over the ranks, and the gradients of their weighted sum."""
    topology = join(rank, world, port, ActorConfig(pool="train", tensor=world))
    rows = len(inputs.weight) // world
    hidden = torch.tensor(inputs.hidden, requires_grad=True)
    weight = torch.tensor(inputs.weight[rank * rows : (rank + 1) * rows], requires_grad=True)
    shard = vocab_shard(vocab=inputs.vocab, rows=rows, rank=rank, size=world, group=topology.tensor_group)
    scores = token_scores(
        hidden,
        weight,
        torch.tensor(inputs.targets),
        shard=shard,
        temperature=inputs.temperature,
        max_chunk_bytes=4 * rows * 4,
    )
    (torch.stack(scores[:2]) * torch.tensor(inputs.importance)).sum().backward()  # type: ignore[no-untyped-call]
    shut_down()
    assert hidden.grad is not None
    assert weight.grad is not None
    return ScoreOutcome(
        logprobs=scores.logprobs.detach().numpy(),
        entropy=scores.entropy.detach().numpy(),
        grad_hidden=hidden.grad.numpy(),
        grad_weight=weight.grad.numpy(),
    )


def join(rank: int, world: int, port: int, actor: ActorConfig, timeout_s: float = 300) -> Topology:
    cpu.install()
    return initialize(
        actor,
        rank=rank,
        world=world,
        master_address="127.0.0.1",
        master_port=port,
        device="cpu",
        seed=1,
        timeout_s=timeout_s,
    )


def coordinates(
    rank: int, world: int, port: int, actor: ActorConfig
) -> tuple[int, int, int, int, list[bool], list[bool]]:
    topology = join(rank, world, port, actor)
    chunks = range(topology.virtual_pipeline)
    shut_down()
    return (
        topology.tensor_rank,
        topology.context_rank,
        topology.data_rank,
        topology.pipeline_rank,
        [topology.is_first_chunk(chunk) for chunk in chunks],
        [topology.is_last_chunk(chunk) for chunk in chunks],
    )


def wait_alone(rank: int, world: int, port: int, timeout_s: float) -> str:
    """Return the error of a rank whose peer is missing."""
    try:
        join(rank, 2, port, ActorConfig(pool="train", tensor=2), timeout_s)
    except MachineError as error:
        return str(error)
    return "no error"


def ask_for_cuda(rank: int, world: int, port: int) -> tuple[str, str, str, bool]:
    """Return the devices of tensors that Megatron creates on a GPU, inside and outside the mode."""
    cpu.install()
    cpu.install()
    with cpu.literal_devices():
        inside = torch.zeros(1, device="cuda")
    try:
        torch.zeros(1, device="cuda")
        is_refused_outside = False
    except (RuntimeError, AssertionError):
        is_refused_outside = True
    return inside.device.type, torch.ones(1).cuda().device.type, torch.ones(1).type(), is_refused_outside


def send_unfinite(rank: int, world: int, port: int, setup: Setup) -> str:
    """Return why a rank does not send its adapter; it is in no transfer group yet."""
    trainer = PublishingActor(
        spec_of(rank, world, port, setup),
        algorithm=setup.algorithm,
        optimizer=setup.optimizer,
        total_steps=4,
        epochs=1,
        bind=None,
    )
    trainer.load(setup.folder)
    values = next(iter(trainer.trained_tensors().values()))
    values[0, :2] = 1e30
    with pytest.raises(AssertionError, match="join comes first"):
        trainer.send(0)
    values[0, :2] = torch.inf
    with pytest.raises(NumericsError) as caught:
        trainer.send(0)
    trainer.close()
    return str(caught.value)


@on_actor
def train_and_save_twice(
    trainer: ActorRank,
    setup: Setup,
    before: Sequence[TrainBatch],
    after: Sequence[TrainBatch],
    folders: tuple[Path, Path],
) -> tuple[TrainerState, TrainerState]:
    """Update with some batches and save everything; do the same with the others."""
    states = []
    for batches, folder in zip((before, after), folders, strict=True):
        for batch in batches:
            trainer.update(batch)
        states.append(trainer.snapshot("everything"))
        trainer.write(folder, setup.folder)
    return states[0], states[1]


@on_actor
def train_and_save(
    trainer: ActorRank, setup: Setup, batches: Sequence[TrainBatch], folder: Path
) -> tuple[TrainerState, dict[str, FileDigest], dict[str, FloatArray]]:
    """Update with every batch, then save everything."""
    for batch in batches:
        trainer.update(batch)
    state = trainer.snapshot("everything")
    files = trainer.write(folder, setup.folder)
    return state, files, copied(trainer.trained_tensors())


@on_actor
def train_in_turns(
    trainer: ActorRank, setup: Setup, batches: Sequence[TrainBatch], folder: Path
) -> tuple[dict[str, FileDigest], dict[str, FloatArray], str]:
    """Release and reload around every update; save while released, and try to compute."""
    for batch in batches:
        trainer.release()
        trainer.reload()
        trainer.logprobs(batch)
        trainer.update(batch)
        trainer.trim()
    trainer.release()
    trainer.snapshot("everything")
    files = trainer.write(folder, setup.folder)
    try:
        trainer.logprobs(batches[0])
        message = "computed"
    except AssertionError as error:
        message = str(error)
    trainer.reload()
    return files, copied(trainer.trained_tensors()), message


def as_on_a_gpu(rank: int, world: int, port: int, job: Callable[..., Result], *arguments: object) -> Result:
    """Run a job with bfloat16 weights, which have master weights apart, and pieces of a few elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roles, "dtype_on", lambda _: "bfloat16")
        patch.setattr(offload, "PIECE_ELEMENTS", 997)
        return job(rank, world, port, *arguments)


def resume_and_train(
    rank: int,
    world: int,
    port: int,
    setup: Setup,
    checkpoint: Path,
    state: TrainerState,
    batches: Sequence[TrainBatch],
    folder: Path,
) -> tuple[TrainerState, list[UpdateResult]]:
    """Resume from a checkpoint, update with every batch, then save everything."""
    trainer = build_empty(rank, world, port, setup) if setup.lora is None else build(rank, world, port, setup)
    trainer.resume(checkpoint, state)
    results = [trainer.update(batch) for batch in batches]
    reached = trainer.snapshot("everything")
    trainer.write(folder, setup.folder)
    trainer.close()
    return reached, results


@on_actor
def fail_to_verify(trainer: ActorRank, _: Setup, checkpoint: Path) -> str:
    """Return the error of a rank that compares its tensors of a checkpoint with their digests."""
    try:
        trainer.verify(checkpoint, "")
    except DamagedError as error:
        return str(error)
    return ""


@on_actor
def fail_to_save_and_go_on(
    trainer: ActorRank, setup: Setup, batch: TrainBatch, folder: Path
) -> tuple[str, UpdateResult]:
    """Return the error of a save to a folder that cannot be written, and the update after it."""
    message = write(trainer, folder, setup)
    return message, trainer.update(batch)


def write(trainer: ActorRank, folder: Path, setup: Setup) -> str:
    """Save the weights; return the error."""
    trainer.snapshot("weights")
    try:
        trainer.write(folder, setup.folder)
    except CheckpointError as error:
        return str(error)
    return "no error"


def build_critic(rank: int, world: int, port: int, setup: Setup) -> CriticRank:
    critic = setup.actor
    assert isinstance(critic, CriticConfig), critic
    return CriticRank(
        spec_of(rank, world, port, setup),
        algorithm=setup.algorithm,
        optimizer=setup.optimizer,
        total_steps=4,
        epochs=critic.epochs,
        clip=critic.clip,
    )


def train_critic(
    rank: int, world: int, port: int, setup: Setup, batch: TrainBatch, folder: Path | None = None
) -> CriticOutcome:
    """Compute values of a batch, update with it, and save."""
    critic = build_critic(rank, world, port, setup)
    critic.load(setup.folder)
    outcome = learned(critic, batch)
    if folder is not None:
        critic.snapshot("everything")
        critic.write(folder, setup.folder)
    critic.close()
    return outcome


def learn_rewards(rank: int, world: int, port: int, setup: Setup, batch: TrainBatch) -> CriticOutcome:
    """Compute the rewards of tokens before and after an update of an implicit reward model."""
    spec = spec_of(rank, world, port, setup)
    model = ImplicitRewardRank(spec, algorithm=setup.algorithm, optimizer=setup.optimizer, total_steps=4)
    model.load(setup.folder)
    model.load_start(setup.folder)
    outcome = learned(model, batch)
    model.close()
    return outcome


def learned(model: CriticRank | ImplicitRewardRank, batch: TrainBatch) -> CriticOutcome:
    before, result, after = model.values(batch), model.update(batch), model.values(batch)
    tensors = copied(model.trained_tensors())
    return CriticOutcome(values=before, result=result, after=after, tensors=tensors, state=model.state)


def resume_critic(
    rank: int, world: int, port: int, setup: Setup, checkpoint: Path, state: TrainerState, batch: TrainBatch
) -> SampleColumn | None:
    """Return the values of a batch from a critic that resumed from a checkpoint."""
    critic = build_critic(rank, world, port, setup)
    if setup.lora is not None:
        critic.load(setup.folder)
    critic.resume(checkpoint, state)
    values = critic.values(batch)
    critic.close()
    return values


@on_actor
def refresh(
    trainer: ActorRank, setup: Setup, batch: TrainBatch
) -> tuple[SampleColumn | None, SampleColumn | None, SampleColumn | None]:
    """Return the log-probabilities of a policy after an update, and those of its reference before and after it is
    refreshed."""
    trainer.load_reference(setup.folder)
    trainer.update(batch)
    policy, before = trainer.logprobs(batch), trainer.reference_logprobs(batch)
    trainer.refresh_reference()
    return policy, before, trainer.reference_logprobs(batch)


@on_actor
def ask_reference(
    trainer: ActorRank, _: Setup, folder: Path, batch: TrainBatch
) -> tuple[SampleColumn | None, SampleColumn | None, SampleColumn | None]:
    """Return log-probabilities of the policy, of a reference in its ranks, and of the policy again."""
    trainer.load_reference(folder)
    return trainer.logprobs(batch), trainer.reference_logprobs(batch), trainer.logprobs(batch)


def ask_separate_reference(rank: int, world: int, port: int, setup: Setup, batch: TrainBatch) -> SampleColumn | None:
    reference = ReferenceRank(spec_of(rank, world, port, setup))
    reference.load(setup.folder)
    logprobs = reference.logprobs(batch)
    reference.close()
    return logprobs


@on_actor
def record(trainer: ActorRank, _: Setup, batch: TrainBatch, folder: Path) -> TrainerRecord:
    return trainer.record(batch, folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """One rank after one update."""

    num_buckets: int
    adam: str
    """Name of the class that Megatron chose."""
    tensors: dict[str, FloatArray]


@on_actor
def update_buckets(trainer: ActorRank, _: Setup, batch: TrainBatch) -> Updated:
    trainer.update(batch)
    optimizer = trainer._optimizer
    (chained,) = optimizer._optimizer.chained_optimizers
    return Updated(
        num_buckets=sum(len(buffer.buckets) for chunk in optimizer.chunks for buffer in chunk.buffers),
        adam=type(chained.optimizer).__name__,
        tensors=copied(trainer.tensors()),
    )
