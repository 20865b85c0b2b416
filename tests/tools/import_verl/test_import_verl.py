"""Every key of verl has a verdict, and the keys that mean something arrive in the recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from megarl.config.algorithm import AdaptiveKlConfig, GaeConfig, GroupConfig, GrpoConfig, KlLossConfig, KlRewardConfig
from megarl.config.checks.recipe import check_without_files
from megarl.config.document import Tree
from megarl.config.hub import PUBLIC_MODELS
from megarl.config.native import check_native
from megarl.config.recipe import ObserveConfig, Recipe
from megarl.config.reward import FunctionRewardConfig
from megarl.config.roles import OptimizerConfig, ReferenceConfig
from megarl.errors import ConfigError
from megarl.tools.import_verl.algorithm import ESTIMATORS
from megarl.tools.import_verl.translate import DECAYS, LOGGERS, translate_file
from megarl.tools.import_verl.translation import (
    Entry,
    Imported,
    KeyRule,
    KeyVerdict,
    Treatment,
    all_rules,
    known_keys,
    rule_for,
)

VALIDATION = "actor_rollout_ref.rollout.val_kwargs."
MULTI = "actor_rollout_ref.rollout.multi_turn."
TURNS = f"{MULTI}enable=True"
OPTIONS = "actor_rollout_ref.actor.megatron.override_transformer_config."
HERE = Path(__file__).parent / "configs"
SOURCES: dict[str, Tree] = {
    "openai/gsm8k": {"kind": "gsm8k"},
    **{name: {"kind": "math"} for name in ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval")},
    "HuggingFaceH4/MATH-500": {"kind": "math"},
    **{name: {"kind": "dapo_math"} for name in ("math_dapo", "math", "math_dapo_reasoning")},
    **{f"aime{separator}{year}": {"kind": "dapo_math"} for separator in ("", "_") for year in (2024, 2025)},
}
BASE = """\
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet \\
  actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct actor_rollout_ref.rollout.n=8 trainer.total_training_steps=50 \\
