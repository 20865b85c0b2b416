"""Frozen models on engines that run already, and the versions of models."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megarl.config.recipe import NetworkConfig, RunConfig
from megarl.config.roles import EndpointConfig, FrozenRoleConfig
from megarl.errors import EngineError
from megarl.observe.observer import Observer
from megarl.runtime.engines.frozen import model_version, start_frozen
from megarl.tools.quickstart.tiny_model import TinyShape, write_tiny_model
from tests.tiny_models import as_classifier


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model", TinyShape(), seed=3)
    return tmp_path / "model"


class LanguageModelServer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        encoded = json.dumps({"model_path": "a-policy", "is_generation": True}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, format: str, *_arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def language_model_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), LanguageModelServer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def join(role: str, url: str, model: Path) -> None:
    async def start() -> None:
        config = FrozenRoleConfig(endpoints=(EndpointConfig(url=url),), model=model)
        run, network = RunConfig(name="test", device="cpu"), NetworkConfig()
        async with AsyncExitStack() as stack:
            await start_frozen(
                {role: config}, {}, stack, run=run, network=network, observer=Observer(()), longest_reply=None
            )

    asyncio.run(start())


def test_an_engine_that_serves_a_model_of_another_kind_is_refused(
    language_model_url: str, model: Path, tmp_path: Path
) -> None:
    join("judge.tiny", language_model_url, model)
    classifier = as_classifier(model, tmp_path / "classifier", "qwen2")
    complaint = r"serves a-policy, which is not a sequence classifier \(roles.reward_model.tiny\)"
    with pytest.raises(EngineError, match=complaint):
        join("reward_model.tiny", language_model_url, classifier)


def test_nothing_at_a_url_is_one_line(model: Path) -> None:
    with pytest.raises(EngineError, match=r"the engines of roles.judge.tiny.endpoints must be running") as caught:
        join("judge.tiny", "http://127.0.0.1:9", model)
    assert "\n" not in str(caught.value)


def test_the_version_of_a_model_changes_with_its_weights(model: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "same", TinyShape(), seed=3)
    write_tiny_model(tmp_path / "other", TinyShape(), seed=4)
    assert model_version(tmp_path / "same") == model_version(model)
    assert model_version(tmp_path / "other") != model_version(model)
