from __future__ import annotations

import asyncio
import json
import sys
from base64 import b64decode
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from megarl.engine import admin
from megarl.engine.client import GenerateRequest
from megarl.engine.server import register
from megarl.engine.server_replies import MaskedReplies, add_flat_logprobs
from tests.engine.engines import ServedModel


def added(*, finish_reason: object, stream: bool = False, top_logprobs_num: int = 0, is_asked: bool = True) -> Any:
    """Return what the hook wrote, or "original" if it left the work to SGLang."""
    state = SimpleNamespace(
        obj=SimpleNamespace(stream=stream, return_flat_raw_top_logprobs_b64=is_asked),
        input_token_logprobs_val=[],
        output_token_logprobs_val=[-0.5, -1.25],
        output_token_logprobs_idx=[7, 8],
    )
    meta_info: dict[str, object] = {"finish_reason": finish_reason}

    def original(*_arguments: object) -> None:
        meta_info["output_token_logprobs"] = "original"

    add_flat_logprobs(original, None, meta_info, state, top_logprobs_num, None, False)
    return meta_info.get("output_token_logprobs")


def test_a_finished_response_has_arrays() -> None:
    fields = added(finish_reason={"type": "stop"})
    assert np.frombuffer(b64decode(fields["logprobs"]), "<f4").tolist() == [-0.5, -1.25]
    assert np.frombuffer(b64decode(fields["token_ids"]), "<i4").tolist() == [7, 8]


@pytest.mark.parametrize("finish_reason", [None, {"type": "length"}])
def test_given_tokens_have_arrays_and_the_likeliest_are_left_to_sglang(finish_reason: object) -> None:
    given = [None, -0.5, -1.25]
    state: Any = SimpleNamespace(
        obj=SimpleNamespace(stream=False, return_flat_raw_top_logprobs_b64=True),
        input_token_logprobs_val=given,
        input_token_logprobs_idx=[6, 7, 8],
        output_token_logprobs_val=[],
        output_token_logprobs_idx=[],
    )
    meta_info: dict[str, Any] = {"finish_reason": finish_reason}

    def original(_manager: object, meta: dict[str, Any], state: Any, num_top: int, *_rest: object) -> None:
        assert state.input_token_logprobs_val == [], "SGLang would make lists of them"
        meta.update({"input_token_logprobs": [], "likeliest": num_top})

    add_flat_logprobs(original, None, meta_info, state, 4, None, False)
    assert state.input_token_logprobs_val is given
    assert meta_info["likeliest"] == 4
    if finish_reason is not None:
        fields = meta_info["input_token_logprobs"]
        np.testing.assert_array_equal(np.frombuffer(b64decode(fields["logprobs"]), "<f4"), [np.nan, -0.5, -1.25])
        assert np.frombuffer(b64decode(fields["token_ids"]), "<i4").tolist() == [6, 7, 8]


def test_the_end_of_a_stream_has_arrays_as_well() -> None:
    assert added(finish_reason={"type": "stop"}, stream=True) == added(finish_reason={"type": "stop"})


def test_nothing_is_encoded_before_the_end() -> None:
    assert added(finish_reason=None) is None


@pytest.mark.parametrize("other", [{"top_logprobs_num": 2}, {"is_asked": False}])
def test_other_requests_are_left_to_sglang(other: dict[str, Any]) -> None:
    assert added(finish_reason={"type": "stop"}, **other) == "original"


def test_a_release_without_plugins_runs_without_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    register()


async def test_a_real_server_answers_with_arrays_where_it_is_asked_and_with_lists_where_it_is_not(
    qwen2_tp1: ServedModel,
) -> None:
    request = GenerateRequest(rid="flat", input_ids=(5, 6), max_new_tokens=8, temperature=1.0, sampling_seed=3)

    class Plain(GenerateRequest):
        def to_json(self) -> dict[str, Any]:
            return {name: value for name, value in super().to_json().items() if "flat" not in name}

    plain = Plain(rid="plain", input_ids=(5, 6), max_new_tokens=8, temperature=1.0, sampling_seed=3)

    async with qwen2_tp1.fleet() as fleet:
        client = fleet.engines[0].client
        flat, listed = [json.loads((await client.generate(each)).content) for each in (request, plain)]
    entries = listed["meta_info"]["output_token_logprobs"]
    fields = flat["meta_info"]["output_token_logprobs"]
    assert flat["output_ids"] == listed["output_ids"] == [entry[1] for entry in entries]
    assert np.frombuffer(b64decode(fields["token_ids"]), "<i4").tolist() == flat["output_ids"]
    assert np.frombuffer(b64decode(fields["logprobs"]), "<f4").tolist() == [entry[0] for entry in entries]


async def test_a_paused_engine_leaves_its_core_to_the_trainer(qwen2_tp1: ServedModel) -> None:
    workers = psutil.Process(qwen2_tp1.process.pid).children(recursive=True)

    def cpu_s() -> float:
        return sum(sum(worker.cpu_times()[:2]) for worker in workers)

    # A loop that polls without a pause takes all of them.
    async with qwen2_tp1.fleet() as fleet:
        client = fleet.engines[0].client
        await admin.sleep(client)
        before = cpu_s()
        await asyncio.sleep(3.0)
        used = cpu_s() - before
        await admin.wake(client)
        assert used < 1.5


def test_a_server_listens_on_its_own_address_alone(qwen2_tp1: ServedModel) -> None:
    family = [psutil.Process(qwen2_tp1.process.pid), *psutil.Process(qwen2_tp1.process.pid).children(recursive=True)]
    assert any(process.name().startswith("sglang::") for process in family)
    listeners = {
        connection.laddr.ip
        for process in family
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listeners <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_no_key_reveals_another(qwen2_tp1: ServedModel) -> None:
    keys, url = qwen2_tp1.process.endpoint.keys, qwen2_tp1.process.endpoint.url
    headers = {"Authorization": f"Bearer {keys.api}"}
    for path in ("/server_info", "/get_server_info", "/model_info", "/metrics"):
        reply = httpx.get(f"{url}{path}", headers=headers, trust_env=False, timeout=120)
        assert reply.status_code == 200, path
        assert keys.admin not in reply.text, path
        assert keys.api not in reply.text, path
    assert httpx.get(f"{url}/server_info", trust_env=False, timeout=120).status_code == 401


def test_secrets_are_masked_in_replies_to_get_and_the_length_stays() -> None:
    async def app(_scope: object, _receive: object, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b'{"a": "secret"}'})

    def body_of(method: str) -> bytes:
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        masked: Any = MaskedReplies(app, secrets=[b"secret"])  # type: ignore[arg-type]
        asyncio.run(masked({"type": "http", "method": method}, None, send))
        return bytes(sent[-1]["body"])

    assert body_of("GET") == b'{"a": "******"}'
    assert body_of("POST") == b'{"a": "secret"}'
