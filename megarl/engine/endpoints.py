"""Engines that megarl did not start: their addresses and keys, and whether they serve the right kind of model.

Read before a run starts, so that it needs neither torch nor Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from megarl.config.model import read_model_shape
from megarl.config.roles import EndpointConfig, FrozenRoleConfig
from megarl.engine.admin import model_info
from megarl.engine.client import EngineClient, EngineEndpoint, EngineKeys
from megarl.errors import EngineError

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
