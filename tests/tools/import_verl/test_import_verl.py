"""Every key of verl has a verdict, and the keys that mean something arrive in the recipe."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from megarl.config.algorithm import AdaptiveKlConfig, GaeConfig, GroupConfig, GrpoConfig, KlLossConfig, KlRewardConfig
from megarl.config.checks.recipe import check_without_files
from megarl.config.document import Tree
from megarl.config.recipe import ObserveConfig, Recipe
from megarl.config.reward import FunctionRewardConfig
from megarl.config.roles import OptimizerConfig, ReferenceConfig
from megarl.errors import ConfigError
from megarl.families import PUBLIC_MODELS
from megarl.reward.scorers.regex import compute_score
from megarl.tools.import_verl.algorithm import ESTIMATORS, THOUGHT
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

SECTIONS = {
    "OPTIONS": "actor_rollout_ref.actor.megatron.override_transformer_config",
    "MEGATRON": "actor_rollout_ref.actor.megatron",
    "TURNS": "actor_rollout_ref.rollout.multi_turn",
    "VALIDATION": "actor_rollout_ref.rollout.val_kwargs",
    "ROLLOUT": "actor_rollout_ref.rollout",
    "ACTOR": "actor_rollout_ref.actor",
    "MODEL": "actor_rollout_ref.model",
    "TEACHERS": "distillation.teacher_models",
    "DISTILLATION": "distillation.distillation_loss",
}
"""Short names of verl's sections, for tables of words."""
HERE = Path(__file__).parent / "configs"
KEYS = yaml.safe_load((Path(__file__).parent / "keys.yaml").read_text())
GEOMETRY: Tree = {
    "kind": "composed",
    "parts": {
        "answer": {"weight": 0.9, "reward": {"kind": "math"}},
        "format": {"weight": 0.1, "reward": {"kind": "regex", "pattern": THOUGHT, "is_format": True}},
    },
}
SOURCES: dict[str, Tree] = {
    "hiyouga/geometry3k": GEOMETRY,
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


def full(words: str) -> str:
    for name, section in SECTIONS.items():
        words = words.replace(f"{name}.", f"{section}.")
    return words


def imported(tmp_path: Path, *words: str) -> Imported:
    script = tmp_path / "run.sh"
    script.write_text(BASE + full(" ".join(words)) + "\n")
    return translate_file(script)


def value_at(tree: Tree, key: str) -> Tree:
    for name in key.split("."):
        assert isinstance(tree, dict), key
        tree = tree.get(name)
    return tree


def entry(result: Imported, key: str) -> Entry:
    return next(item for item in result.entries if item.key == key)


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


def test_every_key_of_verl_has_a_verdict() -> None:
    assert len(known_keys()) == 870
    assert [key for key in known_keys() if rule_for(key) is None] == []


@pytest.mark.parametrize(("words", "values"), KEYS["arrive"])
def test_keys_arrive_in_the_recipe(tmp_path: Path, words: str, values: dict[str, Tree]) -> None:
    result = imported(tmp_path, words)
    assert {key: value_at(result.tree, key) for key in values} == values
    Recipe.model_validate(result.tree)


def test_verls_own_scorers_arrive_by_data_source(tmp_path: Path) -> None:
    assert value_at(imported(tmp_path, "data.reward_fn_key=data_source").tree, "reward.sources") == SOURCES


@settings(max_examples=500)
@given(st.lists(st.sampled_from(["<think>", "</think>", "\\boxed{", "\\boxed", "}", "{", "\n", "7"]), max_size=12))
def test_the_form_of_geometry3k_is_verls(pieces: list[str]) -> None:
    text = "".join(pieces)
    theirs = re.fullmatch(re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL), text)
    assert compute_score("", text, "", pattern=THOUGHT, is_format=True)["score"] == float(theirs is not None)


