"""Reads the shape of a model from the `config.json` of its folder."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.families import FAMILIES
from megarl.families.fields import Fields, refused
from megarl.families.shape import ModelShape


def read_model_shape(folder: Path) -> ModelShape:
    """Return the shape of the model in `folder`; raise ConfigError for what is missing or not supported."""
    path, raw = folder / "config.json", _read(folder)
    architecture = _architecture(raw)
    for family in FAMILIES:
        if architecture in (family.architecture, family.critic):
            shape = family.read(Fields(content=raw, source=str(path)))
            return shape.as_critic() if architecture == family.critic else shape
    raise refused(f"{path}: architecture {architecture} is not supported; docs/models.md lists those that are")


def is_known(folder: Path) -> bool:
    """Whether the model in `folder` is of a known family."""
    return _architecture(_read(folder)) in {
        name for family in FAMILIES for name in (family.architecture, family.critic)
    }


def _read(folder: Path) -> dict[str, object]:
    path = folder / "config.json"
    try:
        raw: dict[str, object] = json.loads(path.read_text())
    except FileNotFoundError:
        raise refused(f"{path} does not exist; model.path is a folder in Hugging Face format") from None
    except json.JSONDecodeError as error:
        raise refused(f"{path} is not JSON: {error}") from None
    return raw


def _architecture(raw: dict[str, object]) -> str:
    named = raw.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else "(none)"
