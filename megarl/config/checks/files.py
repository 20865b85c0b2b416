"""Whether the files and folders a recipe names are there, and whether the model's folder has all of its parts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from megarl.config.recipe import Recipe
from megarl.errors import Problem

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def check_files(recipe: Recipe) -> Iterator[Problem]:
    for key, paths in (("data.train", recipe.data.train), ("data.eval", recipe.data.eval)):
        for path in paths:
            if not path.is_file():
                yield Problem(key=key, message=f"{path} does not exist")
        for path in sorted({path for path in paths if paths.count(path) > 1}):
            yield Problem(key=key, message=f"{path} is given twice; name each file once")
    folder = _existing_parent(recipe.run_folder)
    if not folder.is_dir():
        yield Problem(key="run.folder", message=f"{folder} is a file; choose another folder")
    elif not os.access(folder, os.W_OK):
        yield Problem(key="run.folder", message=f"{folder} is not writable; choose another folder")


def check_model_folder(folder: Path) -> Iterator[Problem]:
    """Weights, tokenizer and chat template; the shape in config.json is read elsewhere."""
    if not (folder / "config.json").is_file():
        return
    if not any(folder.glob("*.safetensors")):
        yield _problem(f"{folder} has no safetensors file; convert the weights to safetensors first")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield _problem(f"{folder} has no tokenizer; add tokenizer.json")
        return
    settings_path = folder / "tokenizer_config.json"
    try:
        settings = json.loads(settings_path.read_text()) if settings_path.is_file() else {}
    except json.JSONDecodeError as error:
        yield _problem(f"{settings_path} is not JSON: {error}")
        return
    has_template = any((folder / name).is_file() for name in _TEMPLATE_FILES)
    if not has_template and not settings.get("chat_template"):
        yield _problem(f"the tokenizer in {folder} has no chat template; add chat_template.jinja to the folder")


def _existing_parent(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _problem(message: str) -> Problem:
    return Problem(key="model.path", message=message)
