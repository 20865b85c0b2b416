"""Whether this machine has what a recipe names: files, folders, all parts of the model, packages of loggers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from megarl.config.checks.secrets import secret_in
from megarl.config.model import read_model_shape
from megarl.config.recipe import DataConfig, MirrorConfig, ObserveConfig
from megarl.config.roles import EngineRoleConfig
from megarl.errors import ConfigError, Problem
from megarl.families.shape import ModelShape

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
NO_TEMPLATE = (
    "has no chat template; add chat_template.jinja to the folder, or set data.template to raw or {jinja: FILE.jinja}"
)
_LOGGER_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
"""By key of `observe`, which is also the name of megarl's extra."""
_STORE_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "file": "fsspec"}
"""By protocol of a URL, which is also the name of megarl's extra."""


def check_data_files(data: DataConfig) -> Iterator[Problem]:
    files = {
        "train": data.train,
        "eval": data.eval,
        "eval_demonstrations": data.eval_demonstrations,
        "eval_pairs": data.eval_pairs,
    }
    template = data.template
    if not isinstance(template, str) and template.jinja.endswith(".jinja") and not Path(template.jinja).is_file():
        yield Problem(key="data.template.jinja", message=f"{template.jinja} does not exist")
    for key, paths in ((f"data.{name}", paths) for name, paths in files.items()):
        for path in paths:
            if not path.is_file():
                yield Problem(key=key, message=f"{path} does not exist")
        for path in sorted({path for path in paths if paths.count(path) > 1}):
            yield Problem(key=key, message=f"{path} is given twice; name each file once")


def check_run_folder(folder: Path) -> Iterator[Problem]:
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        yield Problem(key="run.folder", message=f"{existing} is a file; choose another folder")
    elif not os.access(existing, os.W_OK):
        yield Problem(key="run.folder", message=f"{existing} is not writable; choose another folder")


def check_key_files(roles: Mapping[str, EngineRoleConfig]) -> Iterator[Problem]:
    named = [(role, *pair) for role, engines in roles.items() for pair in enumerate(engines.endpoints)]
    for role, index, endpoint in named:
        files = {"api_key_file": endpoint.api_key_file, "admin_key_file": endpoint.admin_key_file}
        for name, path in files.items():
            if path is not None and not path.is_file():
                yield Problem(key=f"roles.{role}.endpoints.{index}.{name}", message=f"{path} does not exist")


def check_loggers(observe: ObserveConfig) -> Iterator[Problem]:
    """Look for the packages of loggers without importing them."""
    configs = {"tensorboard": observe.tensorboard, "wandb": observe.wandb, "mlflow": observe.mlflow}
    for key, config in configs.items():
        package = _LOGGER_PACKAGES[key]
        if config is not None and find_spec(package) is None:
            yield Problem(
                key=f"observe.{key}",
                message=f"{package} is not installed; run `pip install 'megarl[{key}]'` or remove the key",
            )


def check_mirror(mirror: MirrorConfig | None) -> Iterator[Problem]:
    """Look for the package of the store without importing it."""
    if mirror is None or secret_in(mirror.url) is not None:
        return  # a message must not show a secret
    protocol, separator, place = mirror.url.partition("://")
    if not separator or protocol not in _STORE_PACKAGES:
        protocols = ", ".join(f"{name}://" for name in _STORE_PACKAGES)
        yield Problem(key="checkpoint.mirror.url", message=f"{mirror.url!r} does not begin with one of {protocols}")
    elif protocol == "file" and not place.startswith("/"):
        yield Problem(key="checkpoint.mirror.url", message=f"{mirror.url} is relative; write file:///FOLDER")
    elif not place.strip("/"):
        yield Problem(key="checkpoint.mirror.url", message=f"{mirror.url} names no place; write {protocol}://PLACE")
    elif find_spec(_STORE_PACKAGES[protocol]) is None:
        yield Problem(
            key="checkpoint.mirror.url",
            message=f"{_STORE_PACKAGES[protocol]} is not installed; run `pip install 'megarl[{protocol}]'`",
        )


def shape_or_problem(folder: Path, key: str) -> ModelShape | Problem:
    """Return the shape of the model that the recipe's `key` names, or why there is none."""
    try:
        return read_model_shape(folder)
    except ConfigError as error:
        return Problem(key=key, message=error.problems[0].message.replace("model.path", key))


def check_model_folder(folder: Path, *, needs_template: bool) -> Iterator[Problem]:
    """Check weights, tokenizer and chat template; `read_model_shape` reads config.json."""
    if not (folder / "config.json").is_file():
        return
    if not any(folder.glob("*.safetensors")):
        yield _model_problem(f"{folder} has no safetensors file; convert the weights to safetensors first")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield _model_problem(f"{folder} has no tokenizer; add tokenizer.json")
        return
    settings_path = folder / "tokenizer_config.json"
    try:
        settings = json.loads(settings_path.read_text()) if settings_path.is_file() else {}
    except json.JSONDecodeError as error:
        yield _model_problem(f"{settings_path} is not JSON: {error}")
        return
    has_template = any((folder / name).is_file() for name in _TEMPLATE_FILES)
    if needs_template and not has_template and not settings.get("chat_template"):
        yield _model_problem(f"the tokenizer in {folder} {NO_TEMPLATE}")


def _model_problem(message: str) -> Problem:
    return Problem(key="model.path", message=message)
