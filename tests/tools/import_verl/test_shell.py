"""Scripts in the manner of verl's examples are read as a shell would run them, without running anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.checks.recipe import check_without_files
from megarl.config.recipe import Recipe
from megarl.errors import ConfigError
from megarl.families import PUBLIC_MODELS
from megarl.tools.import_verl.shell import Script
from megarl.tools.import_verl.translate import translate_file

SCRIPTS = Path(__file__).parent / "scripts"
MODELS = {"arithmetic": "qwen2.5-32b", "arrays": "qwen3-8b", "sft": "qwen3-8b"}
HOME = Path.home()


def words(text: str, *arguments: str, **variables: str) -> list[str]:
    script = Script(arguments=arguments, variables={name: [value] for name, value in variables.items()})
    return [word.partition("=")[2] for word in script.read(f"{text}\n") if word.startswith("a.")]


def recipe_of(name: str, *arguments: str) -> Recipe:
    return Recipe.model_validate(translate_file(SCRIPTS / f"{name}.sh", arguments).tree)


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda script: script.stem)
def test_a_script_gives_a_recipe_that_only_lacks_files(script: Path) -> None:
    model = PUBLIC_MODELS[MODELS.get(script.stem, "qwen2.5-7b")]
    assert check_without_files(recipe_of(script.stem), model, critic=model) == []


def test_arithmetic_is_computed() -> None:
    recipe = recipe_of("arithmetic")
    assert (recipe.data.max_prompt_tokens, recipe.sampling.max_response_tokens) == (2048, 4096)
    assert recipe.train.tokens_per_micro_batch == 12288
    assert (recipe.train.prompts_per_update, recipe.pools["shared"].nodes, recipe.run.epochs) == (32, 4, 4)
    assert recipe.algorithm.model_dump()["overlong"]["buffer_tokens"] == 512
    assert recipe.algorithm.model_dump()["loss"]["clip_high"] == 0.28
    assert recipe.data.train == (HOME / "data" / "dapo.parquet",)


def test_defaults_conditions_and_arguments_are_followed() -> None:
    recipe = recipe_of("defaults")
    assert recipe.model.path == HOME / "verl" / "models" / "Qwen2.5-7B"
    assert recipe.data.eval == (HOME / "verl/data/a.parquet", HOME / "verl/data/b.parquet")
    assert recipe.roles.rollout is not None
    assert (recipe.roles.rollout.tensor, recipe.roles.rollout.max_running_requests, recipe.run.seed) == (4, 1024, 11)
    assert recipe.train.optimizer.warmup_share == 0.05
    assert recipe.run.name == "run-tp4"
    other = recipe_of("defaults", "8", "trainer.nnodes=2", "MODEL_PATH=/models/mine", "WARMUP=0.1")
    assert other.roles.rollout is not None
    assert (other.roles.rollout.tensor, other.roles.rollout.max_running_requests) == (8, 384)
    assert (other.model.path, other.pools["shared"].nodes) == (Path("/models/mine"), 2)
    assert other.train.optimizer.warmup_share == 0.1


def test_arrays_count_where_they_are_used() -> None:
    recipe = recipe_of("arrays")
    assert recipe.algorithm.kind == "rloo"
    assert recipe.algorithm.model_dump()["kl"]["estimate"] == "k3"
    assert (recipe.train.prompts_per_step, recipe.roles.actor.offload) == (256, "everything")


def test_blocks_of_words_are_joined_replaced_and_split() -> None:
    recipe = recipe_of("blocks")
    assert recipe.data.train == (Path("train.parquet"),)
    assert recipe.roles.critic is not None
    assert (recipe.roles.actor.tensor, recipe.roles.critic.tensor, recipe.roles.actor.offload) == (2, 2, "optimizer")
    assert recipe.roles.critic.optimizer.learning_rate == 2e-5
    fsdp = recipe_of("blocks", "BACKEND=fsdp")
    assert (fsdp.roles.actor.tensor, fsdp.roles.actor.offload) == (1, "everything")
    assert any("model_engine=megatron: a group" in note for note in translate_file(SCRIPTS / "blocks.sh").notes)


def test_what_only_the_caller_knows_is_asked_for() -> None:
    result = translate_file(SCRIPTS / "arguments.sh")
    assert Recipe.model_validate(result.tree).model.path == Path("ARGUMENT_1")
    text = " ".join([*result.notes, *(entry.text for entry in result.entries)])
    assert "actor_rollout_ref.model.path=$1: argument 1 of the script; write the arguments after the file" in text
    assert "write ROLLOUT_TP=VALUE after the file" in text
    recipe = recipe_of("arguments", "Qwen/Qwen2.5-7B", "ckpts", "trainer.total_epochs=2", "ROLLOUT_TP=1")
    assert (recipe.model.path, recipe.run.folder, recipe.run.epochs) == (Path("Qwen/Qwen2.5-7B"), Path("ckpts"), 2)
    assert recipe.roles.rollout is not None
    assert recipe.roles.rollout.tensor == 1


def test_an_sft_script_keeps_ranks_split_schedule_and_columns() -> None:
    recipe = recipe_of("sft")
    assert (recipe.pools["shared"].gpus, recipe.roles.actor.tensor, recipe.roles.actor.pipeline) == (8, 2, 2)
    assert (recipe.run.epochs, recipe.run.steps, recipe.data.prompt_key) == (2, 200, "messages")
    optimizer = recipe.train.optimizer
    assert (optimizer.beta2, optimizer.warmup_share, optimizer.min_learning_rate) == (0.95, 0.2, 1e-6)
    assert recipe.observe.tensorboard is not None
    assert recipe.evaluation is not None
    assert recipe.evaluation.every_steps == 50
    columns = recipe_of("sft_columns", "4")
    assert (columns.data.prompt_key, columns.data.response_key) == ("extra_info.question", "extra_info.answer")
    assert columns.pools["shared"].gpus == 4


def test_a_comment_within_a_command_does_not_cut_it() -> None:
    recipe = recipe_of("submitted")
    assert (recipe.run.epochs, recipe.sampling.rollouts_per_prompt) == (15, 8)
    assert recipe.train.tokens_per_micro_batch == 8 * 1024


def test_a_sweep_gives_its_first_run() -> None:
    result = translate_file(SCRIPTS / "sweep.sh")
    recipe = Recipe.model_validate(result.tree)
    assert (recipe.train.optimizer.learning_rate, recipe.run.name) == (1e-6, "lr-1e-6")
    assert "the script starts 2 trainers; the recipe is that of the first" in result.notes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x=3; run a.b=$((x * (2 + 1) - 1))", ["8"]),
        ("run a.b=$((7 / 2)) a.c=$((-7 % 4))", ["3", "1"]),
        ("run a.b=${X:-1} a.c=${X-2} a.d=${X:+3}", ["1", "2", ""]),
        ("X=; run a.b=${X:-1} a.c=${X-2}", ["1", ""]),
        (
            "P=/a/b.tar.gz; run a.b=${P##*/} a.c=${P%.*} a.d=${P%%.*} a.e=${P#/a/}",
            ["b.tar.gz", "/a/b.tar", "/a/b", "b.tar.gz"],
        ),
        ("P=x-y-x; run a.b=${P//x/z} a.c=${P/x/z} a.d=${P^^}", ["z-y-z", "z-y-x", "X-Y-X"]),
        ('A=(1 2 3); run a.n=${#A[@]} a.b=${A[1]} a.c="${A[*]}"', ["3", "2", "1 2 3"]),
        ("run a.b='[\"x\",\"y\"]' a.c=\"['x', 'y']\" a.d='$x'", ['["x","y"]', "['x', 'y']", "$x"]),
        ("run a.b=$UNSET a.c=`hostname` a.d=$(nproc)", ["$UNSET", "`hostname`", "$(nproc)"]),
        ('if [ -n "$X" ]; then Y=1; elif [[ 2 -gt 1 && a != b ]]; then Y=2; else Y=3; fi; run a.b=$Y', ["2"]),
        ("while true; do Y=1; done; run a.b=${Y:-2}", ["2"]),
        ("run a.b=1 > log.txt 2>&1 &", ["1"]),
        ("f() {\n run a.b=1\n}\nf", ["1"]),
    ],
)
def test_the_shell_is_followed(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize("text", ["run a.b='x", 'run a.b="x', "run a.b=${x", "run a.b=$(x", "run a.b=`x"])
def test_a_script_that_does_not_end_says_where(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"set -x\n{text}\n")
    with pytest.raises(ConfigError, match=r"not a shell script: line 2: .* is not closed"):
        translate_file(path)


@pytest.mark.patient
@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda script: script.stem)
def test_a_damaged_script_is_read_or_refused(script: Path, tmp_path: Path) -> None:
    """Whatever is cut out of a script, or off its end, no other error than a ConfigError of a line comes of it."""
    text = script.read_text()
    path = tmp_path / "damaged.sh"
    num_read, reasons = 0, list[str]()
    for place in range(0, len(text), 23):
        for damaged in (text[:place], text[:place] + text[place + 7 :]):
            path.write_text(damaged)
            try:
                translate_file(path)
                num_read += 1
            except ConfigError as error:
                reasons += [problem.message for problem in error.problems]
    assert num_read > 0
    assert reasons
    assert not any("\n" in reason for reason in reasons)
