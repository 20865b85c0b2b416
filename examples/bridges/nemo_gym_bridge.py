"""Environments of NeMo Gym as agents of megarl: this process runs their servers, in an environment of its own.

    uv venv --python 3.12 bridge && uv pip install --python bridge/bin/python nemo-gym==0.4.0
    bridge/bin/python examples/bridges/nemo_gym_bridge.py CONFIG.yaml --data TASKS.jsonl --port 8765
    curl -s http://127.0.0.1:8765/tasks > tasks.jsonl
    megarl data prepare rows --from tasks.jsonl --out data/tasks

The recipe then has `environment: {kind: chat, path: examples/bridges/bridged_agent.py}`. Packages that a resources
server needs (its requirements.txt) are installed beside nemo-gym. A request to /run names a task and the endpoint of
one episode; the agent of the configuration plays it, its policy model is that endpoint, and the answer is the
verifier's reward. An episode that NeMo Gym could not play is an error, not a reward: megarl plays it again.
"""

import argparse
import asyncio
import importlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from uuid import uuid4

import nemo_gym
import uvicorn
import yaml
from aiohttp import ClientResponse, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, web
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, ServerClient, SimpleServer, set_global_aiohttp_client
from omegaconf import DictConfig
from pydantic import BaseModel, PrivateAttr

KINDS = ("resources_servers", "responses_api_agents")
HEADER = "X-Megarl-Episode"
HOST = "127.0.0.1"
EPISODE: ContextVar[str] = ContextVar("episode", default="")


class EpisodeClient(ServerClient):
    """Reaches the servers of this process by name, and the policy model at the endpoint of the present episode."""

    _ports: dict[str, int] = PrivateAttr(default_factory=dict)
    _models: set[str] = PrivateAttr(default_factory=set)
    _accesses: dict[str, tuple[str, str]] = PrivateAttr(default_factory=dict)
    _http: ClientSession | None = PrivateAttr(default=None)

    async def request(self, server_name: str, url_path: str, method: str, **kwargs) -> ClientResponse:
        body = kwargs.pop("json", None)
        if isinstance(body, BaseModel):
            body = body.model_dump(exclude_unset=True)
        if server_name in self._ports:
            url, headers = f"http://{HOST}:{self._ports[server_name]}{url_path}", {HEADER: EPISODE.get()}
        elif server_name in self._models and EPISODE.get() in self._accesses:
            base_url, key = self._accesses[EPISODE.get()]
            url, headers = base_url + url_path.removeprefix("/v1"), {"Authorization": f"Bearer {key}"}
        else:
            raise RuntimeError(f"the bridge has no server {server_name}; it has {', '.join(self._ports)}")
        headers |= kwargs.pop("headers", None) or {}
        return await self._http.request(method, url, json=body, headers=headers, **kwargs)

    def serve(self, name: str, port: int) -> None:
        self._ports[name] = port

    def take_models(self, config: object) -> None:
        """Note the names of model servers that a configuration refers to: all are the policy."""
        if isinstance(config, dict):
            if config.get("type") == "responses_api_models":
                self._models.add(config["name"])
            for value in config.values():
                self.take_models(value)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        async with ClientSession(
            connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None), cookie_jar=DummyCookieJar()
        ) as self._http:
            yield

    @asynccontextmanager
    async def episode(self, base_url: str, key: str) -> AsyncIterator[None]:
        number = uuid4().hex
        self._accesses[number] = base_url, key
        EPISODE.set(number)
        try:
            yield
        finally:
            del self._accesses[number]


