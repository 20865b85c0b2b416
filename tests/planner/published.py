"""Published speeds of other stacks, as recipes for the planner that come nearest to them.

NeMo-RL's figures are those of docs/about/performance-summary.md in its releases 0.4 and 0.6 and of the recipes named
there. Its context parallelism of 2 is tensor parallelism here. A node of a GB200-NVL72 rack is the whole rack.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.document import Document, override
from megarl.config.recipe import Recipe
from megarl.families import PUBLIC_MODELS
from megarl.planner.deployment import RoleShapes, StepWorkload, deploy
from megarl.planner.fit import size
from megarl.planner.hardware import parse_gpu
from megarl.planner.timing import Timing
from tests.planner.recipes import RECIPE_TREE, shapes_of

_PROMPT_TOKENS = 150
_RECOMPUTE = "megatron: {recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"
_235B = f"tensor: 4, pipeline: 8, expert: 16, expert_tensor: 1, is_sequence_parallel: true, {_RECOMPUTE}"


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
            f" tokens_per_micro_batch: {self.max_tokens}, max_staleness: {self.staleness}, share_prefixes: false}}",
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


_ACTORS = {
    "235b": f"{_235B}, first_stage_layers: 11, last_stage_layers: 11",
    "235b in a rack": f"{_235B.replace('pipeline: 8', 'pipeline: 4')}, first_stage_layers: 23, last_stage_layers: 23",
    "30b": "expert: 8, expert_tensor: 1",
    "30b in stages": "expert: 8, expert_tensor: 1, pipeline: 2",
    "30b in a rack": "expert: 16, expert_tensor: 1",
    "32b": "tensor: 4, pipeline: 4, is_sequence_parallel: true",
    "8b": "pipeline: 2",
}
_RUNS = """
0.6 | qwen3-235b-a22b | h100  |  8 | 16 |  0 | 235b           | 16 | 0 |  512 | 8192 | 5698 |   58.9
0.6 | qwen3-235b-a22b | h100  |  8 | 32 |  0 | 235b           | 16 | 0 |  512 | 8192 | 5713 |   37.4
0.6 | qwen3-235b-a22b | h100  |  8 | 16 | 16 | 235b           |  8 | 1 |  512 | 8192 | 5721 |   58.7
0.6 | qwen3-30b-a3b   | h100  |  8 |  4 |  0 | 30b            |  2 | 0 | 2048 | 4096 | 3203 | 1102
0.6 | qwen3-30b-a3b   | h100  |  8 |  2 |  2 | 30b in stages  |  2 | 1 | 2048 | 4096 | 3201 | 1414
0.6 | qwen3-30b-a3b   | h100  |  8 | 16 |  8 | 30b            |  2 | 8 | 2048 | 4096 | 3206 | 1025
0.6 | qwen3-235b-a22b | gb200 | 64 |  1 |  0 | 235b in a rack |  8 | 0 |  512 | 8192 | 5709 |  163
0.6 | qwen3-235b-a22b | gb200 | 64 |  2 |  0 | 235b in a rack |  8 | 0 |  512 | 8192 | 5693 |   67.4
0.6 | qwen3-235b-a22b | gb200 | 64 |  1 |  1 | 235b in a rack |  8 | 1 |  512 | 8192 | 5705 |   85.5
0.6 | qwen3-30b-a3b   | gb200 | 16 |  1 |  0 | 30b in a rack  |  1 | 0 | 2048 | 4096 | 3199 | 1910
0.6 | qwen3-30b-a3b   | gb200 |  8 |  1 |  1 | 30b            |  1 | 1 | 2048 | 4096 | 3197 | 1406
0.4 | qwen3-32b       | h100  |  8 |  4 |  0 | 32b            |  4 | 0 | 2048 | 4096 | 3206 |  540
0.4 | qwen3-32b       | h100  |  8 |  4 |  4 | 32b            |  4 | 1 | 2048 | 4096 | 3207 |  494
0.4 | llama-3.1-8b    | h100  |  8 |  2 |  0 | 8b             |  1 | 0 | 2048 | 4096 | 1060 | 1562
0.4 | llama-3.1-8b    | h100  |  8 |  1 |  1 | 8b             |  1 | 1 | 2048 | 4096 | 1129 | 2161
"""
"""Release of NeMo-RL, model, GPU, GPUs of a node, nodes that train, nodes that generate, actor, GPUs per engine,
staleness, sequences of a step (of an update: 512), longest and mean length in tokens, tokens per GPU and second."""


def _nemo(line: str) -> PublishedRun:
    release, model, gpu, actor, speed, *numbers = (
        [word.strip() for word in line.split("|")][place] for place in (0, 1, 2, 6, 12, 3, 4, 5, 7, 8, 9, 10, 11)
    )
    per_node, training, generating, tensor, staleness, sequences, longest, mean = map(int, numbers)
    return PublishedRun(
        source=f"NeMo-RL {release}",
        model=model,
        gpu=gpu,
        nodes=(training, generating),
        gpus_per_node=per_node,
        actor=_ACTORS[actor],
        tensor=tensor,
        staleness=staleness,
        sequences=sequences,
        sequences_per_update=512,
        max_tokens=longest,
        mean_tokens=mean,
        tokens_per_gpu_s=float(speed),
    )


PUBLISHED = tuple(map(_nemo, _RUNS.strip().splitlines()))
