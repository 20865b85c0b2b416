"""An observer that is told everything a run can tell, step by step: every metric has a value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megarl.config.recipe import CheckpointConfig
from megarl.observe import catalogue as names
from megarl.observe.metrics import Meter, Metrics
from megarl.observe.observer import Observer
from megarl.observe.observing import set_constants
from megarl.results import CriticStats, DraftStats, PreferenceStats
from megarl.system.gpu_health import GpuHealth
from megarl.types import JsonValue
from tests.observe.samples import (
    checkpoint_saved,
    engine_changed,
    evaluated,
    grades,
    make_recipe,
    published,
    run_started,
    step_summary,
)

GPU = GpuHealth(index=0, uncorrected_errors=1, needs_reset=True, is_throttled=True, celsius=88.0, watts=700.0)
DRAFT = DraftStats(loss=3.5, grad_norm=0.5, learning_rate=1e-4)
CRITIC = CriticStats(
    loss=0.5,
    grad_norm=1.0,
    learning_rate=1e-4,
    clip_fraction=0.125,
    value_mean=0.5,
    return_mean=0.5,
    explained_variance=0.25,
)
PAIRS = PreferenceStats(num_pairs=4, loss=0.5, accuracy=0.75, margin=0.5, chosen_reward=0.25, rejected_reward=-0.25)


class ScriptedRun:
    def __init__(self, folder: Path) -> None:
        saves = CheckpointConfig(save_every_steps=2)
        recipe = make_recipe(folder).model_copy(update={"checkpoint": saves})
        self.meter = Meter("sample")
        self.observer = Observer([Metrics(self.meter)], meter=self.meter)
        self._step = 0
        set_constants(self.meter, recipe)
        self.meter.set(names.CHECKPOINT_PERIOD, 3600.0)  # of a run that saves hourly, not by steps
        observer = self.observer
        on_gpus: dict[str, JsonValue] = {"run": {"device": "cuda"}, "pools": {"all": {"nodes": 1, "gpus_per_node": 8}}}
        observer.emit(replace(run_started(), recipe={**on_gpus, "cluster": {"gpu_hour_price": 2.5}}))
        observer.data_read(num_prompts=100, num_dropped=1)
        observer.watch_queue(num_waiting=lambda: 4, num_under_way=lambda: 4, capacity=lambda: 16)
        observer.watch_requests(0, lambda: 3)
        observer.emit(engine_changed(0))
        for phase in ("start", "generate", "evaluate", "update"):
            with observer.phase(phase):
                pass

    def step(self) -> None:
        self._step += 1
        step, observer = self._step, self.observer
        for _ in range(4):
            observer.group_generated(seconds=0.5, num_rollouts=4, num_tokens=32)
            observer.prompt_read(64, num_cached=48)
            observer.draft_checked(32, num_passes=16)
            observer.scored(0.01)
        with observer.phase("update"):
            pass
        with observer.phase("evaluate"):
            pass
        observer.emit(published(step))
        observer.step_summarized(replace(step_summary(step), critic=CRITIC, draft=DRAFT, preference=PAIRS, kl_coef=0.1))
        observer.emit(evaluated(step, 0.5, sampled=grades(0.5, rollouts_per_prompt=4)))
        observer.emit(checkpoint_saved(step))
        observer.checkpoint_mirrored(step, "s3://bucket/run", num_bytes=4096, seconds=0.5)
        observer.measured("rollout", {0: 0.01, 1: 0.012})
        observer.nodes_excluded(1)
        observer.gpus_checked([GPU], num_xids=1)
