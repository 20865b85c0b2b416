"""Scores without training: `megarl evaluate`, the answers of a model to held-out prompts, and `megarl rescore`, another
reward on the stored rollouts of a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from pydantic import JsonValue
from rich.table import Table

from megarl.checkpoint.folder import find_model
from megarl.checkpoint.manifest import MANIFEST_FILE, read_manifest
from megarl.cli.display import make_display
from megarl.cli.lines import make_console
from megarl.cli.run_folder import RunArgument
from megarl.cli.train import ignore_warnings
from megarl.config.checks.recipe import check_recipe
from megarl.config.document import Document, override, override_value, read_document
from megarl.config.load import load_recipe, validated
from megarl.config.recipe import Recipe
from megarl.config.reward import FunctionRewardConfig, RewardConfig
from megarl.errors import ConfigError, Problem
from megarl.results import EvalResult
from megarl.reward.build import check_reward
from megarl.run_result import Result
from megarl.tools.rescore import Rescored, rescore, running_models

_FROZEN = ("reward_model", "judge")
_TOLERANCE = 1e-6
_RECIPES = (".yaml", ".yml")


def evaluate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CKPT", help="A run, a checkpoint or a Hugging Face folder.", show_default=False)
    ],
    data: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Held-out prompts; those of the recipe if not given.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Pools, reward, lengths; that of the checkpoint if not given.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one key. May be repeated.")
    ] = None,
    rollouts_per_prompt: Annotated[
        int | None, typer.Option("-n", min=1, help="Also sample this many answers per prompt, for pass@k.")
    ] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Use only the first prompts.")] = None,
) -> None:
    """Grade the answers of a model to held-out prompts. Trains nothing.

    Answers are kept in the folder of a run of their own: `megarl samples` and `megarl view` show them.
    """
    source = find_model(checkpoint)
    document = read_document(recipe) if recipe is not None else _recorded(source.folder)
    document = evaluation_document(
        document, model=source.folder, data=data or (), rollouts_per_prompt=rollouts_per_prompt, max_prompts=max_prompts
    )
    for assignment in overrides or ():
        document = override(document, assignment)
    checked = validated(document, source=str(recipe or checkpoint)).recipe
    problems = check_recipe(checked)
    if problems:
        raise ConfigError(str(recipe or checkpoint), tuple(problems))

    from megarl.run import launch

    console = make_console()
    ignore_warnings()
    # No step is taken: the weights are published, evaluated, and that is all.
    run = checked.model_copy(update={"run": checked.run.model_copy(update={"steps": 0, "epochs": None})})
    launch.train(run, display=make_display(console), resume="never")
    result = Result(checked.run_folder)
    console.print(result_table(result.evaluations[0], model=source.folder))
    console.print(f"answers: megarl samples {checked.run_folder} --wrong")


def _recorded(model: Path) -> Document:
    """Return the recipe that a checkpoint was made with."""
    for folder in model.resolve().parents[:3]:
        if (folder / MANIFEST_FILE).exists():
            return Document(
                tree=Recipe.model_validate(read_manifest(folder).recipe).model_dump(mode="json"), origins={}
            )
    message = "is no checkpoint of a run: name a recipe with --recipe, for pools, reward and lengths"
    raise ConfigError("megarl evaluate", (Problem(key=str(model), message=message),))


def evaluation_document(
    document: Document,
    *,
    model: Path,
    data: Sequence[Path],
    rollouts_per_prompt: int | None,
    max_prompts: int | None,
) -> Document:
    """Return the recipe of a run that only evaluates: no critic, reference or teacher, and no step is ever taken."""
    run, roles = _section(document, "run"), _section(document, "roles")
    name = f"evaluate_{run.get('name', 'model')}"
    prompts: list[JsonValue] = [str(path) for path in data] or _list(_section(document, "data").get("eval"))
    evaluation = {**_section(document, "evaluation"), "every_steps": None, "runs_before_training": True}
    if max_prompts is not None:
        evaluation["max_prompts"] = max_prompts
    if rollouts_per_prompt is not None:
        evaluation["sampled"] = {"rollouts_per_prompt": rollouts_per_prompt}
    kept = {role: roles[role] for role in ("actor", "rollout", *_FROZEN) if roles.get(role) is not None}
    served = [
        kept.get("actor"),
        kept.get("rollout"),
        *(each for kind in _FROZEN for each in _section_of(kept, kind).values()),
    ]
    used = [role.get("pool") for role in served if isinstance(role, dict)]
    pools = {name: pool for name, pool in _section(document, "pools").items() if name in used}
    changes: Mapping[str, JsonValue] = {
        "run.name": name,
        "run.steps": 1,
        "run.epochs": None,
        "model.path": str(model),
        "data.eval": prompts,
        # Prompts to train on are read and never used.
        "data.train": prompts,
        "data.eval_demonstrations": [],
        "pools": pools,
        "roles": kept,
        # It takes groups of any size.
        "algorithm": {"kind": "reinforce_pp"},
        "evaluation": evaluation,
        "checkpoint": {"save_every_steps": None, "save_at_end": False},
        "train": {**_section(document, "train"), "prompts_per_step": 1, "prompts_per_update": None, "max_staleness": 0},
    }
    for key, value in changes.items():
        document = override_value(document, tuple(key.split(".")), value)  # type: ignore[arg-type]
    return document


def _section(document: Document, name: str) -> dict[str, JsonValue]:
    return _section_of(document.tree, name)  # type: ignore[arg-type]


def _section_of(tree: Mapping[str, JsonValue], name: str) -> dict[str, JsonValue]:
    value = tree.get(name)
    return value if isinstance(value, dict) else {}


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []


def result_table(result: EvalResult, *, model: Path) -> Table:
    """Return one row per data source and metric, with the standard error of shares over prompts."""
    table = Table("task", "metric", "value", "stderr", "prompts", title=str(model), title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    for source, num_prompts in _sources(result):
        for name, value in result.numbers_of(source).items():
            is_share = name != "score" and num_prompts > 1 and 0 <= value <= 1
            error = f"{math.sqrt(value * (1 - value) / (num_prompts - 1)):.4f}" if is_share else ""
            table.add_row(source or "all", name, f"{value:.4f}", error, str(num_prompts))
    return table


def _sources(result: EvalResult) -> Iterator[tuple[str | None, int]]:
    assert result.main is not None, "an evaluation without answers"
    if len(result.main.by_source) > 1:
        yield from ((name, grade.num_prompts) for name, grade in result.main.by_source.items())
    yield None, result.main.overall.num_prompts


def rescore_run(
    run: RunArgument,
    reward: Annotated[
        Path,
        typer.Option(metavar="FILE", help="A Python file with compute_score, or a recipe with a reward section."),
    ],
    name: Annotated[str, typer.Option(help="The function in the Python file.")] = "compute_score",
    step: Annotated[int | None, typer.Option(min=0, help="Only the rollouts of this step.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Show this many of the largest changes.")] = 5,
) -> None:
    """Score the stored rollouts of a run again with another reward, and compare. The run is not changed."""
    recipe = load_recipe(reward) if reward.suffix in _RECIPES else None
    # A rollout that the new function cannot score is counted; it does not end the comparison.
    function = FunctionRewardConfig(kind="function", path=reward, name=name, on_error="mask")
    config: RewardConfig = function if recipe is None else recipe.reward
    if problems := check_reward(config):
        raise ConfigError(str(reward), tuple(problems))
    open_models = None
    if recipe is not None and recipe.roles.frozen:
        open_models = running_models(recipe.roles.frozen, config, run=recipe.run, network=recipe.network)
    rescored = rescore(
        run,
        config,
        step=step,
        on_step=lambda at, num: print(f"step {at}: {num} rollouts", flush=True),
        open_models=open_models,
    )
    console = make_console()
    console.print(_rescored_table(rescored))
    for each in _largest_changes(rescored, limit):
        place = f"step {each.step}, prompt {each.prompt_uid}, rollout {each.index}"
        console.print(
            f"{place}: {_shown(each.stored)} -> {_shown(each.new)}: {each.line}", markup=False, highlight=False
        )


def _rescored_table(rescored: Sequence[Rescored]) -> Table:
    table = Table()
    for column in ("data source", "rollouts", "mean stored", "mean new", "changed", "correlation", "without a score"):
        table.add_column(column, justify="left" if column == "data source" else "right")
    by_source = sorted(rescored, key=lambda each: each.data_source)
    for source, members in groupby(by_source, key=lambda each: each.data_source):
        table.add_row(source, *_rescored_numbers(list(members)))
    table.add_row("all", *_rescored_numbers(rescored))
    return table


def _rescored_numbers(rescored: Sequence[Rescored]) -> list[str]:
    pairs = [(each.stored, each.new) for each in rescored if each.stored is not None and each.new is not None]
    num_missing = sum(each.new is None for each in rescored)
    if not pairs:
        return [str(len(rescored)), "", "", "", "", str(num_missing)]
    stored, new = np.array(pairs, dtype=np.float64).T
    num_changed = int((np.abs(stored - new) > _TOLERANCE).sum())
    varies = len(pairs) > 1 and float(stored.std()) > 0 and float(new.std()) > 0
    correlation = f"{np.corrcoef(stored, new)[0, 1]:.3f}" if varies else "-"
    means = (f"{stored.mean():.4f}", f"{new.mean():.4f}")
    return [str(len(rescored)), *means, str(num_changed), correlation, str(num_missing)]


def _largest_changes(rescored: Sequence[Rescored], limit: int) -> list[Rescored]:
    """Return the rollouts whose scores differ most, those that lost or gained a score first."""

    def change(each: Rescored) -> float:
        if each.stored is None or each.new is None:
            return 0.0 if each.stored is each.new else float("inf")
        return abs(each.stored - each.new)

    return [each for each in sorted(rescored, key=change, reverse=True)[:limit] if change(each) > _TOLERANCE]


def _shown(value: float | None) -> str:
    return "no score" if value is None else f"{value:g}"
