"""Makes a tiny model of a family that is not known, and lets transformers and SGLang load it, for a draft."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.errors import ConfigError, MegarlError, first_few, first_line
from megarl.families import BY_NAME, FAMILIES
from megarl.families.fields import Fields, refused
from megarl.families.shape import ModelShape
from megarl.tools.family_probe.draft import Draft, Evidence, LoadedEngine, draft, read_draft
from megarl.tools.family_probe.probe import file_shapes, loaded_parameters, numbered
from megarl.weights.layouts.canonical import canonical_tensors

_LAYERS = 4
_SIZES: Mapping[str, int] = {
    "num_hidden_layers": _LAYERS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 320,
    "shared_expert_intermediate_size": 256,
    "vocab_size": 130,
    "max_position_embeddings": 512,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "sliding_window": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_nextn_predict_layers": 0,
}
"""Sizes that differ, so that a number says what it is. Feed-forward blocks are such that no engine pads them."""
_HEADS, _KV_HEADS, _OWN_HEAD_DIM = 4, 2, 48
_SPREAD = 0.1
_SAME = 1e-4
"""Largest difference of logits in float32 between two classes that compute the same."""


def draft_family(folder: Path, *, work: Path) -> Draft:
    """Return a first description of the family of the model in `folder`; `work` is an empty folder for tiny models."""
    own = json.loads((folder / "config.json").read_text())
    config = tiny_config(_complete(folder, own))
    model, saved = work / "model", work / "saved"
    for each in (model, saved):
        each.mkdir(parents=True)
        (each / "config.json").write_text(json.dumps(config, indent=2))
    _save_random(saved)
    files = load_file(saved / "model.safetensors")
    numbers = numbered({name: tuple(tensor.shape) for name, tensor in files.items()})
    save_file(dict(numbers), model / "model.safetensors", metadata={"format": "pt"})
    known = BY_NAME.get(str(config["model_type"]))
    options = () if known is None else known.engine.cpu_options
    engines, notes = [], list(_other_files(folder, files))
    has_experts = any(".experts.0." in name for name in files)
    for tensor, expert in ((1, 1), (2, 1), (2, 2)) if has_experts else ((1, 1), (2, 1)):
        try:
            run = work / f"engine_{tensor}_{expert}"
            ranks = loaded_parameters(model, run, tensor=tensor, expert=expert, options=options)
            engines.append(LoadedEngine(expert=expert, ranks=tuple(ranks)))
        except MegarlError as error:
            if not engines:
                raise
            notes.append(f"SGLang did not load it with TP{tensor} EP{expert}: {first_line(error)}")
    evidence = Evidence(config=config, own_config=own, numbered=numbers, engines=tuple(engines), notes=tuple(notes))
    first = draft(evidence)
    compared = tuple(_alike(read_draft(first.source, config), saved, work / "alike", str(config["model_type"])))
    if not compared:
        compared = ("what layers compute: no known family has these tensors, with which logits could be compared",)
    return draft(replace(evidence, notes=(*notes, *compared)))


def tiny_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a model like it that is small in every way."""
    tiny = dict(config)
    layers = config.get("num_hidden_layers")
    for key, value in config.items():
        if key in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            tiny[key] = min(value, _SIZES[key])
        elif isinstance(value, list) and len(value) == layers:
            tiny[key] = _few(value)
        elif key.endswith("_token_id") and isinstance(value, list):
            tiny[key] = _SIZES[key]
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    assert isinstance(heads, int), f"num_attention_heads is {heads}"
    assert isinstance(hidden, int), f"hidden_size is {hidden}"
    kv_heads = config.get("num_key_value_heads") or heads
    tiny["num_attention_heads"] = _HEADS
    tiny["num_key_value_heads"] = _HEADS if kv_heads == heads else _KV_HEADS
    if config.get("head_dim") is not None:
        is_derived = config["head_dim"] == hidden // heads
        tiny["head_dim"] = _SIZES["hidden_size"] // _HEADS if is_derived else _OWN_HEAD_DIM
    if "rope_scaling" in tiny:
        tiny["rope_scaling"] = None  # its frequencies change no tensor
    tiny.pop("quantization_config", None)
    return tiny | {"dtype": "float32", "torch_dtype": "float32"}


def _few(values: list[object]) -> list[object]:
    """Return a value per layer of the tiny model, each kind of value at least once where there are few enough."""
    first = [index for index, value in enumerate(values) if value not in values[:index]]
    rest = [index for index in range(len(values)) if index not in first]
    return [values[index] for index in sorted([*first, *rest][:_LAYERS])]


def _complete(folder: Path, own: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of config.json and those that transformers adds to it."""
    from transformers import AutoConfig  # noqa: PLC0415 - seconds

    try:
        known = AutoConfig.from_pretrained(folder).to_dict()
    except ValueError as error:
        raise refused(f"transformers does not know the model: {first_line(error)}") from None
    return {**known, **own}


def _save_random(folder: Path) -> None:
    """Let transformers write a model of which every tensor is random."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - seconds

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point():
                tensor.add_(torch.empty_like(tensor).normal_(std=_SPREAD, generator=generator))
    fields = (folder / "config.json").read_text()
    model.save_pretrained(folder, max_shard_size="10GB")
    (folder / "config.json").write_text(fields)  # transformers leaves out what only SGLang reads


def _other_files(folder: Path, files: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield what the files of the folder have, and a model of transformers has not."""
    known = {_unnumbered(name) for name in files}
    others = dict.fromkeys(_unnumbered(name) for name in file_shapes(folder))
    if more := [name for name in others if name not in known]:
        yield f"the files have tensors that transformers does not save: {first_few(more)}"


def _unnumbered(name: str) -> str:
    return ".".join("N" if word.isdigit() else word for word in name.split("."))


def _alike(shape: ModelShape, saved: Path, work: Path, model_type: str) -> Iterator[str]:
    """Yield for each known family with the same tensors whether its class computes the same logits of them."""
    for family in FAMILIES:
        if family.name == model_type:
            continue
        other = replace(shape, family=family.name)
        try:
            fields = family.config_json(other)
            if family.read(Fields(content=fields, source="config.json")) != other:
                continue
            described = {name: spec.shape for name, spec in canonical_tensors(other).items()}
        except (AssertionError, ConfigError):
            continue  # it needs numbers that the shape has not
        if file_shapes(saved) != described:
            continue
        folder = work / family.name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(fields))
        (folder / "model.safetensors").hardlink_to(saved / "model.safetensors")
        difference = float((_logits(saved) - _logits(folder)).abs().max())
        if difference <= _SAME:
            yield f"whether it is {family.name}: with the same tensors both compute the same logits in transformers"
        else:
            yield (
                f"what layers compute: with the same tensors logits of transformers differ from {family.name}'s "
                f"by {difference:.2g}"
            )


def _logits(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - seconds

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: Tensor = model(torch.arange(3, 27)[None]).logits
    return logits