class WithEpisode:
    """ASGI middleware: what a request causes belongs to the episode that its header names."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, object], receive: object, send: object) -> None:
        if scope["type"] == "http":
            EPISODE.set(dict(scope["headers"]).get(HEADER.lower().encode(), b"").decode())
        await self.app(scope, receive, send)


def read_configs(paths: list[str]) -> dict[str, dict]:
    """Return the servers of configuration files, which are found in the working folder or in the package."""
    servers = {}
    for path in paths:
        found = Path(path) if Path(path).exists() else nemo_gym.PARENT_DIR / path
        servers |= yaml.safe_load(found.read_text())
    return servers


def load_server(name: str, servers: dict[str, dict], client: EpisodeClient) -> SimpleServer:
    """Return the server of an entry such as `{resources_servers: {example_multi_step: {entrypoint: app.py}}}`."""
    ((kind, of_kind),) = servers[name].items()
    ((folder, config),) = of_kind.items()
    module = importlib.import_module(f"{kind}.{folder}.{Path(config['entrypoint']).stem}")
    classes = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, SimpleServer) and each.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise SystemExit(f"{module.__name__} has {len(classes)} servers; the bridge needs one")
    read = classes[0].model_fields["config"].annotation.model_validate
    return classes[0](config=read({**config, "name": name, "host": HOST, "port": 0}), server_client=client)


@asynccontextmanager
async def serving(server: SimpleServer, client: EpisodeClient) -> AsyncIterator[None]:
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    listener = socket.create_server((HOST, 0))
    client.serve(server.config.name, listener.getsockname()[1])
    running = uvicorn.Server(uvicorn.Config(WithEpisode(app), log_level="warning"))
    task = asyncio.create_task(running.serve(sockets=[listener]))
    try:
        yield
    finally:
        running.should_exit = True
        await task


def text_of(row: dict) -> str:
    """Return the last message of a task as text."""
    given = row["responses_create_params"]["input"]
    content = given if isinstance(given, str) else given[-1]["content"]
    return content if isinstance(content, str) else "\n".join(str(part.get("text", "")) for part in content)


def application(servers: list[SimpleServer], agent: str, rows: list[dict], client: EpisodeClient) -> web.Application:
    async def list_tasks(_: web.Request) -> web.Response:
        tasks = [{"prompt": text_of(row), "answer": str(number)} for number, row in enumerate(rows)]
        return web.Response(text="".join(f"{json.dumps(task)}\n" for task in tasks))

    async def run(request: web.Request) -> web.Response:
        asked = await request.json()
        number = int(asked["task"])
        if not 0 <= number < len(rows):
            return web.json_response({"error": f"there is no task {number}; there are {len(rows)}"}, status=404)
        async with client.episode(asked["base_url"], asked["api_key"]):
            reply = await client.post(agent, "/run", json=rows[number])
            told = await reply.read()
        if reply.status != 200:
            reason = told[:1000].decode(errors="replace")
            return web.json_response({"error": f"NeMo Gym did not play the task: {reason}"}, status=502)
        verified = json.loads(told)
        numbers = {name: value for name, value in verified.items() if isinstance(value, bool | int | float)}
        known = rows[number].keys() | {"reward"}
        return web.json_response(
            {"score": verified["reward"], **{name: float(numbers[name]) for name in numbers.keys() - known}}
        )

    async def serve(_: web.Application) -> AsyncIterator[None]:
        # Resources servers may use the package's own client; made here, it reads no command line.
        set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(client.connected())
            for server in servers:
                await stack.enter_async_context(serving(server, client))
            yield

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.get("/tasks", list_tasks), web.post("/run", run)])
    app.cleanup_ctx.append(serve)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve an environment of NeMo Gym to megarl's agents.")
    parser.add_argument("config", nargs="+", help="configuration of an agent and its resources server, as for `gym`")
    parser.add_argument("--data", required=True, help="a JSON line per task, with `responses_create_params`")
    parser.add_argument("--agent", help="the agent's name in the configuration, where it has several")
    parser.add_argument("--host", default=HOST)
    parser.add_argument("--port", type=int, default=8765, help="0 takes a free one, and prints it")
    arguments = parser.parse_args()
    configs = {name: each for name, each in read_configs(arguments.config).items() if set(each) & set(KINDS)}
    agents = [name for name, each in configs.items() if KINDS[1] in each]
    if arguments.agent not in (agents if len(agents) > 1 else [*agents, None]) or not agents:
        raise SystemExit(f"--agent must be one of {', '.join(agents) or 'none'}")
    client = EpisodeClient(head_server_config=BaseServerConfig(host=HOST, port=0), global_config_dict=DictConfig({}))
    client.take_models(configs)
    servers = [load_server(name, configs, client) for name in configs]
    data = Path(arguments.data) if Path(arguments.data).exists() else nemo_gym.PARENT_DIR / arguments.data
    rows = [json.loads(line) for line in data.read_text().splitlines() if line.strip()]
    app = application(servers, arguments.agent or agents[0], rows, client)
    web.run_app(app, host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
