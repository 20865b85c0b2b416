"""Real engines and real Megatron ranks, and one thing between them that is not the same."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.roles import ActorConfig
from megarl.engine import admin
from megarl.engine.process import EngineProcess
from megarl.families.shape import ModelShape
from megarl.stages import SeparatePhases
from megarl.tools.diagnose.comparison import compare
from megarl.tools.diagnose.verdict import Diagnosis, Verdict
from megarl.train.rank_spec import TrainerRecord
from megarl.types import PolicyVersion, TrainBatch
from megarl.weights.layouts.megatron import MegatronParallel
from megarl.weights.layouts.transfer_spec import TransferSpec
from tests.engine.engines import REQUEST_TIMEOUT_S, ServedModel, control_of, engine_spec, generator_of, prompt_of
from tests.train import jobs
from tests.train.cluster import Cluster
from tests.train.reference import Model
from tests.train.splits import SPLITS, setup_of

NOISE = 1e-5
TEMPERATURE = 0.8


class ClusterTrainer:
    """The ranks of a test session as the trainer of a diagnosis."""

    def __init__(self, cluster: Cluster, split: str, folder: Path, shape: ModelShape) -> None:
        self._cluster = cluster
        self._world, self.actor = SPLITS[split]
        self._setup = setup_of(Model(folder=folder, shape=shape), self.actor)

    async def record(self, batch: TrainBatch, folder: Path) -> Sequence[TrainerRecord]:
        return await asyncio.to_thread(self._cluster.run, self._world, jobs.record, self._setup, batch, folder)


def diagnosed(
    served: ServedModel,
    cluster: Cluster,
    folder: Path,
    *,
    split: str = "TP1",
    engine_folder: Path | None = None,
    trainer_shape: ModelShape | None = None,
    trainer_temperature: float = TEMPERATURE,
) -> Diagnosis:
    """On a prompt of 17 tokens and 8 sampled ones; the engine serves `engine_folder` where it is given."""
    trainer = ClusterTrainer(cluster, split, served.folder, trainer_shape or served.shape)

    async def run() -> Diagnosis:
        async with served.fleet() as fleet:
            if engine_folder is not None:
                await admin.load_weights_from_disk(
                    fleet.engines[0].client, engine_folder, version=PolicyVersion(0), timeout_s=REQUEST_TIMEOUT_S
                )
            return await compare(
                prompt_of(*range(3, 20)),
                phases=SeparatePhases(),
                record_trainer=trainer.record,
                fleet=fleet,
                control=control_of(fleet),
                generator=generator_of(fleet, temperature=TEMPERATURE, max_response_tokens=8),
                transfer=transfer_to(served, trainer.actor),
                temperature=trainer_temperature,
                folder=folder,
            )

    return asyncio.run(run())


def transfer_to(served: ServedModel, actor: ActorConfig) -> TransferSpec:
    return TransferSpec(
        shape=served.shape,
        parallel=MegatronParallel(tensor=actor.tensor, pipeline=actor.pipeline),
        trainer_dtype="float32",
        num_engines=1,
        tensor=served.process.endpoint.tensor,
        engine_dtype="float32",
        is_cpu_engine=True,
    )


def perturbed(served: ServedModel, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of the model with other weights."""
    shutil.copytree(served.folder, folder)
    tensors = load_file(served.folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("engine", "split"), [("qwen2_tp1", "TP2-PP2"), ("qwen3_tp2", "TP2-SP")])
def test_nothing_differs_however_either_side_is_split(
    engine: str, split: str, request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path
) -> None:
    served: ServedModel = request.getfixturevalue(engine)
    found = diagnosed(served, cluster, tmp_path, split=split)
    assert found.verdict is Verdict.NOTHING, found.sentence
    assert found.differing_tensors == ()
    assert max(error.error for error in found.errors) < NOISE
    assert len(found.errors) == 1 + 11 * served.shape.num_layers + 3
    assert found.conversation.num_positions == 17 + len(found.conversation.response_ids) - 1


