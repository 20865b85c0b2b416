"""Opens the environments of Harbor tasks from the recipe's section, and checks it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from megarl.config.environment import HarborEnvironmentConfig, has_agent
from megarl.config.section import GIB
from megarl.data.tokenizer import Tokenizer
from megarl.episodes.chat_endpoint import ChatEndpoint
from megarl.episodes.harbor.box_agents import BoxAgents
from megarl.episodes.harbor.containers import ContainerBoxes
from megarl.episodes.harbor.environments import HarborEnvironments
from megarl.episodes.harbor.root_images import BubblewrapBoxes
from megarl.episodes.harbor.tasks import BoxLimits, check_tasks
from megarl.errors import ConfigError, Problem

_MAX_PROBLEMS = 20


async def open_box_agents(config: HarborEnvironmentConfig, tokenizer: Tokenizer, *, host: str) -> BoxAgents:
    """Return agents inside of boxes, which reach the model at `host` where they have a network."""
    endpoint = ChatEndpoint(tokenizer, call_format=config.call_format, host=host)
    await endpoint.start()
    return BoxAgents(config.agent, await open_harbor(config), endpoint, wall_s=config.wall_s)


async def open_harbor(config: HarborEnvironmentConfig) -> HarborEnvironments:
    """Return the environments; nothing is started before the first episode."""
    return HarborEnvironments(
        config.tasks,
        _boxes(config),
        defaults=_defaults(config),
        max_boxes=config.boxes,
        call_deadline_s=config.call_deadline_s,
    )


async def check_harbor(config: HarborEnvironmentConfig) -> None:
    """Raise a ConfigError for tasks that cannot be read, and for a sandbox that does not work here."""
    found = islice(check_tasks(config.tasks, _defaults(config)), _MAX_PROBLEMS)
    problems = [Problem(key="environment.tasks", message=line) for line in found]
    problems += _sandbox_problems(config)
    if problems:
        raise ConfigError("recipe", tuple(problems))
    await try_box(config)


async def try_box(config: HarborEnvironmentConfig) -> None:
    """Raise a ConfigError where the sandbox does not work on this machine."""
    boxes = _boxes(config)
    try:
        await boxes.check(_defaults(config))
    finally:
        await boxes.close()


def _sandbox_problems(config: HarborEnvironmentConfig) -> Iterator[Problem]:
    """Return the keys that do not go with the kind of box."""
    if config.sandbox == "bubblewrap":
        if not config.images:
            message = 'is empty; name root file systems by image, such as {"*": host}, or set sandbox to docker'
            yield Problem(key="environment.images", message=message)
        if config.allows_network:
            message = "boxes of bubblewrap have no network: they would reach the services of their node"
            yield Problem(key="environment.allows_network", message=message)
        return
    if config.images:
        message = f"{config.sandbox} pulls and builds images itself; leave it out, or set sandbox to bubblewrap"
        yield Problem(key="environment.images", message=message)
    if has_agent(config) and not config.allows_network:
        message = f"an agent inside of a container of {config.sandbox} asks the model over a network; set it to true"
        yield Problem(key="environment.allows_network", message=message)


def _boxes(config: HarborEnvironmentConfig) -> BubblewrapBoxes | ContainerBoxes:
    max_cache_bytes = int(config.cache_gib * GIB)
    if config.sandbox == "bubblewrap":
        return BubblewrapBoxes(config.images, config.cache.absolute(), max_cache_bytes=max_cache_bytes)
    return ContainerBoxes(config.sandbox, max_cache_bytes=max_cache_bytes, allows_network=config.allows_network)


def _defaults(config: HarborEnvironmentConfig) -> BoxLimits:
    return BoxLimits(
        cpus=config.cpus,
        memory_bytes=int(config.memory_gib * GIB),
        disk_bytes=int(config.disk_gib * GIB),
        max_processes=config.max_processes,
    )
