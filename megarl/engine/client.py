"""HTTP calls to one SGLang server, each with a deadline. Knows no fleet and no policy.

`EngineClient` has the calls of a plain step, `admin` those that few runs need; `EngineHttp` sends the bytes.
Every failure on the way is an EngineError that names the engine and the operation. A bad token id or tensor ends the
whole server, so callers check what they send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from secrets import token_hex

from megarl.config.section import Device
from megarl.engine.batches import Generated, RequestBatches
from megarl.engine.http import EngineHttp, HttpError, HttpReply, Send
from megarl.engine.image_requests import image_data
from megarl.errors import EngineError
from megarl.routes import RouteRequest
from megarl.system.secret import Secret
from megarl.types import ImagePlace, JsonValue, PolicyVersion

CONTROL_TIMEOUT_S = 60.0
_HEALTH_TIMEOUT_S = 5.0
_TOLD_APART = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKeys:
    """One key to generate, one to control: a caller that can send weights can run code in the engine."""

    api: str = field(repr=False)
    admin: str = field(repr=False)

    def __post_init__(self) -> None:
        for value in (self.api, self.admin):
            Secret(value)  # masked in all output from now on

    def __reduce__(self) -> tuple[Callable[[], EngineKeys], tuple[()]]:
        # Made anew in the receiving process, so that its logs mask the keys as well.
        return partial(EngineKeys, api=self.api, admin=self.admin), ()

    @classmethod
    def fresh(cls) -> EngineKeys:
        return cls(api=token_hex(24), admin=token_hex(24))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEndpoint:
    """The address of one engine, and what a caller needs to know about it."""

    index: int
    """Position in the fleet."""
    host: str
    port: int
    tensor: int
    """Number of tensor-parallel ranks; each gets its own weight payload."""
    device: Device
    keys: EngineKeys
    scheme: str = "http"
    node_hosts: tuple[str, ...] = ()
    """The address of each node of an engine that has several; `host` is the first."""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"

    def host_of(self, tp_rank: int) -> str:
        """Return the address of the node that a TP rank is on; nodes have equal numbers of ranks, in order."""
        return self.node_hosts[tp_rank * len(self.node_hosts) // self.tensor] if self.node_hosts else self.host

    def __str__(self) -> str:
        return f"engine {self.index} ({self.host}:{self.port})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request for one response. SGLang's own `n` is not used: it drops the request id."""

    rid: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int | None = None
    cache_key: str | None = None
    """Only requests with the same key share cached prefixes."""
    session_id: str | None = None
    """Names the episode; SGLang reads it with `enable_session_radix_cache` only."""
    adapter: str | None = None
    """Name of the loaded adapter to compute with; None is the base."""
    returns_prompt: bool = False  # the reply has the prompt tokens that the engine saw
    routes: RouteRequest | None = None
    images: tuple[ImagePlace, ...] = ()

    def to_json(self) -> dict[str, JsonValue]:
        sampling: dict[str, JsonValue] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": -1 if self.top_k is None else self.top_k,
            "stop_token_ids": list(self.stop_token_ids),
        }
        if self.sampling_seed is not None:
            sampling["sampling_seed"] = self.sampling_seed
        request: dict[str, JsonValue] = {
            "rid": self.rid,
            "input_ids": list(self.input_ids),
            "sampling_params": sampling,
            "return_logprob": True,
            # Of output tokens too, where `server` runs.
            "return_flat_raw_top_logprobs": True,
            "return_flat_raw_top_logprobs_b64": True,
        }
        if self.returns_prompt:
            request["return_prompt_token_ids"] = True
        if self.routes is not None:
            request |= {"return_routed_experts": True, "routed_experts_start_len": self.routes.first}
        if self.images:
            request["image_data"] = image_data(self.images)
        if self.cache_key is not None:
            request["extra_key"] = self.cache_key
        if self.session_id is not None:
            request["session_id"] = self.session_id
        if self.adapter is not None:
            request["lora_path"] = self.adapter
        return request