"""


def imported(tmp_path: Path, *words: str) -> Imported:
    script = tmp_path / "run.sh"
    script.write_text(BASE + " ".join(words) + "\n")
    return translate_file(script)


def value_at(tree: Tree, key: str) -> Tree:
    for name in key.split("."):
        assert isinstance(tree, dict), key
        tree = tree.get(name)
    return tree


def entry(result: Imported, key: str) -> Entry:
    return next(item for item in result.entries if item.key == key)


@pytest.mark.parametrize(("name", "model"), [("grpo.yaml", "qwen2.5-7b"), ("ppo.sh", "qwen2.5-72b")])
def test_the_documented_examples_become_valid_recipes(name: str, model: str) -> None:
    recipe = Recipe.model_validate(translate_file(HERE / name).tree)
    assert check_without_files(recipe, PUBLIC_MODELS[model], critic=PUBLIC_MODELS[model]) == []


def test_the_yaml_example_is_translated() -> None:
    recipe = Recipe.model_validate(translate_file(HERE / "grpo.yaml").tree)
    assert recipe.algorithm.kind == "grpo"
    assert (recipe.train.prompts_per_step, recipe.train.prompts_per_update) == (128, 64)
    assert recipe.train.tokens_per_micro_batch == 2 * (512 + 1024)
    assert (recipe.sampling.rollouts_per_prompt, recipe.sampling.max_response_tokens) == (8, 1024)
    assert recipe.roles.actor.pool == "shared"
    assert recipe.roles.rollout is not None
    assert recipe.roles.rollout.memory_fraction == 0.5
    assert recipe.train.optimizer.beta2 == 0.999, "verl's default, not megarl's"


def test_ppo_with_critic_reference_and_kl_is_translated() -> None:
    result = translate_file(HERE / "ppo_kl.yaml")
    recipe = Recipe.model_validate(result.tree)
    assert check_without_files(recipe, PUBLIC_MODELS["qwen2.5-7b"], critic=PUBLIC_MODELS["qwen2.5-14b"]) == []
    assert isinstance(recipe.algorithm, GaeConfig)
    assert (recipe.algorithm.gamma, recipe.algorithm.lam) == (0.99, 0.95)
    assert recipe.algorithm.kl == KlRewardConfig(
        kind="reward", estimate="k3", coef=0.002, adaptive=AdaptiveKlConfig(target=0.05, horizon=5000)
    )
    assert recipe.train.epochs == 2
    assert recipe.roles.actor.megatron_ddp == {"overlap_grad_reduce": True}
    assert recipe.roles.reference == ReferenceConfig(pool="shared", tensor=2, is_sequence_parallel=True)
    critic = recipe.roles.critic
    assert critic is not None
    assert (critic.path, critic.tensor, critic.pipeline) == (Path("models/Qwen2.5-14B"), 2, 2)
    assert (critic.epochs, critic.prompts_per_update, critic.clip, critic.warmup_steps) == (3, 128, 0.2, 10)
    assert critic.optimizer == OptimizerConfig(
        learning_rate=2e-5, min_learning_rate=1e-6, warmup_steps=5, decay="cosine", beta2=0.95
    )
    assert critic.megatron["recompute_granularity"] == "full"
    left = [item.key for item in result.entries if item.verdict in (KeyVerdict.NOT_SUPPORTED, KeyVerdict.UNKNOWN)]
    assert left == []


def test_a_critic_starts_from_the_policy_unless_it_has_a_model_of_its_own() -> None:
    recipe = Recipe.model_validate(translate_file(HERE / "ppo.sh").tree)
    assert recipe.algorithm.kind == "gae"
    assert recipe.roles.critic is not None
    assert recipe.roles.critic.path is None
    assert recipe.roles.critic.optimizer.learning_rate == 1e-5
    assert recipe.roles.reference is None, "verl has the KL off"


@pytest.mark.parametrize(
    ("kl_type", "estimate"),
    [("kl", "k1"), ("abs", "abs"), ("mse", "k2"), ("low_var_kl", "k3"), ("k3+", "k3+"), ("k1+", "k1+")],
)
def test_kl_in_the_loss_is_taken_over_by_meaning(tmp_path: Path, kl_type: str, estimate: str) -> None:
    words = ("actor_rollout_ref.actor.use_kl_loss=True", f"actor_rollout_ref.actor.kl_loss_type={kl_type}")
    result = imported(tmp_path, *words, "algorithm.use_kl_in_reward=True")
    recipe = Recipe.model_validate(result.tree)
    assert isinstance(recipe.algorithm, GrpoConfig)
    assert recipe.algorithm.kl == KlLossConfig.model_validate({"kind": "loss", "estimate": estimate})
    assert recipe.roles.reference == ReferenceConfig()
    assert entry(result, "algorithm.use_kl_in_reward").verdict is KeyVerdict.NOT_SUPPORTED


def test_adapters_of_sft_keep_their_dropout(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    words = "model.lora.rank=8 model.lora.alpha=16 model.lora.dropout=0.05 model.lora.target_modules=[linear_qkv]"
    script.write_text(f"torchrun -m verl.trainer.sft_trainer data.train_files=a.parquet model.path=m {words}\n")
    lora = Recipe.model_validate(translate_file(script).tree).model.lora
    assert lora is not None
    assert (lora.rank, lora.dropout, lora.modules) == (8, 0.05, ("q_proj", "k_proj", "v_proj"))


def test_every_key_of_verl_has_a_verdict() -> None:
    assert len(known_keys()) == 870
    assert [key for key in known_keys() if rule_for(key) is None] == []


def test_there_is_one_entry_per_key_of_the_file() -> None:
    result = translate_file(HERE / "grpo.yaml")
    assert len(result.entries) == len({item.key for item in result.entries}) == 25


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("data.filter_overlong_prompts=True", "data.overlong_prompts", "drop"),
        ("data.val_files=[a.parquet,b.parquet]", "data.eval", ["a.parquet", "b.parquet"]),
        ("data.seed=7", "run.seed", 7),
        ("trainer.total_epochs=15", "run.epochs", 15),
        ("algorithm.adv_estimator=remax", "algorithm.kind", "remax"),
        ("actor_rollout_ref.actor.megatron.optimizer_offload=True", "roles.actor.offload", "optimizer"),
        ("actor_rollout_ref.actor.megatron.param_offload=True", "roles.actor.offload", "everything"),
        ("trainer.logger=['console','wandb'] trainer.project_name=p", "observe.wandb.project", "p"),
        ("trainer.logger=tensorboard", "observe.tensorboard", {}),
        (
            "actor_rollout_ref.model.enable_gradient_checkpointing=True",
            "roles.actor.megatron",
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ),
        ("data.reward_fn_key=data_source", "reward.sources", SOURCES),
        ("actor_rollout_ref.actor.clip_ratio_high=0.28", "algorithm.loss.clip_high", 0.28),
        ("actor_rollout_ref.actor.clip_ratio_c=10.0", "algorithm.loss.clip_dual", 10.0),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "algorithm.loss.kind", "gspo"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=sapo", "algorithm.aggregation", "seq_mean_token_mean"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "algorithm.aggregation", "seq_mean_token_mean"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", "train.optimizer.warmup_share", 0.1),
        ("actor_rollout_ref.actor.optim.lr_decay_style=cosine", "train.optimizer.decay", "cosine"),
        ("actor_rollout_ref.actor.grad_clip=0.5", "train.optimizer.clip_grad_norm", 0.5),
        ("actor_rollout_ref.rollout.top_k=20", "sampling.top_k", 20),
        ("actor_rollout_ref.rollout.top_k=-1", "sampling.top_k", None),
        ("algorithm.adv_estimator=rloo_vectorized", "algorithm.kind", "rloo"),
        ("algorithm.norm_adv_by_std_in_grpo=False", "algorithm.normalize_std", False),
        ("algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc", "algorithm.filter.component", "acc"),
        (
            "algorithm.filter_groups.enable=True data.train_batch_size=512 data.gen_batch_size=1536",
            "algorithm.filter.oversampling",
            3.0,
        ),
        ("algorithm.rollout_correction.rollout_is=token", "algorithm.correction.kind", "tis"),
        ("actor_rollout_ref.rollout.quantization=fp8", "roles.rollout.precision", "fp8"),
        ("actor_rollout_ref.rollout.quantization.weight_dtype=fp8", "roles.rollout.precision", "fp8"),
        ("actor_rollout_ref.rollout.dtype=fp8", "algorithm.correction.kind", "tis"),
        (
            "actor_rollout_ref.rollout.quantization=fp8 actor_rollout_ref.model.lora_rank=8",
            "roles.rollout.precision",
            None,
        ),
        (
            'algorithm.adv_estimator=gdpo +algorithm.gdpo_reward_keys=\'["right", "format"]\' '
            "+algorithm.gdpo_reward_weights=[1.0,0.5]",
            "algorithm.weights",
            {"right": 1.0, "format": 0.5},
        ),
        (
            f"+{OPTIONS}moe_token_dispatcher_type=flex +{OPTIONS}moe_enable_deepep=True "
            "actor_rollout_ref.actor.megatron.expert_model_parallel_size=4",
            "roles.actor.dispatcher",
            "deepep",
        ),
        (
            "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True",
            "roles.actor.offload",
            "optimizer",
        ),
        (
            "+reward.reward_kwargs.overlong_buffer_cfg.enable=True +reward.reward_kwargs.overlong_buffer_cfg.len=256",
            "algorithm.overlong.buffer_tokens",
            256,
        ),
        (
            "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=512",
            "algorithm.overlong.buffer_tokens",
            511,
        ),
        (f"+{OPTIONS}fp8=e4m3 +{OPTIONS}fp8_recipe=blockwise", "roles.actor.fp8_scaling", "blockwise"),
        (f"+{OPTIONS}fp8=hybrid", "roles.actor.fp8_scaling", "delayed"),
        (f"+{OPTIONS}fp8=hybrid", "roles.actor.precision", "fp8"),
        (f"+{OPTIONS}fp8=e4m3 +{OPTIONS}fp8_recipe=mxfp8", "roles.actor.precision", None),
        (f"+{OPTIONS}recompute_granularity=full", "roles.actor.megatron.recompute_num_layers", 1),
        (
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.expert_parallel_size=4",
            "roles.rollout.tensor",
            4,
        ),
        (
            "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B-Instruct-2507 actor_rollout_ref.model.lora.rank=16",
            "model.lora.modules",
            ["q_proj", "k_proj", "v_proj", "o_proj"],
        ),
        ("custom_reward_function.path=r.py custom_reward_function.name=f", "reward.name", "f"),
        ("reward_model.reward_fn.path=r.py", "reward.path", "r.py"),
        ("reward.reward_model.enable=True reward.reward_model.model_path=rm", "roles.reward_model.main.model", "rm"),
        ("reward_model.enable=True reward_model.model.path=rm", "reward.kind", "reward_model"),
        (
            "reward_model.enable=True reward_model.model.path=rm reward_model.rollout.tensor_model_parallel_size=2",
            "roles.reward_model.main.tensor",
            2,
        ),
        ("reward_model.enable=True reward_model.model.path=rm", "roles.reward_model.main.pool", "shared"),
        ("reward_model.enable=True reward_model.model.path=rm", "roles.reward_model.main.max_cached_tokens", 131_072),
        (
            "reward.reward_model.enable=True reward.reward_model.enable_resource_pool=True",
            "pools.reward_model.gpus_per_node",
            8,
        ),
        (
            "reward.reward_model.enable=True reward.reward_model.n_gpus_per_node=4",
            "pools.reward_model.gpus_per_node",
            4,
        ),
        ("trainer.nnodes=4", "pools.shared.nodes", 4),
        ("actor_rollout_ref.actor.megatron.context_parallel_size=2", "roles.actor.context", 2),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3",
            "roles.rollout.sglang.attention_backend",
            "fa3",
        ),
        (
            "+actor_rollout_ref.actor.megatron.override_transformer_config.deterministic_mode=True",
            "roles.actor.megatron.deterministic_mode",
            True,
        ),
        (
            "+actor_rollout_ref.actor.megatron.override_ddp_config.bucket_size=5",
            "roles.actor.megatron_ddp.bucket_size",
            5,
        ),
        ("actor_rollout_ref.actor.ppo_epochs=3", "train.epochs", 3),
        (
            f"{TURNS} {MULTI}function_tool_path=t.py {MULTI}max_assistant_turns=5 {MULTI}max_user_turns=4",
            "environment",
            {
                "kind": "class",
                "path": "t.py",
                "max_turns": 5,
                "max_calls": 4,
                "max_result_tokens": 256,
                "call_format": "hermes",
            },
        ),
        (f"{TURNS} {MULTI}max_tool_response_length=900", "environment.max_result_tokens", 900),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", "environment.path", "environment.py"),
        ("actor_rollout_ref.model.lora_rank=8", "model.lora", {"rank": 8, "alpha": 16}),
        ("actor_rollout_ref.actor.lora_rank=8", "model.lora.rank", 8),
        ("actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora_alpha=4", "model.lora.alpha", 4),
        (
            "actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.target_modules=all-linear",
            "model.lora",
            {"rank": 8, "alpha": 16},
        ),
        (
            "actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.adapter_path=a "
            "actor_rollout_ref.model.lora.target_modules=[linear_qkv,linear_proj]",
            "model.lora",
            {"rank": 8, "alpha": 32, "path": "a", "modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        ),
        ("trainer.experiment_name='my run'", "run.name", "my_run"),
        ("trainer.test_freq=5 data.val_files=v.parquet", "evaluation.every_steps", 5),
        ("trainer.val_before_train=False data.val_files=v.parquet", "evaluation.runs_before_training", False),
        ("data.val_max_samples=64 data.val_files=v.parquet", "evaluation.max_prompts", 64),
        (
            f"data.val_files=v.parquet {VALIDATION}do_sample=True {VALIDATION}n=4 {VALIDATION}temperature=0.6",
            "evaluation",
            {
                "is_greedy": False,
                "sampled": {"rollouts_per_prompt": 4, "temperature": 0.6, "top_p": 1.0},
            },
        ),
        (f"data.val_files=v.parquet {VALIDATION}do_sample=True {VALIDATION}n=4", "evaluation", {}),
        (
            "distillation.enabled=True distillation.distillation_loss.loss_mode=forward_kl_topk "
            "distillation.distillation_loss.topk=16",
            "algorithm.distillation",
            {"kind": "forward_topk", "coef": 1.0, "top_k": 16},
        ),
        (
            "distillation.enabled=True distillation.distillation_loss.loss_mode=k1 "
            "distillation.distillation_loss.use_task_rewards=False",
            "algorithm.kind",
            "distill",
        ),
        (
            "distillation.enabled=True distillation.n_gpus_per_node=4 distillation.teacher_models.a.model_path=x "
            "distillation.teacher_models.a.key=gsm8k distillation.teacher_models.b.model_path=y "
            "distillation.teacher_models.b.inference.tensor_model_parallel_size=2",
            "roles.teacher",
            {
                "a": {"kind": "ranks", "pool": "teacher", "tensor": 1, "model": "x", "sources": ["gsm8k"]},
                "b": {"kind": "ranks", "pool": "teacher", "tensor": 2, "model": "y"},
            },
        ),
        ("distillation.enabled=True distillation.n_gpus_per_node=4", "pools.teacher.gpus_per_node", 4),
        (
            "distillation.enabled=True distillation.teacher_models.a.model_path=x "
            "distillation.teacher_models.a.inference.gpu_memory_utilization=0.5",
            "roles.teacher.a",
            {"kind": "engines", "pool": "teacher", "tensor": 1, "model": "x", "memory_fraction": 0.5},
        ),
        (
            "distillation.enabled=True actor_rollout_ref.rollout.temperature=0.7",
            "roles.teacher.teacher_model.kind",
            "engines",
        ),
    ],
)
def test_a_key_arrives_in_the_recipe(tmp_path: Path, word: str, key: str, value: Tree) -> None:
    result = imported(tmp_path, word)
    assert value_at(result.tree, key) == value
    Recipe.model_validate(result.tree)


@pytest.mark.parametrize(
    ("word", "verdict", "text"),
    [
        ("actor_rollout_ref.actor.clip_ratio=0.3", KeyVerdict.NO_EFFECT, "changes nothing in verl either"),
        ("actor_rollout_ref.actor.kl_loss_coef=0.1", KeyVerdict.NO_EFFECT, "no use with the other keys"),
        ("critic.optim.lr=1e-5", KeyVerdict.NO_EFFECT, "no use with the other keys"),
        ("actor_rollout_ref.ref.megatron.param_offload=True", KeyVerdict.NO_EFFECT, "host memory of the actor's ranks"),
        ("actor_rollout_ref.actor.use_kl_loss=False", KeyVerdict.NO_EFFECT, "off, as in megarl"),
        (
            "actor_rollout_ref.actor.megatron.dynamic_context_parallel=True",
            KeyVerdict.NOT_SUPPORTED,
            "the same for all sequences",
        ),
        ("actor_rollout_ref.actor.peft.lora_rank=8", KeyVerdict.MAPPED, "model.lora.rank"),
        ("actor_rollout_ref.model.lora_rank=0", KeyVerdict.NO_EFFECT, "no use with the other keys"),
        ("actor_rollout_ref.model.lora.dropout=0.1", KeyVerdict.NOT_SUPPORTED, "no dropout"),
        ("actor_rollout_ref.model.lora.dropout=0.0", KeyVerdict.NO_EFFECT, "off, as in megarl"),
        ("actor_rollout_ref.model.lora.merge=True", KeyVerdict.NO_EFFECT, "without merging"),
        ("critic.model.lora_rank=8", KeyVerdict.NO_EFFECT, "as well"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload=True", KeyVerdict.MAPPED, "roles.actor.offload"),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=-1", KeyVerdict.NO_EFFECT, "Megatron only"),
        ("trainer.logger=[console,wandb]", KeyVerdict.MAPPED, "observe"),
        ("ray_kwargs.timeline_json_file=t.json", KeyVerdict.NO_EFFECT, "--timeline"),
        ("actor_rollout_ref.rollout.n=$ROLLOUTS", KeyVerdict.NOT_SUPPORTED, "write ROLLOUTS=VALUE after the file"),
        ("actor_rollout_ref.rollout.quantization=torchao", KeyVerdict.NOT_SUPPORTED, "roles.rollout.precision"),
        ("actor_rollout_ref.rollout.dtype=bfloat16", KeyVerdict.NO_EFFECT, "as in megarl"),
        ("actor_rollout_ref.actor.router_replay.mode=R3", KeyVerdict.NO_EFFECT, "is replayed"),
        ("actor_rollout_ref.actor.router_replay.mode=R2", KeyVerdict.NOT_SUPPORTED, "train.routing"),
        ("actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1", KeyVerdict.NO_EFFECT, "without expert"),
        ("actor_rollout_ref.actor.profile_ranks=[0,1]", KeyVerdict.NO_EFFECT, "--timeline"),
        ("critic.resource_pool_id=trainer_pool", KeyVerdict.NO_EFFECT, "names its pool"),
        ("data.curriculum.curriculum_class=Mine", KeyVerdict.NOT_SUPPORTED, "data.is_shuffled"),
        ("reward_model.reward_kwargs.judge.model=m", KeyVerdict.NOT_SUPPORTED, "constants of its file"),
        ("reward_model.reward_models.judge.model.path=m", KeyVerdict.NOT_SUPPORTED, "roles.judge"),
        (f"+{OPTIONS}apply_rope_fusion=True", KeyVerdict.NO_EFFECT, "chooses this kernel"),
        (f"+{OPTIONS}moe_aux_loss_coeff=0", KeyVerdict.NO_EFFECT, "off, as in megarl"),
        (f"+{OPTIONS}moe_token_dispatcher_type=alltoall", KeyVerdict.NO_EFFECT, "as in megarl"),
        ("actor_rollout_ref.rollout.multi_turn.max_turns=3", KeyVerdict.NOT_SUPPORTED, "no counterpart"),
        (f"{MULTI}max_assistant_turns=5 {TURNS}", KeyVerdict.MAPPED, "environment.max_turns"),
        (f"{MULTI}tool_config_path=t.yaml {TURNS}", KeyVerdict.NOT_SUPPORTED, "environment.path"),
        (f"{MULTI}format=gpt-oss {TURNS}", KeyVerdict.NOT_SUPPORTED, "environment.call_format"),
        (f"{MULTI}tokenization_sanity_check_mode=strict {TURNS}", KeyVerdict.NO_EFFECT, "never rendered again"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=mine", KeyVerdict.NOT_SUPPORTED, "function or chat"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent", KeyVerdict.NO_EFFECT, "one response"),
        ("actor_rollout_ref.rollout.agent.num_workers=8", KeyVerdict.NO_EFFECT, "roles.rollout.workers"),
        ("trainer.save_freq=20", KeyVerdict.MAPPED, "checkpoint.save_every_steps"),
        ("trainer.max_actor_ckpt_to_keep=3", KeyVerdict.MAPPED, "checkpoint.keep_last"),
        ("trainer.resume_mode=disable", KeyVerdict.NO_EFFECT, "--resume"),
        ("trainer.prometheus.port=9090", KeyVerdict.NO_EFFECT, "observe.metrics_port"),
        ("ray_init.num_cpus=8", KeyVerdict.NO_EFFECT, "run.ray_address"),
        ("trainer.nodes=8", KeyVerdict.UNKNOWN, "did you mean trainer.nnodes?"),
        ("data.truncation=left", KeyVerdict.NOT_SUPPORTED, "never cut"),
        ("+actor_rollout_ref.rollout.engine_kwargs.sglang.tp_size=2", KeyVerdict.NOT_SUPPORTED, "roles.rollout.tensor"),
        ("+actor_rollout_ref.rollout.engine_kwargs.sglang.page_size=x", KeyVerdict.NOT_SUPPORTED, "sglang takes int"),
        ("actor_rollout_ref.rollout.engine_kwargs.sglang.page_size=null", KeyVerdict.NO_EFFECT, "off, as in megarl"),
        (
            "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_modules=[core_attn]",
            KeyVerdict.NO_EFFECT,
            "without recompute_granularity",
        ),
        (
            "actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend=flash",
            KeyVerdict.NO_EFFECT,
            "kernels",
        ),
        ("trainer.v1.trainer_mode=sync", KeyVerdict.NO_EFFECT, "take turns"),
        ("algorithm.adv_estimator=codapo", KeyVerdict.NOT_SUPPORTED, "uses grpo instead"),
        (
            "algorithm.adv_estimator=mine actor_rollout_ref.rollout.n=1",
            KeyVerdict.NOT_SUPPORTED,
            "uses reinforce_pp instead",
        ),
        ("trainer.v1.trainer_mode=separate_async", KeyVerdict.NOT_SUPPORTED, "a pool of its own"),
        ("actor_rollout_ref.model.custom_chat_template=@a.jinja", KeyVerdict.NOT_SUPPORTED, "data.template"),
        ("actor_rollout_ref.rollout.do_sample=True", KeyVerdict.NO_EFFECT, "sampling.temperature"),
        (f"+{OPTIONS}fp8_recipe=mxfp8 +{OPTIONS}fp8=e4m3", KeyVerdict.NOT_SUPPORTED, "one of tensorwise, blockwise"),
        ("actor_rollout_ref.rollout.n='${oc.env:N}'", KeyVerdict.NOT_SUPPORTED, "write the value out"),
    ],
)
def test_a_key_that_does_not_arrive_is_explained(tmp_path: Path, word: str, verdict: KeyVerdict, text: str) -> None:
    found = entry(imported(tmp_path, word), word.partition("=")[0].lstrip("+"))
    assert found.verdict is verdict
    assert text in found.text


def test_recomputation_is_taken_over_whole(tmp_path: Path) -> None:
    prefix = "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_"
    words = (f"{prefix}granularity=full", f"{prefix}method=uniform", f"{prefix}num_layers=1")
    recipe = Recipe.model_validate(imported(tmp_path, *words).tree)
    assert recipe.roles.actor.megatron == {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    assert not list(check_native(recipe.roles, device=recipe.run.device))


def test_variables_of_a_script_are_expanded(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("set -x\nN=16\nexport MODEL=Qwen/Qwen2.5-7B\n" + BASE.replace("n=8", "n=$N"))
    assert value_at(translate_file(script).tree, "sampling.rollouts_per_prompt") == 16


def test_an_sft_configuration_becomes_sft(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text("data: {train_files: t.parquet, response_key: answer}\nmodel: {path: m}\noptim: {lr: 1.0e-5}\n")
    recipe = Recipe.model_validate(translate_file(path).tree)
    assert recipe.algorithm.kind == "sft"
    assert recipe.data.response_key == "answer"
    assert recipe.train.optimizer.learning_rate == 1e-5
    assert recipe.roles.rollout is None


def test_a_script_that_only_calls_others_names_them(tmp_path: Path) -> None:
    path = tmp_path / "all.sh"
    path.write_text("set -x\nbash ./ppo/run_small.sh\n./ppo/run_large.sh\n")
    with pytest.raises(ConfigError, match=r"import the script that it calls: \./ppo/run_small\.sh"):
        translate_file(path)


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.sh"
    path.write_text("echo hello\n")
    with pytest.raises(ConfigError, match="no key=value words"):
        translate_file(path)


@pytest.mark.parametrize("name", ["grpo.yaml", "ppo_kl.yaml", "lora.yaml", "multi_turn.yaml", "sft.yaml"])
def test_a_configuration_of_each_kind_gives_a_recipe_that_only_lacks_files(name: str) -> None:
    recipe = Recipe.model_validate(translate_file(HERE / name).tree)
    critic = PUBLIC_MODELS["qwen2.5-14b" if name == "ppo_kl.yaml" else "qwen2.5-7b"]
    assert check_without_files(recipe, PUBLIC_MODELS["qwen2.5-7b"], critic=critic) == []


def test_an_sft_run_keeps_its_epochs_schedule_columns_and_held_out_rows() -> None:
    result = translate_file(HERE / "sft.yaml")
    recipe = Recipe.model_validate(result.tree)
    assert (recipe.run.epochs, recipe.run.steps) == (3, None)
    assert recipe.data.eval_demonstrations == (Path("val.parquet"),)
    assert (recipe.data.prompt_key, recipe.data.response_key) == ("prompt", "response")
    optimizer = recipe.train.optimizer
    assert (optimizer.decay, optimizer.warmup_share, optimizer.learning_rate) == ("cosine", 0.1, 2e-5)
    assert recipe.observe.wandb is not None
    assert (recipe.observe.wandb.project, recipe.observe.wandb.proxy) == ("mine", "http://proxy:3128")
    assert recipe.roles.actor.megatron["recompute_granularity"] == "full"
    assert entry(result, "trainer.test_freq").verdict is KeyVerdict.NOT_SUPPORTED


def test_an_interpolation_of_a_key_in_the_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    rollout = "{n: '${trainer.group}', temperature: '${oc.select:a.b,0.7}'}"
    path.write_text(f"actor_rollout_ref: {{rollout: {rollout}}}\ntrainer: {{group: 6}}\n")
    tree = translate_file(path).tree
    assert value_at(tree, "sampling.rollouts_per_prompt") == 6
    assert value_at(tree, "sampling.temperature") == 0.7


@pytest.mark.parametrize("value", ["x", "", [], ["a", 1], {}, -1, 0, 3.5, None, True, "$X", "${a.b}", "[1", "inf"])
def test_no_value_of_any_key_is_a_crash(tmp_path: Path, value: Tree) -> None:
    """The recipe may be refused by the schema afterwards, which names the key."""
    for prefix in ("actor_rollout_ref.", ""):
        keys = [key for key in known_keys() if prefix or not key.startswith(("actor_rollout_ref.", "algorithm."))]
        keys += ["optim.lr", "optim.lr_scheduler", "data.max_length", "engine.tensor_model_parallel_size", "model.path"]
        path = tmp_path / "all.yaml"
        path.write_text(json.dumps(nested(dict.fromkeys(keys, value))))
        result = translate_file(path)
        assert len(result.entries) >= len(set(keys)) or value == {}


def test_a_file_that_depends_on_its_caller_in_everything_still_gives_a_valid_recipe(tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(json.dumps(nested(dict.fromkeys(known_keys(), "$X"))))
    result = translate_file(path)
    recipe = Recipe.model_validate(result.tree)
    assert check_without_files(recipe, PUBLIC_MODELS["qwen2.5-7b"], critic=PUBLIC_MODELS["qwen2.5-7b"]) == []
    assert recipe.model.path == Path("X")
    assert entry(result, "algorithm.adv_estimator").text == (
        "a variable that the script does not set; write X=VALUE after the file"
    )


def nested(flat: dict[str, Tree]) -> dict[str, Tree]:
    """Return a tree; a key that is the section of another one is left out."""
    tree: dict[str, Tree] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            child = inner.setdefault(section, {})
            if not isinstance(child, dict):
                child = inner[section] = {}
            inner = child
        if not isinstance(inner.get(name), dict):
            inner[name] = value
    return tree


def schema_keys() -> set[str]:
    """Return every key of a recipe, with the names that users choose left out."""
    return set(keys_below(Recipe, "", ()))


def keys_below(section: type[BaseModel], prefix: str, outer: tuple[type[BaseModel], ...]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key
        for inner in sections_in(field.annotation):
            if inner not in outer:  # a composed reward has rewards
                yield from keys_below(inner, f"{key}.", (*outer, section))


def sections_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_in(argument)


KNOWN = schema_keys()


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.pattern)
def test_a_verdict_agrees_with_the_schema(rule: KeyRule) -> None:
    """A target exists, a text names only keys that exist, and what megarl is said to lack does not exist."""
    if rule.treatment is Treatment.RENAME:
        assert rule.text in KNOWN
    roots = "|".join(Recipe.model_fields)
    for key in re.findall(rf"(?<![\w./])((?:{roots})(?:\.[a-z_]+)+)", rule.text):
        assert key in KNOWN, f"{key} of {rule.text!r} is not in the schema"
    if rule.treatment is Treatment.UNSUPPORTED:
        assert rule.lacks, "a missing feature needs the pattern of the key that it would have"
        assert [key for key in KNOWN if fnmatchcase(key, rule.lacks)] == [], f"megarl has it: {rule.text!r}"


def test_what_megarl_has_is_not_said_to_be_missing() -> None:
    """The estimators and loggers of the schema are those that an import can choose."""
    assert set(get_args(GroupConfig.model_fields["kind"].annotation)) <= set(ESTIMATORS.values())
    assert {"gae", "grpo", "reinforce_pp", "remax"} <= set(ESTIMATORS.values())
    assert set(LOGGERS) == {name for name in ObserveConfig.model_fields if name not in ("metrics_port", "rollouts")}
    assert set(DECAYS) == set(get_args(OptimizerConfig.model_fields["decay"].annotation))


def script_recipe(folder: Path, text: str) -> tuple[Recipe, list[str]]:
    path = folder / "run.sh"
    path.write_text(text)
    imported = translate_file(path)
    return Recipe.model_validate(imported.tree), list(imported.notes)


def test_folders_of_a_script_are_those_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "examples" / "grpo").mkdir(parents=True)
    recipe, _ = script_recipe(
        tmp_path / "examples" / "grpo",
        'ROOT=$(cd -- "$(dirname "${BASH_SOURCE[0]}")/../.." >/dev/null 2>&1 && pwd)\n'
        'HERE="$(dirname "$(realpath "$0")")"\n'
        'python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files="$HERE/train.parquet" '
        'custom_reward_function.path="$ROOT/rewards/mine.py" custom_reward_function.name=f',
    )
    assert isinstance(recipe.reward, FunctionRewardConfig)
    assert recipe.reward.path == tmp_path / "rewards" / "mine.py"
    assert recipe.data.train == (tmp_path / "examples" / "grpo" / "train.parquet",)


def test_torchrun_says_how_many_nodes_and_ranks_there_are(tmp_path: Path) -> None:
    recipe, _ = script_recipe(
        tmp_path,
        "E=\"optim.betas='[0.9,0.95]' +engine.override_transformer_config.recompute_granularity=full\"\n"
        "torchrun --nnodes=4 --nproc_per_node 8 -m verl.trainer.sft_trainer data.train_files=a.parquet $E",
    )
    assert (recipe.pools["shared"].nodes, recipe.pools["shared"].gpus_per_node) == (4, 8)
    assert recipe.train.optimizer.beta2 == 0.95
    assert recipe.roles.actor.megatron["recompute_granularity"] == "full"


TRAINER = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet "
MEGATRON = "actor_rollout_ref.actor.megatron."


def test_a_kl_of_no_weight_is_none_and_narrow_sampling_is_corrected(tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor."
    recipe, notes = script_recipe(
        tmp_path,
        f"{TRAINER} {actor}use_kl_loss=True {actor}kl_loss_coef=0.0 actor_rollout_ref.rollout.top_p=0.9",
    )
    assert isinstance(recipe.algorithm, GrpoConfig)
    assert recipe.algorithm.kl is None
    assert recipe.roles.reference is None
    assert recipe.algorithm.correction is not None
    assert any("algorithm.correction: tis" in note for note in notes)


def test_a_case_that_is_not_the_trainers_leaves_a_note(tmp_path: Path) -> None:
    _, notes = script_recipe(tmp_path, f"if [ $1 -le 2 ]; then {TRAINER} actor_rollout_ref.rollout.n=4; fi")
    assert any("depends on the script's arguments" in note for note in notes)


@pytest.mark.parametrize("option", ["--gpus-per-node=4", "--gres=gpu:4", "--gres=gpu:h100:4"])
def test_a_job_of_slurm_says_how_many_nodes_and_gpus_there_are(option: str, tmp_path: Path) -> None:
    recipe, _ = script_recipe(
        tmp_path,
        f"#!/bin/bash\n#SBATCH --nodes=2   # of them\n#SBATCH {option}\n"
        "for ((i = 1; i <= SLURM_NNODES; i++)); do\n  srun -w $i ray start --block &\ndone\n"
        f'srun --overlap -w "$head" {TRAINER} trainer.nnodes=$SLURM_JOB_NUM_NODES '
        'trainer.n_gpus_per_node="${SLURM_GPUS_ON_NODE:-8}"',
    )
    assert (recipe.pools["shared"].nodes, recipe.pools["shared"].gpus_per_node) == (2, 4)


def test_the_ends_of_a_pipeline_keep_their_layers(tmp_path: Path) -> None:
    options = f"{MEGATRON}override_transformer_config."
    split = f"{MEGATRON}pipeline_model_parallel_size=8"
    counted = (f"+{options}account_for_{unit}_in_pipeline_split=True" for unit in ("embedding", "loss"))
    words = f"{TRAINER} {split} actor_rollout_ref.model.path=Qwen/Qwen3-235B-A22B {' '.join(counted)}"
    recipe, _ = script_recipe(tmp_path, words)
    assert (recipe.roles.actor.first_stage_layers, recipe.roles.actor.last_stage_layers) == (11, 11)
    given = f"{TRAINER} {split} +{options}num_layers_in_last_pipeline_stage=6 actor_rollout_ref.model.path=mine"
    recipe, _ = script_recipe(tmp_path, given)
    assert (recipe.roles.actor.first_stage_layers, recipe.roles.actor.last_stage_layers) == (None, 6)


def test_engines_that_generate_ahead_have_a_pool_of_their_own(tmp_path: Path) -> None:
    recipe, notes = script_recipe(
        tmp_path,
        f"{TRAINER} actor_rollout_ref.rollout.n=8 data.train_batch_size=0 "
        f"actor_rollout_ref.actor.ppo_mini_batch_size=32 {MEGATRON}param_offload=True "
        "trainer.nnodes=4 rollout.nnodes=12 rollout.n_gpus_per_node=8 "
        "rollout.total_rollout_steps=$((512*400)) async_training.staleness_threshold=0.5 "
        "async_training.trigger_parameter_sync_step=4 async_training.require_batches=2",
    )
    assert (recipe.train.prompts_per_step, recipe.train.prompts_per_update) == (256, 32)
    assert (recipe.pools["train"].gpus, recipe.pools["rollout"].gpus) == (32, 96)
    assert recipe.roles.rollout is not None
    assert (recipe.roles.actor.pool, recipe.roles.rollout.pool) == ("train", "rollout")
    assert (recipe.train.max_staleness, recipe.run.steps, recipe.roles.actor.offload) == (1, 800, "nothing")
    assert any("nothing is offloaded" in note for note in notes)


def test_kernels_of_transformer_engine_are_left_to_the_user(tmp_path: Path) -> None:
    option = f"{MEGATRON}override_transformer_config.moe_permute_fusion"
    path = tmp_path / "run.sh"
    path.write_text(f"{TRAINER} +{option}=True")
    imported = translate_file(path)
    assert Recipe.model_validate(imported.tree).roles.actor.megatron == {}
    assert next(entry for entry in imported.entries if entry.key == option).verdict is KeyVerdict.NOT_SUPPORTED


def test_demonstrations_with_a_split_model_shard_their_sequences(tmp_path: Path) -> None:
    words = "data.train_files=a.parquet engine=megatron engine.tensor_model_parallel_size=4 model.path=mine"
    recipe, _ = script_recipe(tmp_path, f"torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer {words}")
    assert recipe.roles.actor.is_sequence_parallel


def test_a_model_that_drafts_tokens_is_said_not_to_be_trained(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    words = "data.train_files=a.parquet model.path=mine model.freeze_base_model=true ++model.speculator.n_predict=3"
    path.write_text(f"torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer {words}")
    for key in ("model.freeze_base_model", "model.speculator.n_predict"):
        assert entry(translate_file(path), key).verdict is KeyVerdict.NOT_SUPPORTED


def test_an_overlong_buffer_of_no_tokens_is_none(tmp_path: Path) -> None:
    prefix = "+reward_model.reward_kwargs.overlong_buffer_cfg."
    words = f"{prefix}enable=True {prefix}len=$((1024 * 0)) algorithm.adv_estimator=grpo"
    recipe, _ = script_recipe(tmp_path, f"python3 -m verl.trainer.main_ppo {words}")
    assert isinstance(recipe.algorithm, GrpoConfig)
    assert recipe.algorithm.overlong is None


def test_a_named_configuration_is_read_where_it_is_and_missed_where_it_is_not(tmp_path: Path) -> None:
    words = "python3 -m verl.trainer.main_ppo --config-path=config --config-name=mine data.train_batch_size=32"
    _, notes = script_recipe(tmp_path, words)
    assert notes[0].startswith("--config-name mine: config/mine.yaml is not here, and its keys are missing")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text(
        "defaults: [ppo_trainer]\ndata: {train_batch_size: 8, max_response_length: 99}\n"
    )
    recipe, notes = script_recipe(tmp_path, words)
    assert (recipe.train.prompts_per_step, recipe.sampling.max_response_tokens) == (32, 99)
    assert not any("config-name" in note for note in notes)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("algorithm.sppo_eta=0.5",), {"kind": "sppo", "eta": 0.5}),
        (("actor_rollout_ref.actor.sppo_eta=2.0",), {"kind": "sppo", "eta": 2.0}),
        (
            ("actor_rollout_ref.actor.dpo_beta=0.2", "trainer.ref_update_freq=1"),
            {"kind": "online_dpo", "kl": {"kind": "reward", "coef": 0.2}},
        ),
    ],
)
def test_algorithms_of_verls_recipes_that_compare_answers_arrive(
    words: tuple[str, ...], expected: dict[str, Tree], tmp_path: Path
) -> None:
    result = imported(tmp_path, *words)
    assert value_at(result.tree, "algorithm") == expected
    recipe = Recipe.model_validate(result.tree)
    shape = PUBLIC_MODELS["qwen2.5-7b"]
    assert check_without_files(recipe, shape, critic=shape.as_critic()) == []
    for word in words:
        assert entry(result, word.partition("=")[0]).verdict is not KeyVerdict.UNKNOWN


def test_prime_arrives_with_its_reward_model(tmp_path: Path) -> None:
    result = imported(
        tmp_path,
        "algorithm.adv_estimator=rloo",
        "reward_model.model.path=Qwen/Qwen2.5-7B-Instruct",
        "reward_model.model.beta_train=0.1",
        "reward_model.model.optim.lr=2e-6",
        "reward_model.model.update=before",
        "reward_model.mini_batch_size=64",
        "algorithm.reward_dpo_coef=5",
        "algorithm.reward_gt_coef=2",
    )
    algorithm = value_at(result.tree, "algorithm")
    assert isinstance(algorithm, dict)
    assert (algorithm["kind"], algorithm["beta"], algorithm["process_coef"]) == ("prime", 0.1, 2.5)
    assert value_at(result.tree, "roles.critic.optimizer.learning_rate") == 2e-6
    recipe = Recipe.model_validate(result.tree)
    shape = PUBLIC_MODELS["qwen2.5-7b"]
    assert check_without_files(recipe, shape, critic=shape.as_critic()) == []
    assert not [item for item in result.entries if item.verdict is KeyVerdict.UNKNOWN]
