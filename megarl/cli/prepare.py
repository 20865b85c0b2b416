"""Commands before a first run: `megarl init` writes a recipe with a layout that fits, `megarl import-verl` turns a verl
configuration into one, `megarl data` writes prompt tables of data sets, and models to train on them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
import yaml
from pydantic import ValidationError

from megarl.config.checks.recipe import check_without_files
from megarl.config.document import Document, Tree
from megarl.config.hub import public_model_name
from megarl.config.load import schema_problems, validated
from megarl.config.recipe import Recipe
from megarl.errors import ConfigError, Problem, writing
from megarl.families import PUBLIC_MODELS
from megarl.planner.fit import PlanAnswer, PlanQuestion, answer_for
from megarl.planner.hardware import parse_gpu
from megarl.system.secret import printable
from megarl.tools.import_verl.translate import translate_file
from megarl.tools.import_verl.translation import Entry, Imported, KeyVerdict
from megarl.tools.prepare import DataSetName

if TYPE_CHECKING:
    from megarl.tools.quickstart.tiny_model import TinyShape

data_app = typer.Typer(no_args_is_help=True, help="Write prompt tables from data sets, and make data sets.")
make_app = typer.Typer(no_args_is_help=True, help="Write a data set and a model to train on it.")
data_app.add_typer(make_app, name="make")

_Out = Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.", show_default=False)]
_Seed = Annotated[int, typer.Option(min=0, help="Seed of the problems and of the model's weights.")]
_REWARDS = ("exact", "gsm8k", "math", "dapo_math", "multiple_choice")
_HEAD = "# Written by megarl init; `megarl schema --docs` explains every key.\n"
_MAX_VALUE = 32
_PREVIEW_CHARS = 400


def init(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The recipe to write.", show_default=False)],
    model: Annotated[Path | None, typer.Option(help="A Hugging Face folder; it may be on the cluster only.")] = None,
    train: Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts to train on.")] = None,
    held_out: Annotated[Path | None, typer.Option("--eval", metavar="FILE", help="Held-out prompts.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of one node; 0 runs on the CPU.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    gpu: Annotated[str, typer.Option(help="The kind of GPU, as `megarl plan` knows it.")] = "h100",
    shape: Annotated[str | None, typer.Option(help="A public model's name, where the model is missing here.")] = None,
    reward: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(_REWARDS)}, or your function, file.py:name.")
    ] = None,
    response_tokens: Annotated[int, typer.Option(min=1, help="Length of the longest response.")] = 2048,
) -> None:
    """Write a GRPO recipe that fits. What no flag names is asked on a terminal."""
    if out.exists():
        raise ConfigError("megarl init", (Problem(key=str(out), message="exists; name another file"),))
    model_path = _asked(model, "--model", "folder of the model")
    train_path = _asked(train, "--train", "parquet file to train on")
    num_gpus = int(_asked(gpus, "--gpus", "GPUs of one node (0: CPU)"))
    scorer = _asked(reward, "--reward", f"reward ({', '.join(_REWARDS)}, or file.py:name)")
    base: dict[str, Tree] = {
        "run": {"name": out.stem, "steps": 100, "device": "cuda" if num_gpus else "cpu"},
        "model": {"path": model_path},
        "data": {"train": [train_path], **({"eval": [str(held_out)]} if held_out else {})},
        **({"cluster": {"gpu": gpu}} if num_gpus else {}),
        "algorithm": {"kind": "grpo"},
        "sampling": {"rollouts_per_prompt": 8, "max_response_tokens": response_tokens},
        "reward": _reward(scorer),
        "train": {
            "prompts_per_step": 64,
            "optimizer": {"learning_rate": 1e-6},
        },
        **({"evaluation": {"every_steps": 10}} if held_out else {}),
    }
    tree, note = choose_layout(base, num_gpus=num_gpus, nodes=nodes, gpu=gpu, shape=shape)
    with writing(out):
        out.write_text(_HEAD + yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=110))
    print(f"wrote {out}: {note}\nnext: megarl validate {out} && megarl train {out}")


def _asked(value: object | None, option: str, text: str) -> str:
    if value is not None:
        return str(value)
    if not sys.stdin.isatty():
        raise ConfigError("megarl init", (Problem(key=option, message=f"missing: {text}"),))
    return str(typer.prompt(text))


def _reward(text: str) -> dict[str, Tree]:
    if text in _REWARDS:
        return {"kind": text}
    place, colon, name = text.rpartition(":")
    if colon and place.endswith(".py"):
        return {"kind": "function", "path": place, "name": name}
    problem = Problem(key="--reward", message=f"{text!r}: name one of {', '.join(_REWARDS)}, or file.py:name")
    raise ConfigError("megarl init", (problem,))


def choose_layout(
    base: dict[str, Tree], *, num_gpus: int, nodes: int, gpu: str, shape: str | None
) -> tuple[dict[str, Tree], str]:
    """Return the recipe with the pools and splits that fit and have the shortest step, and a sentence about them."""
    if not num_gpus:
        pools: dict[str, Tree] = {"train": {"gpus_per_node": 1}, "rollout": {"gpus_per_node": 1}}
        roles: dict[str, Tree] = {"actor": {"pool": "train"}, "rollout": {"pool": "rollout"}}
        return {**base, "pools": pools, "roles": roles}, "one trainer and one engine on the CPU"
    question = PlanQuestion(gpu=parse_gpu(gpu), shape_name=shape)
    best: tuple[float, dict[str, Tree], PlanAnswer] | None = None
    refused = ""
    for layout in _layouts(num_gpus, nodes):
        tree = {**base, **layout}
        try:
            answer = answer_for(_recipe(tree), question)
        except ConfigError as error:
            refused = str(error.problems[0])
            continue
        sizes = answer.plan.sizes
        refused = sizes.excess or refused
        seconds = 0.0 if sizes.timing is None else sizes.timing.step_s
        if sizes.fits and (best is None or seconds < best[0]):
            best = (seconds, tree, answer)
    if best is None:
        message = f"no layout of {nodes} x {num_gpus} {gpu} fits; the last one: {refused}; name more GPUs"
        raise ConfigError("megarl init", (Problem(key="--gpus", message=message),))
    seconds, tree, answer = best
    return tree, f"fits {answer.plan.placement.num_gpus} x {gpu}, a step takes about {seconds:.0f} s (megarl plan)"


def _recipe(tree: dict[str, Tree]) -> Recipe:
    return validated(Document(tree=tree, origins={}), source="megarl init").recipe


def _layouts(num_gpus: int, nodes: int) -> Iterator[dict[str, Tree]]:
    """Yield layouts to try: one pool shared in turn, or half of the GPUs each; tensor sizes of 1 to 8."""
    sizes = [size for size in (1, 2, 4, 8) if num_gpus % size == 0]
    for tensor in sizes:
        for engine in sizes:
            for offload in ("nothing", "everything"):
                actor: dict[str, Tree] = {"pool": "all", "tensor": tensor, "is_sequence_parallel": tensor > 1}
                yield {
                    "pools": {"all": {"nodes": nodes, "gpus_per_node": num_gpus}},
                    "roles": {
                        "actor": {**actor, "offload": offload},
                        "rollout": {"pool": "all", "tensor": engine, "memory_fraction": 0.5},
                    },
                }
            if nodes > 1 and nodes % 2 == 0:
                pool: dict[str, Tree] = {"nodes": nodes // 2, "gpus_per_node": num_gpus}
                yield {
                    "pools": {"train": pool, "rollout": dict(pool)},
                    "roles": {
                        "actor": {"pool": "train", "tensor": tensor, "is_sequence_parallel": tensor > 1},
                        "rollout": {"pool": "rollout", "tensor": engine},
                    },
                }


def import_verl(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", show_default=False, help="YAML, or a shell script."),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARGUMENT | NAME=VALUE]...", show_default=False, help="What the script takes from its caller."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="RECIPE", help="Write the recipe here instead of stdout.")] = None,
) -> None:
    """Turn a verl configuration into a recipe. Reports what became of every key."""
    imported = translate_file(file, arguments or ())
    text = _recipe_text(imported, file)
    if out is None:
        print(text, end="")
        _print_report(imported, sys.stderr)
    else:
        with writing(f"--out {out}"):
            out.write_text(text)
        _print_report(imported, sys.stdout)
    problems = _imported_problems(imported.tree)
    if problems:
        raise ConfigError(str(out or file), problems)


def _recipe_text(imported: Imported, file: Path) -> str:
    notes = "".join(f"# {note}\n" for note in imported.notes)
    ordered = {name: imported.tree[name] for name in Recipe.model_fields if name in imported.tree}
    body = yaml.safe_dump(ordered, sort_keys=False, default_flow_style=None, width=110)
    return f"# Imported from {file.name}; the report lists the keys that could not be taken over.\n{notes}{body}"


def _imported_problems(tree: dict[str, Tree]) -> tuple[Problem, ...]:
    """Return the problems of the recipe that can be seen without its files."""
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        return schema_problems(error, Recipe)
    critic = recipe.roles.critic
    name = public_model_name(recipe.model.path)
    if name is None:
        return ()
    critic_name = public_model_name(critic.path) if critic is not None and critic.path is not None else None
    return tuple(check_without_files(recipe, PUBLIC_MODELS[name], critic=PUBLIC_MODELS[critic_name or name]))


def _print_report(imported: Imported, stream: TextIO) -> None:
    for verdict in (KeyVerdict.UNKNOWN, KeyVerdict.NOT_SUPPORTED, KeyVerdict.NO_EFFECT, KeyVerdict.MAPPED):
        entries = [entry for entry in imported.entries if entry.verdict is verdict]
        if entries:
            print(f"{verdict} ({len(entries)})", file=stream)
        for entry in entries:
            print(f"  {_entry_line(entry)}", file=stream)
    for note in imported.notes:
        print(f"note: {note}", file=stream)


def _entry_line(entry: Entry) -> str:
    value = str(entry.value)
    shown = value if len(value) <= _MAX_VALUE else f"{value[: _MAX_VALUE - 3]}..."
    arrow = "->" if entry.verdict is KeyVerdict.MAPPED else ":"
    return f"{entry.key}={shown} {arrow} {entry.text}".replace(" : ", ": ")


@data_app.command()
def prepare(
    name: Annotated[
        DataSetName, typer.Argument(show_default=False, help="A known data set, or `rows` for records of your own.")
    ],
    source: Annotated[
        Path,
        typer.Option(
            "--from",
            metavar="FILE_OR_FOLDER",
            show_default=False,
            help="JSON lines, CSV, Parquet, Arrow, a folder of these or of tasks, or a data set of the hub.",
        ),
    ],
    out: _Out,
    prompt_key: Annotated[str | None, typer.Option(help="Column with the prompt, for `rows`.")] = None,
    answer_key: Annotated[str | None, typer.Option(help="Column with the ground truth, for `rows`.")] = None,
    response_key: Annotated[str | None, typer.Option(help="Column with the answer to imitate, for `rows`.")] = None,
    images_key: Annotated[
        str | None, typer.Option(help="Column with images or their paths relative to the file, for `rows`.")
    ] = None,
    data_source: Annotated[str | None, typer.Option(help="The data_source of all rows, for `rows`.")] = None,
) -> None:
    """Write a data set as the Parquet files that a recipe names in data.train and data.eval."""
    from megarl.tools.prepare.prompt_table import RecordColumns, prepare

    named = {"prompt": prompt_key, "answer": answer_key, "response": response_key, "images": images_key}
    columns = RecordColumns(source=data_source, **{key: (value,) for key, value in named.items() if value is not None})
    with writing(f"--out {out}"):
        written = prepare(name, source, out, columns, report=lambda line: print(line, file=sys.stderr))
    for split in written:
        repeated = f", {split.num_repeated:,} repeated ones left out" if split.num_repeated else ""
        print(f"wrote {split.path}: {split.num_rows:,} rows{repeated}; the first:")
        print("\n".join(f"  {line}" for line in printable(split.first[:_PREVIEW_CHARS]).splitlines()))
        print(f"  -> {printable(split.first_truth[:_PREVIEW_CHARS])}")


@make_app.command()
def arithmetic(
    out: _Out,
    seed: _Seed = 1,
    like: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Give the random model the size of this Qwen2 model, such as qwen2.5-0.5b."),
    ] = None,
) -> None:
    """Write sums of two-digit numbers, and a model that learns them.

    The problems are for training and held out; the model is tiny and random.
    """
    from megarl.tools.quickstart.arithmetic import SHAPE, make_arithmetic

    shape = SHAPE if like is None else _random_shape(like, "arithmetic")
    with writing(f"--out {out}"):
        files = make_arithmetic(out, seed=seed, shape=shape)
    for path in (files.train, files.sft, files.eval, files.model):
        print(f"wrote {path}")


@make_app.command()
def squares(
    out: _Out,
    seed: _Seed = 1,
    like: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Give the text of the model the size of this Qwen2 model."),
    ] = None,
) -> None:
    """Write images of squares to be counted, and a model that learns to see them.

    The model is tiny and random, with a random tower for images, which is not trained.
    """
    from megarl.tools.quickstart.squares import SHAPE, make_squares, seeing

    shape = SHAPE if like is None else seeing(_random_shape(like, "squares"))
    with writing(f"--out {out}"):
        files = make_squares(out, seed=seed, shape=shape)
    for path in (files.train, files.sft, files.eval, files.model):
        print(f"wrote {path}")


@make_app.command()
def calculator(out: _Out, seed: _Seed = 1) -> None:
    """Write sums that a tool adds, lessons of calling it, and a tiny random model whose chat template has tools."""
    from megarl.tools.quickstart.calculator import make_calculator

    with writing(f"--out {out}"):
        files = make_calculator(out, seed=seed)
    for path in (files.train, files.sft, files.eval, files.model):
        print(f"wrote {path}")


def _random_shape(name: str, task: str) -> TinyShape:
    from megarl.tools.quickstart.tiny_model import TinyShape

    known = {known: shape for known, shape in PUBLIC_MODELS.items() if shape.family == "qwen2"}
    if name not in known:
        problem = Problem(key="--like", message=f"{name} is not known; name one of {', '.join(known)}")
        raise ConfigError(f"megarl data make {task}", (problem,))
    return TinyShape.like(known[name])
