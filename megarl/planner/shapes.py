"""The shapes of a recipe's models: from folders that are here, else from the catalogue of public ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megarl.config.model import ModelShape, read_model_shape
from megarl.config.public_models import PUBLIC_MODELS, public_model_name
from megarl.config.recipe import Recipe
from megarl.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleShapes:
    policy: ModelShape
    """Of the actor, the reference and the engines."""
    critic: ModelShape
    """With its value head, whether there is one or not."""
    source: str
    """The folder the policy's was read from, or the entry of the catalogue."""

    def of(self, role: str) -> ModelShape:
        return self.critic if role == "critic" else self.policy


def find_shapes(recipe: Recipe, *, name: str | None = None) -> RoleShapes:
    """Of the model's folder where it is here, else of the catalogue; `name` asks for an entry whatever the path.

    A critic has the policy's shape, unless it starts from a folder of its own.
    """
    if name is not None and name not in PUBLIC_MODELS:
        raise _error("--shape", f"unknown {name!r}; one of {', '.join(PUBLIC_MODELS)}")
    policy, source = (PUBLIC_MODELS[name], _entry(name)) if name else _find(recipe.model.path, "model.path")
    critic = recipe.roles.critic
    body = policy if critic is None or critic.path is None else _find(critic.path, "roles.critic.path")[0]
    return RoleShapes(policy=policy, critic=body.as_critic(), source=source)


def _find(path: Path, key: str) -> tuple[ModelShape, str]:
    if (path / "config.json").is_file():
        return read_model_shape(path), str(path)
    entry = public_model_name(path)
    if entry is None:
        remedy = "name a shape with --shape" if key == "model.path" else "name its folder as one of"
        raise _error(key, f"{path} is neither here nor a known model; {remedy}: {', '.join(PUBLIC_MODELS)}")
    return PUBLIC_MODELS[entry], _entry(entry)


def _entry(name: str) -> str:
    return f"catalogue: {name}"


def _error(key: str, message: str) -> ConfigError:
    return ConfigError("megarl plan", (Problem(key=key, message=message),))
