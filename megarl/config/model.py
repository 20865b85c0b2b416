"""Reads the shape of a model from the `config.json` of its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleHead:
    """A head that drafts tokens from the hidden states of the model that it was trained with."""

    is_third: bool
    """EAGLE-3, which reads three layers."""
    target_hidden: int
    vocab: int
    num_layers: int
    cached_width: int
    """Values per layer and token in the KV cache."""


def read_eagle_head(folder: Path) -> EagleHead:
    """Return what the `config.json` of an EAGLE head says; raise ConfigError for what is missing."""
    raw = _read(folder)
    fields, architecture = Fields(content=raw, source=str(folder / "config.json")), _architecture(raw)
    if "eagle" not in architecture.lower():
        raise refused(f"{folder}: architecture {architecture} is no EAGLE head; for a whole model set kind to model")
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    return EagleHead(
        is_third="eagle3" in architecture.lower(),
        target_hidden=fields.integer("target_hidden_size", hidden),
        vocab=fields.integer("vocab_size"),
        num_layers=fields.integer("num_hidden_layers", 1),
        cached_width=2
        * fields.integer("num_key_value_heads", num_heads)
        * fields.integer("head_dim", hidden // num_heads),
    )


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
