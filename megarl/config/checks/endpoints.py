"""Engines that run already: what a recipe may say of them, and what is theirs to say."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.recipe import Recipe
from megarl.errors import Problem

_OF_STARTED_ENGINES = (
    "tensor",
    "expert",
    "max_cached_tokens",
    "memory_fraction",
    "is_deterministic",
    "start_timeout_s",
    "sglang",
)


def check_endpoints(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.roles.rollout
    if rollout is None:
        return
    if not rollout.endpoints:
        if rollout.pool is None:
            message = "missing; name a pool, or with endpoints engines that run already"
            yield Problem(key="roles.rollout.pool", message=message)
        if rollout.publish_folder is not None:
            message = "only engines of endpoints are published to by files; remove it"
            yield Problem(key="roles.rollout.publish_folder", message=message)
        return
    if rollout.pool is not None:
        message = "either a pool, in which engines are started, or endpoints of those that run already; remove one"
        yield Problem(key="roles.rollout.endpoints", message=message)
    for name in sorted(rollout.model_fields_set.intersection(_OF_STARTED_ENGINES)):
        message = "has no effect on engines that run already; remove it, and start them with it"
        yield Problem(key=f"roles.rollout.{name}", message=message)
    urls = [endpoint.url for endpoint in rollout.endpoints]
    for url in sorted({url for url in urls if urls.count(url) > 1}):
        yield Problem(key="roles.rollout.endpoints", message=f"{url} is given twice; name each engine once")


def check_key_files(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.roles.rollout
    for index, endpoint in enumerate(rollout.endpoints if rollout else ()):
        files = {"api_key_file": endpoint.api_key_file, "admin_key_file": endpoint.admin_key_file}
        for name, path in files.items():
            if path is not None and not path.is_file():
                yield Problem(key=f"roles.rollout.endpoints.{index}.{name}", message=f"{path} does not exist")
