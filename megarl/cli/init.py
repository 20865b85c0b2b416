"""`megarl init`: a first recipe for a model, data and GPUs, with a layout that the planner says fits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
import yaml

from megarl.config.document import Document, Tree
from megarl.config.load import validated
from megarl.config.recipe import Recipe
from megarl.errors import ConfigError, MachineError, Problem
from megarl.planner.fit import PlanAnswer, PlanQuestion, answer_for
from megarl.planner.hardware import parse_gpu

_REWARDS = ("exact", "gsm8k", "math", "dapo_math", "multiple_choice")
_HEAD = "# Written by megarl init; `megarl schema --docs` explains every key.\n"


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
            "tokens_per_micro_batch": max(8192, 1024 + response_tokens),
            "optimizer": {"learning_rate": 1e-6},
        },
        **({"evaluation": {"every_steps": 10}} if held_out else {}),
    }
    tree, note = choose_layout(base, num_gpus=num_gpus, nodes=nodes, gpu=gpu, shape=shape)
    try:
        out.write_text(_HEAD + yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=110))
    except OSError as error:
        raise MachineError(f"{out}: cannot be written: {error.strerror}") from error
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
