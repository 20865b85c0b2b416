"""The checks before a run: machine, columns, rows, reward. All that can fail before anything is moved or started."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from megarl import __version__
from megarl.checkpoint.manifest import TENSOR_SUFFIX, read_header
from megarl.config.algorithm import AlgorithmConfig, AlgorithmNeeds, RowKind
from megarl.config.model import ModelShape, read_model_shape
from megarl.config.recipe import DataConfig, NetworkConfig, ObserveConfig, Recipe
from megarl.config.reward import FrozenRewardConfig, RewardConfig, single_rewards
from megarl.config.section import Device
from megarl.data.prompts import PromptReader, PromptSet
from megarl.data.rows import check_files, check_pairs
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.episodes.build import rehearse
from megarl.episodes.play import tools_of
from megarl.errors import CheckpointError, DataError, MachineError
from megarl.observe.prometheus import MetricsEndpoint
from megarl.reward.build import build_scorer
from megarl.serving.file_publisher import check_running
from megarl.system.network import LOOPBACK, address_in
from megarl.system.user_code import load_code
from megarl.tokens import Content
from megarl.types import FinishReason, Prompt, Rollout, RolloutGroup
from megarl.weights.layouts.canonical import VALUE_HEAD, canonical_tensors

_GPU_DEVICES = (Path("/dev/nvidia0"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Present where an NVIDIA driver is loaded; the last one under WSL."""
_MAX_TRIED = 64
"""Data sources whose reward is tried before a run."""


def check_start(recipe: Recipe, *, address: str | None, keeps_rows: bool = True) -> Inputs:
    """Check the machine, read the inputs, ask frozen models that run already and try the reward: all that can fail
    before a run moves or starts anything.

    `address` is that of the Ray cluster to join. `keeps_rows` as in `read_inputs`.
    """
    refuse_missing_gpu(recipe.run.device, address)
    _try_port(recipe.observe, recipe.network)
    if recipe.sampling.generator is not None:
        load_code(recipe.sampling.generator, key="sampling.generator")
    for key, code in recipe.algorithm.needs.user_code:
        load_code(code, key=key)
    inputs = read_inputs(recipe, keeps_rows=keeps_rows)
    check_weights(recipe.model.path, inputs.shape)
    if recipe.environment is not None:
        limit = recipe.sampling.max_response_tokens
        rehearse(recipe.environment, inputs.tokenizer, max_response_tokens=limit)
    asyncio.run(check_running(recipe.roles.frozen, device=recipe.run.device))
    if recipe.algorithm.needs.has_engines:
        asyncio.run(_try_reward(recipe.reward, recipe.algorithm.needs, (*inputs.train.prompts, *inputs.eval)))
    return inputs


