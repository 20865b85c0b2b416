"""Models and data sets by name: those of the Hugging Face hub, found in its local cache or downloaded into it, and the
shapes of public models, which can be planned without a folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from megarl.config.model import TRAITS, Experts, Family, ModelShape, RopeScaling, YarnScaling
from megarl.config.recipe import Recipe
from megarl.errors import Problem

RepoKind: TypeAlias = Literal["model", "dataset"]

_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_FILES: dict[RepoKind, tuple[str, ...]] = {
    "model": ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"),
    "dataset": ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.arrow"),
}
_LLAMA3_ROPE = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
_DECORATION = re.compile(r"^(meta-)|(-instruct|-base|-chat|-hf|-v0\.1)+$")


class HubError(Exception):
    """A name cannot be turned into a folder; the message is the end of a sentence about it."""


def is_hub_name(path: Path) -> bool:
    """Whether a path can be a name such as `Qwen/Qwen2.5-7B`: nothing on this machine begins like it."""
    return _NAME.match(str(path)) is not None and not path.exists() and not path.parent.exists()


def hub_folder(name: str, *, kind: RepoKind, downloads: bool) -> Path:
    """Return the folder of a model or a data set in the local cache; with `downloads`, fetch what is missing."""
    import httpx  # noqa: PLC0415 - with the hub's package
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - half a second that few recipes need to pay
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError  # noqa: PLC0415

    hint = f"hf download {name}" + (" --repo-type dataset" if kind == "dataset" else "")
    patterns = list(_FILES[kind])
    try:
        # With the same patterns: without them a folder that lacks other files of the repository counts as incomplete.
        folder = Path(snapshot_download(name, repo_type=kind, allow_patterns=patterns, local_files_only=True))
        if kind == "model" and not (missing := missing_shards(folder)):
            return folder
        if kind == "dataset" and not downloads:
            return folder
        state = "is in the local cache of the Hugging Face hub only in part" + (
            f" ({missing[0]} is missing)" if kind == "model" and missing else ""
        )
    except LocalEntryNotFoundError:
        state = "is neither a folder nor in the local cache of the Hugging Face hub"
    if not downloads:
        raise HubError(f"{state}; `megarl train` downloads it, or `{hint}`")
    try:
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=patterns))
    except RepositoryNotFoundError:
        raise HubError(f"{state}, and the hub has no {kind} of this name that you may read") from None
    except (HfHubHTTPError, httpx.HTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = "offline" if isinstance(error, LocalEntryNotFoundError) else type(error).__name__
        raise HubError(f"{state}, and the hub cannot be reached ({reason}); run `{hint}` where it can") from None


def missing_shards(folder: Path) -> list[str]:
    """Return the files of weights that the index of a model names and its folder does not have."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [] if any(folder.glob("*.safetensors")) else ["model.safetensors"]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (json.JSONDecodeError, KeyError, AttributeError):
        return [index.name]
    return sorted(name for name in names if not (folder / name).is_file())


def with_local_models(recipe: Recipe, *, downloads: bool) -> tuple[Recipe, list[Problem]]:
    """Return the recipe with folders in place of the hub's names, and the names that have none."""
    problems: list[Problem] = []

    def local(path: Path | None, key: str) -> Path | None:
        if path is None or not is_hub_name(path):
            return path
        try:
            return hub_folder(str(path), kind="model", downloads=downloads)
        except HubError as error:
            problems.append(Problem(key=key, message=f"{path} {error}"))
            return path

    roles = recipe.roles
    critic, reference = roles.critic, roles.reference
    frozen = {
        kind: {
            name: role.model_copy(update={"model": local(role.model, f"roles.{kind}.{name}.model")})
            for name, role in getattr(roles, kind).items()
        }
        for kind in ("reward_model", "judge", "teacher")
    }
    changed = {
        **frozen,
        "critic": critic and critic.model_copy(update={"path": local(critic.path, "roles.critic.path")}),
        "reference": reference and reference.model_copy(update={"path": local(reference.path, "roles.reference.path")}),
    }
    model = recipe.model.model_copy(update={"path": local(recipe.model.path, "model.path")})
    return recipe.model_copy(update={"model": model, "roles": roles.model_copy(update=changed)}), problems