def test_the_form_of_geometry3k_takes_one_pass_of_a_hostile_text() -> None:
    text = "<think>" + "</think>\\boxed{" * 20_000
    began = time.process_time()
    assert compute_score("", text, "", pattern=THOUGHT, is_format=True)["score"] == 0
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("path", "name", "words"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl-7b", "ROLLOUT.tensor_model_parallel_size=1"),
        (
            "$RAY_DATA_HOME/models/Qwen3-VL-8B-Instruct",
            "qwen3-vl-8b",
            "MEGATRON.pipeline_model_parallel_size=2 MEGATRON.context_parallel_size=2 MEGATRON.use_mbridge=True",
        ),
    ],
)
def test_a_script_with_images_arrives_whole(path: str, name: str, words: str, tmp_path: Path) -> None:
    result = imported(
        tmp_path,
        f"MODEL.path={path} {words} data.train_files=$HOME/data/geo3k/train.parquet data.image_key=pictures",
        "data.val_files=$HOME/data/geo3k/test.parquet +data.mm_processor_kwargs.max_pixels=401408",
        "data.max_prompt_length=1024 data.max_response_length=2048 data.filter_overlong_prompts=True",
        "data.return_multi_modal_inputs=True MEGATRON.tensor_model_parallel_size=2 ROLLOUT.name=vllm ROLLOUT.n=5",
        "+ROLLOUT.engine_kwargs.vllm.disable_mm_preprocessor_cache=True ACTOR.freeze_vision_tower=True",
        "ACTOR.use_kl_loss=True ACTOR.kl_loss_type=low_var_kl trainer.n_gpus_per_node=8",
    )
    recipe = Recipe.model_validate(result.tree)
    assert check_without_files(recipe, PUBLIC_MODELS[name], critic=PUBLIC_MODELS[name]) == []
    assert (recipe.data.images_key, recipe.data.max_image_pixels) == ("pictures", 401408)
    assert value_at(result.tree, "reward.sources.hiyouga/geometry3k") == GEOMETRY
    left = [item.key for item in result.entries if item.verdict in (KeyVerdict.NOT_SUPPORTED, KeyVerdict.UNKNOWN)]
    assert left == []
    assert not any("tower" in note for note in result.notes)


def test_verl_trains_the_tower_unless_it_is_frozen(tmp_path: Path) -> None:
    model = "MODEL.path=Qwen/Qwen2.5-VL-3B-Instruct"
    (note,) = (note for note in imported(tmp_path, model).notes if "tower" in note)
    assert note == f"model.path: {_TRAINED}"
    key = "actor_rollout_ref.actor.freeze_vision_tower"
    report = entry(imported(tmp_path, model, "ACTOR.freeze_vision_tower=False"), key)
    assert (report.verdict, report.text) == (KeyVerdict.NOT_SUPPORTED, _TRAINED)
    assert not any("tower" in note for note in imported(tmp_path).notes)


_TRAINED = "the tower that sees images is not trained, and verl trains it unless freeze_vision_tower is set"


@pytest.mark.parametrize(("words", "verdict", "text"), KEYS["explained"])
def test_a_key_that_does_not_arrive_is_explained(tmp_path: Path, words: str, verdict: str, text: str) -> None:
    report = entry(imported(tmp_path, words), full(words).partition("=")[0].lstrip("+"))
    assert report.verdict == verdict
    assert text in report.text


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("ROLLOUT.top_p=0.9", "algorithm.correction: tis"),
        ("rollout.n_gpus_per_node=8 MEGATRON.param_offload=True", "nothing is offloaded"),
    ],
)
def test_an_assumption_is_noted(tmp_path: Path, words: str, note: str) -> None:
    assert any(note in each for each in imported(tmp_path, words).notes)


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