def check_weights(folder: Path, shape: ModelShape) -> None:
    """Raise a CheckpointError where the headers of the weights differ from `config.json`; reads no weights."""
    index = folder / "model.safetensors.index.json"
    try:
        named = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
    except FileNotFoundError:
        named = set(folder.glob(f"*{TENSOR_SUFFIX}"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors files: {type(error).__name__}") from None
    found = {entry.name: entry.shape for path in sorted(named) for entry in read_header(path).entries}
    for name, spec in canonical_tensors(shape).items():
        if name not in found and name != VALUE_HEAD:
            raise CheckpointError(f"{folder}: tensor {name} is in none of its {len(named)} safetensors file(s)")
        if name in found and found[name] != spec.shape:
            shapes = f"{list(found[name])}, config.json says {list(spec.shape)}"
            raise CheckpointError(f"{folder}: tensor {name} has shape {shapes}; do these files belong together?")


def check_columns(data: DataConfig, algorithm: AlgorithmConfig) -> None:
    """Raise a DataError for a file without the columns that a run needs; reads no rows."""
    check_files(data.train, data, as_demonstrations=algorithm.needs.rows != "prompts")
    if algorithm.needs.rows == "pairs":
        check_pairs((*data.train, *data.eval_pairs), data)
    check_files(data.eval, data, as_demonstrations=False)
    check_files((*data.eval_demonstrations, *data.eval_pairs), data, as_demonstrations=True)


def refuse_missing_gpu(device: Device, address: str | None) -> None:
    """Raise MachineError where a private Ray would find no GPU for a run that needs one."""
    if device == "cuda" and address is None and not any(path.exists() for path in _GPU_DEVICES):
        raise MachineError(
            "run.device: cuda, and this machine has no GPU: set run.device: cpu for a small run here, "
            "or join a cluster (RAY_ADDRESS or run.ray_address)"
        )


def _try_port(observe: ObserveConfig, network: NetworkConfig) -> None:
    """Raise MachineError if the metrics port cannot be listened on."""
    if observe.metrics_port:
        host = LOOPBACK if network.bind is None else address_in(network.bind)
        MetricsEndpoint(CollectorRegistry(), port=observe.metrics_port, host=host).close()


async def _try_reward(config: RewardConfig, needs: AlgorithmNeeds, prompts: Sequence[Prompt]) -> None:
    """Score the ground truth of the first prompt of each source; raise a DataError if a score or a part is missing."""
    if any(isinstance(single, FrozenRewardConfig) for _, single in single_rewards(config)):
        return  # its engines do not run yet
    firsts: dict[str, Prompt] = {}
    for prompt in prompts:
        firsts.setdefault(prompt.data_source, prompt)
    scorer = build_scorer(config)
    try:
        for prompt in islice(firsts.values(), _MAX_TRIED):
            scored = await scorer.score(_answered(prompt))
            for key, name in needs.components:
                if not scored.scores[0].is_masked and name not in scored.scores[0].components:
                    known = ", ".join(scored.scores[0].components) or "none"
                    raise DataError(
                        f"{key}: the reward of prompt {prompt.uid} has no component {name}; it has {known}: return it "
                        "from the reward function or change the recipe"
                    )
    finally:
        scorer.close()


def _answered(prompt: Prompt) -> RolloutGroup:
    """Return a group with one response: the ground truth."""
    nothing = np.zeros(1, dtype=np.int32)
    rollout = Rollout(
        content=Content(token_ids=nothing, logprobs=nothing.astype(np.float32), text=prompt.ground_truth),
        versions=nothing,
        loss_mask=nothing.astype(np.bool_),
        finish_reason=FinishReason.STOP,
    )
    return RolloutGroup(prompt=prompt, rollouts=(rollout,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    shape: ModelShape
    tokenizer: Tokenizer
    train: PromptSet
    eval: tuple[Prompt, ...]
    eval_demonstrations: tuple[Prompt, ...] = ()
    eval_pairs: tuple[Prompt, ...] = ()

    @property
    def tools_digest(self) -> str | None:
        """Digest of the tools that prompts name, in their order; None without any."""
        tools = self.tokenizer.tools
        return hashlib.blake2b(json.dumps(tools).encode(), digest_size=16).hexdigest() if tools else None

    def answers_digest(self, recipe: str) -> str:
        """Return a digest of what answers to prompts and their scores depend on, beside the weights."""
        parts = (recipe, self.train.digest, self.tools_digest, __version__)
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def read_inputs(recipe: Recipe, *, keeps_rows: bool = True) -> Inputs:
    """Read and check everything; raise a DataError or ConfigError that names the file.

    Without `keeps_rows` the prompts to train on are checked and counted, and only the first of each source is kept.
    """
    shape = read_model_shape(recipe.model.path)
    is_scorer = recipe.algorithm.needs.is_scorer
    if is_scorer:
        shape = shape.as_critic()
    tools = () if recipe.environment is None else tools_of(recipe.environment)
    tokenizer = load_tokenizer(
        recipe.model.path,
        vocab=shape.vocab,
        template=recipe.data.template,
        tools=[tool.as_function for tool in tools],
    )
    data, evaluation = recipe.data, recipe.evaluation
    reader = PromptReader(
        config=data,
        kind="prompts",
        max_response_tokens=recipe.sampling.max_response_tokens,
        as_chats=is_scorer,
        keeps_all=keeps_rows,
    )
    train = replace(reader, kind=recipe.algorithm.needs.rows).read(data.train, tokenizer)
    inputs = Inputs(shape=shape, tokenizer=tokenizer, train=train, eval=())
    if evaluation is None:
        return inputs
    reader = replace(reader, keeps_all=True)
    files: dict[RowKind, tuple[Path, ...]] = {
        "prompts": data.eval,
        "demonstrations": data.eval_demonstrations,
        "pairs": data.eval_pairs,
    }
    held_out = {
        kind: replace(reader, kind=kind).read(paths, tokenizer).prompts[: evaluation.max_prompts] if paths else ()
        for kind, paths in files.items()
    }
    return replace(
        inputs,
        eval=held_out["prompts"],
        eval_demonstrations=held_out["demonstrations"],
        eval_pairs=held_out["pairs"],
    )
