"""Calls to an SGLang server beyond those of a plain step: pauses, memory of shared devices, files and adapters.

Also engines that megarl did not start: their addresses and keys, and whether they serve the right kind of model. That
is read before a run starts, and needs neither torch nor Ray.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from megarl.config.model import read_model_shape
from megarl.config.roles import EndpointConfig, FrozenRoleConfig, InFlight
from megarl.engine.client import EngineClient, EngineEndpoint, EngineKeys
from megarl.engine.fleet import Engine, Fleet
from megarl.errors import EngineError
from megarl.types import JsonValue, PolicyVersion

logger = logging.getLogger(__name__)


class PauseMode(StrEnum):
    """The treatment of running requests when an engine is paused."""

    ABORT = "abort"
    """They end and return their tokens so far."""
    IN_PLACE = "in_place"
    """They wait and continue with their KV cache."""
    RETRACT = "retract"
    """They wait and continue with a recomputed KV cache."""


async def abort_all(client: EngineClient) -> None:
    """End all requests; each returns its tokens so far."""
    await client.control("abort all", "/abort_request", {"abort_all": True})


async def pause(client: EngineClient, mode: PauseMode) -> None:
    await client.control("pause", "/pause_generation", {"mode": mode.value})


async def resume(client: EngineClient) -> None:
    """Continue after `pause`."""
    await client.control("resume", "/continue_generation", {"torch_empty_cache": False})


@asynccontextmanager
async def paused(
    fleet: Fleet, in_flight: InFlight, *, announce: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[None]:
    """Pause all reachable engines inside the block; new requests wait.

    `announce` returns when rollout workers in other processes know the counts of pauses.
    """
    engines = fleet.reachable

    async def count() -> None:
        fleet.count_pause(engines)
        if announce is not None:
            # An engine that is paused answers at once: the count must be there before the tokens.
            await announce()

    async def pause_one(engine: Engine) -> None:
        await pause(engine.client, PauseMode(in_flight))

    await count()
    try:
        await _call_all(fleet, engines, pause_one)
        yield
    finally:
        await count()
        await _call_all(fleet, engines, _resume)


async def _resume(engine: Engine) -> None:
    if not engine.is_live:
        # Its weights are wrong: its requests are sent to other engines.
        await abort_all(engine.client)
    await resume(engine.client)


async def _call_all(fleet: Fleet, engines: Sequence[Engine], call: Callable[[Engine], Awaitable[None]]) -> None:
    """Call all engines. One that fails is stale and gets no request until a publish reaches it."""
    outcomes = await asyncio.gather(*(call(engine) for engine in engines), return_exceptions=True)
    for engine, outcome in zip(engines, outcomes, strict=True):
        match outcome:
            case EngineError():
                logger.warning("pause or resume failed engine=%d reason=%s", engine.index, outcome)
                await fleet.mark_stale(engine, str(outcome))
            case BaseException():
                raise outcome


async def sleep(client: EngineClient, *, releases_weights: bool = False) -> None:
    """Stop computing and, on a GPU, release the memory of the KV cache and, if so asked, of the weights.

    Weights that stay can be published to; those that were released are lost. The engine must be idle: SGLang ends
    itself when memory is released during a request. Requests that arrive meanwhile wait until `wake`.
    """
    if not client.is_asleep:
        await pause(client, PauseMode.RETRACT)
        client.is_asleep = True
    await _release(client, "kv_cache", *(["weights"] if releases_weights else []))


async def take_weights(client: EngineClient) -> None:
    """Take the memory of the weights again, without their values: a publish must follow."""
    await _take(client, "weights")


async def wake(client: EngineClient) -> None:
    """Compute again. Weights that were released have been published by now."""
    if not client.is_asleep:
        return
    assert "weights" not in client.released, f"{client.endpoint}: take_weights and a publish come before wake"
    await _take(client, "kv_cache")
    await resume(client)
    client.is_asleep = False


async def _release(client: EngineClient, *tags: str) -> None:
    new: list[JsonValue] = [tag for tag in tags if tag not in client.released]
    if new and client.endpoint.device == "cuda":
        await client.control("release memory", "/release_memory_occupation", {"tags": new})
    client.released += [tag for tag in tags if tag not in client.released]


async def _take(client: EngineClient, tag: str) -> None:
    if tag not in client.released:
        return
    if client.endpoint.device == "cuda":
        await client.control("take memory", "/resume_memory_occupation", {"tags": [tag]})
    client.released.remove(tag)


async def num_cached_tokens(client: EngineClient) -> int | None:
    """Return how many tokens the KV cache holds; None where the engine does not answer that."""
    with suppress(EngineError):
        info = await client.get("server info", "/server_info")
        size = info.get("max_total_num_tokens")
        return size if isinstance(size, int) else None
    return None


async def model_info(client: EngineClient) -> Mapping[str, JsonValue]:
    return await client.get("model info", "/model_info")


async def load_weights_from_disk(
    client: EngineClient, folder: Path, *, version: PolicyVersion, timeout_s: float
) -> None:
    """Let SGLang load a Hugging Face folder."""
    body: dict[str, JsonValue] = {
        "model_path": str(folder),
        # Without it SGLang takes the format of its start, and an engine may have started with random weights.
        "load_format": "auto",
        "weight_version": str(version),
        "flush_cache": False,
    }
    await client.control("load weights from disk", "/update_weights_from_disk", body, timeout_s=timeout_s)


async def load_empty_adapter(
    client: EngineClient, name: str, fields: Mapping[str, object], *, timeout_s: float
) -> None:
    """Let SGLang have an adapter without values beside running requests; `fields` are PEFT's configuration.

    It is pinned: SGLang would fill a slot again with what it has loaded. A publish writes values into the slot.
    """
    empty = base64.b64encode(pickle.dumps({})).decode()
    body: dict[str, JsonValue] = {
        "lora_name": name,
        "config_dict": json.loads(json.dumps(fields)),
        "serialized_named_tensors": [empty] * client.endpoint.tensor,
        "pinned": True,
    }
    await client.guarded("load adapter", "/load_lora_adapter_from_tensors", body, timeout_s=timeout_s)


async def unload_adapter(client: EngineClient, name: str, *, timeout_s: float) -> None:
    """Forget an adapter. SGLang waits for its requests, and holds back all loads meanwhile."""
    await client.control("unload adapter", "/unload_lora_adapter", {"lora_name": name}, timeout_s=timeout_s)


async def unload_all_adapters(client: EngineClient, *, timeout_s: float) -> None:
    models = (await client.get("list adapters", "/v1/models", timeout_s=timeout_s)).get("data")
    cards = [card for card in models if isinstance(card, dict)] if isinstance(models, list) else []
    for card in cards:
        if card.get("parent"):
            await unload_adapter(client, str(card["id"]), timeout_s=timeout_s)


_CHECK_TIMEOUT_S = 30.0


def endpoints_of(configs: Sequence[EndpointConfig], *, device: str) -> list[EngineEndpoint]:
    """Return the endpoints of the engines, with their keys."""
    assert device in ("cpu", "cuda"), device
    endpoints = []
    for index, config in enumerate(configs):
        parts = urlsplit(config.url)
        assert parts.hostname is not None, f"{config.url} has no host"
        assert parts.port is not None, f"{config.url} has no port"
        api = _read_key(config.api_key_file)
        admin = api if config.admin_key_file is None else _read_key(config.admin_key_file)
        endpoints.append(
            EngineEndpoint(
                index=index,
                host=parts.hostname,
                port=parts.port,
                # Weights go to the whole engine; its number of ranks does not matter.
                tensor=1,
                device="cuda" if device == "cuda" else "cpu",
                keys=EngineKeys(api=api, admin=admin),
                scheme=parts.scheme,
            )
        )
    return endpoints


async def check_running(roles: Mapping[str, FrozenRoleConfig], *, device: str) -> None:
    """Raise an EngineError unless every endpoint of frozen models runs and serves a model of the right kind."""
    for role, config in roles.items():
        endpoints = endpoints_of(config.endpoints, device=device)
        await asyncio.gather(*(_check_frozen(role, config.model, endpoint) for endpoint in endpoints))


async def _check_frozen(role: str, model: Path, endpoint: EngineEndpoint) -> None:
    client = EngineClient(endpoint, request_timeout_s=_CHECK_TIMEOUT_S)
    try:
        info = await model_info(client)
    except EngineError as error:
        raise EngineError(f"{error}; the engines of roles.{role}.endpoints must be running") from error
    finally:
        await client.close()
    is_classifier = read_model_shape(model).has_value_head
    if bool(info.get("is_generation")) is is_classifier:
        expected = "a sequence classifier" if is_classifier else "a language model"
        raise EngineError(f"{endpoint} serves {info.get('model_path')}, which is not {expected} (roles.{role})")


def _read_key(path: Path | None) -> str:
    return "" if path is None else path.read_text().strip()