class EngineClient:
    """A client of one engine. It holds connections until `close`."""

    def __init__(self, endpoint: EngineEndpoint, *, request_timeout_s: float, send: Send | None = None) -> None:
        """`send` replaces the network."""
        self.endpoint = endpoint
        self.request_timeout_s = request_timeout_s
        self.is_asleep = False
        self.released: list[str] = []
        """SGLang's tags of the memory that it gave up; it ends itself when asked for memory that it has."""
        self._http = EngineHttp(endpoint.url, send=send)
        self._requests = RequestBatches(
            self._http,
            key=endpoint.keys.api,
            timeout_s=request_timeout_s,
            abort=self.abort,
            failed=partial(self._error, "generate"),
        )

    async def close(self) -> None:
        self._requests.close()
        await self._http.close()

    async def generate(
        self, request: GenerateRequest, *, heard: Callable[[Sequence[int]], None] | None = None
    ) -> Generated:
        """Return a response, or its tokens so far when the request is late. Cancelling this ends it in the engine.

        `heard` is called with all tokens so far, as they come.
        """
        # The end of a prompt tells it from others as well as all of it, in less time.
        prompt = len(request.input_ids), request.input_ids[-_TOLD_APART:]
        return await self._requests.ask(request.rid, request.to_json(), prompt=prompt, heard=heard)

    async def post(self, operation: str, path: str, body: Mapping[str, JsonValue]) -> bytes:
        """Return the reply to a request that is answered at once, without tokens that could be cut."""
        key, timeout_s = self.endpoint.keys.api, self.request_timeout_s
        return (await self._call(operation, path, body, key=key, timeout_s=timeout_s)).content

    async def abort(self, rid: str) -> None:
        """End one request; its `generate` returns the tokens so far, with finish reason abort."""
        assert rid, "SGLang takes an empty rid for all requests"
        await self.control("abort", "/abort_request", {"rid": rid})

    async def flush_cache(self) -> None:
        """Discard cached prefixes. The engine refuses while requests are running."""
        await self.control("flush cache", "/flush_cache", {})

    async def is_healthy(self, *, timeout_s: float = _HEALTH_TIMEOUT_S) -> bool:
        """Return whether the server answers; a paused or sleeping engine does."""
        try:
            response = await self._http.exchange("GET", "/health", None, None, timeout_s)
        except HttpError:
            return False
        return response.status_code == HTTPStatus.OK

    async def probe(self, *, timeout_s: float) -> str:
        """Return the weight version that the engine reports, after an answer of its scheduler.

        SGLang's own health check generates greedily, and a greedy request in a batch changes what the seeds of the
        sampled ones mean. The scheduler is asked for its state instead.
        """
        await self._ask("probe", "/server_info", timeout_s=timeout_s)
        info = await self.get("probe", "/model_info", timeout_s=timeout_s)
        return str(info.get("weight_version"))

    async def load_weights(
        self,
        payloads: Sequence[str],
        *,
        load_format: str,
        version: PolicyVersion | None = None,
        timeout_s: float,
        is_for_draft: bool = False,
        holds_requests: bool = False,
    ) -> None:
        """Pass one payload to the loader of each TP rank; the engine reports `version` afterwards.

        The loader gets the model that generates, or its draft; SGLang before 0.5.21 calls it for both then. Waits until
        no request is running, unless the engine is paused or `holds_requests`: then they wait between two tokens.
        """
        assert len(payloads) == self.endpoint.tensor, f"{len(payloads)} payloads, {self.endpoint.tensor} TP ranks"
        body: dict[str, JsonValue] = {
            "payloads": list(payloads),
            "load_format": load_format,
            "version": None if version is None else str(version),
            "is_for_draft": is_for_draft,
            # A sleeping engine is paused, and stays so.
            "holds_requests": holds_requests and not self.is_asleep,
        }
        await self.control("load weights", "/load_weights", body, timeout_s=timeout_s)

    async def _ask(self, operation: str, path: str, *, timeout_s: float) -> HttpReply:
        try:
            response = await self._http.exchange("GET", path, None, self.endpoint.keys.api, timeout_s)
        except HttpError as error:
            raise self._error(operation, str(error)) from error
        return self._checked(operation, response)

    async def get(self, operation: str, path: str, *, timeout_s: float = CONTROL_TIMEOUT_S) -> Mapping[str, JsonValue]:
        """Return the JSON object that an endpoint replies to GET."""
        info = (await self._ask(operation, path, timeout_s=timeout_s)).json()
        if not isinstance(info, dict):
            raise self._error(operation, f"{path} returned a {type(info).__name__}")
        return info

    async def control(
        self, operation: str, path: str, body: Mapping[str, JsonValue], *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> HttpReply:
        """Post to an endpoint that needs the key of control; see `admin` for those that few runs need."""
        return await self._call(operation, path, body, key=self.endpoint.keys.admin, timeout_s=timeout_s)

    async def guarded(self, operation: str, path: str, body: Mapping[str, JsonValue], *, timeout_s: float) -> HttpReply:
        """Post to an endpoint that needs the key of control in some releases, and in others that of requests."""
        reply = await self._send(operation, path, body, self.endpoint.keys.admin, timeout_s)
        if reply.status_code == HTTPStatus.UNAUTHORIZED:
            reply = await self._send(operation, path, body, self.endpoint.keys.api, timeout_s)
        return self._checked(operation, reply)

    async def _call(
        self, operation: str, path: str, body: Mapping[str, JsonValue], *, key: str, timeout_s: float
    ) -> HttpReply:
        return self._checked(operation, await self._send(operation, path, body, key, timeout_s))

    async def _send(
        self, operation: str, path: str, body: Mapping[str, JsonValue], key: str, timeout_s: float
    ) -> HttpReply:
        try:
            return await self._http.exchange("POST", path, body, key, timeout_s)
        except HttpError as error:
            raise self._error(operation, str(error)) from error

    def _checked(self, operation: str, response: HttpReply) -> HttpReply:
        reason = response.refusal
        if reason is not None:
            raise self._error(operation, reason)
        return response

    def _error(self, operation: str, reason: str) -> EngineError:
        return EngineError(f"{self.endpoint}: {operation}: {reason}")