def _dense(
    family: Family, layers: int, hidden: int, ffn: int, heads: int, kv: int, *, vocab: int, is_tied: bool = False
) -> ModelShape:
    """Return a shape with the numbers that most models of these families share."""
    return ModelShape(
        family=family,
        num_layers=layers,
        hidden=hidden,
        ffn_hidden=ffn,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=128,
        vocab=vocab,
        max_context_tokens=32768,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        has_tied_embeddings=is_tied,
        has_qkv_bias=TRAITS[family].has_qkv_bias,
        has_qk_norm=TRAITS[family].has_qk_norm,
        dtype="bfloat16",
    )


def _qwen2(layers: int, hidden: int, ffn: int, heads: int, kv: int, *, vocab: int = 152064) -> ModelShape:
    # The releases that tie their embeddings are those with the smaller vocabulary.
    shape = _dense(Family.QWEN2, layers, hidden, ffn, heads, kv, vocab=vocab, is_tied=vocab == 151936)
    return replace(shape, head_dim=hidden // heads)


def _qwen2_moe(layers: int, hidden: int, expert_ffn: int, heads: int, kv: int, *, experts: Experts) -> ModelShape:
    shape = _dense(Family.QWEN2_MOE, layers, hidden, expert_ffn, heads, kv, vocab=151936)
    return replace(shape, head_dim=hidden // heads, experts=experts)


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, *, is_tied: bool = False) -> ModelShape:
    shape = _dense(Family.QWEN3, layers, hidden, ffn, heads, 8, vocab=151936, is_tied=is_tied)
    return replace(shape, max_context_tokens=40960)


def _qwen3_moe(layers: int, hidden: int, expert_ffn: int, heads: int) -> ModelShape:
    shape = _dense(Family.QWEN3_MOE, layers, hidden, expert_ffn, heads, 4, vocab=151936)
    experts = Experts(num=128, per_token=8, is_normalized=True)
    return replace(shape, max_context_tokens=40960, experts=experts)


def _llama3(layers: int, hidden: int, ffn: int, heads: int) -> ModelShape:
    shape = _dense(Family.LLAMA, layers, hidden, ffn, heads, 8, vocab=128256)
    return replace(shape, max_context_tokens=131072, norm_eps=1e-5, rope_theta=5e5, rope_scaling=_LLAMA3_ROPE)


PUBLIC_MODELS: Mapping[str, ModelShape] = {
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2, vocab=151936),
    "qwen2.5-1.5b": _qwen2(28, 1536, 8960, 12, 2, vocab=151936),
    "qwen2.5-3b": _qwen2(36, 2048, 11008, 16, 2, vocab=151936),
    "qwen2.5-7b": _qwen2(28, 3584, 18944, 28, 4),
    "qwen2.5-14b": _qwen2(48, 5120, 13824, 40, 8),
    "qwen2.5-32b": _qwen2(64, 5120, 27648, 40, 8),
    "qwen2.5-72b": _qwen2(80, 8192, 29568, 64, 8),
    "qwen1.5-moe-a2.7b": replace(
        _qwen2_moe(24, 2048, 1408, 16, 16, experts=Experts(num=60, per_token=4, is_normalized=False, shared=5632)),
        max_context_tokens=8192,
    ),
    "qwen2-57b-a14b": _qwen2_moe(
        28, 3584, 2560, 28, 4, experts=Experts(num=64, per_token=8, is_normalized=False, shared=20480)
    ),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, is_tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, is_tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, is_tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
    "qwen3-32b-128k": replace(
        _qwen3(64, 5120, 25600, 64),
        max_context_tokens=131072,
        rope_scaling=YarnScaling(factor=4.0, original_max_position=32768),
    ),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 768, 32),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 1536, 64),
    "llama-3.1-8b": _llama3(32, 4096, 14336, 32),
    "llama-3.1-70b": _llama3(80, 8192, 28672, 64),
    "llama-3.1-405b": _llama3(126, 16384, 53248, 128),
    "smollm2-135m": replace(
        _llama3(30, 576, 1536, 9),
        head_dim=64,
        num_kv_heads=3,
        vocab=49152,
        max_context_tokens=8192,
        rope_theta=1e5,
        rope_scaling=None,
        has_tied_embeddings=True,
    ),
    "mixtral-8x7b": replace(
        _dense(Family.MIXTRAL, 32, 4096, 14336, 32, 8, vocab=32000),
        norm_eps=1e-5,
        experts=Experts(num=8, per_token=2, is_normalized=True),
    ),
}


def public_model_name(path: Path) -> str | None:
    """Return the model that a folder or hub name stands for: `models/Qwen2.5-7B-Instruct` is qwen2.5-7b."""
    name = _DECORATION.sub("", path.name.lower())
    return name if name in PUBLIC_MODELS else None
