"""The last stage of `megarl doctor --cluster`: a publish and updates of the recipe's own layout, with random weights.

A whole `megarl train` in a process of its own, with the recipe's pools, roles, splits and shape; short responses, and
neither its model nor its data.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megarl.config.recipe import (
    CheckpointConfig,
    DataConfig,
    ObserveConfig,
    Recipe,
    RolloutSamplesConfig,
    TrainConfig,
)
from megarl.config.reward import FunctionRewardConfig
from megarl.config.roles import RolesConfig
from megarl.env import RAY_ADDRESS, current_environment
from megarl.errors import ConfigError, Problem
from megarl.observe.event_file import EVENTS_FILE, EventTail
from megarl.observe.events import Event, Published, RunFinished, StepFinished
from megarl.system.guard import start_guarded, stop_guarded
from megarl.tools.doctor import Check, CheckStatus
from megarl.tools.doctor.rates import AREA

STEPS = 2
"""The first compiles kernels and connects; the second shows rates."""
TIMEOUT_S = 3600.0
"""Engines of large models take a quarter of an hour to start the first time."""
_MAX_RESPONSE_TOKENS = 64
_MAX_PROMPT_TOKENS = 32
_MAX_ROLLOUTS = 4
_MIN_PROMPTS = 8
_MAX_MISMATCH = 0.02
"""Mean |p| between trainer and engine, bf16 on both sides; real runs are at a tenth of it."""
_SLOWER = 3.0
"""How many times longer than planned a publish may take."""
_POLL_S = 0.5
_STOP_GRACE_S = 60.0
_TRAIN = "from megarl.cli.main import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStepFiles:
    """A model of the recipe's shape without bytes, prompts or demonstrations, and a reward."""

    model: Path
    data: Path
    reward: Path


def first_step_recipe(recipe: Recipe, folder: Path, files: FirstStepFiles) -> Recipe:
    """Return the recipe with its pools, roles, splits and algorithm, for two short steps."""
    if recipe.algorithm.needs.rows == "pairs":
        message = f"{recipe.algorithm.kind} trains on pairs, which this stage does not have; `megarl rehearse` neither"
        raise ConfigError("update", (Problem(key="algorithm.kind", message=message),))
    sampling = recipe.sampling.model_copy(
        update={
            "rollouts_per_prompt": min(_MAX_ROLLOUTS, recipe.sampling.rollouts_per_prompt),
            "max_response_tokens": min(_MAX_RESPONSE_TOKENS, recipe.sampling.max_response_tokens),
        }
    )
    prompts = max(_MIN_PROMPTS, recipe.data_parallel)
    train = TrainConfig(
        prompts_per_step=prompts,
        tokens_per_micro_batch=recipe.train.tokens_per_micro_batch,
        operation_timeout_s=recipe.train.operation_timeout_s,
        max_staleness=recipe.train.max_staleness,
        optimizer=recipe.train.optimizer.model_copy(update={"warmup_steps": 0, "warmup_share": 0.0}),
    )
    lora = recipe.model.lora
    return Recipe(
        run=recipe.run.model_copy(
            update={"name": "update", "folder": folder, "steps": STEPS, "epochs": None, "ray_address": None}
        ),
        model=recipe.model.model_copy(
            update={"path": files.model, "lora": lora and lora.model_copy(update={"path": None})}
        ),
        data=DataConfig(train=(files.data,), max_prompt_tokens=_MAX_PROMPT_TOKENS),
        cluster=recipe.cluster,
        pools=recipe.pools,
        roles=_roles(recipe.roles, files.model),
        # Its buffer is a share of the recipe's own limit of tokens.
        algorithm=recipe.algorithm.model_copy(update={"overlong": None}),
        sampling=sampling,
        reward=FunctionRewardConfig(kind="function", path=files.reward, workers=1),
        train=train,
        checkpoint=CheckpointConfig(save_every_steps=None, save_at_end=False),
        observe=ObserveConfig(rollouts=RolloutSamplesConfig(groups_per_step=0)),
        network=recipe.network,
    )


def _roles(roles: RolesConfig, model: Path) -> RolesConfig:
    """Return the roles with random weights: no folder of their own, and no models of rewards."""
    critic, reference = roles.critic, roles.reference
    return RolesConfig(
        actor=roles.actor,
        critic=critic and critic.model_copy(update={"path": None, "prompts_per_update": None, "warmup_steps": 0}),
        reference=reference and reference.model_copy(update={"path": None}),
        rollout=roles.rollout,
        teacher={name: each.model_copy(update={"model": model}) for name, each in roles.teacher.items()},
    )


