"""The run of all histories: its recipe, its prompts, what engines answer, and the weights that it must reach."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from megarl.config.recipe import Recipe
from megarl.data.prompts import PromptSet
from megarl.data.stream import PromptStream
from megarl.families.shape import ModelShape
from megarl.run.inputs import Inputs
from megarl.types import Prompt, Rollout, RolloutGroup, Score, ScoredGroup, TokenArray
from tests.simulation.actors import START_STATE, next_state
from tests.simulation.disk import ROOT
from tests.values import make_prompt, make_rollout

RUN_FOLDER = Path(ROOT) / "runs" / "sample"
PROMPTS_PER_STEP = 3
_NUM_PROMPTS = 7
_SEED = 3


class BriefRecipe(Recipe):
    """Writes only the sections that a resumed run compares: the manifests of a history take a third of its time."""

    def model_dump(self, **_: Any) -> dict[str, Any]:
        brief: dict[str, Any] = super().model_dump(mode="json", include={"run", "model", "train"})
        return brief

    def model_dump_json(self, **_: Any) -> str:
        return "recipe"


@cache
def sample_recipe(*, steps: int, save_every: int, has_mirror: bool, drops: bool) -> Recipe:
    mirrored = {"mirror": {"url": "sim://bucket", "stall_s": 60}} if has_mirror else {}
    return BriefRecipe.model_validate(
        {
            "run": {
                "name": RUN_FOLDER.name,
                "folder": str(RUN_FOLDER.parent),
                "steps": steps,
                "device": "cpu",
                "seed": _SEED,
            },
            "model": {"path": f"{ROOT}/model"},
            "data": {"train": ["train.parquet"]},
            "pools": {"train": {"gpus_per_node": 2}, "rollout": {"gpus_per_node": 1}},
            "roles": {"actor": {"pool": "train"}, "rollout": {"pool": "rollout", "tensor": 1}},
            "algorithm": {"kind": "grpo", **({"filter": {}} if drops else {})},
            "sampling": {"rollouts_per_prompt": 2, "max_response_tokens": 4},
            "reward": {"kind": "exact"},
            "checkpoint": {"save_every_steps": save_every, "keep_last": 2, "grace_s": 20, **mirrored},
            "cluster": {"lease_s": 90},
            "train": {
                "prompts_per_step": PROMPTS_PER_STEP,
                "tokens_per_micro_batch": 128,
                "operation_timeout_s": 30,
                "restart_pause_s": 1,
            },
            "evaluation": None,
        }
    )


def sample_shape(*, max_context_tokens: int = 128) -> ModelShape:
    return ModelShape(
        family="qwen2",
        num_layers=4,
        hidden=8,
        ffn_hidden=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=2,
        vocab=1 << 14,
        max_context_tokens=max_context_tokens,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        has_tied_embeddings=False,
        has_qkv_bias=True,
        has_qk_norm=False,
        dtype="float32",
    )


@cache
def sample_inputs() -> Inputs:
    prompts = tuple(make_prompt(number, token_ids=[number]) for number in range(_NUM_PROMPTS))
    train = PromptSet(prompts=prompts, num_prompts=len(prompts), num_dropped=0)
    tokenizer = cast("Any", SimpleNamespace(eos_ids=(0,), tools=()))
    return Inputs(shape=sample_shape(), tokenizer=tokenizer, train=train, eval=())


def answer_of(prompt: Prompt, weights: str, version: int) -> ScoredGroup:
    """Return the rollouts that engines with these weights give; every third prompt has two equal scores."""
    digest = hashlib.blake2b(f"{prompt.position} {weights}".encode(), digest_size=4).digest()
    tokens = np.frombuffer(digest, np.uint8).astype(np.int32)
    rollouts = tuple(make_rollout(tokens + index, version=version) for index in range(2))
    second = 1.0 if digest[0] % 3 else 0.0
    scores = tuple(Score(value=value, components={}) for value in (0.0, second))
    return ScoredGroup(group=RolloutGroup(prompt=prompt, rollouts=rollouts), scores=scores)


def batch_of(samples: Iterable[tuple[TokenArray, Rollout]]) -> str:
    """Return the hash of prompts and responses."""
    parts = [(prompt_ids.tolist(), rollout.token_ids.tolist()) for prompt_ids, rollout in samples]
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def undisturbed(num_steps: int, *, drops: bool) -> list[str]:
    """Return the weights after every step of a run without accidents."""
    stream = PromptStream(sample_inputs().train.prompts, seed=_SEED)
    states = [START_STATE]
    for version in range(num_steps):
        groups: list[ScoredGroup] = []
        while len(groups) < PROMPTS_PER_STEP:
            scored = answer_of(next(stream), states[-1], version)
            if not drops or len({score.value for score in scored.scores}) > 1:
                groups.append(scored)
        pairs = [(each.group.prompt.token_ids, rollout) for each in groups for rollout in each.group.rollouts]
        states.append(next_state(states[-1], batch_of(pairs)))
    return states
