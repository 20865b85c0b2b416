"""Engines that scripted clients stand for."""

from __future__ import annotations

import httpx

from megarl.engine.client import EngineClient, EngineEndpoint
from tests.engine.engines import scripted_client

ENDPOINTS = [scripted_client(lambda _: httpx.Response(200), index=index).endpoint for index in range(3)]


def connect(endpoint: EngineEndpoint) -> EngineClient:
    return scripted_client(lambda _: httpx.Response(200), index=endpoint.index)
