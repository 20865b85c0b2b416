"""A request to load becomes calls to SGLang in their order; a stand-in replaces its manager of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import httpx
import pytest

from megarl.engine.server_loads import DirectLoads, LoadRequest, load

STRUCTS: Any = SimpleNamespace(
    **dict.fromkeys(
        (
            "PauseGenerationReqInput",
            "ContinueGenerationReqInput",
            "UpdateWeightsFromTensorReqInput",
            "BeginWeightUpdateReqInput",
            "EndWeightUpdateReqInput",
        ),
        SimpleNamespace,
    )
)
ASKED = LoadRequest(payloads=["YQ==", "Yg=="], load_format="x.y", version="3", is_for_draft=False, holds_requests=True)


@dataclass
class Manager:
    """The manager of SGLang 0.5.21 notes each call; one may fail."""

    fails: str = ""
    calls: list[str] = field(default_factory=list)
    updates: list[Any] = field(default_factory=list)

    async def pause_generation(self, request: Any) -> None:
        self.calls.append(f"pause {request.mode}")

    async def continue_generation(self, request: Any) -> None:
        assert not request.torch_empty_cache
        self.calls.append("continue")

    async def update_weights_from_tensor(self, request: Any) -> tuple[bool, str]:
        self.updates.append(request)
        if self.fails == "crash":
            raise RuntimeError("the scheduler is gone")
        return self._note("update")

    async def begin_weight_update(self, request: Any) -> tuple[bool, str]:
        return self._note(f"begin {request.selector}")

    async def end_weight_update(self, _request: object) -> tuple[bool, str]:
        return self._note("end")

    def _note(self, call: str) -> tuple[bool, str]:
        self.calls.append(call)
        return (False, f"no {call}") if self.fails and call.startswith(self.fails) else (True, "Success")


async def test_requests_wait_during_a_load_inside_a_session_and_nothing_is_flushed() -> None:
    manager = Manager()
    assert await load(manager, STRUCTS, ASKED) == (True, "Success")
    assert manager.calls == ["pause in_place", "begin target", "update", "end", "continue"]
    (update,) = manager.updates
    assert update.serialized_named_tensors == [b"a", b"b"]
    assert (update.load_format, update.weight_version, update.selector, update.flush_cache) == (
        "x.y",
        "3",
        "target",
        False,
    )


@pytest.mark.parametrize(
    ("fails", "calls"),
    [
        ("begin", ["begin target"]),
        ("update", ["begin target", "update", "end"]),
        ("end", ["begin target", "update", "end"]),
    ],
)
async def test_a_failed_load_is_reported_and_requests_go_on(fails: str, calls: list[str]) -> None:
    manager = Manager(fails=fails)
    is_loaded, message = await load(manager, STRUCTS, ASKED)
    assert not is_loaded
    assert message.startswith(f"no {fails}")
    assert manager.calls == ["pause in_place", *calls, "continue"]


async def test_a_crash_ends_the_session_and_the_pause() -> None:
    manager = Manager(fails="crash")
    with pytest.raises(RuntimeError):
        await load(manager, STRUCTS, ASKED)
    assert manager.calls == ["pause in_place", "begin target", "end", "continue"]


async def test_a_load_that_holds_no_request_leaves_pauses_to_others() -> None:
    manager = Manager()
    asked = LoadRequest(payloads=[], load_format="x", version=None, is_for_draft=True, holds_requests=False)
    await load(manager, STRUCTS, asked)
    assert manager.calls == ["begin draft", "update", "end"]


async def test_an_older_sglang_has_no_sessions_and_passes_the_policy_by_for_a_draft() -> None:
    class Older:
        updates: ClassVar[list[Any]] = []

        async def update_weights_from_tensor(self, request: Any) -> tuple[bool, str]:
            self.updates.append(request)
            return True, "Success"

    for is_for_draft in (False, True):
        asked = LoadRequest(payloads=[], load_format="x", version=None, is_for_draft=is_for_draft, holds_requests=False)
        assert await load(cast(Any, Older()), STRUCTS, asked) == (True, "Success")
    assert [update.disable_draft_model for update in Older.updates] == [True, False]
    assert not any(hasattr(update, "selector") for update in Older.updates)


async def test_only_the_key_of_control_may_load() -> None:
    async def sglang(_scope: object, _receive: object, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"of SGLang"})

    transport = httpx.ASGITransport(app=cast(Any, DirectLoads(sglang, key=b"secret")))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        for path, key in (("/load_weights", "another"), ("/other", "secret")):
            reply = await client.post(path, headers={"Authorization": f"Bearer {key}"}, json={})
            assert reply.text == "of SGLang"