@pytest.mark.parametrize(
    ("engine", "tensor", "module"),
    [
        ("qwen2_tp1", "model.layers.0.self_attn.v_proj.bias", "model.layers.0.self_attn.v_proj"),
        ("qwen3_tp2", "model.layers.1.self_attn.k_norm.weight", "model.layers.1.self_attn.attention"),
    ],
)
def test_a_weight_of_the_engine_that_differs_is_named(
    engine: str, tensor: str, module: str, request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path
) -> None:
    served: ServedModel = request.getfixturevalue(engine)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[tensor].view(-1)[-1] += 0.5

    other = perturbed(served, tmp_path / "other", change)
    found = diagnosed(served, cluster, tmp_path / "records", split="TP2", engine_folder=other)
    assert found.verdict is Verdict.WEIGHTS
    assert found.differing_tensors == (tensor,)
    assert found.first is not None
    assert found.first.point.name == module
    assert found.sentence.startswith(f"weights differ: {tensor}; {module} is the first module that differs, by ")
    before = [error.error for error in found.errors[: found.errors.index(found.first)]]
    assert max(before) < NOISE


def test_a_weight_that_differs_too_little_to_show_is_still_named(
    qwen2_tp1: ServedModel, cluster: Cluster, tmp_path: Path
) -> None:
    tensor = "model.layers.1.mlp.gate_proj.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[tensor][3, 5] *= 1 + 1e-6

    other = perturbed(qwen2_tp1, tmp_path / "other", change)
    found = diagnosed(qwen2_tp1, cluster, tmp_path / "records", engine_folder=other)
    assert found.verdict is Verdict.WEIGHTS
    assert found.first is None
    assert found.differing_tensors == (tensor,)


def test_an_engine_with_another_model_differs_from_the_first_module_on(
    qwen2_tp1: ServedModel, cluster: Cluster, tmp_path: Path
) -> None:
    found = diagnosed(qwen2_tp1, cluster, tmp_path, engine_folder=qwen2_tp1.other_folder)
    assert found.verdict is Verdict.WEIGHTS
    assert found.first is found.errors[0]
    assert len(found.differing_tensors) > 20


@pytest.mark.parametrize(
    ("change", "module"),
    [
        ({"norm_eps": 1e-2}, "model.layers.0.input_layernorm"),
        ({"rope_theta": 77.0}, "model.layers.0.self_attn.attention"),
    ],
    ids=["norm", "rope"],
)
def test_a_computation_that_differs_is_named_and_the_weights_are_cleared(
    change: dict[str, float], module: str, qwen3_tp2: ServedModel, cluster: Cluster, tmp_path: Path
) -> None:
    found = diagnosed(qwen3_tp2, cluster, tmp_path, split="TP2", trainer_shape=replace(qwen3_tp2.shape, **change))  # type: ignore[arg-type]
    assert found.verdict is Verdict.COMPUTATION
    assert found.differing_tensors == ()
    assert found.first is not None
    assert found.first.point.name == module
    assert found.sentence.startswith(f"computation differs: {module} is the first module that differs, by ")


def test_another_temperature_is_a_difference_of_definition(
    qwen2_tp1: ServedModel, cluster: Cluster, tmp_path: Path
) -> None:
    found = diagnosed(qwen2_tp1, cluster, tmp_path, trainer_temperature=0.5)
    assert found.verdict is Verdict.DEFINITION
    assert found.first is found.errors[-1]
    assert found.sentence.startswith("only the log-probabilities differ, by ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "module"),
    [
        ("rms_norm_eps", 1e-2, "model.layers.0.input_layernorm"),
        ("rope_parameters", {"rope_theta": 77.0, "rope_type": "default"}, "model.layers.0.self_attn.attention"),
    ],
    ids=["norm", "rope"],
)
def test_an_engine_whose_config_differs_computes_something_else(
    key: str, value: object, module: str, qwen2_tp1: ServedModel, cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(qwen2_tp1.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    process = EngineProcess(engine_spec(folder, tmp_path / "run"))
    process.start()
    try:
        asyncio.run(process.wait_ready())
        found = diagnosed(replace(qwen2_tp1, process=process), cluster, tmp_path / "records", split="TP2-PP2")
    finally:
        process.stop()
    assert found.verdict is Verdict.COMPUTATION, found.sentence
    assert found.differing_tensors == ()
    assert found.first is not None
    assert found.first.point.name == module
