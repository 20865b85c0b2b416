"""Published speeds of other stacks, as recipes for the planner that come nearest to them.

NeMo-RL's figures are those of docs/about/performance-summary.md in its releases 0.4 and 0.6 and of the recipes named
there. Its context parallelism of 2 is tensor parallelism here. A node of a GB200-NVL72 rack is the whole rack.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.document import Document, override
from megarl.config.hub import PUBLIC_MODELS
from megarl.config.recipe import Recipe
from megarl.planner.deployment import RoleShapes, StepWorkload, deploy
from megarl.planner.fit import size
from megarl.planner.hardware import parse_gpu
from megarl.planner.timing import Timing
from tests.planner.recipes import RECIPE_TREE, shapes_of

_PROMPT_TOKENS = 150
_RECOMPUTE = "megatron: {recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"
_235B = f"tensor: 4, pipeline: 8, expert: 16, expert_tensor: 1, is_sequence_parallel: true, {_RECOMPUTE}"
_235B_LAYERS = "first_stage_layers: 11, last_stage_layers: 11"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    source: str
    model: str
    gpu: str
    nodes: tuple[int, int]
    """Nodes that train and nodes that generate; 0 to generate where it trains."""
    gpus_per_node: int
    actor: str
    tensor: int
    """GPUs per engine."""
    staleness: int
    sequences: int
    sequences_per_update: int
    max_tokens: int
    mean_tokens: int
    tokens_per_gpu_s: float

    @property
    def num_gpus(self) -> int:
        return sum(self.nodes) * self.gpus_per_node

    @property
    def name(self) -> str:
        mode = "on policy" if not self.staleness else f"{self.staleness} off"
        return f"{self.model}, {self.num_gpus} {self.gpu.partition(',')[0]}, {mode}"

    def recipe(self) -> Recipe:
        is_shared = not self.nodes[1]
        pools = f"train: {{nodes: {self.nodes[0]}, gpus_per_node: {self.gpus_per_node}}}"
        if not is_shared:
            pools += f", rollout: {{nodes: {self.nodes[1]}, gpus_per_node: {self.gpus_per_node}}}"
        # They offload what trains while they generate.
        offload = "offload: everything" if is_shared else "offload: nothing"
        assignments = [
            f"pools={{{pools}}}",
            f"roles.actor={{pool: train, {offload}, {self.actor}}}",
            f"roles.rollout={{pool: {'train' if is_shared else 'rollout'}, tensor: {self.tensor},"
            f" memory_fraction: {0.6 if is_shared else 0.8}, max_running_requests: 1024, is_deterministic: false}}",
            "roles.reference={}",
            "algorithm={kind: grpo, kl: {kind: reward}}",
            "sampling.rollouts_per_prompt=32",
            f"sampling.max_response_tokens={self.max_tokens - _PROMPT_TOKENS}",
            f"train={{prompts_per_step: {self.sequences // 32}, prompts_per_update: {self.sequences_per_update // 32},"
            f" tokens_per_micro_batch: {self.max_tokens}, max_staleness: {self.staleness}}}",
        ]
        document = Document(tree=RECIPE_TREE, origins={})
        for assignment in assignments:
            document = override(document, assignment)
        return Recipe.model_validate(document.tree)

    def timing(self) -> Timing:
        recipe = self.recipe()
        deployment = deploy(recipe, self.shapes, parse_gpu(self.gpu))
        workload = StepWorkload(
            mean_prompt_tokens=_PROMPT_TOKENS,
            mean_response_tokens=self.mean_tokens - _PROMPT_TOKENS,
            max_response_tokens=self.max_tokens - _PROMPT_TOKENS,
        )
        timing = size(recipe, deployment, workload, publish_s=0.0).timing
        assert timing is not None
        return timing

    def planned_tokens_per_gpu_s(self) -> float:
        timing = self.timing()
        return timing.trained_tokens / timing.step_s / self.num_gpus

    @property
    def shapes(self) -> RoleShapes:
        return shapes_of(PUBLIC_MODELS[self.model])


def _nemo(
    release: str,
    model: str,
    gpu: str,
    nodes: tuple[int, int],
    actor: str,
    tensor: int,
    staleness: int,
    sequences: tuple[int, int],
    tokens: tuple[int, int],
    speed: float,
    *,
    gpus_per_node: int = 8,
) -> PublishedRun:
    return PublishedRun(
        source=f"NeMo-RL {release}",
        model=model,
        gpu=gpu,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        actor=actor,
        tensor=tensor,
        staleness=staleness,
        sequences=sequences[0],
        sequences_per_update=sequences[1],
        max_tokens=tokens[0],
        mean_tokens=tokens[1],
        tokens_per_gpu_s=speed,
    )


_30B = "expert: 8, expert_tensor: 1"
_RACK_235B = _235B.replace("pipeline: 8", "pipeline: 4")
_RACK_LAYERS = "first_stage_layers: 23, last_stage_layers: 23"
_32B = "tensor: 4, pipeline: 4, is_sequence_parallel: true"

PUBLISHED = (
    _nemo("0.6", "qwen3-235b-a22b", "h100", (16, 0), f"{_235B}, {_235B_LAYERS}", 16, 0, (512, 512), (8192, 5698), 58.9),
    _nemo("0.6", "qwen3-235b-a22b", "h100", (32, 0), f"{_235B}, {_235B_LAYERS}", 16, 0, (512, 512), (8192, 5713), 37.4),
    _nemo("0.6", "qwen3-235b-a22b", "h100", (16, 16), f"{_235B}, {_235B_LAYERS}", 8, 1, (512, 512), (8192, 5721), 58.7),
    _nemo("0.6", "qwen3-30b-a3b", "h100", (4, 0), _30B, 2, 0, (2048, 512), (4096, 3203), 1102),
    _nemo("0.6", "qwen3-30b-a3b", "h100", (2, 2), f"{_30B}, pipeline: 2", 2, 1, (2048, 512), (4096, 3201), 1414),
    _nemo("0.6", "qwen3-30b-a3b", "h100", (16, 8), _30B, 2, 8, (2048, 512), (4096, 3206), 1025),
    _nemo(
        "0.6",
        "qwen3-235b-a22b",
        "gb200",
        (1, 0),
        f"{_RACK_235B}, {_RACK_LAYERS}",
        8,
        0,
        (512, 512),
        (8192, 5709),
        163,
        gpus_per_node=64,
    ),
    _nemo(
        "0.6",
        "qwen3-235b-a22b",
        "gb200",
        (2, 0),
        f"{_RACK_235B}, {_RACK_LAYERS}",
        8,
        0,
        (512, 512),
        (8192, 5693),
        67.4,
        gpus_per_node=64,
    ),
    _nemo(
        "0.6",
        "qwen3-235b-a22b",
        "gb200",
        (1, 1),
        f"{_RACK_235B}, {_RACK_LAYERS}",
        8,
        1,
        (512, 512),
        (8192, 5705),
        85.5,
        gpus_per_node=64,
    ),
    _nemo(
        "0.6",
        "qwen3-30b-a3b",
        "gb200",
        (1, 0),
        "expert: 16, expert_tensor: 1",
        1,
        0,
        (2048, 512),
        (4096, 3199),
        1910,
        gpus_per_node=16,
    ),
    _nemo(
        "0.6",
        "qwen3-30b-a3b",
        "gb200",
        (1, 1),
        "expert: 8, expert_tensor: 1",
        1,
        1,
        (2048, 512),
        (4096, 3197),
        1406,
        gpus_per_node=8,
    ),
    _nemo("0.4", "qwen3-32b", "h100", (4, 0), _32B, 4, 0, (2048, 512), (4096, 3206), 540),
    _nemo("0.4", "qwen3-32b", "h100", (4, 4), _32B, 4, 1, (2048, 512), (4096, 3207), 494),
    _nemo("0.4", "llama-3.1-8b", "h100", (2, 0), "pipeline: 2", 1, 0, (2048, 512), (4096, 1060), 1562),
    _nemo("0.4", "llama-3.1-8b", "h100", (1, 1), "pipeline: 2", 1, 1, (2048, 512), (4096, 1129), 2161),
)