@pytest.mark.parametrize("name", ["grpo.yaml", "ppo.sh", "ppo_kl.yaml", "lora.yaml", "multi_turn.yaml", "sft.yaml"])
def test_a_configuration_of_each_kind_gives_a_recipe_that_only_lacks_files(name: str) -> None:
    result = translate_file(HERE / name)
    recipe = Recipe.model_validate(result.tree)
    policy = "qwen2.5-72b" if name == "ppo.sh" else "qwen2.5-7b"
    critic = "qwen2.5-14b" if name == "ppo_kl.yaml" else policy
    assert check_without_files(recipe, PUBLIC_MODELS[policy], critic=PUBLIC_MODELS[critic]) == []
    keys = [item.key for item in result.entries]
    assert len(keys) == len(set(keys)) > 10


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3.5-35B-A3B", "qwen3.5-35b-a3b"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next-80b-a3b"),
        ("zai-org/GLM-4.5-Air", "glm-4.5-air"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
    ],
)
def test_a_script_of_a_mixture_arrives_whole(path: str, name: str, tmp_path: Path) -> None:
    words = (
        f"MODEL.path={path}",
        "trainer.nnodes=2 trainer.n_gpus_per_node=8",
        "MEGATRON.tensor_model_parallel_size=2 MEGATRON.expert_model_parallel_size=8",
        "MEGATRON.expert_tensor_parallel_size=1 MEGATRON.use_mbridge=True MEGATRON.vanilla_mbridge=False",
        "ROLLOUT.tensor_model_parallel_size=4 data.train_batch_size=128 ACTOR.ppo_mini_batch_size=64",
    )
    result = imported(tmp_path, *words)
    recipe = Recipe.model_validate(result.tree)
    assert check_without_files(recipe, PUBLIC_MODELS[name], critic=PUBLIC_MODELS[name]) == []
    assert (recipe.roles.actor.tensor, recipe.roles.actor.expert, recipe.roles.actor.expert_tensor) == (2, 8, 1)
    left = [item.key for item in result.entries if item.verdict in (KeyVerdict.NOT_SUPPORTED, KeyVerdict.UNKNOWN)]
    assert left == []


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


@pytest.mark.patient
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
    assert set(LOGGERS) == set(ObserveConfig.model_fields) - {"metrics_port", "rollouts", "profile"}
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


TRAINER = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet "
SFT = "torchrun --nnodes=4 --nproc_per_node 8 -m verl.trainer.sft_trainer data.train_files=a.parquet "


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (
            "model.path=m model.lora.rank=8 model.lora.dropout=0.05 model.lora.target_modules=[linear_qkv]",
            {"model.lora": {"rank": 8, "alpha": 32, "dropout": 0.05, "modules": ["q_proj", "k_proj", "v_proj"]}},
        ),
        ("engine=megatron", {"pools.shared": {"nodes": 4, "gpus_per_node": 8}, "roles.rollout": None}),
        ("engine.tensor_model_parallel_size=4", {"roles.actor.is_sequence_parallel": True}),
        ("data.response_key=answer optim.lr=1e-5", {"data.response_key": "answer", "algorithm.kind": "sft"}),
        ("optim.betas='[0.9,0.95]'", {"train.optimizer.beta2": 0.95}),
        (
            "+engine.override_transformer_config.recompute_granularity=full",
            {"roles.actor.megatron.recompute_granularity": "full"},
        ),
    ],
)
def test_keys_of_demonstrations_arrive(tmp_path: Path, words: str, values: dict[str, Tree]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f'E="{words}"\n{SFT} $E\n')
    tree = translate_file(path).tree
    assert {key: value_at(tree, key) for key in values} == values
    Recipe.model_validate(tree)


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


def test_a_model_that_drafts_tokens_is_said_not_to_be_trained(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    words = "data.train_files=a.parquet model.path=mine model.freeze_base_model=true ++model.speculator.n_predict=3"
    path.write_text(f"torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer {words}")
    for key in ("model.freeze_base_model", "model.speculator.n_predict"):
        assert entry(translate_file(path), key).verdict is KeyVerdict.NOT_SUPPORTED


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
        (
            (
                "algorithm.adv_estimator=rloo",
                "reward_model.model.path=Qwen/Qwen2.5-7B-Instruct",
                "reward_model.model.beta_train=0.1",
                "reward_model.model.optim.lr=2e-6",
                "reward_model.model.update=before",
                "reward_model.mini_batch_size=64",
                "algorithm.reward_dpo_coef=5",
                "algorithm.reward_gt_coef=2",
            ),
            {"kind": "prime", "beta": 0.1, "process_coef": 2.5},
        ),
    ],
)
def test_algorithms_of_verls_recipes_that_compare_answers_arrive(
    words: tuple[str, ...], expected: dict[str, Tree], tmp_path: Path
) -> None:
    result = imported(tmp_path, *words)
    algorithm = value_at(result.tree, "algorithm")
    assert isinstance(algorithm, dict)
    assert {name: algorithm[name] for name in expected} == expected
    recipe = Recipe.model_validate(result.tree)
    shape = PUBLIC_MODELS["qwen2.5-7b"]
    assert check_without_files(recipe, shape, critic=shape.as_critic()) == []
    for word in words:
        assert entry(result, word.partition("=")[0]).verdict is not KeyVerdict.UNKNOWN
