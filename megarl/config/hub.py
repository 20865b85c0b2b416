"""Models and data sets by name: those of the Hugging Face hub, found in its local cache or downloaded into it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal, TypeAlias

from megarl.config.recipe import Recipe
from megarl.errors import Problem
from megarl.families import PUBLIC_MODELS

RepoKind: TypeAlias = Literal["model", "dataset"]

_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_FILES: dict[RepoKind, tuple[str, ...]] = {
    "model": ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"),
    "dataset": ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.arrow"),
}
_DECORATION = re.compile(r"^(meta-)|(-instruct|-base|-chat|-it|-hf|-bf16|-0324|-0528|-v0\.[13])+$")


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


def public_model_name(path: Path) -> str | None:
    """Return the model that a folder or hub name stands for: `models/Qwen2.5-7B-Instruct` is qwen2.5-7b."""
    name = _DECORATION.sub("", path.name.lower())
    return name if name in PUBLIC_MODELS else None