def try_first_step(
    recipe: Recipe, folder: Path, *, address: str | None, planned_publish_s: float | None, say: Callable[[str], None]
) -> Iterator[Check]:
    """Run the recipe to its end; return what its events show, or the end of its log."""
    path, log_path = folder / "recipe.yaml", folder / "train.log"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True)))
    environment = {**current_environment(), **({} if address is None else {RAY_ADDRESS.name: address})}
    words = [sys.executable, "-c", _TRAIN, "train", str(path), "--resume", "never", "--override-fit"]
    with log_path.open("wb") as log:
        process = start_guarded(words, environment=environment, output=log)
    events: list[Event] = []
    try:
        events = _follow(process, recipe.run_folder / EVENTS_FILE, say)
    finally:
        stop_guarded(process, grace_s=_STOP_GRACE_S)
    yield from judge_events(
        events, planned_publish_s=planned_publish_s, has_engines=recipe.roles.rollout is not None, log=log_path
    )


def _follow(process: subprocess.Popen[bytes], path: Path, say: Callable[[str], None]) -> list[Event]:
    events: list[Event] = []
    tail: EventTail | None = None
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        has_ended = process.poll() is not None
        if tail is None and path.exists():
            tail = EventTail(path)
        for event in [record.event for record in tail.read()] if tail is not None else []:
            events.append(event)
            if isinstance(event, Published):
                say(f"update: version {event.result.version} is published in {event.result.seconds:.2f} s")
            if isinstance(event, StepFinished):
                say(f"update: step {event.summary.step} of {STEPS} is trained")
        if has_ended or time.monotonic() > deadline:
            return events
        time.sleep(_POLL_S)


def judge_events(
    events: Sequence[Event], *, planned_publish_s: float | None, has_engines: bool, log: Path
) -> Iterator[Check]:
    """Yield what a run of two steps shows about publishes and updates."""
    ends = [event for event in events if isinstance(event, RunFinished)]
    updates = [event.summary.update for event in events if isinstance(event, StepFinished) and event.summary.update]
    if not updates:
        reason = ends[-1].reason if ends else "the run ended without an event of its end"
        remedy = f"{reason}; its log is {log}"
        yield Check(area=AREA, name="update", found="no step was trained", status=CheckStatus.ERROR, remedy=remedy)
        return
    if has_engines:
        yield _publish([event for event in events if isinstance(event, Published)], planned_publish_s)
    last = updates[-1]
    is_finite = math.isfinite(last.loss) and math.isfinite(last.grad_norm)
    found = f"{len(updates)} updates, gradient {last.grad_norm:.3g}"
    remedy = f"random weights give finite losses: kernels or memory of a GPU are wrong; logs in {log.parent}"
    yield Check.of(AREA, "update", found, is_ok=is_finite, remedy=remedy)
    if has_engines:
        found = f"trainer and engines differ by {last.mismatch_mean:.2g} in the mean |p|"
        remedy = "more than bf16 explains: `megarl diagnose mismatch` names the first module that differs"
        yield Check.of(AREA, "same policy", found, is_ok=last.mismatch_mean <= _MAX_MISMATCH, remedy=remedy)


def _publish(published: Sequence[Published], planned_s: float | None) -> Check:
    if not published:
        remedy = "the engines have no weights; the log of the run says why"
        return Check(area=AREA, name="publish", found="none", status=CheckStatus.ERROR, remedy=remedy)
    best = min((event.result for event in published), key=lambda result: result.seconds)
    found = f"{best.num_bytes / 1e9:.3g} GB to {best.num_engines} engine(s) in {best.seconds:.2f} s, all digests equal"
    if planned_s is None:
        return Check(area=AREA, name="publish", found=found, status=CheckStatus.OK)
    is_ok = best.seconds <= max(1.0, _SLOWER * planned_s)
    return Check.of(
        AREA,
        "publish",
        f"{found}; planned {planned_s:.2f}",
        is_ok=is_ok,
        remedy="slower than planned: `network of NCCL` and the pairs of nodes above say which link",
        otherwise=CheckStatus.WARNING,
    )
